"""Stand-ins of what libraries keep quantised and adapted projections in, by their layouts; none needs its library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Projection(nn.Module):
    """A layer that dequantises what it holds, as the kernels of a library do, and multiplies in its input's dtype."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.quantise(linear.weight.detach())
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())

    def quantise(self, weight: Tensor) -> None:
        raise NotImplementedError

    def dequantised(self) -> Tensor:
        raise NotImplementedError

    def forward(self, states: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(states.dtype)
        return F.linear(states, self.dequantised().to(states.dtype), bias)


class RowScaled(Projection):
    """EETQ: int8 codes, transposed, in a buffer, and a scale for every output."""

    def quantise(self, weight: Tensor) -> None:
        scale = weight.abs().amax(1) / 127
        self.register_buffer("weight", (weight / scale[:, None]).round().to(torch.int8).T.contiguous())
        self.register_buffer("weight_scales", scale)

    def dequantised(self) -> Tensor:
        return (self.weight.float() * self.weight_scales).T


class Gptq(Projection):
    """GPTQ: eight codes of 4 bits in an int32 along the inputs, zero points packed along the outputs, group indices."""

    group = 16

    def quantise(self, weight: Tensor) -> None:
        order = torch.arange(self.in_features) // self.group
        grouped = weight.T.reshape(-1, self.group, self.out_features)
        low, high = grouped.amin(1), grouped.amax(1)
        scales = ((high - low) / 15).half()
        zeros = (-low / scales.float()).round().clamp(0, 15)
        codes = (weight.T / scales.float()[order] + zeros[order]).round().clamp(0, 15).to(torch.int32)
        self.register_buffer("qweight", packed(codes))
        self.register_buffer("qzeros", packed(zeros.T.to(torch.int32)).T.contiguous())
        self.register_buffer("scales", scales)
        self.register_buffer("g_idx", order.to(torch.int32))

    def dequantised(self) -> Tensor:
        codes, zeros = unpacked(self.qweight), unpacked(self.qzeros.T).T
        return ((codes - zeros[self.g_idx.long()]) * self.scales.float()[self.g_idx.long()]).T


class Packed(Projection):
    """compressed-tensors: packed codes, their scales and the shape as parameters."""

    group = 32

    def quantise(self, weight: Tensor) -> None:
        grouped = weight.reshape(self.out_features, -1, self.group)
        scale = grouped.abs().amax(-1, keepdim=True) / 7
        codes = (grouped / scale).round().to(torch.int32).reshape(weight.shape) + 8
        self.weight_packed = nn.Parameter(packed(codes.T).T.contiguous(), requires_grad=False)
        self.weight_scale = nn.Parameter(scale[..., 0], requires_grad=False)
        self.weight_shape = nn.Parameter(torch.tensor(weight.shape), requires_grad=False)

    def dequantised(self) -> Tensor:
        return (unpacked(self.weight_packed.T).T - 8) * self.weight_scale.repeat_interleave(self.group, 1)


class Hqq(Projection):
    """HQQ: codes in a parameter, scales and zero points in a dictionary beside it."""

    def quantise(self, weight: Tensor) -> None:
        low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        scale = (high - low) / 255
        self.W_q = nn.Parameter(((weight - low) / scale).round().to(torch.uint8), requires_grad=False)
        self.meta = {"scale": scale, "zero": -low / scale, "shape": weight.shape}

    def dequantised(self) -> Tensor:
        zero: Any = self.meta["zero"]
        return (self.W_q.float() - zero) * self.meta["scale"]  # type: ignore[operator]


class BlockFloat8(nn.Linear):
    """Fine-grained float8: a scale for every block of weights, and inputs rounded to float8, too."""

    block = 24  # which divides neither side

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        weight = linear.weight.detach()
        rows, columns = (-(-size // self.block) for size in weight.shape)
        blocks = [
            [block.abs().max() / 448 for block in row.split(self.block, 1)] for row in weight.split(self.block, 0)
        ]
        scale = torch.tensor(blocks)
        assert scale.shape == (rows, columns)
        self.weight = nn.Parameter((weight / self.spread(scale)).to(torch.float8_e4m3fn), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scale, requires_grad=False)

    def spread(self, scale: Tensor) -> Tensor:
        wide = scale.repeat_interleave(self.block, 0).repeat_interleave(self.block, 1)
        return wide[: self.out_features, : self.in_features]

    def dequantised(self) -> Tensor:
        return self.weight.float() * self.spread(self.weight_scale_inv)

    def forward(self, states: Tensor) -> Tensor:
        scale = states.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / 448
        rounded = (states / scale).to(torch.float8_e4m3fn).float() * scale
        return F.linear(rounded, self.dequantised()).to(states.dtype)


class Adapted(nn.Module):
    """LoRA: a base layer, and two small matrices that add to it."""

    def __init__(self, linear: nn.Module, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = linear
        self.in_features, self.out_features = int(linear.in_features), int(linear.out_features)  # type: ignore[arg-type]
        self.lora_A = nn.Linear(self.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, self.out_features, bias=False)

    @property
    def weight(self) -> Any:  # as PEFT's have it
        return self.base_layer.weight

    def dequantised(self) -> Tensor:
        base: Any = self.base_layer
        weight = base.weight if isinstance(base, nn.Linear) else base.dequantised()
        return weight.detach() + (self.lora_B.weight @ self.lora_A.weight).detach()

    def forward(self, states: Tensor) -> Tensor:
        return self.base_layer(states) + self.lora_B(self.lora_A(states))  # type: ignore[no-any-return]


LAYOUTS: dict[str, Callable[[nn.Linear], Any]] = {
    "EETQ": RowScaled,
    "GPTQ": Gptq,
    "compressed-tensors": Packed,
    "HQQ": Hqq,
    "float8 in blocks": BlockFloat8,
    "LoRA": Adapted,
    "LoRA on GPTQ": lambda linear: Adapted(Gptq(linear)),
}


def packed(codes: Tensor) -> Tensor:
    """Put eight codes of 4 bits along the first dimension into an int32, [N, M] to [N / 8, M]."""
    shifts = torch.arange(0, 32, 4)[:, None]
    return (codes.reshape(-1, 8, codes.shape[1]).long() << shifts).sum(1).to(torch.int32)


def unpacked(words: Tensor) -> Tensor:
    """Undo `packed`."""
    shifts = torch.arange(0, 32, 4)[:, None]
    return ((words[:, None].long() >> shifts) & 15).flatten(0, 1)


def projections(model: Any) -> list[Any]:
    """The attention modules of a tiny Llama."""
    return [layer.self_attn for layer in model.model.layers]


def quantised(model: Any, layout: str) -> Any:
    """Put stand-ins in the place of the output projections of a model; the model."""
    torch.manual_seed(2)
    for attention in projections(model):
        attention.o_proj = LAYOUTS[layout](attention.o_proj)
    return model.eval()


def in_float(model: Any) -> Any:
    """Put plain linear layers with the dequantised weights in the place of stand-ins; the model."""
    for attention in projections(model):
        held = attention.o_proj
        plain = nn.Linear(held.in_features, held.out_features, bias=False)
        plain.weight = nn.Parameter(held.dequantised().detach().clone())
        attention.o_proj = plain
    return model

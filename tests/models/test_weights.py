"""What projections apply, and what a model holds, whatever layout its weights have."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kvsearch
from kvsearch.core.errors import IncompatibleError
from kvsearch.models.architecture import find_attention_modules, read_output_weight
from kvsearch.models.fingerprint import hash_weights
from kvsearch.models.weights import (
    count_numbers,
    count_stored_bytes,
    is_finite,
    list_named_tensors,
    read_effective_weight,
)
from kvsearch.runtime.logits import OutputProjection
from tests.families import build
from tests.models.layouts import LAYOUTS, Adapted, Gptq, RowScaled, in_float, projections, quantised
from tests.tiny import loaded, wrap

layouts = pytest.mark.parametrize("layout", LAYOUTS)


def weighted(**changes: Any) -> Any:
    """A tiny Llama whose output projections have rows of different size, as trained ones have."""
    torch.manual_seed(0)
    model = loaded("llama", **changes).model
    with torch.no_grad():
        for attention in projections(model):
            attention.o_proj.weight.mul_(torch.exp(1.5 * torch.randn(64, 1)))
    return model


def kept(model: Any, policy: str, folder: Path) -> list[list[int]]:
    """What heads of the first layer keep of a prompt under a plan of 20 entries."""
    ids = torch.randint(4, 90, (1, 80), generator=torch.Generator().manual_seed(3))
    kvsearch.plans.uniform(wrap(model), policy=policy, budget=20, output=str(folder / "plan.json"), force=True)
    with kvsearch.attach(model, kvsearch.load_plan(str(folder / "plan.json"))) as planned:
        cache = planned.read(ids)
        return [list(cache.kept_positions(0, 0, head)) for head in range(2)]


@layouts
def test_policies_see_the_weights_and_not_what_they_are_held_in(layout: str, tmp_path: Path) -> None:
    model = quantised(weighted(), layout)
    same = in_float(deepcopy(model))
    for module, other in zip(projections(model), projections(same), strict=True):
        torch.testing.assert_close(read_output_weight(module, 8), read_output_weight(other, 8), atol=1e-6, rtol=1e-6)
    assert kept(model, "criticalkv:window=8", tmp_path) == kept(same, "criticalkv:window=8", tmp_path)


def test_a_plain_layer_is_read_as_it_is() -> None:
    """No copy, in any float dtype; hooks that look on are not shown unit vectors."""
    linear = nn.Linear(4, 3)
    linear.register_forward_hook(lambda *_: pytest.fail("applied"))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        linear.to(dtype)
        assert read_effective_weight(linear, "it", 4, dtype) is linear.weight


def test_a_large_bias_does_not_round_the_map() -> None:
    linear = nn.Linear(64, 64)
    torch.nn.init.constant_(linear.bias, 300.0)
    held = RowScaled(linear)
    made = read_effective_weight(held, "it", 64, torch.bfloat16)
    torch.testing.assert_close(made, held.dequantised().bfloat16().float(), atol=0, rtol=0)


class _Gelu(nn.Linear):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(super().forward(states))


class _Saturating(nn.Linear):
    def forward(self, states: torch.Tensor) -> torch.Tensor:  # a static scale of activations that are always small
        return super().forward(states.clamp(-0.01, 0.01))


def _damaged() -> nn.Module:
    held = Gptq(nn.Linear(32, 8, bias=False))
    held.scales[0, 0] = torch.nan
    return held


def _codes() -> nn.Module:
    linear = nn.Linear(32, 8, bias=False)
    linear.weight = nn.Parameter(torch.ones(8, 32, dtype=torch.float8_e4m3fn), requires_grad=False)
    return linear


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (_Gelu(32, 8), "does not follow from what it makes of unit vectors"),
        (_Saturating(32, 8), "does not follow from what it makes of unit vectors"),
        (_damaged(), "NaN or infinite"),
        (_codes(), "Linear, and the linear map that it applies cannot be read"),
        (RowScaled(nn.Linear(16, 8)), "cannot be read"),
        (RowScaled(nn.Linear(32, 8)).to("meta"), "on no device"),
        (nn.Sequential(nn.Linear(32, 8), nn.Dropout(0.5)).train(), "training mode"),
    ],
    ids=["bent", "saturating", "nan", "codes without scales", "other width", "meta", "dropout"],
)
def test_what_is_no_map_is_refused_in_one_line(module: nn.Module, why: str) -> None:
    with pytest.raises(IncompatibleError, match=why) as refusal:
        read_effective_weight(module, "o_proj of layer 7", 32, torch.float32)
    assert str(refusal.value).startswith(f"o_proj of layer 7 is a {type(module).__name__}, and")
    assert "\n" not in str(refusal.value)


@layouts
def test_all_that_is_held_makes_the_fingerprint(layout: str) -> None:
    """Codes as well as scales, zero points and adapters, wherever a layout keeps them; and the memory counts them."""
    model = quantised(build("llama"), layout)
    before = hash_weights(model)
    assert hash_weights(quantised(build("llama"), layout)) == before
    assert before != hash_weights(build("llama"))
    held = [
        (name, tensor)
        for name, tensor in list_named_tensors(model)
        if "o_proj" in name and name.startswith("model.layers.0")
    ]
    assert count_stored_bytes(model.modules()) == sum(tensor.nbytes for _, tensor in list_named_tensors(model))
    for name, tensor in held:
        first = tensor.view(torch.uint8).flatten() if tensor.dtype.itemsize == 1 else tensor.flatten()
        copied = first[:1].clone()
        first[:1] = first[:1] + 1
        assert hash_weights(model) != before, name
        first[:1] = copied
    assert hash_weights(model) == before


def test_wrappers_have_no_part_in_names() -> None:
    class Wrapper(nn.Module):
        def __init__(self, linear: nn.Module) -> None:
            super().__init__()
            self.linear = linear

    model = build("llama")
    before = hash_weights(model)
    for attention in projections(model):
        attention.o_proj = Wrapper(attention.o_proj)
    assert hash_weights(model) == before
    assert all("linear" not in name for name, _ in list_named_tensors(model))


def test_numbers_are_counted_as_they_are_multiplied() -> None:
    """Two codes of 4 bits in a byte are two numbers."""
    plain, model = build("llama"), quantised(build("llama"), "GPTQ")
    assert count_numbers(plain.modules()) == sum(one.numel() for one in plain.parameters())
    assert count_numbers(model.modules()) == count_numbers(plain.modules())
    assert count_stored_bytes(model.modules()) < count_stored_bytes(plain.modules())


def test_what_is_not_finite() -> None:
    assert is_finite(torch.tensor([1, 2], dtype=torch.int8))
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        assert is_finite(torch.tensor([1.0]).to(dtype))
        assert not is_finite(torch.tensor([1.0, torch.nan]).to(dtype))


def test_norms_follow_an_adapter_that_changes() -> None:
    """Decode steps keep what they made of the weights, for as long as these stay."""
    model = build("llama")
    attention = find_attention_modules(model)[0]
    attention.o_proj = Adapted(attention.o_proj)
    values = torch.randn(1, 2, 1, 16)
    norms = OutputProjection(attention, 8, 2)
    before = norms(values, "l2")
    torch.testing.assert_close(norms(values, "l2"), before, atol=0, rtol=0)
    with torch.no_grad():
        attention.o_proj.lora_B.weight.mul_(5)
    assert not torch.allclose(norms(values, "l2"), before)

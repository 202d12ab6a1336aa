"""Attention logits of a layer, and norms of values behind its output projection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from kvsearch.core.arrays import Ints
from kvsearch.kernels.dispatch import needs_gradients
from kvsearch.models.architecture import find_output_projection, read_output_weight
from kvsearch.models.weights import is_plain, state_of
from kvsearch.policies.base import Norm
from kvsearch.policies.scoring import choose_chunk_bytes, projected_norms, softmax

FEW_NORMS = 32  # entries whose norms are two small products

# what was made of a projection, by its attention layer, for as long as its weights stay
_Made = WeakKeyDictionary[nn.Module, tuple[tuple[object, ...], Tensor]]
_factors: _Made = WeakKeyDictionary()
_weights: _Made = WeakKeyDictionary()  # of projections that are quantised or have adapters: made by applying them


HeadRows = tuple[tuple[int, Tensor], ...] | None  # kv heads with their segments [n] int64; None: whole layers in order


def list_head_rows(heads: Ints, count: int, device: torch.device) -> HeadRows:
    """Group segments by their kv heads [S] of `count`; one copy to the device where they are not whole layers."""
    if len(heads) % count == 0 and (heads.reshape(-1, count) == np.arange(count)).all():
        return None
    numbers, sizes = np.unique(heads, return_counts=True)
    order = torch.from_numpy(np.argsort(heads, kind="stable")).to(device)
    return tuple(zip(numbers.tolist(), torch.split_with_sizes(order, sizes.tolist()), strict=True))


class OutputProjection:
    """The output projection of one attention layer, for norms of projected values."""

    def __init__(self, module: nn.Module, query_heads: int, kv_heads: int, dtype: torch.dtype = torch.float32) -> None:
        self.module = module
        self.query_heads = query_heads
        self.group = query_heads // kv_heads
        self.dtype = dtype

    def __call__(self, values: Tensor, order: Norm) -> Tensor:
        """Return norms |v W_O[q]| of values [B, Hkv, T, Dv], [B, Hkv, G, T] fp32."""
        # |v W|^2 = v (W W^T) v: for few entries two small products, for many the large one is cheaper per entry.
        if order == "l2" and values.shape[2] <= FEW_NORMS:
            return _compute_few_norms(values, self.factors()[None])
        return projected_norms(values, self._weight(), order)

    def factors(self) -> Tensor:
        """Return W W^T per query head, [Hkv, G, Dv, Dv] fp32; made once for as long as the weights stay."""
        return self._made_once(_factors, self._made_factors)

    def _made_once(self, made: _Made, make: Callable[[], Tensor]) -> Tensor:
        """Return the stored result for this projection, made anew when its weights have changed."""
        # Addresses and weak references mean nothing while code is traced.
        if torch.compiler.is_compiling():  # which knows no addresses
            return make()
        state = state_of(find_output_projection(self.module))
        if (last := made.get(self.module)) is None or last[0] != state:
            made[self.module] = last = (state, make())
        return last[1]

    def _weight(self) -> Tensor:
        """Return W_O per query head, [Hq, Dv, d_model] fp32."""
        if is_plain(find_output_projection(self.module)):
            return self._made_weight()
        return self._made_once(_weights, lambda: self._made_weight().to(self.dtype)).float()

    def _made_weight(self) -> Tensor:
        return read_output_weight(self.module, self.query_heads, self.dtype)

    def _made_factors(self) -> Tensor:
        by_head = self._made_weight()
        products = by_head @ by_head.transpose(-1, -2)
        return products.view(-1, self.group, *products.shape[1:])

    def of_heads(self, heads: Tensor, rows: HeadRows) -> Callable[[Tensor, Norm], Tensor]:
        """Return the norm function of values [S, 1, T, Dv] whose row s is of kv head `heads[s]`; `rows` groups them."""

        def projected(values: Tensor, order: Norm) -> Tensor:
            if order == "l2" and values.shape[2] <= FEW_NORMS:  # as in decode steps
                return _compute_few_norms(values, self.factors()[heads][:, None])
            weight = self._weight()
            group = self.group
            count = self.query_heads // self.group
            if rows is None:
                whole = projected_norms(values.view(-1, count, *values.shape[2:]), weight, order)
                return whole.view(len(values), 1, *whole.shape[2:])
            norms = values.new_empty(len(values), 1, group, values.shape[2], dtype=torch.float32)
            for head, mine in rows:
                some = projected_norms(values.index_select(0, mine), weight[head * group : (head + 1) * group], order)
                norms.index_copy_(0, mine, some)
            return norms

        return projected


def _compute_few_norms(values: Tensor, factors: Tensor) -> Tensor:
    """Return norms of values [B, Hkv, T, Dv] by their factors [B or 1, Hkv, G, Dv, Dv], [B, Hkv, G, T] fp32."""
    states = values[:, :, None].float()
    return (states @ factors * states).sum(-1).clamp(min=0).sqrt()


@dataclass(frozen=True)
class Logits:
    """How a layer computes attention (scale, soft cap, sinks), and its output projection where a policy needs it.

    `sinks` [Hkv, G] fp32 are learned logits, one per query head, that take their share of every softmax and have no
    value (gpt-oss): attention to the entries adds up to less than 1.
    """

    scaling: float
    softcap: float | None = None
    projection: OutputProjection | None = None
    sinks: Tensor | None = None

    @classmethod
    def of_call(
        cls, module: nn.Module, query: Tensor, key: Tensor, kwargs: dict[str, Any], *, learned: bool = False
    ) -> Logits:
        """Read the settings off the arguments of a model's attention function; the default scale is D^-1/2.

        Gradients of the sinks are recorded where they are `learned`: for attention, not for scores.
        """
        scaling = kwargs.get("scaling")
        sinks = kwargs.get("s_aux")
        if sinks is not None and not learned:
            sinks = sinks.detach()
        return cls(
            float(query.shape[-1] ** -0.5 if scaling is None else scaling),
            kwargs.get("softcap"),
            OutputProjection(module, query.shape[1], key.shape[1], query.dtype),
            None if sinks is None else sinks.float().view(key.shape[1], -1),
        )

    @property
    def plain(self) -> bool:
        """Whether attention is a plain softmax of scaled products."""
        return self.softcap is None and self.sinks is None

    def sinks_of(self, heads: Tensor) -> Tensor | None:
        """Return the sinks of segments that belong to these kv heads [S], [S, G]."""
        return None if self.sinks is None else self.sinks[heads]

    def softmax(self, scores: Tensor, heads: Tensor) -> Tensor:
        """Return attention of logits [S, G, ..., T] fp32 of segments that belong to these kv heads [S]."""
        sinks = self.sinks_of(heads)
        return softmax(scores, None if sinks is None else sinks.view(*sinks.shape, *[1] * (scores.dim() - 2)))

    def of(self, query: Tensor, keys: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return scaled, soft-capped logits [..., q, T] fp32 of queries [..., q, D] and keys [..., T, D].

        `bias` [..., 1 or q, T] fp32 is added to them.
        """
        if self.softcap is None:
            return multiply(query, keys, self.scaling, bias)
        scores = self.softcap * torch.tanh(multiply(query, keys, self.scaling) / self.softcap)
        return scores if bias is None else scores + bias


def multiply(query: Tensor, keys: Tensor, scaling: float, bias: Tensor | None = None) -> Tensor:
    """Return scaled q.k [..., q, T] fp32 of queries [..., q, D] and keys [..., T, D] with the same leading dimensions.

    `bias` [..., 1 or q, T] fp32 is added. A product of half-precision matrices is rounded to half precision: at logits
    of hundreds bf16 is off by whole units, and fp16 overflows. So CUDA is told to leave its fp32 sums as they are, and
    elsewhere half precision is cast, some matrices at a time, so that what is cast stays in a CPU's cache.
    """
    shape = (*query.shape[:-1], keys.shape[-2])
    rows = query.flatten(0, -3)
    columns = keys.flatten(0, -3).transpose(-1, -2)
    added = rows.new_empty(1, 1, 1, dtype=torch.float32) if bias is None else bias.flatten(0, -3)
    beta = 0 if bias is None else 1
    single = query.dtype == torch.float32 == keys.dtype
    if not single and query.is_cuda and not needs_gradients(query, keys) and query.dtype == keys.dtype:
        # Tensor cores add up in fp32: asked for that dtype they do not round the sum to half precision.
        scores = torch.bmm(rows, columns, out_dtype=torch.float32).mul_(scaling)  # baddbmm's takes no `added` in 2.8
        return (scores if bias is None else scores.add_(added)).view(shape)
    step = max(1, choose_chunk_bytes(keys.device) // (8 * max(1, columns[0].numel())))
    if single or step >= len(rows):  # as in most decode steps: what is beside the product would cost as much
        return torch.baddbmm(added, rows.float(), columns.float(), beta=beta, alpha=scaling).view(shape)
    added = added.expand(len(rows), -1, -1)
    parts = zip(*(torch.split(tensor, step) for tensor in (added, rows, columns)), strict=True)
    made = [torch.baddbmm(part, some.float(), others.float(), beta=beta, alpha=scaling) for part, some, others in parts]
    return torch.cat(made).view(shape)

"""Attention through gates: a differentiable blend of the full cache and a cache without some entries."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsearch.policies.scoring import choose_chunk_bytes
from kvsearch.runtime.attention import make_causal_mask
from kvsearch.runtime.logits import Logits
from kvsearch.signals.attention_rows import EXPONENT_SHIFT


def gated_attention(
    tokens: tuple[Tensor, Tensor, Tensor], prompt: tuple[Tensor, Tensor], keep: Tensor, gates: Tensor, how: Logits
) -> Tensor:
    """Compute attention of M rows of K tokens to one prompt of T tokens through gates; [M, K, Hq, Dv].

    `tokens` are queries [M, Hq, K, D], keys [M, Hkv, K, D] and values [M, Hkv, K, Dv], `prompt` keys [1, Hkv, T, D] and
    values [1, Hkv, T, Dv]. `keep` [Hkv, T] bool are entries without a gate; every other entry gets its share of
    attention times the gate of the row, `gates` [M] in [0, 1], and what the gate holds back goes to the entries without
    one and to the tokens, in proportion. So a gate of 1 is the full cache, 0 a cache without these entries, and the
    output is linear in between.

    Only the tokens and gates get gradients. One kv head and some rows are a piece of work, whose attention backward
    passes compute again.
    """
    query, key, value = tokens
    count, heads = key.shape[:2]
    grouped = query.view(count, heads, -1, *query.shape[2:]).flatten(2, 3)  # [M, Hkv, G * K, D]
    # Logits of a piece fill one chunk of scratch memory; backward passes make them again instead of keeping them.
    piece = max(1, choose_chunk_bytes(query.device) // (4 * grouped.shape[2] * keep.shape[1]))
    outputs = []
    for head, kept in enumerate(keep):
        sinks = None if how.sinks is None else how.sinks[head].repeat_interleave(query.shape[2])[:, None]
        shared = (prompt[0][0, head], prompt[1][0, head], kept.nonzero()[:, 0])
        parts = [
            _Gated.apply(*some, *shared, gate, how, sinks)  # type: ignore[no-untyped-call]
            for *some, gate in zip(
                *(torch.split(states[:, head], piece) for states in (grouped, key, value)),
                torch.split(gates, piece),
                strict=True,
            )
        ]
        outputs.append(torch.cat(parts))
    output = torch.stack(outputs, 1)
    return output.view(count, query.shape[1], query.shape[2], -1).transpose(1, 2)


class _Masses(NamedTuple):
    """Exponentials of the logits of queries, [m, G * K, n], and the slopes of a soft cap (None: there is none)."""

    far: Tensor  # of gated entries, 0 elsewhere, [..., T]
    near: Tensor  # of the N others and of the tokens, [..., N + K]
    slopes: tuple[Tensor, Tensor] | None
    total: Tensor  # [..., 1] of all, sinks included
    rest: Tensor  # [..., 1] of all but gated entries


def _masses(query: Tensor, key: Tensor, keys: Tensor, kept: Tensor, how: Logits, sinks: Tensor | None) -> _Masses:
    count = key.shape[1]
    scaled = query.float() * how.scaling
    far = scaled @ keys.float().T
    own = scaled @ key.float().transpose(1, 2)
    slopes = None
    if how.softcap is not None:
        far, own = (scores.div_(how.softcap).tanh_() for scores in (far, own))
        capped = (1 - scores.square() for scores in (far, torch.cat([far[..., kept], own], -1)))
        # d/dx of c * tanh(x / c) is 1 - tanh^2, taken before the cap is multiplied back in.
        slopes = (next(capped), next(capped))
        far, own = (scores.mul_(how.softcap) for scores in (far, own))
    own.masked_fill_(~make_causal_mask(count, count, key.device).repeat(query.shape[1] // count, 1), float("-inf"))
    near = torch.cat([far[..., kept], own], -1)
    largest = torch.maximum(far.amax(-1, keepdim=True), near.amax(-1, keepdim=True))
    # The largest exponential is far above 1, so that masses far below it are no 0; the shift cancels in the quotient.
    largest = (largest if sinks is None else torch.maximum(largest, sinks)) - EXPONENT_SHIFT
    far.sub_(largest).exp_().index_fill_(-1, kept, 0.0)
    near.sub_(largest).exp_()
    rest = near.sum(-1, keepdim=True)
    rest = rest if sinks is None else rest + (sinks - largest).exp()
    rest.clamp_(min=torch.finfo(torch.float32).tiny)  # masses too far below the largest are nothing
    return _Masses(far, near, slopes, far.sum(-1, keepdim=True) + rest, rest)


class _Gated(torch.autograd.Function):
    """Gated attention of m rows under one kv head, queries [m, G * K, D]; `kept` are the columns without a gate.

    The output is a * far V + b * near V, of masses as they are in `_masses`: a = gate / total, and b makes up to 1.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        query, key, value, keys, values, kept, gates, how, sinks = args
        masses = _masses(query, key, keys, kept, how, sinks)
        through, others = _shares(masses, gates)
        of_far = _scaled(masses.far, through, values) @ values
        near = _scaled(masses.near, others, values)
        of_near = near[..., : len(kept)] @ values[kept] + near[..., len(kept) :] @ value
        ctx.save_for_backward(query, key, value, keys, values, kept, gates, of_far, of_near)
        ctx.how = how, sinks
        output: Tensor = of_far + of_near
        return output

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, keys, values, kept, gates, of_far, of_near = ctx.saved_tensors
        how, sinks = ctx.how
        [slope] = slopes
        masses = _masses(query, key, keys, kept, how, sinks)
        through, others = _shares(masses, gates)
        far_pull = (slope.float() * of_far).sum(-1, keepdim=True)
        near_pull = (slope.float() * of_near).sum(-1, keepdim=True)
        # what comes of it that a mass changes the sums which masses are divided by
        far_sum = -(far_pull + through / others * near_pull) / masses.total
        hidden = through * (1 - masses.rest / masses.total)
        near_sum = -far_pull / masses.total + (hidden / others - 1) * near_pull / masses.rest
        by_far = ((slope * through).to(slope.dtype) @ values.T + far_sum).mul_(masses.far)
        near_values = torch.cat([values[kept].expand(len(value), -1, -1), value], 1)
        by_near = ((slope * others).to(slope.dtype) @ near_values.transpose(1, 2) + near_sum).mul_(masses.near)
        if masses.slopes is not None:
            by_far.mul_(masses.slopes[0])
            by_near.mul_(masses.slopes[1])
        by_far, by_near = (pulls.mul_(how.scaling).to(query.dtype) for pulls in (by_far, by_near))
        by_own = by_near[..., len(kept) :]
        # Attention to the tokens themselves, by which their values get gradients; the prompt is fixed and gets none.
        own = _scaled(masses.near[..., len(kept) :], others, value)
        by_query = by_far @ keys + by_near[..., : len(kept)] @ keys[kept] + by_own @ key
        return by_query, by_own.transpose(1, 2) @ query, own.transpose(1, 2) @ slope, *[None] * 6


def _shares(masses: _Masses, gates: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of the masses of gated entries and of all others, [m, G * K, 1] each."""
    through = gates[:, None, None] / masses.total
    return through, (1 - through * (masses.total - masses.rest)) / masses.rest


def _scaled(masses: Tensor, factors: Tensor, like: Tensor) -> Tensor:
    """Return masses times factors, in the dtype of `like`."""
    out: Tensor = torch.mul(masses, factors, out=masses.new_empty(masses.shape, dtype=like.dtype))
    return out

"""Generic rankings: no fit is behind them, so they know every kind of content as little and as well as any other.

A fitted ranking can leave them a share of what a head keeps. It was never asked about some kinds of content, and throws
those away with confidence; what a generic ranking puts first stays whatever the fit says of it.
"""

from __future__ import annotations

from kvsearch.policies.base import Needs, Observation, Policy
from kvsearch.policies.expected_attention import ExpectedAttention
from kvsearch.policies.keydiff import KeyDiff
from kvsearch.policies.ranking import inverse, scored
from kvsearch.policies.snapkv import SnapKV
from kvsearch.policies.tensors import Tensor, torch

SINKS = 4
WINDOW = 8
SPREAD = "spread"  # an even sample of the entries
GOLDEN = (5**0.5 - 1) / 2
POLICIES: dict[str, Policy] = {
    "expected_attention": ExpectedAttention(sinks=SINKS),
    "snapkv": SnapKV(window=WINDOW, sinks=SINKS),
    "keydiff": KeyDiff(sinks=SINKS),
}
GENERIC = (*POLICIES, SPREAD)


def generic_needs(name: str) -> Needs:
    """Return what a generic ranking needs of a prompt."""
    return POLICIES[name].needs() if name in POLICIES else Needs()


def generic_scores(name: str, observation: Observation) -> Tensor:
    """Return the scores of a generic ranking, [B, Hkv, T] fp32."""
    if name in POLICIES:
        return scored(POLICIES[name], observation)
    return even_places(observation.index)[:, None].expand(observation.keys.shape[:3])


def even_places(index: Tensor) -> Tensor:
    """Return the fractional part of indices times the golden ratio, fp32: the largest lie evenly at every budget."""
    return (index.clamp(min=0).double() * GOLDEN).frac().float()


def sharing(scores: Tensor, generic: Tensor, share: float) -> Tensor:
    """Return `scores` [..., T] handed out anew, so that a ranking by `generic` has a share of every budget.

    Of b entries the best floor(share b) of `generic` stay, and the best floor((1 - share) b) of `scores`: entry i comes
    in the order of min((r_i + 1) / share, (s_i + 1) / (1 - share)), r and s its ranks under the two, from 0 on. Where
    both want the same entries there is room for more, which both get. One order holds at all budgets, and a head has
    the scores that it had, so that heads and new tokens are compared as before.
    """
    orders = (ranking.argsort(dim=-1, descending=True, stable=True) for ranking in (generic, scores))
    first, second = (inverse(order).double() + 1 for order in orders)  # ties go to the lower position
    wanted = torch.minimum(first / share, second / (1 - share) if share < 1 else torch.full_like(second, torch.inf))
    order = wanted.argsort(dim=-1, stable=True)
    return torch.empty_like(scores).scatter_(-1, order, _told_apart(scores.sort(dim=-1, descending=True).values))


def _told_apart(scores: Tensor) -> Tensor:
    """Return descending scores [..., T] with the k-th of equal ones k steps of their precision lower."""
    index = torch.arange(scores.shape[-1], device=scores.device).expand_as(scores)
    fresh = torch.ones_like(scores, dtype=torch.bool)
    fresh[..., 1:] = scores[..., 1:] != scores[..., :-1]
    behind = index - torch.where(fresh, index, 0).cummax(-1).values
    step = scores.abs() * (2 * torch.finfo(scores.dtype).eps)
    return torch.where(behind > 0, scores - behind * step, scores)

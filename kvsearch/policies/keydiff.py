"""KeyDiff (Park et al. 2025): keep the keys least similar to the mean key direction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsearch.policies.base import Observation, Policy
from kvsearch.policies.decoding import Step
from kvsearch.policies.tensors import F, Tensor, torch

EPSILON = 1e-8
BELOW_ONE = 15 / 16


@dataclass(frozen=True)
class KeyDiff(Policy):
    """score[i] = -cos(k_i, anchor), anchor = mean_i k_i / |k_i| over the cached keys (rotated), anew in every step."""

    name: ClassVar[str] = "keydiff"
    signed_scores: ClassVar[bool] = True
    signed: ClassVar[bool] = False
    source: ClassVar[str] = "KeyDiff, arXiv 2504.15364; one-shot form"
    summary: ClassVar[str] = "-cos(k_i, mean direction of the keys)"
    weakness: ClassVar[str] = (
        "a haystack of facts: 7 of 100 at 20% kept; negative scores, which LAVa's allocation refuses"
    )
    is_baseline: ClassVar[bool] = True
    is_rival: ClassVar[bool] = True

    sinks: int = 0
    window: int = 0

    def score(self, observation: Observation) -> Tensor:
        """Return the negative cosine to the anchor, [B, Hkv, T] fp32."""
        real = observation.valid[:, None]
        keys = observation.keys.float().masked_fill(~real[..., None], 0.0)
        return score_difference(keys, compute_anchor(observation.keys, real))

    def step(self, step: Step) -> Tensor:
        """Return 1 minus the cosine to the anchor of what is held now, [S, C] fp32, by a rising line per segment.

        That is |m| - c k.m / |k|, m the sum of unit keys, with c a little below 1, so that rounding leaves nothing
        below 0: the order, which is all that counts, is the same.
        """
        keys = step.cached.keys.float()
        scale = torch.linalg.vector_norm(keys, dim=-1).clamp_(min=EPSILON).reciprocal_()  # [S, C]
        if not step.full:
            scale.masked_fill_(step.empty, 0.0)
        total = torch.bmm(scale[:, None], keys).transpose(1, 2)  # of unit keys, [S, D, 1]
        along = torch.baddbmm(scale[..., None], keys, total, beta=0, alpha=BELOW_ONE)[..., 0]
        return torch.addcmul(torch.linalg.vector_norm(total, dim=1), along, scale, value=-1)


def compute_anchor(keys: Tensor, real: Tensor) -> Tensor:
    """Return the mean direction of the `real` [..., T] bool of keys [..., T, D], [..., D] fp32."""
    keys = keys.float().masked_fill(~real[..., None], 0.0)  # what else lies there may be anything, NaN included
    return F.normalize(keys, dim=-1, eps=EPSILON).sum(-2) / real.sum(-1).clamp(min=1)[..., None]


def score_difference(keys: Tensor, mean: Tensor) -> Tensor:
    """Return the negative cosine of keys [..., T, D] to the direction `mean` [..., D], [..., T] fp32."""
    return -F.cosine_similarity(keys.float(), mean[..., None, :], dim=-1, eps=EPSILON)

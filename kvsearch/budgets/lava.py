"""LAVa: layer budgets by how spread out a layer's scores are, head budgets by where the highest are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import numpy as np

from kvsearch.budgets.adakv import check_floor_share, order_heads, split_heads
from kvsearch.budgets.dynamic import NO_SCORES, Allocation, Order
from kvsearch.core.arrays import Floats, Ints
from kvsearch.core.errors import UsageError
from kvsearch.core.naming import require_known
from kvsearch.policies.tensors import Tensor, torch

if TYPE_CHECKING:
    from kvsearch.policies.base import Observation, Policy


LayerWeights = Literal["dynamic", "planned", "scores"]
HeadWeights = Literal["dynamic", "equal"]


def compute_layer_entropy(scores: Tensor) -> Tensor:
    """Return the entropy of a layer's scores, a share of its maximum: -sum p * log(p) / log(Hkv * M), p = s / sum s.

    In [0, 1]: 0 when one entry holds everything, 1 when all are equal; also 1 without any score and 0 for less than two
    candidates. The paper divides by Hkv * N; a divisor that is equal in all layers cancels in their shares. NaN if a
    score is not finite.

    Args:
        scores: [Hkv, M] of the layer's candidates, >= 0, in any unit.

    Returns:
        A scalar of the scores' dtype.
    """
    if scores.numel() < 2:
        return scores.new_zeros(())
    shares = scores.flatten() / scores.max().clamp(min=torch.finfo(scores.dtype).tiny)  # first: no sum overflows
    total = shares.sum()
    entropy = torch.special.entr(shares / total.clamp(min=torch.finfo(scores.dtype).tiny)).sum()
    # Without any score nothing is known, which is treated as evenly spread.
    return torch.where(total == 0, torch.ones_like(total), (entropy / np.log(scores.numel())).clamp(0.0, 1.0))


@dataclass(frozen=True)
class LAVaAllocation(Allocation):
    """LAVa (Shen et al. 2025, arXiv 2509.09754, Algorithm 2): the free entries of all layers are one pool.

    Layer l gets e_l / sum_j e_j of the pool, e by `compute_layer_entropy`, and splits it over its heads as AdaKV
    does. A layer with a single spike has next to no entropy and gets little more than its floors. The official code's
    truncated pools and stale head floors, 4.5 % over a budget of 128, are not reproduced.

    Args:
        floor_share: share of a layer's even budget that every head is sure of, in [0, 1]; the paper has 0, its code
            0.2.
        heads: "equal" gives the heads of a layer the same, the paper's ablation of dynamic head budgets.
        layers: "planned" leaves every layer what the plan has for it, the paper's ablation of dynamic layer budgets.
            "scores" gives it as many as it has among the highest scores of all layers, which Layer-DefensiveKV does.
    """

    name: ClassVar[str] = "lava"
    floor_share: float = 0.2
    heads: HeadWeights = "dynamic"
    layers: LayerWeights = "dynamic"

    def __post_init__(self) -> None:
        check_floor_share(self.floor_share)
        require_known("layers", self.layers, get_args(LayerWeights))
        require_known("heads", self.heads, get_args(HeadWeights))
        if not (self.shares_layers or self.shares_heads):
            raise UsageError("allocation lava with planned layers and equal heads shares nothing: use static")

    @property
    def shares_layers(self) -> bool:
        return self.layers != "planned"

    @property
    def shares_heads(self) -> bool:
        return self.heads == "dynamic"

    def weight(self, policy: Policy, observation: Observation, scores: Sequence[Tensor]) -> list[float]:
        """Return the entropy of every sequence's scores; UsageError if some are negative.

        Where scores of layers are compared, their sums, which are finite where all scores are.
        """
        if self.layers == "scores":
            return torch.stack([sequence.sum() for sequence in scores]).tolist()
        entropies = torch.stack([compute_layer_entropy(sequence) for sequence in scores])
        minima = torch.stack([sequence.min() if sequence.numel() else entropies.new_zeros(()) for sequence in scores])
        weights, lowest = torch.stack([entropies, minima]).tolist()
        # One copy to the host has both, the weights and what would make them meaningless.
        if min(lowest) < 0:
            raise UsageError(self._signed(policy, f"layer {observation.layer}"))
        return list(weights)

    def check(self, policy: Policy, name: str, carries: bool = False) -> None:
        """Raise UsageError for a policy whose entries cannot be shared: layers need scores >= 0."""
        super().check(policy, name, carries)
        if self.layers == "dynamic" and policy.signed_scores:
            raise UsageError(self._signed(policy, name))

    def _signed(self, policy: Policy, name: str) -> str:
        return (
            f"{name}: {policy.name} scores entries below 0, and allocation lava takes the entropy of scores: use a "
            "policy that scores attention (lava, snapkv), or allocation adakv or cake"
        )

    def order(self, ranked: Tensor, free: int) -> Order:
        return order_heads(ranked, free)

    def scores(self, ranked: Tensor, free: int) -> Floats:
        if self.layers != "scores":
            return NO_SCORES
        highest: Floats = ranked.flatten().sort(descending=True).values[:free].cpu().numpy()
        return highest

    def split(self, order: Order, free: int, rooms: Ints) -> Floats:
        return split_heads(order, free, rooms, self.floor_share)

"""What a layer demands of the entries that it shares with others: read off its dense prompt."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from kvsearch.budgets.dynamic import Allocation, LayerDemand, Order
from kvsearch.errors import IncompatibleError
from kvsearch.policies import Observation, Policy, rank_under
from kvsearch.policies.ranking import rank_scored, scored


class LayerDemands:
    """The demands of one layer, per sequence of a batch: its entries by score, and how much it wants."""

    def __init__(self, allocation: Allocation, policy: Policy, observation: Observation) -> None:
        self.allocation, self.policy, self.observation = allocation, policy, observation
        scores = scored(policy, observation)
        self.by_score = rank_scored(policy, observation)
        # [B, Hkv, T], protected entries first, then the candidates from the highest score on, then padding
        self.ordered = torch.empty_like(scores).scatter_(-1, self.by_score.long(), scores)
        self.lengths: list[int] = observation.lengths.tolist()
        self._orders: dict[tuple[int, int, int], Order] = {}
        self.weights = [1.0] * len(self.lengths)
        if allocation.shares_layers:
            candidates = [
                self.ordered[sequence, :, policy.protected(length) : length]
                for sequence, length in enumerate(self.lengths)
            ]
            self.weights = allocation.weight(policy, observation, candidates)
            if not all(weight < math.inf for weight in self.weights):  # nor NaN; -inf is the logarithm of nothing
                raise self._not_finite("its budgets cannot be decided")

    def of(self, sequence: int, floor: int, free: int) -> LayerDemand:
        """Return the demand of a sequence whose heads have `floor` entries each, for at least `free` beyond them.

        Raises:
            IncompatibleError: heads are compared, and scores are not finite.
        """
        if not self.allocation.shares_heads:
            return LayerDemand(self.weights[sequence], np.zeros(0, dtype=np.uint8))
        key = (sequence, floor, free)
        if key not in self._orders:
            length = self.lengths[sequence]
            ranked = self.ordered[sequence, :, max(floor, self.policy.protected(length)) : length]
            if not bool(ranked.isfinite().all()):
                raise self._not_finite("its heads cannot be compared")
            self._orders[key] = self.allocation.order(ranked, free)
        return LayerDemand(self.weights[sequence], self._orders[key])

    def _not_finite(self, so: str) -> IncompatibleError:
        return IncompatibleError(
            f"layer {self.observation.layer}: the scores of {self.policy.name} are not finite, so {so}: the model "
            "computes NaN or infinity"
        )

    def ranks(self) -> Tensor:
        """Return the rank of every entry in its head, [B, Hkv, T]."""
        if self.policy.first_stage(self.observation) is None:
            return self.by_score
        return rank_under(self.policy, self.observation)

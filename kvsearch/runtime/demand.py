"""What a layer demands of the entries that it shares with others: read off its dense prompt."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from kvsearch.budgets.dynamic import Allocation, LayerDemand, Order
from kvsearch.errors import IncompatibleError
from kvsearch.policies import Observation, Policy, rank_under
from kvsearch.policies.checks import lengths_after
from kvsearch.policies.ranking import rank_scored, scored


class LayerDemands:
    """The demands of one layer, per sequence of a batch: its entries by score, and how much it wants."""

    def __init__(self, allocation: Allocation, policy: Policy, observation: Observation) -> None:
        self.allocation, self.policy, self.observation = allocation, policy, observation
        scores = scored(policy, observation)
        self.by_score = rank_scored(policy, observation)
        # [B, Hkv, T], protected entries first, then the candidates from the highest score on, then padding
        self.ordered = torch.empty_like(scores).scatter_(-1, self.by_score.long(), scores)
        self.lengths = lengths_after(observation)
        self._orders: dict[tuple[int, int, int], Order] = {}
        self.weights = [1.0] * len(self.lengths)
        if allocation.shares_layers:
            candidates = [
                self.ordered[sequence, :, policy.protected(length) : length]
                for sequence, length in enumerate(self.lengths)
            ]
            self.weights = allocation.weight(policy, observation, candidates)
            if not all(weight < math.inf for weight in self.weights):  # nor NaN; -inf is the logarithm of nothing
                raise IncompatibleError(
                    f"layer {observation.layer}: the scores of {policy.name} give it no finite weight, so its budgets "
                    "cannot be decided: the model computes NaN or infinity"
                )

    def of(self, sequence: int, floor: int, free: int) -> LayerDemand:
        """Return the demand of a sequence whose heads have `floor` entries each, for at least `free` beyond them."""
        if not self.allocation.shares_heads:
            return LayerDemand(self.weights[sequence], np.zeros(0, dtype=np.uint8))
        key = (sequence, floor, free)
        if key not in self._orders:
            length = self.lengths[sequence]
            ranked = self.ordered[sequence, :, max(floor, self.policy.protected(length)) : length]
            self._orders[key] = self.allocation.order(ranked, free)
        return LayerDemand(self.weights[sequence], self._orders[key])

    def ranks(self) -> Tensor:
        """Return the rank of every entry in its head, [B, Hkv, T]."""
        return rank_under(self.policy, self.observation)

"""Programs to measure without a calibration: one policy, with the same budgets everywhere or with skewed ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvsearch.arrays import Ints
from kvsearch.errors import UsageError
from kvsearch.models.architecture import describe
from kvsearch.plan import Phase
from kvsearch.plan.rounding import water_fill
from kvsearch.plan.size import Size
from kvsearch.policies import Policy
from kvsearch.runtime import Program

SMALLEST, LARGEST = 0.2, 2.5  # budgets of heads before they are brought to their mean, as multiples of it


def skewed_budgets(layers: int, heads: int, mean: int, floor: int = 1, upper: int | None = None) -> Ints:
    """Return budgets [L, Hkv] int64 that differ as calibrated ones do, the same ones for the same arguments.

    Logarithms are uniform between those of a fifth and of two and a half; every layer's mean is `mean` exactly.
    """
    low, high = np.log(SMALLEST), np.log(LARGEST)
    drawn = [np.exp(np.random.default_rng(layer).uniform(low, high, heads)) for layer in range(layers)]
    return np.stack([water_fill(weights, mean * heads, floor, upper) for weights in drawn])


def program_at(model: Any, policy: Policy, size: Size, phases: tuple[Phase, ...], skewed: bool = False) -> Program:
    """Return a program of one policy in all full-attention layers, at one size in every phase.

    Budgets are those of `skewed_budgets`, or the same in all heads. In a prefill phase none is larger than the prompt.

    Raises:
        UsageError: a budget is below what the policy always keeps.
    """
    shape = describe(model)
    layers, heads, floor = len(shape.full_layers), shape.kv_heads, max(policy.floor, 1)
    if size.budget is not None and size.budget < floor:
        raise UsageError(f"--budget {size.budget} is below the {floor} entries that {policy.name} always keeps")

    def table(length: int) -> Ints:
        mean = round((1 - size.ratio) * length) if size.ratio is not None else size.budget
        assert mean is not None
        mean = min(max(mean, floor), length)
        if not skewed:
            return np.full((layers, heads), mean, np.int64)
        return skewed_budgets(layers, heads, mean, min(floor, mean), length)

    return Program.of_policy(model, policy, dict.fromkeys(phases, table))

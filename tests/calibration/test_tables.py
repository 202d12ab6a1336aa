"""Tables of local ratios: totals of the grid, and means over prompts that can be cut so far."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.budgets.lukv import compute_grid_totals
from kvsearch.calibration.tables import RatioTables
from kvsearch.plan.profile_arrays import GRID_SIZE
from kvsearch.plan.size import round_half_up
from kvsearch.policies import create_policy

POLICY = create_policy("snapkv", {"window": 4, "kernel": 3, "sinks": 2})


@given(st.integers(1, 100_000), st.integers(1, 300), st.sampled_from([1, 25, 50, 75, 99]))
def test_totals_are_those_of_an_export(length: int, heads: int, percent: int) -> None:
    assert compute_grid_totals(length * heads)[percent - 1] == round_half_up((1 - percent / 100) * length * heads)


def table(value: float, layers: int = 1, heads: int = 2) -> np.ndarray:
    """The same local ratios in all rows: a head above and a head below `value`."""
    one = np.full((GRID_SIZE, layers, heads), value, np.float32)
    one[:, :, 0] -= 0.25
    one[:, :, 1] += 0.25
    return one


def test_means_and_deviations() -> None:
    """A prompt of 12 tokens cannot lose more than half of them, so from row 0.51 on the longer one counts alone."""
    tables = RatioTables(POLICY, 0.0)
    tables.add(table(0.25), 12, 0)
    tables.add(table(0.75), 600, 1)
    mean, deviation = tables.mean(), tables.deviation()
    assert (mean.dtype, deviation.dtype) == (np.float32, np.float32)
    assert mean[49, 0].tolist() == [0.25, 0.75]
    assert deviation[49, 0].tolist() == [0.25, 0.25]
    assert mean[50, 0].tolist() == [0.5, 1.0]
    assert deviation[50:].max() == 0.0
    assert (tables.length, tables.floor(tables.length)) == (600, 6)


def test_what_no_prompt_can_reach_is_the_mean_of_those_that_come_nearest() -> None:
    tables = RatioTables(POLICY, 0.1)
    for value in (0.25, 0.5):
        tables.add(table(value), 60, 0)
    tables.add(table(0.75), 30, 1)
    assert tables.mean()[98, 0].tolist() == [0.125, 0.625]

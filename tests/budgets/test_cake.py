from __future__ import annotations

import numpy as np
import pytest

from kvsearch.budgets.cake import CAKEAllocation, exponents
from kvsearch.budgets.dynamic import LayerDemand, shared_budgets

NOTHING = np.zeros(0, dtype=np.int32)


def allocate(preferences: list[float], pool: int, cap: int = 100, heads: int = 1, window: int = 0) -> list[int]:
    floors = np.full((len(preferences), heads), window)
    planned = floors.copy()
    planned[0] += pool
    with np.errstate(divide="ignore"):
        weights = np.log(preferences).tolist()
    budgets = shared_budgets(
        CAKEAllocation(), planned, floors, floors + cap, lambda layer, _: LayerDemand(weights[layer], NOTHING)
    )
    assert (budgets == budgets[:, :1]).all()
    return [int(kept) for kept in budgets[:, 0] - window]


@pytest.mark.parametrize(("heads", "window"), [(1, 0), (4, 0), (4, 32)])
def test_worked_example_of_the_cascade(heads: int, window: int) -> None:
    # The layers seen so far share a pool of 12: 9.6 and 2.4, then 4.8, 1.2 and 6.
    assert allocate([0.4], 12, heads=heads, window=window) == [12]
    assert allocate([0.4, 0.1], 12, heads=heads, window=window) == [10, 2]
    assert allocate([0.4, 0.1, 0.5], 12, heads=heads, window=window) == [5, 1, 6]
    assert allocate([0.4, 0.1], 12, cap=8, heads=heads, window=window) == [8, 4]


def test_a_full_layer_loses_nothing_of_the_pool() -> None:
    # 24, 4 and 2 of 30 wanted, two layers full: the official code spreads 14 equally and cuts what overflows.
    assert allocate([12.0, 2.0, 1.0], 25, cap=10) == [10, 10, 5]


def test_zero_preferences_mean_equal_layers() -> None:
    assert allocate([0.0, 0.0, 0.0], 12) == [4, 4, 4]
    assert allocate([0.0, 1.0], 12) == [0, 12]
    assert allocate([0.0, 1.0], 12, cap=8) == [4, 8]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("llama3.1-8b-128k", (1.6, 0.4)),
        ("meta-llama/Llama-3.1-8B-Instruct", (1.6, 0.4)),
        ("llama2-13b", (0.5, 0.4)),
        ("mistralai/Mistral-7B-Instruct-v0.3", (0.8, 0.5)),
        ("Qwen/Qwen2.5-7B-Instruct", (1.5, 0.6)),
        ("Qwen/Qwen2.5-72B-Instruct", (1.0, 1.0)),
        ("mistralai/Mistral-7B-Instruct-v0.2", (1.0, 1.0)),
        ("llama", (1.0, 1.0)),
    ],
)
def test_exponents(model: str, expected: tuple[float, float]) -> None:
    assert exponents(model) == expected

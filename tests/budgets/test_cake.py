from __future__ import annotations

import numpy as np
import pytest

from kvsearch.budgets.allocator import Allocator, Signals
from kvsearch.budgets.cake import CAKEAllocation, exponents, preference
from kvsearch.core.errors import UsageError
from tests.budgets.contract import LAYERS, AllocatorContract


class TestCAKE(AllocatorContract):
    def allocator(self) -> Allocator:
        return CAKEAllocation()

    def signals(self, rng: np.random.Generator) -> Signals:
        return rng.pareto(1.1, LAYERS)


def allocate(preferences: list[float], pool: int, cap: int = 100, heads: int = 1, window: int = 0) -> list[int]:
    floors = np.full((len(preferences), heads), window)
    budgets = CAKEAllocation().allocate(np.array(preferences), pool * heads + int(floors.sum()), floors, floors + cap)
    assert (budgets == budgets[:, :1]).all()
    return [int(kept) for kept in budgets[:, 0] - window]


def test_worked_example_of_preferences() -> None:
    found = preference([2.0, 1.0], [0.04, 0.01], tau1=1, tau2=2)
    assert found.tolist() == pytest.approx([0.4, 0.1])
    assert allocate(found.tolist(), 10) == [8, 2]
    assert preference(9.0, 8.0, tau1=2, tau2=3).tolist() == pytest.approx(6.0)


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


def test_common_factors_cancel_through_the_exponents() -> None:
    rng = np.random.default_rng(0)
    entropy, variance = rng.random(6), rng.random(6)
    base = preference(entropy, variance, 1.6, 0.4)
    other = preference(32 * entropy, 8 * variance, 1.6, 0.4)
    assert (other / other.sum()).tolist() == pytest.approx((base / base.sum()).tolist())


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


def test_refusals() -> None:
    with pytest.raises(UsageError, match=r"entropy must be finite and >= 0, got -1.0 at \[1\]"):
        preference([1.0, -1.0], [1.0, 1.0])
    with pytest.raises(UsageError, match=r"variance .* nan at \[0\]"):
        preference([1.0], [float("nan")])
    with pytest.raises(UsageError, match=r"variance must be .2., got shape .1."):
        preference([1.0, 2.0], [1.0])
    with pytest.raises(UsageError, match="tau2 must be finite and above 0, got 0"):
        preference([1.0], [1.0], tau2=0)
    with pytest.raises(UsageError, match=r"preferences .* inf at \[0\]"):
        preference([1e300], [1.0], tau1=0.1)
    for bad in (-0.5, float("nan"), float("inf")):
        with pytest.raises(UsageError, match=rf"preferences must be finite and >= 0, got {bad} at \[1\]"):
            allocate([1.0, bad], 4)
    with pytest.raises(UsageError, match=r"preferences must be .2., got shape .3."):
        CAKEAllocation().allocate(np.ones(3), 4, np.zeros((2, 1), dtype=np.int64), np.full((2, 1), 9))

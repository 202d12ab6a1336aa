"""Pools that layers share, by hand: CAKE's cascade, and LAVa's entropy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike

from kvsearch.budgets.allocator import Allocator, Signals
from kvsearch.budgets.cake import CAKEAllocation, find_exponents
from kvsearch.budgets.dynamic import LayerDemand, share_budgets
from kvsearch.budgets.lava import HeadWeights, LAVaAllocation, LayerWeights
from kvsearch.budgets.lava import compute_layer_entropy as entropy_of
from kvsearch.core.arrays import Floats, Ints
from kvsearch.testing.allocator_contract import HEADS, LAYERS, LENGTH
from tests.budgets.known import OfScores
from tests.budgets.samples import Contract

NOTHING = np.zeros(0, dtype=np.int32)


def allocate(preferences: list[float], pool: int, cap: int = 100, heads: int = 1, window: int = 0) -> list[int]:
    floors = np.full((len(preferences), heads), window)
    planned = floors.copy()
    planned[0] += pool
    with np.errstate(divide="ignore"):
        weights = np.log(preferences).tolist()
    budgets = share_budgets(
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
    assert allocate([0.0, 0.0, 0.0], 12) == [4, 4, 4]
    assert allocate([0.0, 1.0], 12, cap=8) == [4, 8]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", (1.6, 0.4)),
        ("llama2-13b", (0.5, 0.4)),
        ("mistralai/Mistral-7B-Instruct-v0.3", (0.8, 0.5)),
        ("Qwen/Qwen2.5-7B-Instruct", (1.5, 0.6)),
        ("mistralai/Mistral-7B-Instruct-v0.2", (1.0, 1.0)),
    ],
)
def test_exponents(model: str, expected: tuple[float, float]) -> None:
    assert find_exponents(model) == expected


def lava(floor_share: float = 0.2, heads: HeadWeights = "dynamic", layers: LayerWeights = "dynamic") -> OfScores:
    return OfScores(LAVaAllocation(floor_share, heads, layers))


class TestDynamic(Contract):
    """More entropy, e.g. the square root of the scores, never costs the layer budget; which head gets it is open."""

    def allocator(self) -> Allocator:
        return lava()

    def signals(self, rng: np.random.Generator) -> Signals:
        return rng.pareto(1.1, (LAYERS, HEADS, LENGTH))

    def scaled(self, signals: Signals, layer: int, head: int) -> Signals:
        flatter = signals.copy()
        flatter[layer] **= 0.5
        return flatter

    def budget_of(self, budgets: Ints, layer: int, head: int) -> int:
        return int(budgets[layer].sum())


class TestEqualHeads(TestDynamic):
    def allocator(self) -> Allocator:
        return lava(heads="equal")

    def budget_of(self, budgets: Ints, layer: int, head: int) -> int:
        return int(budgets[layer, head])


def layer_entropy(scores: ArrayLike) -> float:
    return float(entropy_of(torch.as_tensor(np.asarray(scores, dtype=np.float64))))


SCORES = np.array([[0.4, 0.2, 0.1, 0.05], [0.3, 0.3, 0.9, 0.6]])


def test_worked_example_of_entropy() -> None:
    assert layer_entropy(SCORES) * np.log(8) == pytest.approx(1.8165, abs=5e-5)
    assert layer_entropy(SCORES) == pytest.approx(0.8735, abs=5e-5)
    assert layer_entropy(SCORES * 1e250) == pytest.approx(layer_entropy(SCORES))


def test_ends_of_entropy() -> None:
    assert layer_entropy([[0, 0, 7.0], [0, 0, 0]]) == 0
    assert layer_entropy(np.full((2, 3), 5.0)) == pytest.approx(1)
    assert layer_entropy(np.zeros((2, 3))) == 1
    assert layer_entropy([[3.0]]) == layer_entropy(np.zeros((1, 1))) == layer_entropy(np.zeros((2, 0))) == 0
    assert layer_entropy([[1.0, 1.0, 0, 0]]) == pytest.approx(0.5)


def spread(entries: int) -> Floats:
    """A layer with this many equal scores; its entropy is log(entries) / log(40)."""
    layer = np.zeros((2, 20))
    layer.flat[np.arange(entries) * 2] = 1.0
    return layer


FLOORS = np.full((2, 2), 4)


def test_pools_follow_the_entropy_above_the_floors() -> None:
    scores = np.stack([spread(4), 50 * spread(16)])  # entropies 1 : 2
    for heads in ("dynamic", "equal"):
        budgets = lava(heads=heads).allocate(scores, 30 + 16, FLOORS, FLOORS + 20)  # type: ignore[arg-type]
        assert budgets.sum(axis=1).tolist() == [18, 28]
    assert lava(heads="equal").allocate(scores, 46, FLOORS, FLOORS + 20).tolist() == [[9, 9], [14, 14]]
    spike = np.stack([spread(1), spread(16)])
    assert lava().allocate(spike, 30, FLOORS, FLOORS + 20).sum(axis=1).tolist() == [8, 22]
    assert lava().allocate(np.zeros((2, 2, 20)), 40, FLOORS, FLOORS + 20).tolist() == [[10, 10], [10, 10]]


def test_one_pool_of_scores() -> None:
    """Of 9, 8, 3, 1 and 7, 6, 5, 2 the five highest are two of the first layer and three of the second.

    Heads hold 9, 1 and 8, 3 in the first layer, 7, 6 and 5, 2 in the second.
    """
    scores = np.array([[[9.0, 1], [8, 3]], [[7, 6], [5, 2]]])
    floors = np.full((2, 2), 4)
    pooled = lava(0.0, layers="scores")
    assert pooled.allocate(scores, 16 + 5, floors, floors + 2).tolist() == [[4 + 1, 4 + 1], [4 + 2, 4 + 1]]
    assert pooled.allocate(scores, 16 + 2, floors, floors + 2).tolist() == [[4 + 1, 4 + 1], [4, 4]]
    equal = lava(layers="scores", heads="equal").allocate(scores, 16 + 5, floors, floors + 2)
    assert equal.sum(1).tolist() == [8 + 2, 8 + 3]

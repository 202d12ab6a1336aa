from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.budgets.adakv import AdaKVAllocation, order_heads
from kvsearch.budgets.cake import CAKEAllocation
from kvsearch.budgets.dynamic import Allocation, LayerDemand, Shares, create_allocation
from kvsearch.budgets.lava import LAVaAllocation
from kvsearch.core.arrays import Ints
from kvsearch.core.errors import UsageError
from tests.budgets.known import head_budgets

ALLOCATIONS: list[Allocation] = [
    LAVaAllocation(),
    LAVaAllocation(0.0),
    LAVaAllocation(heads="equal"),
    CAKEAllocation(),
    AdaKVAllocation(),
    LAVaAllocation(layers="planned"),
    LAVaAllocation(layers="scores"),
    LAVaAllocation(0.0, layers="scores"),
]


def demand(rng: np.random.Generator, heads: int, candidates: int) -> LayerDemand:
    weight = float(rng.choice([0.0, 1.0, rng.random(), rng.pareto(1.0)]))
    scores = rng.pareto(1.1, (heads, candidates)) * rng.pareto(1.0, (heads, 1))
    ranked = torch.from_numpy(-np.sort(-scores, axis=1))
    highest = ranked.flatten().sort(descending=True).values.numpy()
    return LayerDemand(weight, order_heads(ranked, heads * candidates), highest)


@given(st.integers(0, 2**32))
def test_what_a_layer_can_still_get_only_shrinks_and_ends_above_its_budget(seed: int) -> None:
    rng = np.random.default_rng(seed)
    allocation = ALLOCATIONS[int(rng.integers(len(ALLOCATIONS)))]
    layers, heads = int(rng.integers(1, 7)), int(rng.integers(1, 5))
    length = int(rng.integers(1, 60))
    protected = int(rng.integers(0, length + 1))
    planned = np.minimum(rng.integers(0, length + 1, (layers, heads)), length)
    caps, floors = np.full_like(planned, length), np.full_like(planned, protected)
    shares = Shares(allocation, planned, floors, caps)
    bounds: dict[int, Ints] = {}
    for layer in range(layers):
        shares.add(layer, demand(rng, heads, length - protected))
        for known in range(layer + 1):
            most = shares.most(known) if allocation.shares_layers else shares.layer_budgets(known)
            assert (most <= bounds.get(known, most)).all()
            bounds[known] = most
        if allocation.shares_layers:
            held = sum(bounds[known].sum() for known in bounds)
            assert held <= shares.floors[: layer + 1].sum() + shares.free[0] + len(bounds) * heads
    budgets = shares.budgets()
    assert budgets.sum() == planned.sum()
    assert (budgets <= caps).all()
    assert (budgets >= np.minimum(floors, shares.floors)).all()
    assert all((budgets[layer] <= bounds[layer]).all() for layer in range(layers))
    if not allocation.shares_layers:
        assert budgets.sum(-1).tolist() == planned.sum(-1).tolist()


def even(layers: int, heads: int, budget: int) -> Ints:
    return np.full((layers, heads), budget)


def test_worked_example_of_the_pool() -> None:
    """Entropies 0.9, 0.6 and 0.75 of a pool of 30 per head: 30, then 18 and 12, then 12, 8 and 10."""
    shares = Shares(LAVaAllocation(heads="equal"), even(3, 2, 14), even(3, 2, 4), even(3, 2, 100))
    seen = []
    for layer, entropy in enumerate((0.9, 0.6, 0.75)):
        shares.add(layer, LayerDemand(entropy, np.zeros(0, dtype=np.uint8)))
        seen.append([int(shares.most(known)[0]) - 4 for known in range(layer + 1)])
    assert seen == [[30], [18, 12], [12, 8, 10]]
    assert shares.budgets().tolist() == [[16, 16], [12, 12], [14, 14]]


def test_the_shape_of_a_plan_loses_nothing_of_its_total() -> None:
    """Heads with more than a prompt has pass it on where layers share, and within their layer where they do not."""
    steep = np.array([[20, 20], [2, 2]])
    both = Shares(LAVaAllocation(), steep, even(2, 2, 1), even(2, 2, 12))
    apart = Shares(AdaKVAllocation(), np.array([[20, 4], [2, 2]]), even(2, 2, 1), even(2, 2, 12))
    for shares in (both, apart):
        for layer in range(2):
            shares.add(layer, LayerDemand(1.0, np.array([0, 1] * 11, dtype=np.uint8)))
    assert both.budgets().tolist() == [[11, 11], [11, 11]]
    assert apart.budgets().tolist() == [[12, 12], [2, 2]]


def test_weights_may_be_logarithms() -> None:
    for weights, expected in (([-2000.0, -2000.0], [8, 8]), ([5000.0, -np.inf], [16, 0]), ([-np.inf] * 2, [8, 8])):
        shares = Shares(CAKEAllocation(), even(2, 1, 8), even(2, 1, 0), even(2, 1, 30))
        for layer, weight in enumerate(weights):
            shares.add(layer, LayerDemand(weight, np.zeros(0, dtype=np.uint8)))
        assert shares.budgets()[:, 0].tolist() == expected


@given(st.integers(0, 2**32))
def test_the_order_does_not_depend_on_its_length(seed: int) -> None:
    rng = np.random.default_rng(seed)
    heads, candidates = (int(size) for size in rng.integers(1, 9, 2))
    scores = rng.integers(0, 4, (heads, candidates)).astype(float)  # many ties
    ranked = torch.from_numpy(-np.sort(-scores, axis=1))
    whole = order_heads(ranked, scores.size)
    for most in range(scores.size + 1):
        assert order_heads(ranked, most).tolist() == whole[:most].tolist()
        assert np.bincount(whole[:most], minlength=heads).tolist() == head_budgets(scores, most, 0.0).tolist()


@pytest.mark.parametrize(
    ("name", "params", "match"),
    [
        ("lavaa", {}, "unknown allocation 'lavaa'; did you mean 'lava'"),
        ("lava", {"floor": 1.0}, "allocation lava has no option 'floor'"),
        ("lava", {"heads": "even"}, "unknown heads 'even'"),
        ("lava", {"heads": "equal", "layers": "planned"}, "shares nothing: use static"),
        ("adakv", {"floor_share": 1.5}, r"floor_share must be in \[0, 1\], got 1.5"),
        ("cake", {"tau1": 0.0}, "tau1 must be finite and above 0, got 0.0"),
    ],
)
def test_bad_names_and_options(name: str, params: dict[str, object], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        create_allocation(name, params)

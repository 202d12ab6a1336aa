"""Thousands of small random instances per allocator: exact totals within bounds, and one line where there are none."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvsearch.arrays import Floats, Ints
from kvsearch.budgets.allocator import Allocator
from kvsearch.errors import UsageError

CANDIDATES = 12

Draw = Callable[[np.random.Generator, int, int], Floats]


def sweep(allocators: list[Allocator], draw: Draw, rounds: int = 10_000) -> None:
    """Run `rounds` instances, one allocator after the other; every eighth asks for a total that cannot be met."""
    rng = np.random.default_rng(20)
    for turn in range(rounds):
        allocator = allocators[turn % len(allocators)]
        layers, heads = (int(size) for size in rng.integers(1, 4, 2))
        floors = rng.integers(0, 5, (layers, heads)) * int(rng.integers(0, 2))
        caps = floors + rng.integers(0, CANDIDATES + 1, (layers, heads))
        signals = draw(rng, layers, heads)
        least, most = int(floors.sum()), int(caps.sum())
        if turn // len(allocators) % 8:
            check(allocator, signals, int(rng.integers(least, most + 1)), floors, caps)
            continue
        total = (least - int(rng.integers(1, 9))) if rng.random() < 0.5 else most + int(rng.integers(1, 9))
        with pytest.raises(UsageError) as caught:
            allocator.allocate(signals, total, floors, caps)
        assert f"total {total} cannot be met" in str(caught.value)
        assert "\n" not in str(caught.value)


def check(allocator: Allocator, signals: Floats, total: int, floors: Ints, caps: Ints) -> None:
    budgets = allocator.allocate(signals, total, floors, caps)
    assert budgets.dtype == np.int64
    assert budgets.shape == floors.shape
    assert budgets.sum() == total
    assert (floors <= budgets).all()
    assert (budgets <= caps).all()


def awkward(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Values >= 0 of one of many kinds: zero, constant, tied, sparse, a spike, heavy-tailed, at any scale."""
    kind = int(rng.integers(0, 6))
    if kind == 0:
        return np.full(shape, float(rng.integers(0, 2)))
    if kind == 1:
        return rng.integers(0, 3, shape).astype(float)
    if kind == 2:
        return rng.random(shape) * (rng.random(shape) < 0.3)
    if kind == 3:
        spike = np.zeros(shape)
        spike.flat[int(rng.integers(0, spike.size))] = 1.0
        return spike
    values = rng.pareto(1.1, shape)
    return values if kind == 4 else values * 10.0 ** float(rng.integers(-290, 290))

from __future__ import annotations

import numpy as np

from kvsearch.budgets.allocator import Allocator, Signals, Uniform
from tests.budgets.contract import HEADS, LAYERS, AllocatorContract


class TestUniform(AllocatorContract):
    def allocator(self) -> Allocator:
        return Uniform()

    def signals(self, rng: np.random.Generator) -> Signals:
        return rng.random((LAYERS, HEADS))


def test_worked_example() -> None:
    floors, caps = np.zeros((2, 2), dtype=np.int64), np.full((2, 2), 100)
    assert Uniform().allocate(np.zeros(1), 16, floors, caps).tolist() == [[4, 4], [4, 4]]
    assert Uniform().allocate(np.zeros(1), 18, floors, caps).tolist() == [[5, 5], [4, 4]]


def test_a_full_head_passes_its_share_on() -> None:
    floors, caps = np.zeros((1, 3), dtype=np.int64), np.array([[2, 100, 100]])
    assert Uniform().allocate(np.zeros(1), 30, floors, caps).tolist() == [[2, 14, 14]]

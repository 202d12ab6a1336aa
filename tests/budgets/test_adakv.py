from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.budgets.adakv import Variant
from kvsearch.budgets.allocator import Allocator, Signals
from kvsearch.core.arrays import Floats
from kvsearch.testing.allocator_contract import HEADS, LAYERS, LENGTH
from tests.budgets.known import adakv, head_budgets
from tests.budgets.samples import Contract


class TestExact(Contract):
    def allocator(self) -> Allocator:
        return adakv()

    def signals(self, rng: np.random.Generator) -> Signals:
        return rng.pareto(1.1, (LAYERS, HEADS, LENGTH))


class TestKvpress(TestExact):
    def allocator(self) -> Allocator:
        return adakv(variant="kvpress")


def with_counts(counts: list[int]) -> Floats:
    """A layer whose head h has counts[h] of the highest scores; all scores differ."""
    scores = np.random.default_rng(sum(counts)).permuted(np.linspace(0, 0.9, len(counts) * 40))
    table = scores.reshape(len(counts), 40)
    for row, count in zip(table, counts, strict=True):
        row[np.argsort(-row)[:count]] += 1
    return table


@pytest.mark.parametrize(
    ("counts", "variant", "expected"),
    [
        ([15, 0, 0], "kvpress", [13, 1, 1]),
        ([9, 4, 2], "exact", [8, 4, 3]),
    ],
)
def test_worked_examples(counts: list[int], variant: Variant, expected: list[int]) -> None:
    scores = with_counts(counts)
    assert head_budgets(scores, sum(counts), variant=variant).tolist() == expected
    assert head_budgets(scores, 15, 0.0, variant).tolist() == counts
    assert head_budgets(scores, 15, 1.0, variant).tolist() == [5, 5, 5]


def test_room_passes_the_rest_on() -> None:
    scores = with_counts([12, 0, 0])
    assert head_budgets(scores, 12, most=[5, 40, 40]).tolist()[0] == 5
    assert head_budgets(with_counts([6, 4, 2]), 12, 0.0, most=[3, 4, 40]).tolist() == [3, 4, 5]


@given(st.integers(0, 2**32))
def test_counts_are_those_of_the_sorted_layer(seed: int) -> None:
    rng = np.random.default_rng(seed)
    heads, length = (int(size) for size in rng.integers(1, 7, 2))
    scores = rng.normal(size=(heads, length))
    free = int(rng.integers(0, scores.size + 1))
    best = np.argsort(-scores, axis=None, kind="stable")[:free]
    assert head_budgets(scores, free, 0.0).tolist() == np.bincount(best // length, minlength=heads).tolist()
    safe = int(0.5 * free / heads)
    forced = np.where((-scores).argsort(1).argsort(1) < safe, np.inf, scores)
    best = np.argsort(-forced, axis=None, kind="stable")[:free]
    expected = np.bincount(best // length, minlength=heads)
    assert head_budgets(scores, free, 0.5, "kvpress").tolist() == expected.tolist()


def test_layers_are_even() -> None:
    scores = np.stack([with_counts([9, 4, 2]), 1000 * with_counts([3, 3, 9])])
    floors = np.full((2, 3), 8)
    budgets = adakv().allocate(scores, 30 + 48, floors, floors + 40)
    assert budgets.tolist() == [[16, 12, 11], [12, 11, 16]]  # 3.4, 3.4 and 8.2 in the second

from __future__ import annotations

import heapq
import itertools
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.budgets.allocator import Allocator, Signals
from kvsearch.budgets.convex import compute_oracle_recall, compute_recall, sort_as_oracle
from kvsearch.budgets.lukv import MarginalSolver, solve_exactly, solve_grid
from kvsearch.core.arrays import Floats, Ints
from kvsearch.core.errors import UsageError
from kvsearch.testing.allocator_contract import HEADS, LAYERS, LENGTH
from tests.budgets.samples import Contract, eviction_loss, heavy_tailed, marginal_gains, tables

FIRST = np.array([[[1.0, 5, 3, 1], [4, 2, 2, 2]]])
SECOND = np.array([[[1.0, 1, 1, 5], [3, 2, 1, 1]]])


def value(table: Floats, budgets: Ints) -> float:
    return float(table.sum() - eviction_loss(table, budgets).sum())


class Marginal:
    """The solver as an allocator of one total."""

    name: ClassVar[str] = "marginal"

    def allocate(self, signals: Signals, total: int, floors: Ints, caps: Ints) -> Ints:
        assert (caps == signals.shape[-1]).all()  # it has none of its own
        return MarginalSolver(signals, floors).solve(total)


class TestBest(Contract):
    def allocator(self) -> Allocator:
        return Marginal()

    def signals(self, rng: np.random.Generator) -> Signals:
        return heavy_tailed(rng, (LAYERS, HEADS, LENGTH))

    def bounds(self, rng: np.random.Generator) -> tuple[Ints, Ints]:
        return rng.integers(0, 6, (LAYERS, HEADS)), np.full((LAYERS, HEADS), LENGTH)

    def slack(self, signals: Signals, floors: Ints, caps: Ints) -> int:
        # Whole blocks are monotone; the leftover, smaller than the block that did not fit, may move between heads.
        whole = [marginal_gains(x[f:]) for x, f in zip(signals.reshape(-1, LENGTH), floors.flat, strict=True)]
        return max(int(np.unique(g, return_counts=True)[1].max(initial=1)) for g in whole) - 1


def cut_blocks(table: Floats, total: int, floors: Ints) -> Ints:
    """LU-KV's own rule: whole blocks by gain, ties in head order, and the next block cut short."""
    solver = MarginalSolver(table, floors)
    budgets = floors.ravel().copy()
    blocks = solver.blocks
    for block in np.lexsort((blocks.head, -blocks.slope)):
        budgets[blocks.head[block]] += min(blocks.size[block], total - budgets.sum())
    return budgets.reshape(floors.shape)


@pytest.mark.parametrize(
    ("table", "total", "best", "partial_block", "optimum"),
    [(FIRST, 2, 6, 5, 6), (FIRST, 3, 10, 10, 10), (SECOND, 4, 7, 6, 8), (SECOND, 5, 11, 11, 11)],
)
def test_worked_examples(table: Floats, total: int, best: float, partial_block: float, optimum: float) -> None:
    assert value(table, MarginalSolver(table).solve(total)) == best
    assert value(table, cut_blocks(table, total, np.zeros((1, 2), dtype=int))) == partial_block
    assert value(table, solve_exactly(table, [total])[0]) == optimum


@given(tables(), st.data())
def test_every_total_is_exact_feasible_and_at_least_the_partial_block(table: Floats, data: st.DataObject) -> None:
    floors = np.array(
        data.draw(st.lists(st.integers(0, table.shape[2]), min_size=table[..., 0].size, max_size=table[..., 0].size))
    )
    floors = floors.reshape(table.shape[:2])
    solver = MarginalSolver(table, floors)
    totals = np.arange(solver.least, solver.most + 1)
    tiny = 1e-9 * (1 + table.sum())
    for total, best in zip(totals, solver.solve_many(totals), strict=True):
        partial = cut_blocks(table, int(total), floors)
        assert best.sum() == partial.sum() == total
        assert (best >= floors).all()
        assert best.max() <= table.shape[2]
        assert value(table, best) >= value(table, partial) - tiny
        optimum = value(table, solve_exactly(table, [int(total)], floors)[0])
        assert value(table, best) <= optimum + tiny
        if total in solver.ends:
            assert value(table, best) == pytest.approx(optimum)


def test_profile_rows_keep_the_global_ratio() -> None:
    solver = MarginalSolver(heavy_tailed(np.random.default_rng(3), (3, 2, 70)), 1)
    profile = solve_grid(solver)
    assert profile.shape == (99, 3, 2)
    assert profile.dtype == np.float32
    kept = np.rint((1 - profile.astype(float)) * 70).astype(int)
    for row in range(99):
        assert kept[row].sum() == max(6, (2 * (99 - row) * 420 + 100) // 200)
        assert (kept[row] == solver.solve(int(kept[row].sum()))).all()
    assert profile.min() >= 0
    assert profile.max() <= 1 - 1 / 70
    clipped = solve_grid(MarginalSolver(np.ones((1, 2, 10)), 4))
    assert clipped[98].tolist() == pytest.approx(np.full((1, 2), 0.6))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"importance": np.ones((1, 2, 3)), "floors": 4}, "a floor must be in .0, 3.: head .0, 0. has floor 4"),
        ({"importance": np.full((1, 2, 3), np.nan)}, "nan"),
    ],
)
def test_refusals(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        MarginalSolver(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [float("nan"), -0.5])
def test_refusals_name_the_place(bad: float) -> None:
    with pytest.raises(UsageError, match=rf"{bad} at \[1, 2\]"):
        sort_as_oracle([[1.0, 2.0, 3.0], [1.0, 2.0, bad]])


def test_worked_example() -> None:
    """Protected entries stay in front; a head without importance loses nothing."""
    values = [1.0, 5, 3, 1]
    assert marginal_gains(values).tolist() == [3, 3, 3, 1]
    assert compute_recall(values).tolist() == pytest.approx([0, 0.1, 0.6, 0.9, 1])
    assert compute_oracle_recall(values).tolist() == pytest.approx([0, 0.5, 0.8, 0.9, 1])
    assert sort_as_oracle(values).tolist() == [5, 3, 1, 1]
    assert sort_as_oracle([1.0, 0, 3, 5, 2], 2).tolist() == [1, 0, 5, 3, 2]
    assert compute_recall([0.0, 0.0]).tolist() == [1, 1, 1]


@given(tables())
def test_curves_rise_to_one_below_the_oracle(table: Floats) -> None:
    curve, oracle = compute_recall(table), compute_oracle_recall(table)
    assert curve.shape == (*table.shape[:-1], table.shape[-1] + 1)
    assert (np.diff(curve, axis=-1) >= 0).all()
    assert np.allclose(curve[..., -1], 1)
    assert (curve <= oracle + 1e-12).all()
    mass = table.sum(-1, keepdims=True)
    for budget in range(table.shape[-1] + 1):
        lost = eviction_loss(table, np.full(table.shape[:-1], budget))
        assert np.allclose(lost, (mass * (1 - curve))[..., budget])


@given(tables(heads=2, length=4))
def test_equals_enumeration(table: Floats) -> None:
    heads = table.shape[:-1]
    floors = np.minimum(1, np.arange(np.prod(heads)).reshape(heads))
    every = [np.reshape(b, heads) for b in itertools.product(range(table.shape[-1] + 1), repeat=int(np.prod(heads)))]
    totals = range(int(floors.sum()), table.size + 1)
    for total, budgets in zip(totals, solve_exactly(table, totals, floors), strict=True):
        least = min(eviction_loss(table, b).sum() for b in every if b.sum() == total and (b >= floors).all())
        assert budgets.sum() == total
        assert (budgets >= floors).all()
        assert eviction_loss(table, budgets).sum() == pytest.approx(least, abs=1e-9)


def test_a_perfect_ranking_assumed_costs_importance() -> None:
    # LU-KV's ablation: solve as if the ranking were the oracle's, then evict with the ranking.
    assert cut_blocks(sort_as_oracle(SECOND), 5, np.zeros((1, 2), dtype=int)).tolist() == [[3, 2]]
    assert value(SECOND, np.array([[3, 2]])) == 8
    assert value(SECOND, MarginalSolver(sort_as_oracle(SECOND)).solve(5)) == 8
    assert MarginalSolver(SECOND).solve(5).tolist() == [[4, 1]]
    assert value(SECOND, np.array([[4, 1]])) == 11


def reference(table: Floats, floors: Ints, total: int) -> Ints:
    """The split rule as it is stated: a heap of next blocks, then single head against brute-force density greedy."""
    rows = table.reshape(-1, table.shape[-1])
    prefix = [np.concatenate([[0.0], np.cumsum(row)]) for row in rows]
    budgets = floors.ravel().copy()
    runs: list[list[tuple[float, int]]] = []
    for row, floor in zip(rows, budgets, strict=True):
        gains = marginal_gains(row[floor:])
        cuts = [0, *(np.flatnonzero(np.diff(gains)) + 1).tolist(), len(gains)]
        runs.append([(gains[a], b - a) for a, b in itertools.pairwise(cuts) if b > a])
    heap = [(-run[0][0], run[0][1], head, 0) for head, run in enumerate(runs) if run]
    heapq.heapify(heap)
    left = int(total - budgets.sum())
    while heap and heap[0][1] <= left:
        _, size, head, index = heapq.heappop(heap)
        budgets[head] += size
        left -= size
        if index + 1 < len(runs[head]):
            slope, size = runs[head][index + 1]
            heapq.heappush(heap, (-slope, size, head, index + 1))
    if not left:
        return budgets.reshape(floors.shape)
    single, spread = budgets.copy(), budgets.copy()
    fits = [h for h in range(len(rows)) if budgets[h] + left <= table.shape[-1]]
    single[max(fits, key=lambda h: prefix[h][budgets[h] + left] - prefix[h][budgets[h]])] += left
    while left:
        moves = [(h, k) for h in range(len(rows)) for k in range(1, min(left, len(rows[h]) - spread[h]) + 1)]
        head, step = max(moves, key=lambda m: (prefix[m[0]][spread[m[0]] + m[1]] - prefix[m[0]][spread[m[0]]]) / m[1])
        spread[head] += step
        left -= step
    better = value(table, spread.reshape(floors.shape)) > value(table, single.reshape(floors.shape))
    return (spread if better else single).reshape(floors.shape)


@given(st.integers(0, 2**32), st.integers(0, 3))
def test_equals_the_rule_as_stated(seed: int, floor: int) -> None:
    # Continuous importance, so that no two candidates tie.
    rng = np.random.default_rng(seed)
    table = heavy_tailed(rng, (int(rng.integers(1, 4)), int(rng.integers(1, 5)), int(rng.integers(3, 24))))
    floors = np.full(table.shape[:2], floor)
    solver = MarginalSolver(table, floors)
    for total in rng.integers(solver.least, solver.most + 1, 6).tolist():
        assert (solver.solve(total) == reference(table, floors, total)).all()

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.budgets.joint import JointSolver
from kvsearch.budgets.lukv import MarginalSolver, solve_exactly
from kvsearch.core.arrays import Floats, Ints
from kvsearch.core.errors import UsageError

# Of one layer with one head: the first ranking finds 6 at once and 4 last, the second 1, 9 and then nothing.
EARLY, LATE = [6.0, 0, 0, 4], [1.0, 9, 0, 0]


def value(importance: Floats, chosen: Ints, budgets: Ints) -> float:
    rows = importance[chosen, np.arange(importance.shape[1])]  # [L, Hkv, T]
    kept = np.arange(rows.shape[-1]) < budgets[..., None]
    return float(np.where(kept, rows, 0.0).sum())


def optimum(importance: Floats, total: int, floors: Ints) -> float:
    """Try every choice of policies, each with the best of all budgets."""
    policies, layers = importance.shape[:2]
    best = -np.inf
    for choice in itertools.product(range(policies), repeat=layers):
        chosen = np.array(choice)
        low = floors[chosen, np.arange(layers)]
        if low.sum() <= total:
            rows = importance[chosen, np.arange(layers)]
            best = max(best, value(importance, chosen, solve_exactly(rows, [total], low)[0]))
    return best


@st.composite
def rankings(draw: st.DrawFn) -> tuple[Floats, Ints]:
    """[P, L, Hkv, T] and floors [P, L, Hkv]: the same entries in other orders, many of them equal."""
    policies, layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    length = draw(st.integers(2, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    shape = (layers, heads, length)
    table = rng.integers(0, 4, shape).astype(float) if draw(st.booleans()) else rng.standard_exponential(shape)
    order = rng.random((policies, *shape)).argsort(axis=-1)
    floors = np.broadcast_to(rng.integers(0, 3, (policies, 1, 1)), (policies, layers, heads))
    return np.take_along_axis(np.broadcast_to(table, order.shape), order, axis=-1), floors


def test_the_policy_of_a_layer_changes_with_its_budget() -> None:
    solver = JointSolver(np.array([EARLY, LATE]).reshape(2, 1, 1, 4))
    found = [solver.solve(total) for total in range(5)]
    assert [one.kept for one in found] == [0, 6, 10, 10, 10]
    assert [one.policies.tolist() for one in found][1:3] == [[0], [1]]
    assert [one.budgets.tolist() for one in found] == [[[total]] for total in range(5)]


@given(rankings())
def test_nothing_keeps_more_than_the_bound_or_at_the_end_of_a_piece(drawn: tuple[Floats, Ints]) -> None:
    importance, floors = drawn
    solver = JointSolver(importance, floors)
    for total in range(solver.least, solver.most + 1):
        found, best = solver.solve(total), optimum(importance, total, floors)
        assert best <= found.bound + 1e-9
        if total in solver.ends:
            assert found.kept == pytest.approx(best)


@given(rankings(), st.floats(0, 1))
def test_every_total_is_exact_within_the_bounds_and_never_below_a_single_policy(
    drawn: tuple[Floats, Ints], share: float
) -> None:
    importance, floors = drawn
    solver = JointSolver(importance, floors)
    singles = [MarginalSolver(rows, floor) for rows, floor in zip(importance, floors, strict=True)]
    for total in range(solver.least, solver.most + 1):
        whole = solver.solve(total)
        for found in (whole, solver.simplified(whole, share)):
            assert found.budgets.sum() == total
            assert (found.budgets >= floors[found.policies, np.arange(importance.shape[1])]).all()
            assert found.budgets.max() <= importance.shape[-1]
            assert found.kept == pytest.approx(value(importance, found.policies, found.budgets))
            for alone in singles:
                assert total < alone.least or found.kept >= alone.kept(alone.solve(total)) - 1e-9


def test_a_layer_leaves_the_best_policy_only_where_that_is_worth_it() -> None:
    # the second layer gains 8 of 11.5 that the first policy loses, the third one half an entry
    importance = np.array(
        [[[9.0, 0, 0, 1], [1, 0, 0, 9], [5, 4.5, 0, 0]], [[1.0, 0, 0, 9], [9, 0, 0, 1], [4.5, 5, 0, 0]]]
    )[:, :, None]
    importance[1, 2] += [[1, -1, 0, 0]]  # 5.5 at once
    solver = JointSolver(importance)
    found = solver.solve(3)
    assert found.policies.tolist() == [0, 1, 1]
    assert found.kept == 23.5
    assert solver.simplified(found, 0.0).policies.tolist() == [0, 1, 1]
    simpler = solver.simplified(found, 0.05)
    assert simpler.policies.tolist() == [0, 1, 0]
    assert (simpler.kept, simpler.budgets.tolist()) == (23.0, [[1], [1], [1]])
    assert solver.simplified(found, 0.9).policies.tolist() == [0, 0, 0]


@pytest.mark.parametrize("total", [1, 9])
def test_a_total_out_of_reach_is_refused(total: int) -> None:
    with pytest.raises(UsageError, match="at least 2, at most 8"):
        JointSolver(np.ones((2, 1, 2, 4)), floors=1).solve(total)

"""The pool of the best: start plans stay, others as long as they are among so many."""

from __future__ import annotations

import numpy as np
import pytest

from kvsearch.search import candidates
from kvsearch.search.candidates import Candidate, Flatness, SearchOutcome


def found(budget: int, value: float, where: str = "group 1") -> Candidate:
    return Candidate(np.array([[budget]]), value, where)


def test_a_pool_has_its_best_and_the_start_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "MAX_POOL", 3)
    outcome = SearchOutcome()
    outcome.add([found(1, 9.0, "start uniform"), found(2, 2.5, "start mine")])
    for number in range(10):
        outcome.add([found(10 + number, 5.0 - number / 4)])
    assert [(one.where, one.value) for one in outcome.pool] == [
        ("start mine", 2.5), ("group 1", 2.75), ("group 1", 3.0), ("start uniform", 9.0)
    ]  # fmt: skip
    outcome.add([found(10, 1.0), found(2, float("nan"))])
    assert [one.value for one in outcome.pool] == [1.0, 2.5, 2.75, 9.0]


def test_nothing_is_flat_once_two_plans_differ() -> None:
    flat = Flatness("nll")
    flat.add([np.array([[1]])], [2.0])
    assert flat.verdict is None
    flat.add([np.array([[2]])], [2.0 + 1e-9])
    assert flat.verdict == "2 plans and all the same: this budget does not matter here"
    flat.add([np.array([[3]])], [5.0], (0, 1))  # the only one on these samples
    assert flat.verdict is not None
    flat.add([np.array([[4]])], [5.1], (0, 1))
    flat.add([np.array([[5]]), np.array([[6]])], [1.0, 1.0])
    assert flat.verdict is None

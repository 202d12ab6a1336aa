"""The smallest budget that loses little: bisected on some questions, confirmed on others."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.errors import UsageError
from kvsearch.evaluation.compare import StageStore
from kvsearch.selection.selection import TriedBudget
from kvsearch.selection.selection_job import SelectionJob, find_smallest_budget, list_budgets
from kvsearch.strategies.names import FULL

FULL_SCORE = 0.9


@dataclass(frozen=True)
class MadeRace:
    """A race of a candidate that loses `first_loss` on the contexts that are looked at, `second_loss` on the others."""

    first_loss: float
    second_loss: float
    encoded: tuple[Any, ...] = ()
    candidate_set: Any = field(default_factory=lambda: SimpleNamespace(candidates={"bad": 0, "good": 1}, baselines={}))
    only: Any = None

    def with_questions(self, questions: list[Any]) -> MadeRace:
        return replace(self, only=questions)

    def ask(self, questions: list[Any], names: list[str], stage: str, store: object) -> Any:
        assert (questions, names, stage) == ([], ["bad", "good"], "look")
        scores = {FULL: FULL_SCORE, "bad": 0.0, "good": FULL_SCORE - self.first_loss}
        return SimpleNamespace(score=lambda name: SimpleNamespace(mean=scores[name]))

    def decide(self, store: object, *, answered: bool) -> Any:
        assert answered
        assert self.only == []  # the other half
        full = SimpleNamespace(mean=FULL_SCORE)
        return SimpleNamespace(full=full, score=FULL_SCORE - self.second_loss, written="chosen")


@dataclass(frozen=True)
class Made:
    """A choice at a budget."""

    race: MadeRace
    seed: int = 0

    def report(self, result: Any, store: object) -> Any:
        return result


def tried_at(first: dict[int, float], second: dict[int, float], within: float = 0.01) -> list[TriedBudget]:
    def choice_at(budget: int) -> tuple[SelectionJob, StageStore | None]:
        return cast("SelectionJob", Made(MadeRace(first[budget], second[budget]))), None

    _, tried = find_smallest_budget(list(first), within, choice_at)
    return tried


@given(st.integers(1, 40), st.integers(0, 400))
def test_the_ladder_rises_by_a_tenth_or_by_one(least: int, more: int) -> None:
    steps = list_budgets(least, least + more)
    assert steps[0] == least
    assert steps[-1] <= least + more
    assert all(low < high <= max(low + 1, low * 1.1 + 1) for low, high in pairwise(steps))
    assert max(steps[-1] + 1, steps[-1] * 1.1 + 1) > least + more


@given(st.integers(0, 29), st.integers(0, 29))
def test_what_looks_good_is_confirmed_on_other_questions(looks: int, holds: int) -> None:
    budgets = range(10, 40)
    first = {budget: 0.0 if at >= looks else 0.5 for at, budget in enumerate(budgets)}
    second = {budget: 0.0 if at >= holds else 0.5 for at, budget in enumerate(budgets)}
    tried = tried_at(first, second)
    assert tried[-1].budget == budgets[max(looks, holds)]
    assert [one.budget for one in tried if one.confirmed] == list(budgets[looks : max(looks, holds) + 1])
    assert sum(not one.confirmed for one in tried) <= 5
    assert tried[-1].name == "chosen"


def test_what_is_lost_is_of_the_best_candidate() -> None:
    tried = tried_at({10: 0.2, 20: 0.01, 30: 0.0}, {10: 0.2, 20: 0.005, 30: 0.0})
    assert [(one.budget, one.name, round(one.loss, 9)) for one in tried] == [
        (20, "good", 0.01), (10, "good", 0.2), (20, "chosen", 0.005),
    ]  # fmt: skip


def test_no_budget_may_hold() -> None:
    with pytest.raises(UsageError, match="up to 30 entries per kv head, none loses at most 1 points: allow more"):
        tried_at({20: 0.5, 30: 0.0}, {20: 0.5, 30: 0.5})

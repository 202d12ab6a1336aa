"""The smallest budget that is shown to lose little: bisected by the questions of the choice, tested on others."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.errors import UsageError
from kvsearch.evaluation.guarantee import count_needed_contexts
from kvsearch.selection import selection_job
from kvsearch.selection.records import Selection, TriedBudget
from kvsearch.selection.selection_job import find_guaranteed_budget, list_budgets
from tests.plan.builders import make_plan

CONTEXTS = 100
FULL_SCORE = 0.9
Losses = dict[int, float]


def found_at(
    monkeypatch: pytest.MonkeyPatch, chosen: Losses, reported: Losses, bound: float = 0.1
) -> tuple[Selection, list[TriedBudget]]:
    """What is found if a share of contexts lose all, at each budget, where plans are chosen and on the report."""
    plan = make_plan()

    def choice_at(budget: int) -> tuple[Any, None]:
        score = SimpleNamespace(
            full=SimpleNamespace(mean=FULL_SCORE), score=FULL_SCORE - chosen[budget], written="best"
        )
        race = SimpleNamespace(
            prepared=SimpleNamespace(loaded=None),
            candidate_set=SimpleNamespace(plans={"best": budget}),
            decide=lambda store, *, answered: score if answered else None,
        )
        prompts = [SimpleNamespace(distinct=CONTEXTS, task=SimpleNamespace(name="t"))]
        job: Any = SimpleNamespace(
            race=race, plan=plan, reported="report", protocol="question-agnostic", report_prompts=prompts
        )
        nothing: Any = None
        job.report = lambda result, store: Selection(job, result, nothing, nothing, plan)
        return job, None

    def prepare(loaded: object, plans: dict[str, int], split: str) -> Any:
        assert split == "report"
        report = SimpleNamespace(samples=(), contexts={}, names=plans)
        return SimpleNamespace(run_stage=lambda stage, store: report)

    def measure(samples: object, budget: int, contexts: object) -> Any:
        return (np.arange(CONTEXTS) < round(reported[budget] * CONTEXTS)).astype(float)

    monkeypatch.setattr(selection_job, "prepare_plans", prepare)
    monkeypatch.setattr(selection_job, "measure_context_losses", measure)
    monkeypatch.setattr(selection_job, "measure_evicted_masses", lambda *_: [0.4, 0.1, 0.2])
    return find_guaranteed_budget(list(chosen), bound, 0.95, choice_at)


@given(st.integers(1, 40), st.integers(0, 400))
def test_the_ladder_rises_by_a_tenth_or_by_one(least: int, more: int) -> None:
    steps = list_budgets(least, least + more)
    assert steps[0] == least
    assert steps[-1] <= least + more
    assert all(low < high <= max(low + 1, low * 1.1 + 1) for low, high in pairwise(steps))
    assert max(steps[-1] + 1, steps[-1] * 1.1 + 1) > least + more


@pytest.mark.parametrize(("looks", "more"), [(0, 0), (1, 2), (12, 1), (12, 2), (28, 0), (29, 0)])
def test_the_smallest_that_is_shown(monkeypatch: pytest.MonkeyPatch, looks: int, more: int) -> None:
    """What looks good is flattered: up to two budgets more are tried, and tested from the largest down."""
    budgets = range(10, 40)
    holds = min(looks + more, 29)
    chosen = {budget: 0.0 if number >= looks else 0.5 for number, budget in enumerate(budgets)}
    reported = {budget: 0.0 if number >= holds else 0.5 for number, budget in enumerate(budgets)}
    selection, tried = found_at(monkeypatch, chosen, reported)
    assert [step.budget for step in tried] == sorted((step.budget for step in tried), reverse=True)
    assert [step for step in tried if step.confirmed][-1].budget == budgets[holds]
    assert [step.confirmed for step in tried] == [step.budget >= budgets[holds] for step in tried]
    assert len(tried) <= 5 + 2
    shown = selection.plan.guarantee
    assert shown is not None
    assert (shown.loss, shown.confidence, shown.contexts, shown.mean_loss) == (0.1, 0.95, CONTEXTS, 0.0)
    assert shown.evicted_mass == (0.1, 0.4)
    assert (shown.tasks, shown.protocol) == ({"t": CONTEXTS}, "question-agnostic")


def test_a_loss_that_would_not_be_shown_does_not_look_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred contexts show ten points with three that lose all, not with four: of the choice the same share does."""
    assert count_needed_contexts(0.1, 0.95) == 29
    losses = {10: 0.04, 11: 0.03, 12: 0.0}
    selection, tried = found_at(monkeypatch, losses, losses)
    assert [(step.budget, step.confirmed) for step in tried] == [(12, True), (11, True), (10, False)]
    assert selection.plan.guarantee is not None
    assert selection.plan.guarantee.mean_loss == pytest.approx(0.03)


def test_none_may_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = "up to 30 entries per kv head, none is shown to lose at most 10 points: 30 loses 50.00 on 100 contexts, "
    with pytest.raises(UsageError, match=refusal + r"which shows 62.1 at most: allow more with --lose-at-most"):
        found_at(monkeypatch, {20: 0.5, 30: 0.0}, {20: 0.5, 30: 0.5})

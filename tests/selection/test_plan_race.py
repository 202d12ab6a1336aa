"""What a race asks and says on a tiny model: kinds of questions on which a candidate is behind, and levels."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvsearch.evaluation.samples import Sample
from kvsearch.report.selections import describe_decision
from kvsearch.runs.estimates import Difference, Estimate
from kvsearch.selection.plan_race import find_behind_on_kinds, find_lower_kinds, group_by_kind
from kvsearch.selection.records import MethodResult, PhaseResult, QuestionCount
from tests.evaluation.test_statistics import samples

SCORE = Estimate(1.0, 1.0, 1.0)
AHEAD = MethodResult("a", "candidate", SCORE, 10, Difference(1.0, 1.0, 1.0, 10, 0, 0), chance=1 / 30)
METHODS = (AHEAD, MethodResult("b", "baseline", SCORE, 10))
LIKELY = PhaseResult("prefill", METHODS, SCORE, "b", "a", "likely", 0.01, 0.9, 0.5, QuestionCount(10, 10, 1, 1), 10)


def comparison_of(*scores: Sample) -> Any:
    """Return what stands for a round: its replies."""
    contexts = {(sample.task, sample.key): sample.key for sample in scores}
    names = {sample.method: sample.method for sample in scores}
    distinct = {task: len({key for name, key in contexts if name == task}) for task in {s.task for s in scores}}
    return SimpleNamespace(samples=list(scores), contexts=contexts, distinct=distinct, coverage=(), names=names)


def of_two_kinds(candidate: float) -> Any:
    """Return a round in which a candidate scores 1 on one kind and `candidate` on the other, where a baseline has 1."""
    easy, hard = [[1.0]] * 8, [[candidate]] * 7 + [[1.0]]
    return comparison_of(
        *samples(easy, "a", "t"), *samples(hard, "a", "u"), *samples([[0.5]] * 8, "b", "t"),
        *samples([[1.0]] * 8, "b", "u"),
    )  # fmt: skip


def test_a_candidate_that_loses_a_kind_is_out() -> None:
    assert list(find_behind_on_kinds([of_two_kinds(0.2)], ["a"], ["b"])) == ["a"]
    assert find_behind_on_kinds([of_two_kinds(1.0)], ["a"], ["b"]) == {}
    twice = comparison_of(
        *samples([[1.0]] * 8, "a", "t"), *samples([[0.5]] * 2, "a", "u"), *samples([[1.0]] * 8, "b", "t"),
        *samples([[1.0]] * 2, "b", "u"),
    )  # fmt: skip
    assert find_behind_on_kinds([twice], ["a"], ["b"]) == {}  # two equal leads say little
    one_kind = comparison_of(*samples([[0.0]] * 8, "a", "t"), *samples([[1.0]] * 8, "b", "t"))
    assert find_behind_on_kinds([one_kind], ["a"], ["b"]) == {}  # there the mean says it


def test_the_first_line_says_on_which_kinds_a_plan_scores_less() -> None:
    asked = of_two_kinds(0.9)
    assert find_lower_kinds(asked.samples, asked.contexts, "a", "b") == ["u"]
    assert find_lower_kinds(asked.samples, asked.contexts, "b", "a") == ["t"]
    result = replace(LIKELY, lower=("t", "u"))
    assert describe_decision(result).endswith("; it scores less on t and u")
    assert describe_decision(replace(result, verdict="beats")).endswith("; it scores less on t and u")


def test_kinds_are_tasks_or_their_categories() -> None:
    one, two = samples([[1.0], [0.0]], "a", "t")
    assert list(group_by_kind([one, two])) == ["t"]
    assert list(group_by_kind([one, replace(two, category="other")])) == [f"t, {one.category}", "t, other"]


@pytest.mark.parametrize(("level", "verdict"), [(0.01, "likely"), (0.05, "beats")])
def test_what_is_likely_may_beat_at_a_higher_level(level: float, verdict: str) -> None:
    assert LIKELY.with_level(level).verdict == verdict
    assert replace(LIKELY, verdict="baseline", winner=None).with_level(0.05).verdict == "baseline"

"""A whole evaluation: what it runs, what it says about it, and what is refused before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvsearch.core.errors import UsageError
from kvsearch.evaluation.compare import Evaluation, Split, prepare
from kvsearch.evaluation.ready_methods import check_plans, prepare_with_baselines
from kvsearch.evaluation.statistics import MIN_CONTEXTS_FOR_INTERVAL
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Plan
from kvsearch.report.table import to_markdown
from kvsearch.tasks.base import Example, Query, Task
from kvsearch.tasks.synthetic.suite import FACTS_AMONG_FACTS
from tests import tiny
from tests.evaluation.results import as_if, json_of, tables_of
from tests.plan.builders import make_plan, phase_dict

TASKS = [
    tiny.listed((60, 2), (48, 1), (70, 2), name="one"),
    replace(tiny.listed((52, 1), (66, 2), name="two"), category="other"),
]


def studied(
    model: LoadedModel, plans: dict[str, Plan], names: Sequence[str], tasks: Sequence[Task] = TASKS, **settings: Any
) -> Evaluation:
    subject = settings.pop("subject", next(iter(plans)))
    split = Split(tasks, **{"samples": 3, "seed": 5, "batch": 2, **settings})
    return prepare(model, prepare_with_baselines(model, plans, names, subject), subject, split).run()


def made(model: LoadedModel, names: Sequence[str] = (), **settings: Any) -> Evaluation:
    plans = {
        "mine": tiny.plan_for(model, [[14, 7], [25, 6], [31, 12], [9, 16]]),
        "yours": tiny.plan_for(model, [[15, 15]] * 4),
    }
    return studied(model, plans, names, **settings)


@pytest.fixture(scope="module")
def result(model: LoadedModel) -> Evaluation:
    return made(model, ("uniform", "snapkv", "streaming", "random"))


def plan_under(name: str, params: dict[str, Any], first: int = 10) -> Plan:
    """A plan whose first head has this budget."""
    budgets = [[first, 6], None, [4, 12]]
    return make_plan(budgets, prefill=phase_dict(budgets, {"name": name, "params": params}))


GOOD = plan_under("snapkv", {"window": 4})
ONE_MORE = plan_under("snapkv", {"window": 4}, 11)


def paths(*names: str) -> list[Path]:
    return [Path(f"{name}.json") for name in names]


def rebudgeted(**changes: Any) -> Plan:
    return GOOD.model_copy(update=changes)


@pytest.mark.parametrize(
    ("plans", "given", "names", "problem"),
    [
        ({"a": GOOD}, paths("x/a", "y/a"), (), "two plan files have the same name"),
        ({"a": GOOD}, paths("a"), ("uniform", "snapk"), "unknown baseline 'snapk'; did you mean 'snapkv'"),
        ({"full": GOOD}, paths("full"), (), r"cannot be called full\.json"),
        ({"random": GOOD}, paths("random"), (), r"cannot be called random\.json"),
        ({"a": plan_under("snapk", {})}, paths("a"), (), "unknown policy 'snapk'"),
        ({"a": plan_under("snapkv", {"windows": 4})}, paths("a"), (), "no parameter 'windows'"),
        ({"a": plan_under("snapkv", {"window": 0})}, paths("a"), (), "window must be 1 or more"),
        ({"a": GOOD, "b": ONE_MORE}, paths("a", "b"), (), r"different totals \(a: 32 in prefill, b: 33 in prefill\)"),
        ({"a": GOOD, "b": rebudgeted(scaling="fixed")}, paths("a", "b"), (), r"others, b: whatever the prompt\)"),
        ({"a": GOOD, "b": rebudgeted(length=50)}, paths("a", "b"), (), "different totals"),
        (
            {"a": GOOD, "b": rebudgeted(prefill=None, decode=GOOD.prefill)},
            paths("a", "b"),
            (),
            f"different totals .a: {GOOD.total} in prefill, b: {GOOD.total} in decode.",
        ),
    ],
)
def test_what_is_refused(plans: Any, given: list[Path], names: tuple[str, ...], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        check_plans(plans, given, names)


def test_json_compares_every_method_with_the_subject(result: Evaluation) -> None:
    (block,) = json_of(result)["blocks"]
    mine, *others = block["methods"]
    assert mine["differences"] is None
    for other in [*others, {"scores": json_of(result)["full"]["scores"], "differences": block["full_differences"]}]:
        for kind, found in other["differences"].items():
            for column, difference in found.items():
                wanted = other["scores"][kind][column]["mean"] - mine["scores"][kind][column]["mean"]
                assert difference["mean"] == pytest.approx(wanted)
                if difference["contexts"] < MIN_CONTEXTS_FOR_INTERVAL:
                    assert (difference["low"], difference["high"]) == (None, None)
                else:
                    assert difference["low"] <= difference["mean"] <= difference["high"]
        for covered in json_of(result)["tasks"]:
            found = other["differences"]["tasks"][covered["task"]]
            assert found["wins"] + found["ties"] + found["losses"] == covered["questions"]


def test_what_was_not_asked_is_said(model: LoadedModel) -> None:
    queries = (Query("? vote", ("",), 5), Query("? vote", ("anchor",), 5))
    rows = (*TASKS[0].rows, Example("one", "3", TASKS[0].rows[1].context, queries))
    tasks = [replace(TASKS[0], rows=rows), TASKS[1]]
    plans = {"mine": tiny.plan_for(model, [[14, 7], [25, 6], [31, 12], [9, 16]])}
    told = studied(model, plans, (), tasks, samples=4, max_length=62)
    assert told.notes == [
        told.doubt,
        "one: the middle of 1 of 4 contexts was cut out, so that prompt and reply fit 62 tokens",
        "one: only 3 of 4 contexts differ: intervals are over these",
        "one: questions left out (empty answer: 1)",
        "two: 4 contexts were asked for, it has 2",
        "two: the middle of 1 of 2 contexts was cut out, so that prompt and reply fit 62 tokens",
    ]
    assert told.doubt.startswith("the full cache itself scores 0.0")
    data = json_of(told)
    assert data["notes"] == told.notes
    assert all(note in to_markdown(tables_of(told)[0]) for note in told.notes)
    facts = [replace(told.coverage[0], category=FACTS_AMONG_FACTS), told.coverage[1]]
    apart = as_if(told, coverage=facts)
    (note,) = set(apart.notes) - set(told.notes)
    assert note.startswith("one: the evidence looks like the haystack")
    aware = replace(told.split, protocol="question-aware")
    assert as_if(replace(told, split=aware), coverage=facts).notes == told.notes
    assert data["most_tokens"] == 62
    assert [(task["truncated"], task["excluded"]) for task in data["tasks"]] == [(1, {"empty answer": 1}), (1, {})]
    whole = made(model)
    assert whole.notes[:-1] == [whole.doubt]  # and the one context that task two lacks


def test_methods_that_hold_more_while_they_reply_are_named(model: LoadedModel) -> None:
    plan = tiny.plan_for(model, [[30, 30]] * 4, scaling="fixed", length=80)
    same = {"prefill": plan.prefill, "decode": plan.prefill}
    both = {"flat": {**plan.model_dump(), **same}, "other": {**plan.model_dump(), **same, "floor": 2}}
    told = studied(model, {name: Plan.model_validate(one) for name, one in both.items()}, (), TASKS[:1])
    assert not [note for note in told.notes if "at most" in note]
    assert {held.most for name, held in told.held.items() if name != "full"} == {8 * 30 + 8}
    samples = [replace(one, most=int(one.most * (1.02 if one.method == "other" else 1))) for one in told.samples]
    note = "not all held the same at most until a reply was complete, mean entries: flat 248, other 252"
    assert replace(told, samples=samples).notes[-1] == note
    assert note not in replace(told, samples=[replace(one, most=248) for one in told.samples]).notes
    longer = as_if(replace(told, samples=samples), decode_entries={}).notes[-1]
    assert ", as their replies differ in length, mean entries: flat 248" in longer

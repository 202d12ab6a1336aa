"""A whole evaluation: what it runs, what it says about it, and what is refused before a model is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvsearch.core.errors import UsageError
from kvsearch.evaluation.compare import Evaluation, Split, estimate_reply_tokens, prepare
from kvsearch.evaluation.ready_methods import check_plans, prepare_with_baselines
from kvsearch.evaluation.statistics import MIN_CONTEXTS_FOR_INTERVAL
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Plan
from kvsearch.report.table import to_markdown
from kvsearch.runs.estimates import Estimate, find_doubt
from kvsearch.tasks.base import Example, Query, Task
from kvsearch.tasks.encode import Question
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


def test_methods(result: Evaluation) -> None:
    assert result.labels == ["full", "mine", "yours", "uniform", "snapkv", "streaming", "random"]
    assert (result.loaded.name, result.subject, result.split.seed) == ("tiny", "mine", 5)
    (block,) = result.blocks
    assert (block.size, list(block.methods)) == (None, result.labels[1:])
    told = [(row.task, row.kind) for row in block.rows]
    assert told == [
        ("one", "task"), ("two", "task"), ("listed", "category"), ("other", "category"), ("macro", "average"),
    ]  # fmt: skip
    assert block.overall is block.rows[-1]
    for row in block.rows:
        assert list(row.scores) == result.labels
        assert list(row.differences) == [method for method in result.labels if method != "mine"]


def test_every_method_but_the_full_cache_holds_the_same(result: Evaluation) -> None:
    held = dict(result.held)
    full = held.pop("full")
    mine = held["mine"]
    assert len({footprint.entries for footprint in held.values()}) == 1
    assert mine.entries == pytest.approx(full.entries * 120 / 320, abs=1)
    assert full.most > full.entries
    assert mine.most - mine.entries == pytest.approx(full.most - full.entries)
    assert mine.bytes < full.bytes / 2
    one = [sample for sample in result.samples if sample.method == "full"]
    assert full.entries == sum(8 * sample.context_tokens for sample in one) / len(one)


def test_as_json(result: Evaluation) -> None:
    data = json_of(result)
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["schema"] == "kvsearch.evaluation/1"
    assert (data["model"], data["subject"], data["protocol"]) == ("tiny", "mine", "question-agnostic")
    assert data["full"]["held"]["entries"] == result.held["full"].entries
    assert data["averages"] == {"macro": ["one", "two"]}
    (block,) = data["blocks"]
    assert block["size"] is None
    assert [method["name"] for method in block["methods"]] == result.labels[1:]
    mine = block["methods"][0]
    assert mine["held"]["entries"] == result.held["mine"].entries
    assert set(mine["definition"]) == {"plan"}
    assert set(mine["scores"]["tasks"]["one"]) == {"mean", "low", "high", "contexts"}
    kinds = {kind: list(found) for kind, found in mine["scores"].items()}
    assert kinds == {"tasks": ["one", "two"], "categories": ["listed", "other"], "averages": ["macro"]}
    counted = {name: data["tasks"][1][name] for name in ("wanted", "found", "contexts", "truncated", "excluded")}
    assert counted == {"wanted": 3, "found": 2, "contexts": 2, "truncated": 0, "excluded": {}}


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


def test_settings_that_differ_stand_above_the_scores(model: LoadedModel) -> None:
    plan = tiny.plan_for(model, [[14, 7], [25, 6], [31, 12], [9, 16]])
    told = studied(model, {"mine": plan}, ("snapkv", "streaming"), TASKS[:1])
    assert told.different == (
        "settings differ: kernel 3 (mine), 7 (snapkv); sinks 2 (mine), 4 (snapkv, streaming); "
        "window 4 (mine), 32 (snapkv)"
    )
    assert tables_of(told)[0].above == (told.different,)
    assert json_of(told)["different_settings"] == told.different
    assert studied(model, {"mine": plan}, ("uniform",), TASKS[:1]).different is None


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


@pytest.mark.parametrize(
    ("mean", "contexts", "words"),
    [
        (0.1, 1, None),
        (0.0, 1, "scores 0.00, but on 1 context that may be chance: ask about 8 or more with --samples"),
        (0.05, 7, "scores 0.05, but on 7 contexts that may be chance"),
        (0.05, 8, "scores 0.05: these questions cannot tell methods apart on this model, ask others with --tasks"),
        (0.0, None, "scores 0.00: these questions cannot tell methods apart"),
    ],
)
def test_few_contexts_do_not_tell_what_the_full_cache_can_do(
    mean: float, contexts: int | None, words: str | None
) -> None:
    doubt = find_doubt(Estimate(mean, 0.0, 1.0, contexts=contexts))
    assert doubt is None if words is None else words in str(doubt)


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


def test_methods_that_may_not_hold_the_same_while_they_reply_are_named(model: LoadedModel) -> None:
    """What a decode phase leaves is another number than what is held after the context."""
    flat = tiny.plan_for(model, [[40, 40]] * 4, scaling="fixed", length=80)
    steep = tiny.plan_for(model, [[70, 70], [10, 10]] * 2, scaling="fixed", length=80)
    steep = Plan.model_validate({**steep.model_dump(), "decode": flat.prefill})
    alike = studied(model, {"one": steep, "two": steep}, (), TASKS[:1])
    assert not [note for note in alike.notes if "while they reply" in note]
    assert (alike.phases, alike.decode_entries) == ("both", {"one": 320.0, "two": 320.0})
    differ = as_if(alike, decode_entries={"one": 320.0, "two": 300.4})
    assert differ.notes[-1] == "not all may hold the same while they reply, mean entries: one 320, two 300"
    mixed = as_if(alike, decode_entries={"one": 320.0})
    assert mixed.notes[-1] == "not all may hold the same while they reply, mean entries: one 320, two all"
    assert json_of(alike)["phases"] == "both"


@pytest.mark.parametrize(("right", "limit", "expected"), [(5, 128, 10), (5, 7, 7), (0, 30, 30)])
def test_a_forecast_guesses_replies_by_right_ones(right: int, limit: int, expected: int) -> None:
    tokens = torch.zeros(right, dtype=torch.int64)
    question = Question(0, Query("what?", answers=("that",), max_new_tokens=limit), ids=tokens, right=tokens)
    assert estimate_reply_tokens(question) == expected

"""A whole evaluation: what is refused before a model is loaded, what it runs, and how it is told."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvsearch.errors import IncompatibleError, UsageError
from kvsearch.evaluate.protocol import PROTOCOLS, QUESTION_AWARE, Protocol
from kvsearch.evaluate.report import as_json, plain_scores, score_table
from kvsearch.evaluate.study import Study, check_plans, study
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Plan
from kvsearch.tasks.base import Example, Query

from .. import tiny
from ..plan.builders import make_plan, model_dict, plan_dict

TASKS = [
    tiny.listed((60, 2), (48, 1), (70, 2), name="one"),
    replace(tiny.listed((52, 1), (66, 2), name="two"), category="other"),
]
OTHER: list[list[int] | None] = [[6, 10], None, [12, 4]]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny.loaded()


def made(model: LoadedModel, names: Sequence[str] = (), **changes: Any) -> Study:
    plans = {
        "mine": tiny.plan_for(model, [[14, 7], [25, 6], [31, 12], [9, 16]]),
        "yours": tiny.plan_for(model, [[15, 15]] * 4),
    }
    return study(model, plans, names, TASKS, 3, seed=5, batch=2, **changes)


@pytest.fixture(scope="module")
def result(model: LoadedModel) -> Study:
    return made(model, ("uniform", "snapkv", "streaming", "random"))


def plan_under(name: str, params: dict[str, Any]) -> Plan:
    content = plan_dict()
    for layer in content["prefill"]["layers"]:
        if layer is not None:
            layer["policy"] = {"name": name, "params": params}
    return Plan.model_validate(content)


GOOD = plan_under("snapkv", {"window": 4})


def one_more() -> Plan:
    content = GOOD.model_dump()
    layers = [layer for layer in content["prefill"]["layers"] if layer is not None]
    layers[0]["budget"] = [layers[0]["budget"][0] + 1, *layers[0]["budget"][1:]]
    return Plan.model_validate({**content, "total": GOOD.total + 1})


ONE_MORE = one_more()


def paths(*names: str) -> list[Path]:
    return [Path(f"{name}.json") for name in names]


def test_plans_that_can_be_compared() -> None:
    plans = {"a": GOOD, "b": Plan.model_validate({**plan_dict(OTHER), "prefill": GOOD.prefill})}
    assert check_plans(plans, paths("a", "b"), ("uniform",)) == plans
    assert check_plans({"a": GOOD}, paths("a"), ()) == {"a": GOOD}


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
        ({"a": GOOD, "b": rebudgeted(scaling="fixed")}, paths("a", "b"), (), "different totals"),
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


def test_a_subject_that_is_no_plan() -> None:
    with pytest.raises(UsageError, match=r"unknown plan 'b'; did you mean|unknown plan 'b' \(known: a\): the subject"):
        check_plans({"a": GOOD}, paths("a"), (), "b")
    assert check_plans({"a": GOOD}, paths("a"), (), "a") == {"a": GOOD}


def test_fixed_plans_are_compared_whatever_their_length() -> None:
    plans = {"a": rebudgeted(scaling="fixed"), "b": rebudgeted(scaling="fixed", length=77)}
    assert check_plans(plans, paths("a", "b"), ()) == plans


def test_a_plan_of_another_model(model: LoadedModel) -> None:
    plan = make_plan([[10, 6]] * 4, model=model_dict(layers=4, kv_heads=2))
    with pytest.raises(IncompatibleError, match="made for another model"):
        study(model, {"mine": plan}, (), TASKS, 1)


def test_methods(result: Study) -> None:
    assert result.methods == ["full", "mine", "yours", "uniform", "snapkv", "streaming", "random"]
    assert (result.model, result.subject, result.seed) == ("tiny", "mine", 5)
    assert [row.task for row in result.rows] == ["one", "two", "listed", "other", "average"]
    for row in result.rows:
        assert list(row.scores) == result.methods
        assert list(row.differences) == [method for method in result.methods if method != "mine"]


def test_every_method_but_the_full_cache_holds_the_same(result: Study) -> None:
    held = {method: result.held(method) for method in result.methods}
    full, full_bytes, most = held.pop("full")
    assert most > full
    assert len({entries for entries, _, _ in held.values()}) == 1
    entries, size, at_most = held["mine"]
    assert entries == pytest.approx(full * 120 / 320, abs=1)
    assert at_most - entries == pytest.approx(most - full)
    assert size < full_bytes / 2
    one = [sample for sample in result.samples if sample.method == "full"]
    assert full == sum(8 * sample.context_tokens for sample in one) / len(one)


def test_equal_runs_give_equal_results(result: Study, model: LoadedModel) -> None:
    plans = {"mine": tiny.plan_for(model, [[14, 7], [25, 6], [31, 12], [9, 16]])}
    again = study(model, plans, ("uniform",), TASKS, 3, seed=5, batch=2)
    assert [row.scores["mine"] for row in again.rows] == [row.scores["mine"] for row in result.rows]
    mine = [sample for sample in result.samples if sample.method == "mine"]
    assert [sample for sample in again.samples if sample.method == "mine"] == mine


def test_as_json(result: Study) -> None:
    data = as_json(result)
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert (data["model"], data["subject"], data["protocol"]) == ("tiny", "mine", "question-agnostic")
    assert data["held"]["mine"]["entries"] == result.held("mine")[0]
    assert [(task["task"], task["kind"]) for task in data["tasks"]] == [
        ("one", "task"), ("two", "task"), ("listed", "category"), ("other", "category"), ("average", "average"),
    ]  # fmt: skip
    assert set(data["tasks"][0]["scores"]["mine"]) == {"mean", "low", "high"}
    counted = {name: data["tasks"][1][name] for name in ("wanted", "found", "contexts", "truncated", "excluded")}
    assert counted == {"wanted": 3, "found": 2, "contexts": 2, "truncated": 0, "excluded": {}}


def test_json_compares_every_plan_with_every_other_method(result: Study) -> None:
    for number, task in enumerate(as_json(result)["tasks"]):
        assert set(task["differences"]) == {"mine", "yours"}
        for plan, differences in task["differences"].items():
            assert list(differences) == [method for method in result.methods if method != plan]
            for method, found in differences.items():
                assert found["mean"] == pytest.approx(task["scores"][plan]["mean"] - task["scores"][method]["mean"])
                assert found["wins"] + found["ties"] + found["losses"] == result.rows[number].questions
        mirrored = task["differences"]["yours"]["mine"]
        assert task["differences"]["mine"]["yours"]["wins"] == mirrored["losses"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_same_seed_gives_the_same_report(model: LoadedModel, protocol: Protocol) -> None:
    one, other = (made(model, ("streaming",), protocol=protocol) for _ in range(2))
    assert json.dumps(as_json(one)) == json.dumps(as_json(other))
    assert rendered(score_table(one)) == rendered(score_table(other))
    assert one.samples == other.samples
    assert "seconds" not in json.dumps(as_json(one))
    assert min(sample.prefill_seconds for sample in one.samples) > 0
    assert min(sample.reply_seconds for sample in one.samples) > 0


def test_the_protocol_is_said_everywhere(model: LoadedModel) -> None:
    aware = made(model, protocol=QUESTION_AWARE)
    assert as_json(aware)["protocol"] == "question-aware"
    assert {sample.protocol for sample in aware.samples} == {"question-aware"}
    tables = [rendered([table]) for table in score_table(aware)]
    assert all("(question-aware)" in table for table in tables)
    assert "held after the prompt" in tables[-1]


def test_the_subject_is_compared_and_lends_its_policy(model: LoadedModel, result: Study) -> None:
    """Under the other subject all is the same but for whose differences are shown."""
    other = made(model, ("uniform", "snapkv", "streaming", "random"), subject="yours")
    assert other.subject == "yours"
    assert other.samples == result.samples
    assert as_json(other) == {**as_json(result), "subject": "yours"}
    assert list(other.rows[0].differences) == ["full", "mine", "uniform", "snapkv", "streaming", "random"]
    text = rendered(score_table(other))
    assert "yours minus the others: paired difference, 95% interval; questions won / tied / lost" in text
    assert "uniform: the policy of yours with even budgets" in text


def test_what_was_not_asked_is_said(model: LoadedModel) -> None:
    queries = (Query("? vote", ("",), 5), Query("? vote", ("anchor",), 5))
    rows = (*TASKS[0].rows, Example("one", "3", TASKS[0].rows[1].context, queries))
    tasks = [replace(TASKS[0], rows=rows), TASKS[1]]
    plans = {"mine": tiny.plan_for(model, [[14, 7], [25, 6], [31, 12], [9, 16]])}
    told = study(model, plans, (), tasks, 4, max_length=62)
    assert told.notes == [
        "one: the middle of 1 of 4 contexts was cut out, so that prompt and reply fit 62 tokens",
        "one: questions left out (empty answer: 1)",
        "two: 4 contexts were asked for, it has 2",
        "two: the middle of 1 of 2 contexts was cut out, so that prompt and reply fit 62 tokens",
    ]
    text = " ".join(rendered(score_table(told)).split())
    for note in told.notes:
        assert note in text
    data = as_json(told)
    assert data["most_tokens"] == 62
    assert [(task["truncated"], task["excluded"]) for task in data["tasks"][:2]] == [(1, {"empty answer": 1}), (1, {})]
    assert not made(model).notes[:-1]  # but for the one context that task two lacks


def rendered(tables: Any) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    for table in tables:
        console.print(table)
    return console.export_text()


def test_tables(result: Study) -> None:
    text = rendered(score_table(result))
    assert "tiny: score, 95% interval (question-agnostic)" in text
    assert "mine minus the others: paired difference" in text
    for method in result.methods:
        assert method in text
    assert text.count("average") == 2
    assert text.count("other (mean)") == 2
    found = result.rows[0].differences["streaming"]
    assert f"{found.wins} / {found.ties} / {found.losses}" in text
    assert "1.000" in text  # the share of the full cache
    assert f"{result.held('mine')[0]:.0f}" in text
    assert "yours" in rendered([plain_scores("scores", result.methods, result.rows)])

"""A whole evaluation: what is refused before a model is loaded, what it runs, and how it is told."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvsearch.errors import IncompatibleError, UsageError
from kvsearch.evaluate.report import as_json, plain_scores, score_table, write_samples
from kvsearch.evaluate.study import Study, check_plans, study
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Plan

from .. import tiny
from ..plan.builders import make_plan, model_dict, plan_dict

TASKS = [tiny.listed((60, 2), (48, 1), (70, 2), name="one"), tiny.listed((52, 1), (66, 2), name="two")]
OTHER: list[list[int] | None] = [[6, 10], None, [12, 4]]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny.loaded()


@pytest.fixture(scope="module")
def result(model: LoadedModel) -> Study:
    plans = {
        "mine": tiny.plan_for(model, [[14, 7], [25, 6], [31, 12], [9, 16]]),
        "yours": tiny.plan_for(model, [[15, 15]] * 4),
    }
    return study(model, plans, ("uniform", "snapkv", "streaming", "random"), TASKS, 3, seed=5, batch=2)


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
    assert [row.task for row in result.rows] == ["one", "two", "average"]
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
    assert [task["task"] for task in data["tasks"]] == ["one", "two", "average"]
    assert set(data["tasks"][0]["scores"]["mine"]) == {"mean", "low", "high"}


def test_samples_as_csv(result: Study, tmp_path: Path) -> None:
    write_samples(result, tmp_path / "samples.csv")
    text = (tmp_path / "samples.csv").read_bytes().decode()
    assert "\r" not in text
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == len(result.samples) == 7 * 8
    for row, sample in zip(rows, result.samples, strict=True):
        assert (row["task"], row["method"], row["key"], row["reply"]) == (
            sample.task,
            sample.method,
            sample.key,
            sample.reply,
        )
        assert (int(row["question"]), float(row["score"]), int(row["entries"])) == (
            sample.question,
            sample.score,
            sample.entries,
        )


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
    assert "1.000" in text  # the share of the full cache
    assert f"{result.held('mine')[0]:.0f}" in text
    assert "yours" in rendered([plain_scores("scores", result.methods, result.rows)])

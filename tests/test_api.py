"""The public Python API: a dozen names, which the commands call, too."""

from __future__ import annotations

import inspect
from functools import partial
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvsearch
import kvsearch.cli
from kvsearch.cli.command import MAIN_VERBS, PLAN_VERBS, read_catalog
from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.core.resources import find_resource
from tests import tiny


def test_every_name_is_there() -> None:
    assert dir(kvsearch) == sorted(kvsearch.__all__)
    assert all(getattr(kvsearch, name) is not None for name in kvsearch.__all__)
    assert kvsearch.__version__ == version("kvsearch")
    with pytest.raises(AttributeError, match="no attribute 'calibrates'"):
        _ = kvsearch.calibrates  # type: ignore[attr-defined]


FUNCTIONS = {"report": "write_report", "lm-eval": "run_lm_eval"}
ALL = {**MAIN_VERBS, **{f"plans.{name}": verb for name, verb in PLAN_VERBS.items()}}


def test_a_verb_is_a_function_with_the_options_of_its_command() -> None:
    """Keywords and flags are made of the same fields."""
    for name in ALL.keys() - {"policies", "tasks", "recipes"}:
        parameters = inspect.signature(attrgetter(FUNCTIONS.get(name, name))(kvsearch)).parameters
        flags = {flag.name for flag in read_catalog(ALL[name].options) if flag.help}  # not those of earlier versions
        assert flags <= parameters.keys(), name
        assert parameters.keys() - flags <= {"recipe", "reporter", "tokenizer"}, name
        assert ("tokenizer" in parameters) == ("model" in flags), name


@pytest.fixture(scope="module")
def loaded() -> dict[str, Any]:
    """A model as its user loads it, and its tokenizer."""
    place = find_resource("data/bundled-redundant")
    model = AutoModelForCausalLM.from_pretrained(place, dtype="auto")
    return {"model": model, "tokenizer": AutoTokenizer.from_pretrained(place)}


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::kvsearch.core.errors.KvsearchWarning")
def test_a_loaded_model_is_not_loaded_again(
    loaded: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsearch.models.loading.load", lambda *_, **__: pytest.fail("it is loaded"))
    tasks = tiny.task_file(tmp_path / "mine.jsonl", 40, length=100, facts=3)
    asked = {"tasks": [f"jsonl:{tasks}"], "samples": 2, "seed": 1}
    plan = kvsearch.plans.uniform(**loaded, policy="snapkv", budget=64, output=tmp_path / "plan.json")
    assert plan.model.name == str(find_resource("data/bundled-redundant"))
    found = kvsearch.evaluate(**loaded, methods=["uniform", "lava"], budgets=[64], output=tmp_path / "table", **asked)
    kvsearch.run(
        **loaded, budget=64, policies=["snapkv"], rankings=["query_bank"], fit=4, measure=2, refine=False,
        output=tmp_path / "run", **asked,
    )  # fmt: skip
    assert kvsearch.load_plan(tmp_path / "run" / "plan.json").model == plan.model
    monkeypatch.undo()
    again = kvsearch.evaluate(plan.model.name, methods="uniform,lava", budgets="64", output=tmp_path / "table", **asked)
    assert again.as_json() == found.as_json()


def test_wrong_calls_say_what_to_do(loaded: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "plan.json").touch()
    run = partial(kvsearch.run, **loaded, output=tmp_path / "run")
    write = partial(kvsearch.plans.uniform, **loaded, policy="snapkv", budget=9, output=tmp_path / "plan.json")
    for call, error, words in [
        (partial(kvsearch.evaluate, loaded["model"], budgets=[64]), TypeError, "give it as tokenizer="),
        (partial(run, device="cpu"), TypeError, "device= is for a model that is loaded by its name"),
        (
            run,
            UsageError,
            r"Give --budget \(entries per kv head\), several with --budgets, --ratio .* or --lose-at-most",
        ),
        (
            partial(run, budget=3, ratio=0.5),
            UsageError,
            "^--ratio: cannot be given with --budget: leave one of them out",
        ),
        (write, UsageError, "--force to replace it"),
    ]:
        with pytest.raises(error, match=words):
            call()
    loaded["model"].train()
    with pytest.raises(IncompatibleError, match="training mode"):
        write()
    loaded["model"].eval()


def test_wrong_options_are_told_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        kvsearch.evaluate("bundled", samples=0, batch=0, colour="red")
    assert all(words in str(caught.value) for words in ("  --samples: ", "  --batch: ", "colour: unknown key"))

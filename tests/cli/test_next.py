"""Lines that offer the next command: whoever pastes them goes on, with the model and the questions that were typed."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvsearch.commands.calibrate import CalibrateOptions, suggest_commands
from kvsearch.commands.groups import suggest_plan_commands
from kvsearch.commands.run import RunOptions
from kvsearch.commands.run import remarks as remarks_on_run
from kvsearch.commands.select import SelectOptions
from kvsearch.commands.select import remarks as remarks_on_selection
from kvsearch.commands.validate import ValidateOptions
from kvsearch.commands.validate import remarks as remarks_on_signals
from kvsearch.core.resources import find_resource
from tests import tiny
from tests.cli.conftest import done


def offered(lines: Iterable[str]) -> list[list[str]]:
    """The words of all commands that were offered, as a shell reads them."""
    return [shlex.split(line)[2:] for line in lines if line.startswith("next: kvsearch ")]


def paste(words: Iterable[object], *more: object) -> tuple[str, list[list[str]]]:
    """Run what was offered; what it prints, and what it offers."""
    out, talk = done(*words, *more)
    return out, offered(talk.splitlines())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that is not bundled and a file of questions in its language; its name has to be quoted."""
    folder = tmp_path_factory.mktemp("my own")
    shutil.copytree(find_resource("data/bundled-redundant"), folder / "model")
    tiny.task_file(folder / "own.jsonl", contexts=24, length=120, facts=2)
    return folder


def typed(place: Path) -> dict[str, Any]:
    """Options that every command has to carry along."""
    return {
        "model": str(place / "model"), "tasks": f"jsonl:{place / 'own.jsonl'}", "samples": 3, "max_length": 300,
        "dtype": "float32", "seed": 3,
    }  # fmt: skip


def flags(options: dict[str, Any]) -> list[object]:
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]


def asked(words: Iterable[str]) -> dict[str, Any]:
    """What a command that was offered would ask."""
    found: dict[str, Any] = json.loads(paste(words, "--dry-run", "--json")[0])
    return found


@pytest.mark.slow
def test_from_a_calibration_to_an_evaluation_of_its_plan(place: Path) -> None:
    options = typed(place)
    model = options.pop("model")
    calibrate = ("calibrate", model, "--no-check", "-o", place / "lukv", *flags(options))
    _, (export,) = paste(calibrate)
    _, (show, evaluate) = paste(export)
    paste(show)
    assert evaluate[:2] == ["evaluate", model]
    out, _ = paste(evaluate, "--json")
    result = json.loads(out)
    assert (result["samples"], result["seed"], result["max_length"]) == (3, 3, 300)
    _, (show, evaluate) = paste(("plan", "scale", place / "lukv/plan.json", "--ratio", 0.5, "-o", place / "p.json"))
    assert evaluate == ["evaluate", model, "--plan", str(place / "p.json")]


def test_from_the_verdicts_on_signals_to_a_selection_and_on(inputs: Path, tmp_path: Path) -> None:
    given = {"directory": inputs / "polykv", "tasks": f"jsonl:{inputs / 'mine.jsonl'}"}
    plan = tmp_path / "plan.json"
    verdicts: Any = SimpleNamespace(budgets=(SimpleNamespace(budget=24, ratio=None),))
    (select,) = offered(remarks_on_signals(ValidateOptions.of(model="bundled", samples=3, **given), verdicts))
    assert asked(select)["tasks"] == ["mine"]
    done("plan", "uniform", "bundled", "--policy", "snapkv:window=8", "--budget", 40, "-o", plan)
    chosen: Any = SimpleNamespace(model="bundled", protocol="question-aware", plan=str(plan))
    result: Any = SimpleNamespace(choices=(chosen,))
    _, evaluate = offered(remarks_on_selection(SelectOptions.of(output=plan, **given), result))
    assert asked(evaluate)["protocol"] == "question-aware"


def test_from_a_search_to_an_evaluation(place: Path) -> None:
    options = RunOptions.of(budget=40, output=place / "best", protocol="question-aware", **typed(place))
    plan = place / "run.json"
    _, (_, first) = paste(("plan", "uniform", options.model, "--policy", "snapkv:window=8", "--budget", 40, "-o", plan))
    assert first == ["evaluate", options.model, "--plan", str(plan)]
    _, words = offered(suggest_plan_commands(plan, options.model, options))
    found = asked(words)
    assert (found["tasks"], found["protocol"], found["contexts"]) == (["own"], "question-aware", 3)


def test_without_tasks_their_length_is_carried_along(place: Path) -> None:
    options = RunOptions.of(model="bundled", budget=40, output=place, length="512")
    report = SimpleNamespace(ahead={}, scores={}, nats={}, parts={})
    choice = SimpleNamespace(
        decision="it is written", reported="it scores", report=report, plan="plan.json", uniform="snapkv"
    )
    result: Any = SimpleNamespace(sizes={"40": choice})
    _, words = offered(remarks_on_run(options, result))
    assert words == ["evaluate", "bundled", "--plan", str(place / "plan.json"), "--length", "512"]


@pytest.mark.parametrize(("fit", "policy"), [(0.5, "cake"), (0.1, "probe=fit"), (0.3, "probe=fit")])
def test_budgets_are_offered_for_the_ranking_that_is_better(fit: float, policy: str) -> None:
    noise = np.linspace(-0.2, 0.2, 8)[:, None, None] * [[[1], [-1]]]
    losses = np.array([[[fit], [0.3]]]) + noise * (fit == 0.3)
    settings = {"judged": ("probe", "cake"), "at": (0.1,)}
    provenance = SimpleNamespace(settings=settings)
    profile: Any = SimpleNamespace(arrays={"text_loss": losses}, metadata=SimpleNamespace(provenance=provenance))
    own = {"data": "own.json", "max_length": 300}
    (words,) = suggest_commands(CalibrateOptions.of(model="bundled", method="probe", output="fit", **own), profile)
    assert words == [
        "calibrate", "bundled", "--policy", policy, "-o", "fit-budgets", "--max-length", "300", "--data", "own.json",
    ]  # fmt: skip
    tasks = {"tasks": "jsonl:own.jsonl", "samples": 4, "dtype": "float32"}
    (words,) = suggest_commands(CalibrateOptions.of(model="m", method="probe", output="fit", **tasks), profile)
    assert words[6:] == [
        "--tasks", "jsonl:own.jsonl", "--samples", "4", "--dtype", "float32", "--split", "select",
    ]  # fmt: skip

"""What a user writes and types about a PolyKV calibration, what it costs, and how an interrupted one goes on."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from kvsearch.calibration.polykv.measure import PolykvCalibration
from kvsearch.calibration.polykv.options import PAPER_PATTERNS, PolykvOptions
from kvsearch.cli import app
from kvsearch.core.errors import UsageError
from kvsearch.plan import load_plan, load_profile
from kvsearch.policies import create_policy
from tests.calibration.test_recipe import resolve_recipe
from tests.signals.profiles import make_signals
from tests.tiny import calibration_file


def typed(
    *settings: str, options: tuple[str, ...] = (), path: Path | str | None = None, **values: Any
) -> PolykvOptions:
    """What the command line says, over a recipe file."""
    return resolve_recipe(path, {"method": "polykv", **values}, list(settings), options)


def written(folder: Path, text: str) -> PolykvOptions:
    path = folder / "recipe.yaml"
    path.write_text(f"method: polykv\n{text}")
    return typed(path=path)


def names_of(recipe: PolykvOptions) -> list[str]:
    return [policy.name for policy in recipe.policies()]


def test_everything_typed() -> None:
    recipe = typed(
        "window=4", "snapkv.window=6", options=("answer_tokens=5",), patterns="tova, snapkv,pyramidkv", policy="tova",
        budgets="128, 64", phases="decode", signals="entropy,ppl",
        protocol="question-aware", batch=3,
    )  # fmt: skip
    assert (recipe.policy, recipe.budgets, recipe.measured_phases) == ("tova", (64, 128), ("decode",))
    assert recipe.signals == ("ppl", "entropy")
    assert (recipe.answer_tokens, recipe.protocol, recipe.batch) == (5, "question-aware", 3)
    windows = [(policy.name, policy.recent_count) for policy in recipe.policies()]
    assert windows == [("tova", 0), ("snapkv", 6), ("pyramidkv", 4)]
    assert recipe.make_policy() == create_policy("tova")


def test_patterns_of_a_file(tmp_path: Path) -> None:
    text = "patterns: [paper, {name: h2o, params: {recent: 8}}, {name: keydiff}]\nparams: {window: 16}\n"
    recipe = written(tmp_path, text)
    assert names_of(recipe) == [*PAPER_PATTERNS, "keydiff"]
    h2o, *_, keydiff = recipe.policies()
    assert (h2o, keydiff) == (create_policy("h2o", {"recent": 8}), create_policy("keydiff", {"window": 16}))
    over = typed("recent=4", "keydiff.window=2", path=tmp_path / "recipe.yaml")
    h2o, *_, keydiff = over.policies()
    assert (h2o, keydiff) == (create_policy("h2o", {"recent": 4}), create_policy("keydiff", {"window": 2}))
    assert over.make_policy() == create_policy("snapkv", {"window": 16})


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"patterns": "tova,tova", "policy": "tova"}, "patterns: must have at least one item, and each once"),
        ({"patterns": "tova,h2o"}, "policy 'snapkv', for .* is none of the patterns: name one of tova, h2o with --pol"),
        ({"policy": "snapk"}, "policy 'snapk', for strategies without a route, is none of the patterns"),
        (
            {"budgets": "16"},
            r"patterns \(snapkv is left out: it always keeps 32 .* a budget of 16: .*\): name one of h2o",
        ),
        ({"budgets": "64,x"}, r"budgets\.1: .*, not 'x'"),
        ({"budgets": "0"}, r"budgets\.0: .*, not 0"),
        ({"phases": "prefil"}, r"unknown phases 'prefil'; did you mean 'prefill'\?"),
        ({"signals": "cosine,pl"}, r"signals\.1: .*, not 'pl'"),
    ],
)
def test_what_cannot_be_typed(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        typed(**values).make_policy()


@pytest.mark.parametrize("name", ["paper", "sweep", "figure3", "bundled"])
def test_what_a_run_resolved_is_a_recipe(name: str, tmp_path: Path) -> None:
    recipe = typed("pyramidkv.kernel=5" if name != "bundled" else "snapkv.kernel=5", path=f"polykv-{name}")
    resolved = recipe.resolved()
    assert json.loads(json.dumps(resolved)) == resolved
    assert resolved.keys() == PolykvOptions.model_fields.keys() - {"seed"}
    assert [item["params"] for item in resolved["patterns"]] == [policy.parameters() for policy in recipe.policies()]
    path = tmp_path / "resolved.yaml"
    path.write_text(yaml.safe_dump(resolved))
    again = typed(path=path)
    assert again.policies() == recipe.policies()
    assert again.resolved() == resolved


Run = Callable[..., tuple[int, str, str]]
EVICTS = ("--budgets", 64)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibration_file(tmp_path_factory.mktemp("data") / "short.json", 2)


@pytest.fixture
def run(data: Path, tmp_path: Path) -> Run:
    """A PolyKV calibration of the bundled model into one directory: exit code, output, talk."""

    def command(*arguments: object) -> tuple[int, str, str]:
        words = ("calibrate", "bundled", "-o", tmp_path / "run", "--data", data, "--method", "polykv", *arguments)
        result = CliRunner().invoke(app, [str(word) for word in words])
        return result.exit_code, result.stdout, " ".join(result.stderr.split())

    return command


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[PolykvCalibration]:
    calls: list[PolykvCalibration] = []
    monkeypatch.setattr(PolykvCalibration, "measure", lambda self, *_: calls.append(self) or make_signals())
    return calls


def test_what_is_calibrated_is_recorded(run: Run, made: list[PolykvCalibration], tmp_path: Path) -> None:
    code, _, talk = run("--phases", "prefill", "--seed", 3, *EVICTS)
    assert code == 0, talk
    (calibration,) = made
    assert (calibration.options.measured_phases, calibration.options.seed) == (("prefill",), 3)
    assert "calibrating bundled by polykv for h2o, tova, " in talk
    assert " on 2 contexts with 4 questions from tiny" in talk
    assert f"next: kvsearch export {tmp_path / 'run'} --budget 64 -o {tmp_path / 'run' / 'plan.json'}" in talk
    content = json.loads((tmp_path / "run" / "config.json").read_text())["content"]
    assert (content["model"], content["seed"], content["dtype"], content["revision"]) == ("bundled", 3, "auto", None)
    assert content["recipe"] == typed(phases="prefill", budgets="64").resolved()
    assert load_profile(tmp_path / "run" / "profile.safetensors").metadata.method == "polykv"


def test_the_command_that_comes_next_works(run: Run, tmp_path: Path) -> None:
    patterns = ("--patterns", "tova,streaming", "--policy", "tova", "--budgets", 32, "--questions", 1)
    code, _, talk = run("--signals", "entropy", *patterns)
    assert code == 0, talk
    _, following = (shlex.split(line)[1:] for line in talk.split("next: ")[1:])
    written = tmp_path / "run" / "plan.json"
    assert following == [
        "export", str(tmp_path / "run"), "--budget", "32", "--budget-signal", "entropy", "-o", str(written),
    ]  # fmt: skip
    result = CliRunner().invoke(app, following)
    assert result.exit_code == 0, result.stderr
    settings = load_plan(written).provenance.settings
    assert (settings["route"], settings["budget_signal"]) == (None, "entropy")

"""Calibrating lava, cake and adakv from the command line, on the bundled model and short contexts."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from transformers import PreTrainedTokenizerFast

from kvsearch.cli.console import Console
from kvsearch.core.errors import UsageError
from kvsearch.plan import Profile, load_plan, load_profile
from kvsearch.plan.origin import context_hash
from kvsearch.report.profile import profile_parts
from tests import tiny
from tests.cli.conftest import Run
from tests.families import build
from tests.robustness.inputs import calibration_file
from tests.tasks.ruler.helpers import bpe_tokenizer

METHODS = ("lava", "cake", "adakv")
CONTEXTS = 3
methods = pytest.mark.parametrize("method", METHODS)


@pytest.fixture(scope="session")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration file of short contexts in the bundled model's language."""
    return calibration_file(tmp_path_factory.mktemp("short") / "short.json", CONTEXTS, length=200)


def profile_in(directory: Path) -> Profile:
    return load_profile(directory / "profile.safetensors")


def shown(directory: Path, capsys: pytest.CaptureFixture[str]) -> str:
    Console().out.print_parts(profile_parts(profile_in(directory)))
    return capsys.readouterr().out


@methods
def test_calibrate_export_and_show(
    method: str, run: Run, short: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run"
    code, _, talk = run("calibrate", "bundled", "-o", directory, "--data", short, "--method", method)
    assert code == 0, talk
    config = json.loads((directory / "config.json").read_text())["content"]
    assert (config["recipe"]["method"], config["recipe"]["protocol"]) == (method, "question-agnostic")
    assert config["recipe"]["policy"] == {"adakv": "snapkv"}.get(method, method)
    made = profile_in(directory)
    assert (made.metadata.method, made.metadata.questions, made.metadata.floor) == (method, CONTEXTS, 32)
    for target, total in ((("--ratio", 0.7, "--length", 1000), 300 * 24), (("--budget", 50), 50 * 24)):
        path = tmp_path / f"{total}.json"
        code, out, talk = run("export", directory, *target, "-o", path, "--json")
        assert code == 0, talk
        assert json.loads(out)["total"] == load_plan(path).total == total
    page = shown(directory, capsys)
    for title in ("local eviction ratio at 0.8", "standard deviation of the local eviction ratio", "rank correlation"):
        assert title in page
    assert "\x1b" not in page


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.task_file(tmp_path_factory.mktemp("task") / "mine.jsonl", 20, 140, 3)


@pytest.mark.parametrize(
    "method",
    [
        ("lukv",),
        ("lava",),
        pytest.param(("cake",), marks=pytest.mark.nightly),
        pytest.param(("adakv",), marks=pytest.mark.nightly),
        ("polykv", "--budgets", 48, "--patterns", "snapkv,h2o"),
    ],
)
def test_every_method_takes_tasks(run: Run, questions: Path, tmp_path: Path, method: tuple[object, ...]) -> None:
    """Its own questions, of the train split; the profile knows its contexts."""
    tasks = ("--tasks", f"jsonl:{questions}+synthetic:multikey", "--length", 512, "--samples", 2)
    code, _, talk = run("calibrate", "bundled", "--method", *method, "-o", tmp_path / "p", *tasks)
    assert code == 0, talk
    assert "evaluate asks all examples" in talk
    origin = load_profile(tmp_path / "p" / "profile.safetensors").metadata.provenance
    assert origin.settings["data"] == "mine+multikey"
    fitted = json.loads((tmp_path / "p" / "contexts.json").read_text())["fitted"]
    assert len(fitted) == 4
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    assert len(set(fitted) & {context_hash(row["context"]) for row in rows}) == 2
    config = json.loads((tmp_path / "p" / "config.json").read_text())
    assert (config["options"]["tasks"], config["content"]["data"]) == (tasks[1], "mine+multikey")
    code, _, talk = run("show", tmp_path / "p")
    assert code == 0, talk


def test_a_model_with_fewer_positions_than_the_texts(run: Run, tmp_path: Path) -> None:
    """They are cut, and the remark names the options that bring others; `show` tells how far texts agree."""
    model, made = tmp_path / "model", tmp_path / "p"
    shape = {"num_hidden_layers": 2, "hidden_size": 32, "max_position_embeddings": 512}
    build("llama", vocab_size=3000, **shape).save_pretrained(model)
    PreTrainedTokenizerFast(tokenizer_object=bpe_tokenizer(), eos_token="0").save_pretrained(model)
    code, _, talk = run("calibrate", model, "--method", "lava", "-o", made)
    assert code == 0, talk
    assert "the middle of 5 of 5 calibration contexts was cut out, so that context, question and answer fit 512" in talk
    assert "--data" in talk
    assert "--tasks" in talk
    profile = load_profile(made / "profile.safetensors")
    assert 350 < profile.metadata.length < 512
    code, out, _ = run("show", made, "--json")
    assert code == 0
    found = next(table for table in json.loads(out)["tables"] if table["title"].startswith("rank correlation"))
    assert found["header"][3] == "halves of the texts"
    assert -1 <= found["rows"][0][3] <= 1


def test_a_policy_that_does_not_suit_the_model_is_warned_of(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsearch.runtime.program.normalises_keys", lambda model: True)
    monkeypatch.setattr("kvsearch.calibration.lukv.measure_importance", Mock(side_effect=UsageError("far enough")))
    _, _, talk = run("calibrate", "bundled", "-o", tmp_path / "run", "--policy", "knorm", "--questions", 1)
    (line,) = [line for line in talk.splitlines() if "warning" in line]
    assert line.startswith("kvsearch: warning: ")
    assert "knorm" in line

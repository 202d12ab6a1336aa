"""Calibration on tasks and on the texts of models other than the bundled one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from kvsearch.plan import load_profile
from kvsearch.plan.origin import context_hash
from tests import tiny
from tests.cli.conftest import Run
from tests.families import build
from tests.tasks.ruler.helpers import bpe_tokenizer


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
    assert found["header"][3] == "a text and the others"
    assert -1 <= found["rows"][0][3] <= 1

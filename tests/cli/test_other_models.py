"""A model that is not the bundled one: what it is asked by default, and what stops where it cannot answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from kvsearch.models.loading import load
from kvsearch.plan import save_profile
from tests.cli.conftest import Run
from tests.cli.test_bad_input import INCOMPATIBLE, refused
from tests.families import build
from tests.signals.profiles import make_signals, signal_metadata
from tests.tasks.ruler.helpers import bpe_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model in a folder, with a tokenizer for English."""
    path = tmp_path_factory.mktemp("models") / "random"
    shape = {"num_hidden_layers": 2, "hidden_size": 32, "max_position_embeddings": 4200}
    build("llama", vocab_size=3000, **shape).save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=bpe_tokenizer(), eos_token="0").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def calibrated(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random signals of that model."""
    directory = tmp_path_factory.mktemp("signals")
    metadata = signal_metadata(load(str(model)).fingerprint, phases=("prefill",))
    save_profile(make_signals(metadata), directory / "profile.safetensors")
    return directory


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short ones that a random model cannot answer."""
    path = tmp_path_factory.mktemp("task") / "mine.jsonl"
    words = "the harbour master weighed the basket again and said nothing of it to the captain"
    rows = (
        {"context": f"{n} {words} " * 8, "question": "Who?", "answers": ["Ann Lee"], "max_new_tokens": 2}
        for n in range(30)
    )
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.nightly
def test_a_model_that_cannot_answer_gets_no_plan(
    run: Run, model: Path, calibrated: Path, questions: Path, tmp_path: Path
) -> None:
    """Nothing could be chosen by its scores: one line, exit code 4, and no plan or verdict is written."""
    asked = ("--tasks", f"jsonl:{questions}", "--samples", 2)
    words = "on mine: the full cache itself scores 0.00, but on 2 contexts that may be chance: ask about 8 or more"
    plan, searched = tmp_path / "plan.json", tmp_path / "evolved"
    for command in (
        ("select", calibrated, "--model", model, *asked, "-o", plan),
        ("evolve", model, "--budget", 40, "--group-size", 1, *asked, "-o", searched),
        ("headroom", model, *asked),
    ):
        complaint = refused(run, INCOMPATIBLE, words, *command)
        assert len(complaint.strip().splitlines()) == 1
        assert "ask others with --tasks" in complaint
    assert not plan.exists()
    assert not searched.exists()


def test_an_evaluation_of_such_a_model_is_shown_and_kept(
    run: Run, model: Path, questions: Path, tmp_path: Path
) -> None:
    asked = ("--tasks", f"jsonl:{questions}", "--samples", 2, "--methods", "snapkv", "--budgets", 40)
    code, out, talk = run("evaluate", model, *asked, "-o", tmp_path / "run", "--json")
    assert code == INCOMPATIBLE
    assert json.loads(out) == json.loads((tmp_path / "run" / "report.json").read_text())
    (line,) = (line for line in talk.splitlines() if "error" in line)
    assert line.startswith("kvsearch: error: the full cache itself scores 0.00")
    assert json.loads(out)["notes"][0] in line

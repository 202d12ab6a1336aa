"""kvsearch validate, end to end on the bundled model and a made-up profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvsearch.plan import save_profile
from kvsearch.report.integrity import Verification
from kvsearch.results.validation import find_harmful
from kvsearch.runs.run import read_sums
from kvsearch.selection.from_signals import Strategy
from tests.cli.conftest import Run, done, polykv_in
from tests.cli.test_bad_input import INCOMPATIBLE, USAGE, refused
from tests.signals.profiles import make_signals, signal_metadata

PATTERNS: dict[str, dict[str, Any]] = {"snapkv": {"window": 8}, "streaming": {"sinks": 4}}
ASKED = ("--tasks", "synthetic:single", "--length", 512, "--samples", 2)
ROUTE = ("--signals", "cosine", "--phases", "prefill")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return polykv_in(tmp_path / "polykv", PATTERNS, budgets=(32, 64))


@pytest.mark.slow
def test_all_measured_budgets(directory: Path) -> None:
    out, talk = done("validate", directory, *ASKED, *ROUTE, "--json")
    assert {one.state for one in Verification([directory]).artefacts} == {"whole"}
    assert {"validation.json", "64-question-agnostic/ledger.jsonl"} <= read_sums(directory / "validation").keys()
    found = json.loads(out)
    assert found == json.loads((directory / "validation" / "validation.json").read_text())
    assert (found["schema"], found["split"], found["protocol"]) == (
        "kvsearch.validation/3", "select", "question-agnostic",
    )  # fmt: skip
    assert [at["budget"] for at in found["budgets"]] == [32, 64]
    for at in found["budgets"]:
        (judged,) = at["signals"]
        assert (judged["signal"], judged["kind"], judged["phases"]) == ("cosine", "route", "prefill")
        assert judged["verdict"] == "unproven"
        assert judged["reason"].startswith("too few contexts to tell: 2 different ones")
        assert len(judged["random"]) == 5
    assert "kept in" in talk
    assert find_harmful(directory, Strategy("ppl"), 64) is None


@pytest.mark.slow
def test_the_model_is_found_or_named(run: Run, directory: Path) -> None:
    command = ("validate", directory, *ASKED, *ROUTE, "--dry-run")
    for content in ("{}", '{"model": 3}'):
        (directory / "config.json").write_text(content)
        refused(run, USAGE, "does not say which model was calibrated: give --model", *command)
    done(*command, "--model", "bundled")
    save_profile(make_signals(signal_metadata(patterns=PATTERNS)), directory / "profile.safetensors", overwrite=True)
    refused(run, INCOMPATIBLE, "was made for another model", *command, "--model", "bundled")

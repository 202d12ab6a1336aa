"""Searches from the command line: what ends them speaks for what was tried, and they go on where they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import invoke

ASKED = ("--length", 512, "--tasks", "synthetic:single")


def evolve(output: Path, *more: Any) -> tuple[int, str]:
    code, out, error = invoke("evolve", "bundled", "--set", "window=8", *ASKED, *more, "-o", output)
    return code, out + error


def stages(output: Path) -> set[str]:
    """The stages whose optimisers were told values."""
    lines = [json.loads(line) for line in (output / "ledger.jsonl").read_text().splitlines()]
    return {line["stage"] for line in lines if line["kind"] == "told"}


@pytest.mark.nightly
def test_few_questions_do_not_end_a_search_at_its_first_layer(tmp_path: Path) -> None:
    """Four questions score even budgets and small steps alike; the layer that retrieves is the fourth of six."""
    few = ("--budget", 60, "--samples", 4, "--seed", 3, "--objective", "metric", "--group-size", 1, "--max-evals", 60)
    code, said = evolve(tmp_path, *few)
    assert code == 0
    assert "does not matter" not in said
    values = {
        value
        for line in (tmp_path / "ledger.jsonl").read_text().splitlines()
        if (told := json.loads(line))["kind"] == "told"
        for value in told["values"]
    }
    assert len(values) > 1
    assert len(stages(tmp_path)) >= 4


@pytest.mark.nightly
def test_a_search_that_is_flat_everywhere_tried_everything(tmp_path: Path) -> None:
    """With this many entries nothing that a layer loses is missed; cut by limits it goes on to the same end."""
    flat = ("--budget", 400, "--samples", 4, "--objective", "metric", "--group-size", 2, "--sigma", "0.05")
    code, said = evolve(tmp_path / "whole", *flat, "--max-evals", 200)
    assert code == 0
    if "does not matter" in said:
        assert len(stages(tmp_path / "whole")) == 3
    for limit in (5, 9, 200):
        evolve(tmp_path / "steps", *flat, "--max-evals", limit)
    assert (tmp_path / "steps" / "plan.json").read_bytes() == (tmp_path / "whole" / "plan.json").read_bytes()


@pytest.mark.nightly
def test_a_seed_of_zero_is_a_seed(tmp_path: Path) -> None:
    common = ("--budget", 24, "--samples", 8, "--max-evals", 14, "--group-size", 2, "--seed", 0)
    for name in ("a", "b"):
        assert evolve(tmp_path / name, *common)[0] == 0
    assert (tmp_path / "a" / "plan.json").read_bytes() == (tmp_path / "b" / "plan.json").read_bytes()

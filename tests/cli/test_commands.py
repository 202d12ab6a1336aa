"""Every command, end to end, on the bundled model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvsearch.cli.command import MAIN_VERBS
from kvsearch.models.loading import BUNDLED
from tests.cli.conftest import Run, done, done_json


def test_the_list_of_commands_says_what_they_say() -> None:
    """The list is made without importing them."""
    listed = "".join(done("--help")[0].split())
    for name, verb in MAIN_VERBS.items():
        command = verb.load_command()
        assert "".join((command.help or "").split("\n\n")[0].split()) in listed, name
        assert command.name == name


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--colour",), "No such option: --colour (see `kvsearch -h`)"),
        (("evolv",), "No such command 'evolv'. Did you mean 'evolve'? (see `kvsearch -h`)"),
        (("show", "x", "--colour"), "No such option: --colour (see `kvsearch show -h`)"),
        (("plan", "dif"), "No such command 'dif'. Did you mean 'diff'? (see `kvsearch plan -h`)"),
        (("show", "--ratio"), "Option '--ratio' requires an argument."),
    ],
)
def test_what_does_not_exist_is_told_on_one_line(run: Run, arguments: tuple[str, ...], expected: str) -> None:
    assert run(*arguments) == (2, "", f"kvsearch: error: {expected}\n")


def test_generate_answers_from_the_small_cache(calibrated: Path) -> None:
    plan = calibrated / "plan.json"
    small = done_json("generate", "bundled", "--plan", plan, "--max-new-tokens", 3, "--json")
    full = done_json("generate", "bundled", "--max-new-tokens", 3, "--json")
    assert small["text"] == full["text"]
    assert small["entries"] * 5 == pytest.approx(full["entries"], rel=0.01)
    _, talk = done("generate", "bundled", "--plan", plan, "--max-new-tokens", 3)
    assert "expected to begin with: " + full["text"] in talk


def test_show_a_plan_and_a_profile(calibrated: Path) -> None:
    out, _ = done("show", calibrated / "plan.json")
    assert "prefill entries by layer and head" in out
    out, _ = done("show", calibrated, "--ratio", 0.5)
    for title in ("local eviction ratio at 0.5", "recall lost", "importance evicted", "rank correlation"):
        assert title in out
    shown = done_json("show", calibrated, "--json")
    lost = next(table for table in shown["tables"] if table["title"].startswith("importance evicted"))
    _, even, own = lost["rows"][-1]
    assert own < even


def test_doctor_is_content_here() -> None:
    out, _ = done("doctor", "--json")
    answers = [json.loads(out)[f"{name} model"] for name in BUNDLED]
    assert all(answer.startswith("answers '") for answer in answers)

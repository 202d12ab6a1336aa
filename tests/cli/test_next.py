"""Lines that offer the next command: whoever pastes them goes on."""

from __future__ import annotations

import shlex
from pathlib import Path

from kvsearch.jobs.calibrate import CalibrateOptions, following_commands
from kvsearch.plan import load_profile
from tests.cli.conftest import Run


def offered(talk: str) -> list[list[str]]:
    """The words of all commands that were offered, as a shell reads them."""
    return [shlex.split(line)[2:] for line in talk.splitlines() if line.startswith("next: kvsearch ")]


def test_from_a_calibration_to_a_plan_and_on(run: Run, calibrated: Path, tmp_path: Path) -> None:
    directory = tmp_path / "my calibration"  # a name that has to be quoted
    directory.mkdir()
    for name in ("profile.safetensors", "config.json"):
        (directory / name).write_bytes((calibrated / name).read_bytes())
    options = CalibrateOptions.of(model="bundled", output=directory)
    (words,) = following_commands(options, load_profile(directory / "profile.safetensors"))
    code, _, talk = run(*words)
    assert code == 0, talk
    show, evaluate = offered(talk)
    assert (show[0], evaluate[0]) == ("show", "evaluate")
    code, _, talk = run(*show)
    assert code == 0, talk
    code, out, talk = run(*evaluate, "--dry-run")
    assert code == 0, talk
    assert "on this machine (" in talk
    assert '"seconds"' in out


def test_a_plan_of_ones_own(run: Run, tmp_path: Path) -> None:
    plan = tmp_path / "my plan.json"
    code, _, talk = run("plan", "uniform", "bundled", "--policy", "snapkv", "--budget", 3000, "-o", plan)
    assert code == 0, talk
    show, evaluate = offered(talk)
    assert run(*show)[0] == 0
    code, _, talk = run(*evaluate, "--dry-run", "--samples", 1)
    assert code == 0, talk
    assert "nothing is evicted from any prompt" in talk
    code, _, talk = run("generate", "bundled", "--plan", plan, "--max-new-tokens", 1)
    assert code == 0, talk
    assert "warning: nothing was evicted" in talk
    code, _, talk = run("plan", "yaml", plan, "-o", tmp_path / "my plan.yaml")
    assert run(*offered(talk)[0])[0] == 0
    assert (tmp_path / "my plan-edited.json").read_bytes() == plan.read_bytes()

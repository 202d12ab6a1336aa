"""`kvsearch plan uniform`: every pattern in every phase from the command line, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvsearch.plan import load_plan
from kvsearch.policies.registry import BUILT_IN
from tests.cli.conftest import Run


@pytest.mark.parametrize("phases", ["prefill", "decode", "both"])
def test_a_plan_is_made_and_answers(run: Run, phases: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    making = ("plan", "uniform", "bundled", "--policy", "tova", "--budget", 300, "--phases", phases, "-o", path)
    code, out, talk = run(*making, "--json")
    assert code == 0, talk
    assert json.loads(out) == {"plan": str(path), "total": 7200, "scaling": "fixed", "phases": phases}
    code, out, talk = run("generate", "bundled", "--plan", path, "--json", "--max-new-tokens", 3)
    assert code == 0, talk
    reply = json.loads(out)
    full = reply["full_entries"]
    assert reply["entries"] == (full if phases == "decode" else 7200)
    fed = 3 + 2  # the question, and all new tokens but the last
    assert reply["most"] == {"prefill": 7200 + 24 * fed, "decode": full + 24, "both": 7200 + 24}[phases]
    code, out, talk = run(*making)
    assert (code, out) == (2, "")
    assert "--force" in talk


@pytest.mark.parametrize("policy", BUILT_IN)
def test_every_pattern_runs_in_both_phases(run: Run, policy: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    code, _, talk = run(
        "plan", "uniform", "bundled", "--policy", policy, "--budget", 320, "--phases", "both", "-o", path
    )
    if policy == "full":
        assert code == 2
        assert "full never evicts" in talk
        return
    assert code == 0, talk
    code, out, talk = run("generate", "bundled", "--plan", path, "--json", "--max-new-tokens", 2)
    assert code == 0, talk
    assert json.loads(out)["entries"] == 320 * 24


def test_evaluating_a_plan_with_a_decode_phase(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    code, _, talk = run(
        "plan", "uniform", "bundled", "--policy", "h2o", "--budget", 200, "--phases", "both", "-o", path
    )
    assert code == 0, talk
    code, out, talk = run(
        "evaluate", "bundled", "--plan", path, "--tasks", "synthetic:single", "--samples", 2, "--length", 512,
        "--baselines", "snapkv,streaming", "--json",
    )  # fmt: skip
    assert code == 0, talk
    held = json.loads(out)["held"]
    assert held["mine"]["entries"] == held["snapkv"]["entries"] == held["streaming"]["entries"] == 200 * 24
    assert held["mine"]["most"] == held["snapkv"]["most"] == held["streaming"]["most"] == 201 * 24
    assert load_plan(path).decode is not None


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--policy", "h20", "--budget", 9), "unknown policy 'h20'; did you mean 'h2o'?"),
        (("--policy", "h2o", "--set", "recnt=3", "--budget", 9), "no parameter 'recnt'; did you mean 'recent'?"),
        (("--policy", "h2o", "--set", "recent_share=2", "--budget", 9), "recent_share must be between 0 and 1"),
        (("--policy", "snapkv", "--budget", 9), "below the 32 that snapkv always keeps"),
        (("--policy", "h2o", "--budget", 9, "--phases", "decod"), "unknown phases 'decod'; did you mean 'decode'?"),
        (("--policy", "duo_attention", "--budget", 400), "duo_attention never evicts heads with even budgets of 400"),
        (("--policy", "h2o"), "give either a ratio to evict"),
        (("--policy", "h2o", "--ratio", 0.5), "a ratio needs the --length"),
    ],
)
def test_what_is_refused_without_a_model(run: Run, arguments: tuple[object, ...], problem: str, tmp_path: Path) -> None:
    code, out, talk = run("plan", "uniform", "/no/such/model", *arguments, "-o", tmp_path / "x.json")
    assert (code, out) == (2, "")
    assert problem in talk
    assert talk.count("\n") == 1
    assert not (tmp_path / "x.json").exists()

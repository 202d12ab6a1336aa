"""`kvsearch plan uniform`, `pyramid` and `scale`: every pattern in every phase, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvsearch.budgets.pyramidkv import Pyramid
from kvsearch.plan import load_plan
from tests.cli.conftest import Run


@pytest.mark.parametrize("phases", ["prefill", "decode", "both"])
def test_a_plan_is_made_and_answers(run: Run, phases: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    making = ("plan", "uniform", "bundled", "--policy", "tova", "--budget", 300, "--phases", phases, "-o", path)
    code, out, talk = run(*making, "--json")
    assert code == 0, talk
    assert json.loads(out) == {
        "plan": str(path), "total": 7200, "scaling": "fixed", "length": None, "phases": phases, "allocation": "static",
    }  # fmt: skip
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
    held = {method["name"]: method["held"] for method in json.loads(out)["blocks"][0]["methods"]}
    assert held["mine"]["entries"] == held["snapkv"]["entries"] == held["streaming"]["entries"] == 200 * 24
    assert held["mine"]["most"] == held["snapkv"]["most"] == held["streaming"]["most"] == 201 * 24
    assert load_plan(path).decode is not None


def test_a_pyramid_falls_from_layer_to_layer_with_the_total_of_even_budgets(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "pyramid.json"
    making = ("plan", "pyramid", "bundled", "--policy", "pyramidkv", "--budget", 64, "-o", path)
    code, _, talk = run(*making, "--dry-run")
    assert (code, path.exists()) == (0, False)
    assert talk == f"would write {path}: 1536 entries, 64.0 per kv head, fixed\n"
    assert run(*making)[0] == 0
    sums = [sum(budget or ()) for budget in load_plan(path).budgets("prefill")]
    assert (len(sums), sum(sums)) == (6, 64 * 24)
    assert sums == sorted(sums, reverse=True)
    assert (sums[0], sums[-1]) == (4 * (8 + 2 * 56 - 2), 4 * (8 + 2))  # 56 / 20 = 2.8 free entries in the last layer
    assert load_plan(path).provenance.settings["beta"] == Pyramid().beta
    assert run(*making, "--beta", 2, "--force")[0] == 0
    assert [sum(budget or ()) for budget in load_plan(path).budgets("prefill")][-1] == 4 * (8 + 28)


def test_an_allocation_is_written_and_shown(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "lava.json"
    making = ("plan", "uniform", "bundled", "--policy", "lava", "--budget", 64, "-o", path)
    code, _, talk = run(*making, "--allocation", "lava:layers=planned")
    assert code == 0, talk
    assert "1536 entries, 64.0 per kv head, fixed, shared out by lava" in talk
    assert load_plan(path).allocation.params["layers"] == "planned"
    code, out, _ = run("show", path)
    assert code == 0
    (line,) = [line for line in out.splitlines() if line.startswith("allocation ")]
    assert "lava" in line
    assert "'layers': 'planned'" in line
    assert "what the entries of a prompt are shared out from, not what a head keeps" in line


def test_the_loss_of_a_profile_is_without_the_allocation_of_a_plan(run: Run, calibrated: Path, tmp_path: Path) -> None:
    path = tmp_path / "lava.json"
    making = ("plan", "uniform", "bundled", "--policy", "lava", "--budget", 64, "-o", path, "--length", 400)
    assert run(*making, "--allocation", "lava")[0] == 0
    code, _, talk = run("show", calibrated, "--plan", path)
    assert code == 0
    assert "warning: the loss shown for the plan is that of its budgets without allocation lava" in talk


def test_scale_by_ratio_and_by_budget(run: Run, tmp_path: Path) -> None:
    plan, new = tmp_path / "plan.json", tmp_path / "new.json"
    assert run("plan", "uniform", "bundled", "--policy", "knorm", "--ratio", 0.8, "--length", 40, "-o", plan)[0] == 0
    code, out, talk = run("plan", "scale", plan, "--ratio", 0.9, "--length", 400, "-o", new, "--json")
    assert code == 0, talk
    assert json.loads(out) == {
        "plan": str(new), "total": 960, "scaling": "proportional", "length": 400, "phases": "prefill",
        "allocation": "static",
    }  # fmt: skip
    code, out, talk = run("plan", "scale", plan, "--budget", 16, "-o", new, "--force")
    assert (code, out) == (0, "")
    assert talk.startswith(f"wrote {new}: 384 entries, 16.0 per kv head of a 40-token prompt, fixed\n")
    assert set(sum((budget or () for budget in load_plan(new).budgets("prefill")), ())) == {16}

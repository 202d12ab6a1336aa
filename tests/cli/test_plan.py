"""`kvsearch plan`: `uniform`, `pyramid`, `scale`, `diff`, `yaml` and `build`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvsearch.plan import load_plan, save_plan
from tests.cli.conftest import Run, done, done_json
from tests.plan.builders import PROVENANCE, make_plan, phase_dict


@pytest.mark.parametrize("phases", [pytest.param("decode", marks=pytest.mark.nightly), "both"])
def test_a_plan_is_made_and_answers(run: Run, phases: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    making = ("plan", "uniform", "bundled", "--policy", "tova", "--budget", 300, "--phases", phases, "-o", path)
    out, _ = done(*making, "--json")
    assert json.loads(out) == {
        "plan": str(path), "total": 7200, "scaling": "fixed", "length": None, "phases": phases, "allocation": "static",
    }  # fmt: skip
    reply = done_json("generate", "bundled", "--plan", path, "--json", "--max-new-tokens", 3)
    full = reply["full_entries"]
    assert reply["entries"] == (full if phases == "decode" else 7200)
    assert reply["most"] == {"decode": full + 24, "both": 7200 + 24}[phases]
    code, out, talk = run(*making)
    assert (code, out) == (2, "")
    assert "--force" in talk


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
    assert run(*making, "--beta", 2, "--force")[0] == 0
    assert [sum(budget or ()) for budget in load_plan(path).budgets("prefill")][-1] == 4 * (8 + 28)


def test_an_allocation_is_written_and_shown(tmp_path: Path) -> None:
    path = tmp_path / "lava.json"
    making = ("plan", "uniform", "bundled", "--policy", "lava", "--budget", 64, "-o", path)
    _, talk = done(*making, "--allocation", "lava:layers=planned")
    assert "1536 entries, 64.0 per kv head, fixed, shared out by lava" in talk
    assert load_plan(path).allocation.params["layers"] == "planned"
    out, _ = done("show", path)
    (line,) = [line for line in out.splitlines() if line.startswith("allocation ")]
    for words in ("lava", "'layers': 'planned'", "what the entries of a prompt are shared out from"):
        assert words in line


def test_scale_by_ratio_and_by_budget(run: Run, tmp_path: Path) -> None:
    plan, new = tmp_path / "plan.json", tmp_path / "new.json"
    assert run("plan", "uniform", "bundled", "--policy", "knorm", "--ratio", 0.8, "--length", 40, "-o", plan)[0] == 0
    out, _ = done("plan", "scale", plan, "--ratio", 0.9, "--length", 400, "-o", new, "--json")
    assert json.loads(out) == {
        "plan": str(new), "total": 960, "scaling": "proportional", "length": 400, "phases": "prefill",
        "allocation": "static",
    }  # fmt: skip
    code, out, talk = run("plan", "scale", plan, "--budget", 16, "-o", new, "--force")
    assert (code, out) == (0, "")
    assert talk.startswith(f"wrote {new}: 384 entries, 16.0 per kv head of a 40-token prompt, fixed\n")
    assert set(sum((budget or () for budget in load_plan(new).budgets("prefill")), ())) == {16}


def written(path: Path, budgets: list[list[int] | None] | None = None, **changes: Any) -> Path:
    save_plan(make_plan(budgets, **changes), path)
    return path


@pytest.fixture
def a(tmp_path: Path) -> Path:
    return written(tmp_path / "a.json")


def cells(out: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines()]


def test_a_plan_differs_from_none_of_the_same_budgets(run: Run, a: Path, tmp_path: Path) -> None:
    b = written(tmp_path / "b.json", provenance={**PROVENANCE, "seed": 1})
    assert run("plan", "diff", a, b) == (0, "the plans are equal\n", "")
    out, _ = done("plan", "diff", a, b, "--json")
    assert json.loads(out) == {"equal": True, "settings": [], "budgets": [], "totals": {"prefill": [32, 32]}}


def test_tables_show_what_differs(a: Path, tmp_path: Path) -> None:
    more = phase_dict([[8, 8], None, None])
    b = written(tmp_path / "b.json", [[10, 7], [5, 5], [4, 12]], length=50, decode=more)
    out, _ = done("plan", "diff", a, b)
    found = cells(out)
    assert ["A", str(a)] in found
    assert ["B", str(b)] in found
    assert ["length", "40", "50"] in found
    assert ["prefill", "1", "policy", "-", "snapkv"] in found
    assert ["decode", "0", "policy.window", "-", "4"] in found
    assert ["0", "16", "17", "+1", "10", "6", "10", "7"] in found
    assert ["1", "-", "10", "-", "-", "5", "5"] in found
    assert ["total", "32", "43", "+11"] in found
    assert ["total", "-", "16", "-"] in found
    assert not any(row[:2] == ["2", "16"] for row in found)  # layer 2 is the same


USAGE = 2


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """A plan of three layers: 10 and 6 entries, the whole cache, 4 and 12 entries."""
    phase = phase_dict([[10, 6], None, [4, 12]], {"name": "snapkv", "params": {"window": 4}})
    save_plan(make_plan(prefill=phase), tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_there_and_back_gives_the_same_bytes(run: Run, plan: Path, tmp_path: Path) -> None:
    strategy, again = tmp_path / "strategy.yaml", tmp_path / "again.json"
    code, out, talk = run("plan", "yaml", plan, "-o", strategy)
    assert (code, out) == (0, "")
    assert talk == (
        f"wrote {strategy}, to be edited\nnext: kvsearch plan build {strategy} -o {strategy.with_suffix('.json')}\n"
    )
    assert "    0: {policy: snapkv, budget: [10, 6], params: {window: 4}}\n    1: full\n" in strategy.read_text()
    code, out, talk = run("plan", "build", strategy, "-o", again)
    assert (code, out) == (0, "")
    assert talk.startswith(f"wrote {again}: 32 entries, 8.0 per kv head of a 40-token prompt, proportional\nnext: ")
    assert again.read_bytes() == plan.read_bytes()


def test_what_is_there_is_kept(run: Run, plan: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    code, out, talk = run("plan", "yaml", plan, "-o", mine)
    assert (code, out, mine.read_text()) == (USAGE, "", "mine")
    assert talk == f"kvsearch: error: {mine} exists: choose another file, or --force to replace it\n"
    assert run("plan", "yaml", plan, "-o", mine, "--force")[0] == 0
    assert run("plan", "build", mine, "-o", plan)[0] == USAGE

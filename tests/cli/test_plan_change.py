"""`kvsearch plan scale`, `convert` and `merge`: plans made of other plans, and what is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsearch.plan import Plan, load_plan, save_plan
from kvsearch.plan.arithmetic import budgets_at
from tests.cli.conftest import Run
from tests.plan.builders import PROVENANCE, make_plan, model_dict

USAGE, INCOMPATIBLE = 2, 4
SNAPKV = {"name": "snapkv", "params": {"window": 4}}


def phase(*budgets: list[int] | None, policy: dict[str, Any] = SNAPKV) -> dict[str, Any]:
    return {"layers": [None if budget is None else {"policy": policy, "budget": budget} for budget in budgets]}


def written(path: Path, **changes: Any) -> Path:
    """A plan file of a toy model whose policies exist; 32 entries of prompts of 40 tokens."""
    given = {"prefill": phase([10, 6], None, [4, 12]), "provenance": {**PROVENANCE, "settings": {}}, **changes}
    main = given["prefill"] or given["decode"]
    total = sum(sum(layer["budget"]) for layer in main["layers"] if layer)
    save_plan(make_plan(**given, total=total), path)
    return path


def rows(plan: Plan) -> list[list[int]]:
    return [list(budget) for budget in plan.budgets("prefill") if budget]


def refused(run: Run, output: Path, words: str, *arguments: object, code: int = USAGE) -> None:
    """Run a command that must fail with one line and write nothing."""
    before = output.read_bytes() if output.exists() else None
    got, out, talk = run("plan", *arguments, "-o", output)
    assert (got, out) == (code, ""), talk
    assert words in talk
    assert talk.count("\n") == 1 or " is not valid, " in talk  # a list of problems has a line for each
    assert (output.read_bytes() if output.exists() else None) == before


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    return written(tmp_path / "plan.json")


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return tmp_path / "new.json"


# --- scale ----------------------------------------------------------------------------------------------------------


def test_scale_by_ratio_and_by_budget(run: Run, plan: Path, new: Path) -> None:
    code, out, talk = run("plan", "scale", plan, "--ratio", 0.9, "--length", 400, "-o", new, "--json")
    assert code == 0, talk
    assert json.loads(out) == {
        "plan": str(new), "total": 160, "scaling": "proportional", "length": 400, "phases": "prefill",
        "allocation": "static",
    }  # fmt: skip
    assert rows(load_plan(new)) == [[50, 30], [20, 60]]
    code, out, talk = run("plan", "scale", plan, "--budget", 16, "-o", new, "--force")
    assert (code, out) == (0, "")
    assert (
        talk.splitlines(keepends=True)[0] == f"wrote {new}: 64 entries, 16.0 per kv head of a 40-token prompt, fixed\n"
    )
    assert rows(load_plan(new)) == [[20, 12], [8, 24]]


def test_convert_a_plan(run: Run, plan: Path, new: Path) -> None:
    assert run("plan", "convert", plan, "--length", 27, "-o", new)[0] == 0
    made = load_plan(new)
    assert (made.scaling, made.length) == ("fixed", 27)
    assert np.array_equal(rows(made), budgets_at(load_plan(plan), "prefill", 27))
    hashed = hashlib.sha256(plan.read_bytes()).hexdigest()
    assert made.provenance.settings["changes"] == (f"converted to length 27: plan {hashed}",)
    refused(run, plan, 'the plan is "fixed" already', "convert", new, "--length", 27, "--force")


# --- merge ----------------------------------------------------------------------------------------------------------


def test_merge(run: Run, plan: Path, tmp_path: Path, new: Path) -> None:
    tova = phase([9, 9], None, [9, 9], policy={"name": "tova", "params": {"sinks": 0}})
    other = written(tmp_path / "tova.json", prefill=tova, scaling="fixed", length=None, floor=1)
    code, _, talk = run("plan", "merge", "--policies", other, "--budgets", plan, "-o", new)
    assert code == 0, talk
    merged = load_plan(new)
    assert merged.budgets("prefill") == load_plan(plan).budgets("prefill")
    assert [layer and layer.policy.name for layer in merged.phase("prefill").layers] == ["tova", None, "tova"]
    assert (merged.scaling, merged.length, merged.total) == ("proportional", 40, 32)


def test_plans_that_do_not_merge(run: Run, plan: Path, tmp_path: Path, new: Path) -> None:
    def merge(words: str, code: int = USAGE, **changes: Any) -> None:
        policies = written(tmp_path / "policies.json", **changes)
        refused(run, new, words, "merge", "--policies", policies, "--budgets", plan, code=code)
        policies.unlink()

    merge("plans of different models", INCOMPATIBLE, model=model_dict(config_sha256="0" * 64))
    merge("only one of the plans has layers [1, 2]", prefill=phase([4, 4], [4, 4], None))
    wide = phase([9, 9], None, [9, 9], policy={"name": "snapkv", "params": {"window": 7}})
    merge("below the 7 entries that snapkv always keeps", prefill=wide)

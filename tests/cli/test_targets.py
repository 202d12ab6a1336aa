"""`kvsearch export --to`: exit codes, what is said, and what is written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvsearch.plan import load_plan, save_plan
from kvsearch.plan.profile import save_profile
from tests.cli.conftest import Run, done
from tests.plan.builders import make_plan, make_profile, phase_dict


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    budgets = [[10, 6], [4, 12]]
    save_plan(make_plan(budgets, prefill=phase_dict(budgets, {"name": "keydiff"})), tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_what_is_lost_is_refused_until_it_is_asked_for(run: Run, plan: Path, tmp_path: Path) -> None:
    command = ("export", plan, "--to", "trtllm-windows", "-o", tmp_path / "windows.yaml")
    code, out, talk = run(*command)
    assert (code, out) == (4, "")
    assert "budgets are windows of whole layers: 6 of 32 entries (18.8%)" in talk
    assert "--lossy" in talk
    assert not (tmp_path / "windows.yaml").exists()
    out, _ = done(*command, "--lossy", "--json")
    assert json.loads(out)["losses"][0] == {"what": "budgets are windows of whole layers", "entries": 6}
    assert (tmp_path / "windows.yaml").read_text() == (
        "kv_cache_config:\n  max_attention_window:\n  - 8\n  - 8\n  sink_token_length: 0\n"
    )
    assert run(*command, "--lossy")[0] == 0  # what is there already is the same
    (tmp_path / "windows.yaml").write_text("mine")
    code, _, talk = run(*command, "--lossy")
    assert (code, (tmp_path / "windows.yaml").read_text()) == (2, "mine")
    assert "exists" in talk


def test_a_folder_is_a_plan_everywhere(run: Run, plan: Path, tmp_path: Path) -> None:
    _, talk = done("export", plan, "--to", "folder", "-o", tmp_path / "deploy")
    assert "nothing is lost" in talk
    assert load_plan(tmp_path / "deploy") == load_plan(plan)
    out, _ = done("verify", tmp_path / "deploy")
    assert "3 checksums compared; -v lists them" in out
    shown = run("show", tmp_path / "deploy")
    assert shown == run("show", plan)
    assert shown[0] == 0
    done("export", tmp_path / "deploy", "--to", "attention-matching", "--lossy", "-o", tmp_path / "a")
    shares = json.loads((tmp_path / "a").read_text())
    assert shares == {"L0H0": 10 / 32, "L0H1": 6 / 32, "L1H0": 4 / 32, "L1H1": 12 / 32}


def test_a_profile_is_a_curve_or_a_plan_first(run: Run, plan: Path, tmp_path: Path) -> None:
    profile = make_profile(policy={"name": "keydiff", "params": {}})
    path = tmp_path / "profile.safetensors"
    save_profile(profile, path)
    _, talk = done("export", path, "--to", "kvpress-lukv", "-o", tmp_path / "c.npy")
    assert "LUKVPress(KeyDiffPress(), compression_ratio=0.8, sink=0, window=0)" in talk
    curves = np.load(tmp_path / "c.npy")
    assert curves.shape == (99, 3, 2)
    np.testing.assert_array_equal(curves[:, [0, 2]], profile.arrays["evicted_ratio"])
    assert not curves[:, 1].any()
    layers = ("export", path, "--to", "kvpress-layers", "--lossy", "-o", tmp_path / "l.json")
    assert run(*layers)[0] == 2  # of which size?
    done(*layers, "--ratio", "0.5")
    # a plan beside a profile is the plan that was made of it: the directory is that of the profile
    done("export", tmp_path, "--to", "kvpress-lukv", "-o", tmp_path / "e.npy")
    code, _, talk = run("export", plan, "--to", "kvpress-lukv", "-o", tmp_path / "d.npy")
    assert code == 2
    assert "is made of a profile" in talk

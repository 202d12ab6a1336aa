"""The press of DefensiveKV's authors keeps the entries that the method `defensivekv` keeps."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvsearch.models.fingerprint import compute_fingerprint
from tests.interop.test_kvpress import LENGTH, PYTHON, ids, ours
from tests.tiny import loaded, plan_for

PRESS = PYTHON.parents[1] / "efficient_defensivekv_press.py"  # of the authors, at a commit that environments.py names
SIDE = Path(__file__).with_name("run_defensivekv.py")

pytestmark = pytest.mark.skipif(not PRESS.exists(), reason="`make interop` installs the tools")


@pytest.mark.parametrize(("mass", "sharpness"), [(0.0, 1.0), (0.9, 6.0)])
def test_the_authors_press_keeps_the_same(tmp_path: Path, mass: float, sharpness: float) -> None:
    """With sharp attention, so that what is taken first leaves room for others, as the authors limit it by head."""
    torch.manual_seed(0)
    made = loaded("llama")
    for layer in made.model.model.layers:
        layer.self_attn.q_proj.weight.data *= sharpness
    made = replace(made, fingerprint=compute_fingerprint(made.model, made.name))
    made.model.save_pretrained(tmp_path)
    shape = made.fingerprint
    budgets = [[LENGTH * 6 // 10] * shape.kv_heads] * shape.layers
    layers = [
        {"policy": {"name": "defensivekv", "params": {"mass": mass, "window": 8}}, "budget": budget}
        for budget in budgets
    ]
    shared = {"name": "adakv", "params": {"floor_share": 0.0}}
    plan = plan_for(made, budgets, prefill={"layers": layers}, allocation=shared, length=LENGTH, floor=1)
    command = [str(PYTHON), str(SIDE), str(tmp_path), json.dumps(ids(made)), str(PRESS), str(mass)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == ours(made, plan, ids(made))

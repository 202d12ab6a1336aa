"""OpenVINO GenAI runs a random model under what we export for it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from kvsearch.exporters.base import SINGLE_FILE, ExportInputs
from kvsearch.exporters.budget_tables import OPENVINO_BLOCK, OpenVINO
from tests.plan.builders import phase_dict
from tests.tiny import loaded, plan_for

PYTHON = Path(__file__).parents[2] / ".venv-openvino" / "bin" / "python"
SIDE = Path(__file__).with_name("run_openvino.py")
LENGTH, BUDGET = 400, 128

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="`make interop` installs the tools")


def test_it_holds_as_many_entries_as_the_plan(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = loaded("llama", max_position_embeddings=2 * LENGTH)
    made.model.generation_config.eos_token_id = 2
    made.model.save_pretrained(tmp_path / "model")
    shape = made.fingerprint
    budgets = [[BUDGET] * shape.kv_heads for _ in range(shape.layers)]
    phase = phase_dict(budgets, {"name": "h2o"})
    exported = OpenVINO().export(plan_for(made, budgets, prefill=phase, length=LENGTH, floor=1), ExportInputs())
    (tmp_path / "sizes.json").write_bytes(exported.files[SINGLE_FILE])
    command = [str(PYTHON), str(SIDE), str(tmp_path / "model"), str(tmp_path / "sizes.json"), str(LENGTH)]
    done = subprocess.run([*command, str(tmp_path / "converted")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    most, held = json.loads(done.stdout.splitlines()[-1])
    assert LENGTH - OPENVINO_BLOCK < most < LENGTH + 2 * OPENVINO_BLOCK  # the prompt was read whole
    assert BUDGET <= held <= BUDGET + OPENVINO_BLOCK  # one block for new tokens

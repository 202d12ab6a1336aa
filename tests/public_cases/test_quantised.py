"""What peft, bitsandbytes and torchao make of a model; see `quantised.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.public_cases.quantised import CHECKS, saved

PACKAGES = Path(sys.prefix) / "checkpoints"
ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
@pytest.mark.skipif(not PACKAGES.is_dir(), reason=f"peft, bitsandbytes and torchao are not in {PACKAGES}")
@pytest.mark.parametrize("check", CHECKS)
def test_with_their_packages(check: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.public_cases.quantised", check, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(PACKAGES), str(ROOT))), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_adapter_is_not_left_out_where_peft_is_missing(tmp_path: Path) -> None:
    """transformers without peft would load the model alone, in silence."""
    from kvsearch.core.errors import EnvironmentFault, IncompatibleError
    from kvsearch.models.loading import load

    folder = saved(tmp_path / "m")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "a/model"}')
    with pytest.raises(EnvironmentFault, match=r"holds an adapter .* beside the model, and without the package peft"):
        load(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(IncompatibleError, match=r"is an adapter \(LoRA .*\) of the model 'a/model', without"):
        load(str(folder))

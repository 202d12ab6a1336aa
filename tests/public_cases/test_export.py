"""Plans in the words of other tools, from the command line: what the tool holds is the plan, or a loss says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsearch.plan import load_plan
from tests.cli.conftest import done, done_json
from tests.exporters.simulations import SIMULATIONS, options_of
from tests.tiny import loaded

WINDOW = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = loaded("llama")
    folder = tmp_path_factory.mktemp("model")
    made.model.save_pretrained(folder)
    made.tokenizer.save_pretrained(folder)
    return folder


def planned(folder: Path, model: Path, policy: str, rows: list[list[int]] | None) -> Path:
    """A plan file with these budgets per head, or with 24 everywhere."""
    path = folder / "plan.json"
    done("plan", "uniform", model, "--policy", policy, "--budget", 24, "-o", path)
    content = json.loads(path.read_text())
    for layer, row in zip(content["prefill"]["layers"], rows or [], strict=False):
        layer["budget"] = row
    content["total"] = sum(sum(layer["budget"]) for layer in content["prefill"]["layers"])
    path.write_text(json.dumps(content))
    return path


def exported(plan: Path, target: str, *more: Any) -> Any:
    return done_json("export", plan, "--to", target, *more, "--json")


class Written:
    """What an export left on the disk, as the tools see it."""

    def __init__(self, folder: Path, summary: dict[str, Any]) -> None:
        files = [Path(file) for file in summary["files"]]
        named = {file.name: file.read_bytes() for file in files if file.is_file()}
        self.files = named if folder.is_dir() else {"": folder.read_bytes()}
        self.usage = tuple(summary["usage"])


@pytest.mark.parametrize("uneven", [False, True])
def test_headkv_keeps_its_window_beside_the_budget(tmp_path: Path, model: Path, uneven: bool) -> None:
    shape = loaded("llama").fingerprint
    rows = [[40, 8], [24, 24], [32, 16]] if uneven else [[24, 24]] * 3
    rows = [row * (shape.kv_heads // 2) for row in rows[: shape.layers]]
    plan = planned(tmp_path, model, f"snapkv:window={WINDOW}", rows)
    summary = exported(plan, "headkv", "--model", model, "-o", tmp_path / "scores")
    assert summary["losses"] == []
    assert "--window_sizes" not in options_of(tuple(summary["usage"]))
    held = SIMULATIONS["headkv"](Written(tmp_path / "scores", summary), shape, 200)  # type: ignore[arg-type]
    assert held.tolist() == [list(row or ()) for row in load_plan(plan).budgets("prefill")]


def test_streaming_llm_is_duo_attention_without_retrieval_heads(tmp_path: Path, model: Path) -> None:
    plan = planned(tmp_path, model, "streaming", None)
    summary = exported(plan, "duo", "--length", 200, "-o", tmp_path / "gates")
    assert summary["losses"] == []
    config = json.loads((tmp_path / "gates" / "config.json").read_text())
    assert (config["sink_size"], config["recent_size"]) == (4, 20)
    held = SIMULATIONS["duo"](Written(tmp_path / "gates", summary), loaded("llama").fingerprint, 200)  # type: ignore[arg-type]
    assert np.unique(held).tolist() == [24]


def test_as_many_heads_keep_everything_as_the_plan_wants(tmp_path: Path, model: Path) -> None:
    shape = loaded("llama").fingerprint
    rows = [[24] * shape.kv_heads for _ in range(shape.layers)]
    rows[0][0] = rows[-1][0] = 60
    plan = planned(tmp_path, model, "duo_attention:sinks=4:window=20", rows)
    summary = exported(plan, "duo", "--length", 60, "--lossy", "-o", tmp_path / "gates")
    held = SIMULATIONS["duo"](Written(tmp_path / "gates", summary), shape, 60)  # type: ignore[arg-type]
    assert held.tolist() == rows

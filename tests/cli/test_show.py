"""`kvsearch show` of plans: which layer has which pattern."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvsearch.plan import save_plan
from tests.cli.conftest import Run
from tests.plan.builders import make_plan, model_dict, phase_dict

SNAPKV, TOVA = {"name": "snapkv", "params": {"window": 4}}, {"name": "tova", "params": {}}


@pytest.mark.parametrize(
    ("policies", "names"),
    [
        ((SNAPKV, TOVA, SNAPKV), ["0 snapkv", "2 tova", "3 snapkv"]),
        (
            (SNAPKV, {"name": "snapkv", "params": {"window": 2}}, SNAPKV),
            ["0 snapkv {'window': 4}", "2 snapkv {'window': 2}", "3 snapkv {'window': 4}"],
        ),
        ((TOVA, TOVA, TOVA), ["0", "2", "3"]),
    ],
    ids=["patterns", "settings", "one pattern"],
)
def test_the_pattern_of_every_layer(
    run: Run, tmp_path: Path, policies: tuple[dict[str, Any], ...], names: list[str]
) -> None:
    phase = phase_dict([[10, 6], None, [4, 12], [8, 8]])
    for layer, policy in zip([layer for layer in phase["layers"] if layer], policies, strict=True):
        layer["policy"] = policy
    save_plan(make_plan(model=model_dict(layers=4), prefill=phase, total=48), tmp_path / "plan.json")
    code, out, talk = run("show", tmp_path / "plan.json")
    assert (code, talk) == (0, "")
    rows = [" ".join(line.split()) for line in out.splitlines() if line.strip(" ─")][-4:]
    assert rows == ["layer h0 h1 sum", f"{names[0]} 10 6 16", f"{names[1]} 4 12 16", f"{names[2]} 8 8 16"]

"""`kvsearch show` of plans: which layer has which pattern."""

from __future__ import annotations

from pathlib import Path

from kvsearch.plan import save_plan
from tests.cli.conftest import Run
from tests.plan.builders import make_plan, model_dict, phase_dict


def shown(run: Run, directory: Path, *policies: dict[str, object]) -> list[list[str]]:
    """The cells of the heat map of a plan with these policies, the header first."""
    phase = phase_dict([[10, 6], None, [4, 12], [8, 8]])
    for layer, policy in zip([one for one in phase["layers"] if one], policies, strict=True):
        layer["policy"] = policy
    path = directory / "plan.json"
    save_plan(make_plan(model=model_dict(layers=4), prefill=phase, total=48), path, overwrite=True)
    code, out, talk = run("show", path)
    assert (code, talk) == (0, "")
    lines = [line for line in out.splitlines() if line.strip(" ─")]
    first = next(at for at, line in enumerate(lines) if line.split()[:2] == ["layer", "h0"])
    return [line.rstrip().split(maxsplit=4) for line in lines[first:]]


def test_the_pattern_of_every_layer(run: Run, tmp_path: Path) -> None:
    snapkv, tova = {"name": "snapkv", "params": {"window": 4}}, {"name": "tova", "params": {}}
    assert shown(run, tmp_path, snapkv, tova, snapkv) == [
        ["layer", "h0", "h1", "sum", "pattern"],
        ["0", "10", "6", "16", "snapkv"],
        ["2", "4", "12", "16", "tova"],
        ["3", "8", "8", "16", "snapkv"],
    ]


def test_settings_of_one_pattern_are_told_apart(run: Run, tmp_path: Path) -> None:
    wide, narrow = ({"name": "snapkv", "params": {"window": window}} for window in (4, 2))
    assert [cells[4] for cells in shown(run, tmp_path, wide, narrow, wide)] == [
        "pattern", "snapkv {'window': 4}", "snapkv {'window': 2}", "snapkv {'window': 4}",
    ]  # fmt: skip


def test_one_pattern_needs_no_column(run: Run, tmp_path: Path) -> None:
    tova = {"name": "tova", "params": {}}
    assert shown(run, tmp_path, tova, tova, tova)[0] == ["layer", "h0", "h1", "sum"]

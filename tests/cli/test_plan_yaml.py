"""`kvsearch plan yaml` and `build`: there and back byte by byte, edits, and mistakes with their lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsearch.plan import save_plan
from tests.cli.conftest import Run
from tests.plan.builders import make_plan, phase_dict

USAGE = 2


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """A plan of three layers: 10 and 6 entries, the whole cache, 4 and 12 entries."""
    phase = phase_dict([[10, 6], None, [4, 12]])
    for layer in phase["layers"]:
        if layer is not None:
            layer["policy"] = {"name": "snapkv", "params": {"window": 4}}
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


@pytest.mark.parametrize("verb", ["yaml", "build"])
def test_what_is_there_is_kept(run: Run, plan: Path, tmp_path: Path, verb: str) -> None:
    strategy, mine = tmp_path / "strategy.yaml", tmp_path / "mine"
    run("plan", "yaml", plan, "-o", strategy)
    source = plan if verb == "yaml" else strategy
    mine.write_text("mine")
    code, out, talk = run("plan", verb, source, "-o", mine)
    assert (code, out, mine.read_text()) == (USAGE, "", "mine")
    assert talk == f"kvsearch: error: {mine} exists: choose another file, or --force to replace it\n"
    code, _, talk = run("plan", verb, source, "-o", mine, "--force")
    assert (code, mine.read_text()) == (USAGE, "mine")
    assert "holds something else than a plan" in talk
    mine.write_text("")  # as mktemp makes one
    assert run("plan", verb, source, "-o", mine, "--force")[0] == 0
    assert run("plan", verb, source, "-o", mine, "--force")[0] == 0
    assert mine.read_text() != ""
    code, _, talk = run("plan", verb, source, "-o", tmp_path / "no" / "such")
    assert code == USAGE
    assert "its folder does not exist" in talk

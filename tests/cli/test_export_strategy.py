"""`kvsearch export` of PolyKV profiles: what it writes and says, where its defaults come from, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvsearch.plan import Size, load_plan, load_profile
from kvsearch.results import validation
from kvsearch.selection.from_signals import Strategy, make_strategy_plan
from tests.cli.conftest import Run, done, polykv_in
from tests.cli.test_bad_input import USAGE, refused

PATTERNS: dict[str, dict[str, Any]] = {"snapkv": {"window": 8}, "streaming": {"sinks": 4}, "tova": {}, "h2o": {}}


@pytest.fixture
def polykv(tmp_path: Path) -> Path:
    return polykv_in(tmp_path / "run", PATTERNS)


def test_options_reach_the_strategy(polykv: Path, tmp_path: Path) -> None:
    path, profile = tmp_path / "plan.json", load_profile(polykv / "profile.safetensors")
    for strategy, options in (
        (Strategy(), ""),
        (
            Strategy("ppl", "entropy", "decode", least=9),
            "--route ppl --budget-signal entropy --phases decode --least 9",
        ),
        (Strategy(None, "ppl-mean", policy="h2o"), "--route none --budget-signal ppl-mean --policy h2o"),
    ):
        words = ("--budget", 64, "--length", 300, *options.split(), "--force")
        _, talk = done("export", polykv, "-o", path, *words)
        assert load_plan(path) == make_strategy_plan(profile, strategy, Size(budget=64, length=300))
        assert talk.startswith(f"wrote {path}: 1536 entries, 64.0 per kv head of a 300-token prompt, fixed")


def test_a_budget_must_be_named_where_several_were_measured(run: Run, tmp_path: Path) -> None:
    polykv_in(tmp_path / "run", budgets=(16, 32))
    words = "signals were measured at 16, 32 entries per kv head: say how many to keep"
    refused(run, USAGE, words, "export", tmp_path / "run", "-o", tmp_path / "plan.json")
    assert not (tmp_path / "plan.json").exists()


def test_harmful_signals_are_not_used_unless_allowed(
    run: Run, polykv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, why = tmp_path / "plan.json", "route cosine was judged harmful"

    def harmful(directory: Path, strategy: Strategy, budget: float) -> str | None:
        return why if (directory, strategy.route, budget) == (polykv, "cosine", 20.0) else None

    monkeypatch.setattr(validation, "find_harmful", harmful)
    for source, *size in ((polykv, "--budget", 20), (polykv / "profile.safetensors", "--ratio", 0.9)):
        words = ("export", source, "-o", path, *size)
        refused(run, USAGE, f"{why}; give --allow-harmful to write it anyway", *words)
        assert not path.exists()
    done("export", polykv, "-o", path, "--route", "ppl", "--budget", 20)
    _, talk = done("export", polykv, "-o", path, "--budget", 20, "--allow-harmful", "--force")
    assert talk.startswith(f"kvsearch: warning: {why}\nwrote ")

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


def test_the_defaults_and_what_is_said(run: Run, polykv: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    code, out, talk = run("export", polykv, "-o", path, "--budget", 32, "--phases", "both")
    assert (code, out) == (0, "")
    plan = load_plan(path)
    assert plan == make_strategy_plan(
        load_profile(polykv / "profile.safetensors"), Strategy(phases="both"), Size(budget=32)
    )
    assert talk.splitlines()[0] == f"wrote {path}: 768 entries, 32.0 per kv head of a 200-token prompt, fixed"


def test_options_reach_the_strategy(polykv: Path, tmp_path: Path) -> None:
    path, profile = tmp_path / "plan.json", load_profile(polykv / "profile.safetensors")
    given: list[tuple[Strategy, tuple[object, ...]]] = [
        (
            Strategy("ppl", "entropy", "decode", least=9),
            ("--route", "ppl", "--budget-signal", "entropy", "--phases", "decode", "--least", 9),
        ),
        (
            Strategy(None, "ppl-mean", policy="h2o"),
            ("--route", "none", "--budget-signal", "ppl-mean", "--policy", "h2o"),
        ),
    ]  # fmt: skip
    for strategy, options in given:
        done("export", polykv, "-o", path, "--budget", 64, "--length", 300, *options, "--force")
        assert load_plan(path) == make_strategy_plan(profile, strategy, Size(budget=64, length=300))


def test_a_budget_must_be_named_where_several_were_measured(run: Run, tmp_path: Path) -> None:
    polykv_in(tmp_path / "run", budgets=(16, 32))
    words = "signals were measured at 16, 32 entries per kv head: say how many to keep"
    refused(run, USAGE, words, "export", tmp_path / "run", "-o", tmp_path / "plan.json")
    assert not (tmp_path / "plan.json").exists()


def test_harmful_signals_are_not_used_unless_allowed(
    run: Run, polykv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Path, Strategy, float]] = []

    def harmful(directory: Path, strategy: Strategy, budget: float) -> str | None:
        asked.append((directory, strategy, budget))
        return "route cosine was judged harmful" if strategy.route == "cosine" else None

    path, file = tmp_path / "plan.json", polykv / "profile.safetensors"
    monkeypatch.setattr(validation, "find_harmful", harmful)
    words = "route cosine was judged harmful; give --allow-harmful to write it anyway"
    refused(run, USAGE, words, "export", polykv, "-o", path, "--budget", 20)
    assert not path.exists()
    assert asked == [(polykv, Strategy(), 20.0)]
    assert run("export", file, "-o", path, "--route", "ppl", "--ratio", 0.9, "--phases", "both")[0] == 0
    assert asked[1:] == [(polykv, Strategy("ppl", phases="both"), 20.0)]
    _, talk = done("export", polykv, "-o", path, "--allow-harmful", "--force")
    assert talk.startswith("kvsearch: warning: route cosine was judged harmful\nwrote ")

"""What a selection on text alone says: nats per token, by hand and on a tiny model, and never percent."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from kvsearch.evaluation.compare import Split
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Size
from kvsearch.report.artifacts import LoadedArtifact
from kvsearch.report.charts import make_selection_figures
from kvsearch.report.page import group_by_model, render
from kvsearch.report.selections import (
    describe_decision,
    describe_parts,
    describe_results,
    make_selection_result,
    make_tables,
)
from kvsearch.results.selection import SelectionResult
from kvsearch.runs.estimates import Estimate, TextLoss
from kvsearch.selection.records import MethodResult, QuestionCount, ReportScores, Rule
from kvsearch.selection.selection_job import measure_parts, prepare_selection
from kvsearch.selection.signal_candidates import find_signal_candidates
from kvsearch.tasks.user_files import TextTask
from tests import tiny
from tests.evaluation.results import rendered
from tests.selection.test_plan_race import LIKELY
from tests.signals.profiles import make_signals, signal_metadata

TEXT = " ".join(tiny.document(3000).words[1:])


def nats(excess: float, difference: float | None, reach: float = 0.01) -> TextLoss:
    def about(mean: float) -> Estimate:
        return Estimate(mean, mean - reach, mean + reach, contexts=10)

    return TextLoss(about(3 + excess), about(excess), None if difference is None else about(difference))


LOSSES = {
    "full": nats(0.0, -0.05), "a": nats(0.05, None), "b": nats(0.12, 0.07), "c": nats(0.045, -0.005),
    "d": nats(0.03, -0.02),
}  # fmt: skip
SCORES = {name: Estimate(1.0, 1.0, 1.0) for name in LOSSES}
REPORT = ReportScores(QuestionCount(10, 10, 9, 9), SCORES, {}, None, None, {}, nats=LOSSES)


def test_the_lead_of_a_candidate_is_its_difference_in_nats() -> None:
    ahead = replace(LIKELY.methods[0], nats=nats(0.05, -0.07))
    base = MethodResult("b", "baseline", SCORES["b"], 10, nats=nats(0.12, None))
    words = describe_decision(replace(LIKELY, methods=(ahead, base)))
    lead = "-0.0700 [-0.0800, -0.0600] nats per token, lower is better (chance 0.033"
    assert words.startswith(f"a is likely better than b, the best of 1 baseline: {lead}")
    assert "points" not in words


def test_what_each_part_of_a_plan_brings() -> None:
    """Losses .05 with all parts, .12 without the last, .045 with even budgets; the even baseline loses .03."""
    by_subject = {
        name: {other: nats(loss.excess.mean, loss.excess.mean - own.excess.mean) for other, loss in LOSSES.items()}
        for name, own in LOSSES.items()
    }
    report = Mock(nats=by_subject.__getitem__)
    parts = measure_parts(report, "d", {"rankings": "c", "budgets": "b", "carry": "a"})
    assert {part: round(added.mean, 9) for part, added in parts.items()} == {
        "rankings": -0.015, "budgets": -0.075, "carry": 0.07,
    }  # fmt: skip
    assert list(describe_parts(Mock(uniform="d", report=replace(REPORT, parts=parts)))) == [
        "report split, its rankings bring -0.0150 [-0.0250, -0.0050] nats per token saved beside d with even budgets",
        "report split, its budgets bring -0.0750 [-0.0850, -0.0650] nats per token saved beside its rankings with "
        "even budgets",
        "report split, what its entries carry brings +0.0700 [+0.0600, +0.0800] nats per token saved beside its "
        "rankings with its budgets",
    ]


@pytest.mark.slow
def test_a_selection_on_text_never_speaks_of_percent(model: LoadedModel) -> None:
    profile = make_signals(signal_metadata(model.fingerprint, budgets=(8, 16, 32), length=60))
    splits = [Split([TextTask("t", TEXT, 60, part)], samples=6, seed=3, batch=8) for part in ("select", "report")]
    plans = find_signal_candidates(model, profile, Size(budget=12), routes=("none",), allocators=("entropy",))
    found = prepare_selection(model, plans, Size(budget=12), *splits, Rule()).run()
    result = make_selection_result(found)
    again = SelectionResult.model_validate(json.loads(json.dumps(result.as_json())))
    written, best = result.chosen.written, result.chosen.best
    assert again.report.nats == result.report.nats
    losses = result.report.nats
    assert set(losses) == set(result.report.scores)
    assert losses["full"].excess.mean == 0.0
    if written != best:
        expected = losses[best].excess.mean - losses[written].excess.mean
        assert losses[best].difference.mean == pytest.approx(expected)
    best_in_race = result.chosen.method(best).nats
    for method in result.chosen.methods:
        if method.contexts == result.chosen.asked.contexts and method.name != best:
            expected = method.nats.excess.mean - best_in_race.excess.mean
            assert method.nats.difference.mean == pytest.approx(expected)
    race, report = make_tables(again)
    assert race.header[3] == report.header[2] == "nats above full"
    rows = {row[0].text: row[2].value for row in report.rows}
    assert rows == {name: loss.excess.mean for name, loss in losses.items()}
    assert list(rows.values())[1:] == sorted(list(rows.values())[1:])
    texts = (result.decision, result.reported, describe_results(again), rendered([race, report]))
    assert all("points" not in text and "score" not in text and "% of the gap" not in text for text in texts)
    assert f"{written} {losses[written].excess.mean:.4f}" in result.reported
    assert "nats per token above the full cache" in describe_results(again)
    page = render(group_by_model([LoadedArtifact(Path("selection.json"), "selection", again)])).decode()
    assert "Losses are in nats per token, lower is better" in page
    assert f"<dt>nats above full</dt><dd>{losses[written].excess.mean:.4f}" in page
    assert "Scores are of 100" not in page
    [figure] = make_selection_figures(again)
    assert figure.body.y == "excess nats per token, lower is better"
    assert figure.body.series[0].y == (0.0,)

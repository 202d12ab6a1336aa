"""Losses on text in nats per token: by hand, in tables and sentences, and in files without them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvsearch.evaluation.compare import Evaluation, Split
from kvsearch.evaluation.samples import Sample
from kvsearch.evaluation.statistics import MACRO, make_blocks, summarize
from kvsearch.report.evaluation import describe_best, make_tables
from kvsearch.report.table import to_latex, to_markdown
from kvsearch.results.evaluation import EvaluationResult
from kvsearch.runs.estimates import TextLoss
from kvsearch.tasks.base import Coverage
from kvsearch.tasks.metrics.likelihood import FORCED, format_losses, likelihood
from tests.evaluation.results import as_if, rendered
from tests.evaluation.test_statistics import samples
from tests.report.test_tables import method

FULL = [2.0, 3.0, 4.0, 5.0, 6.0]
EXCESS = {  # of five windows; one predicts better than the full cache, others lose more than scores count
    "full": [0.0] * 5, "h2o@8": [0.1, 0.2, 0.3, 0.4, 0.5], "cake@8": [-0.1, 0.0, 0.4, 0.4, 1.3],
}  # fmt: skip
# By hand, with t(4) = 2.7764: variances are .025 of h2o and .17 of cake - h2o, which is -.2, -.2, .1, 0, .8
REACH = 2.7764 * math.sqrt(0.025 / 5)
REACH_OF_DIFFERENCE = 2.7764 * math.sqrt(0.17 / 5)


def texts(task: str = "story", excess: dict[str, list[float]] = EXCESS, windows: int = 5) -> list[Sample]:
    """What is kept of a text: losses in place of replies, and the scores that these make."""
    made = []
    for label, more in excess.items():
        for key, (full, above) in enumerate(list(zip(FULL, more, strict=True))[:windows]):
            reply = format_losses(full + above, full)
            [sample] = samples([[likelihood(reply, ())]], label, task, "text")
            made.append(replace(sample, key=str(key), reply=reply))
    return made


def result_of(found: Sequence[Sample], subject: str = "h2o") -> EvaluationResult:
    """The evaluation of some samples; tasks other than `qa` are texts."""
    tasks = dict.fromkeys(sample.task for sample in found)
    labels = list(dict.fromkeys(sample.method for sample in found))
    ready = tuple(map(method, labels))
    averages = {MACRO: tuple(tasks)}
    encoded: Any = [
        SimpleNamespace(
            task=SimpleNamespace(name=task, metric="exact" if task == "qa" else FORCED, traced=False), prompts=(),
            coverage=Coverage(task, "c" if task == "qa" else "text", 5, 5, 5, 0, 5, {}), distinct=5, sampling=None,
        )
        for task in tasks
    ]  # fmt: skip
    model: Any = SimpleNamespace(name="m", model=None)
    evaluation = Evaluation(model, ready, subject, encoded, Split(()), samples=list(found))
    blocks = make_blocks(found, ready, subject, averages)
    known = {"averages": averages, "blocks": blocks, "contexts": None, "seen": {}, "decode_entries": {}}
    return EvaluationResult.of(as_if(evaluation, **known, environment={}, most_tokens=None))


def answers() -> list[Sample]:
    return [sample for label in EXCESS for sample in samples([[1.0]] * 5, label, "qa", "c")]


def test_excess_and_differences_are_paired_and_not_clipped() -> None:
    [row] = summarize(texts(), "h2o@8")
    h2o, cake, full = (row.nats[label] for label in ("h2o@8", "cake@8", "full"))
    assert (full.loss.mean, full.excess.mean, full.excess.high) == (4.0, 0.0, 0.0)
    assert (h2o.loss.mean, h2o.excess.mean, h2o.difference) == (pytest.approx(4.3), pytest.approx(0.3), None)
    assert h2o.excess.low == pytest.approx(0.3 - REACH, abs=1e-4)
    assert (cake.excess.mean, cake.excess.contexts) == (pytest.approx(0.4), 5)
    assert row.scores["cake@8"].mean == pytest.approx(0.4)  # of scores 1, 1, 0, 0, 0: clipped at both ends
    assert cake.difference is not None
    assert cake.difference.mean == pytest.approx(0.1)
    assert cake.difference.high == pytest.approx(0.1 + REACH_OF_DIFFERENCE, abs=1e-4)


def test_a_mean_over_texts_weighs_every_text_the_same() -> None:
    """Five windows of one and three of another, all of the second .7 higher: the variance is theirs within each."""
    lower = texts()
    other = texts("log", {label: [value + 0.7 * (label == "h2o@8") for value in EXCESS[label]] for label in EXCESS}, 3)
    row = summarize([*lower, *other], "cake@8")[-1]
    assert row.kind == "average"
    excess = row.nats["h2o@8"].excess
    assert excess.mean == pytest.approx((0.3 + 0.9) / 2)
    variance = (0.025 / 5 + 0.01 / 3) / 4  # within the texts, of the mean of two means
    assert excess.high - excess.mean == pytest.approx(2.4469 * math.sqrt(variance), abs=1e-4)  # t of 8 - 2
    single = summarize([*lower, *texts("log", windows=1)], "cake@8")[-1].nats["h2o@8"].excess
    assert math.isnan(single.low)  # one window says nothing of its variance


def test_a_text_is_shown_in_nats_and_never_in_percent() -> None:
    result = result_of(texts())
    first, held = make_tables(result, on_screen=True)
    assert first.header == ["method", "story", "story - h2o"]
    assert [[cell.text for cell in row] for row in first.rows] == [
        ["full", "4.0000 [2.0368, 5.9632]", ""],
        ["h2o", "0.3000 [0.1037, 0.4963]", ""],
        ["cake", "0.4000 [-0.2857, 1.0857]", "+0.1000 [-0.4120, +0.6120]"],
    ]
    assert [row[1].best for row in first.rows] == [False, True, False]
    assert "lower is better" in first.title
    assert "story: the full cache has a perplexity of 54.6, 4.0000 nats per token" in first.notes
    for text in (rendered([first, held]), to_markdown(first), to_latex(first), describe_best(result)):
        assert "percent" not in text
        assert "0.3000" in text
    assert describe_best(result) == (
        "least loss above the full cache: 8 entries per kv head: h2o 0.3000 [0.1037, 0.4963] nats per token; full "
        "cache itself 4.0000 [2.0368, 5.9632]"
    )


def test_they_are_written_and_read_and_old_files_have_none() -> None:
    result = result_of(texts())
    written = result.as_json()
    again = EvaluationResult.model_validate(written)
    assert again.full.nats == result.full.nats
    assert isinstance(again.blocks[0].methods[1].nats["tasks"]["story"], TextLoss)
    assert again.on_text
    del written["full"]["nats"]
    for one in written["blocks"][0]["methods"]:
        del one["nats"]
    old = EvaluationResult.model_validate(written)
    assert not old.on_text
    assert "score in percent" in make_tables(old)[0].title
    assert describe_best(old).startswith("highest scores: ")
    assert "nats" not in result_of(answers()).as_json()["full"]

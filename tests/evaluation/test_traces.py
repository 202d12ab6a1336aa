"""Traces of problems in mathematics: replies that are drawn, how long they are, and how many are cut."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
import torch

from kvsearch.evaluation.compare import Evaluation, Split, prepare
from kvsearch.evaluation.methods import parse_methods
from kvsearch.evaluation.ready_methods import prepare_methods
from kvsearch.evaluation.statistics import find_student_quantile
from kvsearch.models.loading import LoadedModel, LoadOptions, load
from kvsearch.plan import Size
from kvsearch.report.evaluation import make_csv_rows, make_trace_table
from kvsearch.results.evaluation import EvaluationResult
from kvsearch.runtime.decode.next_tokens import Draws, NextTokens
from kvsearch.tasks.base import Sampling, Task
from kvsearch.tasks.maths import TracedTask
from tests import tiny

LIMIT = 20
ENDS = ["vote", "both", "set", "item", "one", "lemon"]
DRAWN = Sampling(1.2, 0.95, replies=3, seed=7)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """The bundled model, whose replies end where it would ask something else."""
    loaded = load("bundled", LoadOptions())
    loaded.model.generation_config.eos_token_id = loaded.tokenizer.convert_tokens_to_ids(ENDS)
    return loaded


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> TracedTask:
    """A file in the format of MATH-500, with problems in the language of the model."""
    folder = tmp_path_factory.mktemp("math")
    rows = []
    for seed in range(6):
        made = tiny.document(60, seed, 3)
        problem = " ".join((*made.words[1:], *made.questions[0].question.split()[:-1]))
        told = {"solution": "It is \\boxed{4}.", "answer": "4", "level": 1, "unique_id": f"test/{seed}.json"}
        rows.append({"problem": problem, "subject": "Algebra" if seed % 2 else "Geometry", **told})
    (folder / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "prompts.json").write_text(json.dumps({"math500": "{context} mango"}))
    return TracedTask("math500", folder, prompts=folder / "prompts.json", max_new_tokens=LIMIT)


def evaluation(model: LoadedModel, task: Task, sampling: Sampling | None = DRAWN, **settings: Any) -> Evaluation:
    methods = prepare_methods(model, parse_methods("streaming", []), [Size(24)], "decode")
    asked = Split([task], **{"samples": 6, "batch": 4, "sampling": sampling, **settings})
    return prepare(model, methods, "streaming", asked)


@pytest.fixture(scope="module")
def found(model: LoadedModel, task: TracedTask) -> Evaluation:
    return evaluation(model, task).run()


def texts(found: Evaluation) -> dict[tuple[Any, ...], str]:
    return {tuple(sample.place): sample.reply for sample in found.samples}


def test_how_long_replies_are_is_paired_by_problem(found: Evaluation) -> None:
    lengths: dict[str, list[list[int]]] = {method: [] for method in ("full", "streaming@24")}
    for method, tokens in lengths.items():
        for key in map(str, range(6)):
            mine = [one for one in found.samples if (one.method, one.key) == (method, key)]
            assert [one.question for one in mine] == [0, 1, 2]
            tokens.append([one.reply_tokens for one in mine])
    full, evicted = (found.traces[method]["math500"] for method in lengths)
    assert len({count for tokens in lengths["full"] for count in tokens}) > 3
    for method, length in (("full", full), ("streaming@24", evicted)):
        assert length.tokens.mean == pytest.approx(fmean(map(fmean, lengths[method])))
        assert length.at_limit == sum(count == LIMIT for tokens in lengths[method] for count in tokens) > 0
    longer = [fmean(b) - fmean(a) for a, b in zip(lengths["full"], lengths["streaming@24"], strict=True)]
    spread = sum((value - fmean(longer)) ** 2 for value in longer) / 5
    assert full.longer is None
    assert evicted.longer is not None
    assert evicted.longer.mean == pytest.approx(fmean(longer))
    assert evicted.longer.high - evicted.longer.mean == pytest.approx(find_student_quantile(5) * (spread / 6) ** 0.5)


def test_lengths_are_reported(found: Evaluation) -> None:
    result = EvaluationResult.of(found)
    full, evicted = (found.traces[method]["math500"] for method in ("full", "streaming@24"))
    counts = f"full {full.at_limit}, streaming@24 {evicted.at_limit}"
    assert f"math500: of 18 replies so many reached the most tokens of a reply: {counts}" in result.notes
    table = make_trace_table(result)
    assert table.header == ["method", "math500", "math500 - full", "math500 at limit"]
    assert "temperature 1.2, top-p 0.95, replies to each: 3, 18 questions about 6 contexts" in table.title
    assert table.groups[1][1][0][1].value == evicted.tokens.mean
    rows = [row for row in csv.DictReader(make_csv_rows(result).splitlines()) if row["kind"] == "tokens"]
    assert [(row["method"], float(row["score"]), row["subject"]) for row in rows] == [
        ("full", full.tokens.mean, "full"), ("streaming", evicted.tokens.mean, "full"),
    ]  # fmt: skip
    again = EvaluationResult.model_validate(result.as_json())
    assert (again.full.traces, again.sampling) == ({"math500": full}, DRAWN)
    assert {row.name for row in result.rows if row.kind == "category"} == {"Algebra", "Geometry"}


@pytest.mark.nightly
def test_a_reply_depends_on_its_own_seed(model: LoadedModel, task: TracedTask, found: Evaluation) -> None:
    def few(sampling: Sampling | None = DRAWN, samples: int = 2, **settings: Any) -> dict[tuple[Any, ...], str]:
        return texts(evaluation(model, task, sampling, samples=samples, **settings).run())

    several = texts(found)
    assert len(few(batch=1).items() & several.items()) == 12
    assert len(few(replace(DRAWN, replies=1)).items() & several.items()) == 4
    assert len(few(replace(DRAWN, seed=8)).items() & several.items()) < 6
    assert few(Sampling(1e-4), 1) == few(None, 1)


def test_tokens_are_drawn_by_their_chances() -> None:
    chances = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2])
    logits = chances.log().expand(4_000, 5)
    prompts = [torch.tensor([1])] * 4_000
    for top_p, kept in ((1.0, 5), (0.84, 3), (0.6, 2)):
        draws = Draws(Sampling(0.5, top_p), range(4_000))
        drawn = NextTokens(tiny.loaded().model, prompts, [1] * 4_000, draws)(logits).flatten()
        expected = chances**2 / (chances**2).sum()  # at a temperature of a half
        expected[expected.argsort()[: 5 - kept]] = 0
        assert torch.allclose(drawn.bincount(minlength=5) / 4_000, expected / expected.sum(), atol=0.03)

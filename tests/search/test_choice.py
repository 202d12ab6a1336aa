"""What a search writes: a candidate that is better than its start plans beyond chance, or else the best of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvsearch.core.errors import UsageError
from kvsearch.evaluation.compare import Evaluation, Split
from kvsearch.evaluation.ready_methods import ReadyMethod
from kvsearch.evaluation.samples import Sample
from kvsearch.evaluation.statistics import MACRO, make_blocks
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Plan
from kvsearch.plan.origin import ContextRecord, ContextSet, hash_context
from kvsearch.report.search import describe_decision
from kvsearch.runtime import Program
from kvsearch.search import evolve
from kvsearch.search.evolve import PreparedSearch, keep_hard_questions, prepare_searches
from kvsearch.search.loop import SearchOutcome
from kvsearch.search.start_plans import SearchSetup
from kvsearch.search.trials import Candidate
from kvsearch.selection.plan_race import PlanRace
from kvsearch.selection.records import Rule
from kvsearch.tasks.encode import collect_contexts, list_context_hashes
from tests import tiny
from tests.evaluation.results import as_if
from tests.search.evolving import (
    BUDGET,
    CONTEXTS,
    POLICY,
    decide,
    prepare,
    settings_of,
    splits,
)

CHOICE, REPORT = 60, 1000  # contexts of the simulated splits
ROUNDS = 4


def compared(scores: Mapping[str, Sequence[float]], part: int) -> Evaluation:
    """A comparison in which every method has a score per context."""
    numbers = (9, 9, 1, 9, 9.0, 9, 0.1, 0.1)  # tokens, entries, bytes and seconds
    samples = [
        Sample("t", "c", name, "question-agnostic", f"{part}/{n}", 0, "", score, "", False, *numbers)
        for name, row in scores.items()
        for n, score in enumerate(row)
    ]
    ready = tuple(ReadyMethod(name, Program(None), {}) for name in scores)
    blocks = make_blocks(samples, ready, "full", {MACRO: ("t",)})
    names = {name: name for name in scores}
    nobody: Any = SimpleNamespace(model=None)
    found = Evaluation(nobody, ready, "full", [], Split(()), names=names, samples=samples)
    return as_if(found, blocks=blocks, contexts=None, seen={}, decode_entries={})


def outcome_of(prepared: PreparedSearch, count: int) -> SearchOutcome:
    """Candidates that differ from even budgets in two layers."""
    found = []
    for number in range(count):
        table = prepared.starts["uniform"].copy()
        table[number % 3] += 1 + number // 3
        table[3 + number % 3] -= 1 + number // 3
        found.append(Candidate(table, 1.0 + number, f"layers 0-5, generation {number}"))
    return SearchOutcome(found)


def simulate(monkeypatch: pytest.MonkeyPatch, quality: Mapping[str, float], seed: int) -> None:
    """Let every plan answer a question rightly with the chance `quality` (of the others: that of "")."""

    def draw(names: Sequence[str], contexts: int, part: int) -> Evaluation:
        rng = np.random.default_rng([seed, part])
        draws = {name: rng.random(contexts) < quality.get(name, quality[""]) for name in sorted(names, reverse=True)}
        return compared(
            {"full": np.ones(contexts), **{name: right.astype(float) for name, right in draws.items()}}, part
        )

    def run(self: Evaluation, *_: Any) -> Evaluation:
        return draw([name for name in self.names if name != "full"], REPORT, 0)

    def ask(self: PlanRace, questions: int, names: Sequence[str], *_: Any, **__: Any) -> Evaluation:
        return draw(names, CHOICE // ROUNDS, questions)

    monkeypatch.setattr(Evaluation, "run", run)
    monkeypatch.setattr(PlanRace, "ask", ask)
    monkeypatch.setattr(PlanRace, "rounds", list(range(1, ROUNDS + 1)))


def test_the_luckiest_of_many_candidates_is_not_written(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """All candidates are 8 points below even budgets; the best of them on the second split scores above these."""
    prepared = replace(prepare(loaded, finalists=20), rule=Rule(sure=0.95))
    simulate(monkeypatch, {"uniform": 0.58, "pyramid": 0.4, "": 0.5}, 0)
    evolved = decide(prepared, outcome_of(prepared, 20))
    choice = evolved.choice
    assert choice.race.method(choice.best).score.mean > choice.race.method("uniform").score.mean
    assert evolved.report.gain(choice.best, ["uniform"]).high < 0
    assert (choice.name, choice.race.best) == ("uniform", "uniform")
    np.testing.assert_equal(choice.table, prepared.starts["uniform"])
    assert choice.race.verdict == "baseline"
    assert describe_decision(evolved).startswith("the start plan uniform is written (")


def start_of(loaded: LoadedModel, contexts: ContextRecord | None) -> Plan:
    """A start plan with a record."""
    plan = tiny.plan_for(loaded, [[16, 16, 16, 16]] * 3 + [[8, 8, 8, 8]] * 3)
    return plan.model_copy(update={"provenance": plan.provenance.model_copy(update={"contexts": contexts})})


def rows_of(part: Sequence[Any]) -> list[Any]:
    """The examples of a split."""
    (task,) = part
    return list(task.rows)


def test_a_result_records_its_splits_and_its_starts(loaded: LoadedModel) -> None:
    fitted, chosen = ContextSet.of([hash_context("a")]), ContextSet.of([hash_context("b")])
    prepared = prepare(loaded, {"mine": start_of(loaded, ContextRecord(fitted=fitted, chosen=chosen))})
    asked = {name: collect_contexts(encoded) for name, encoded in prepared.encoded.items()}
    assert len(asked["search"].ids) == CONTEXTS
    searched = prepared.record(searched=True)
    assert searched.fitted == fitted.union(asked["search"])
    assert searched.chosen == chosen.union(asked["choice"])
    assert (searched.reported, searched.complete) == (asked["report"], True)
    kept = decide(prepared, SearchOutcome()).choice.plan.provenance.contexts
    assert kept == prepared.record(searched=False) == searched.model_copy(update={"fitted": fitted})
    assert prepared.hashes["chosen"] == list_context_hashes(prepared.encoded["choice"])
    known, unknown = start_of(loaded, ContextRecord()), start_of(loaded, None)
    assert prepare(loaded, {"mine": known}).before == ContextRecord()
    assert not prepare(loaded, {"mine": known, "other": unknown}).before.complete


def test_no_context_is_asked_that_a_start_was_made_on(loaded: LoadedModel) -> None:
    """Of the six contexts of each split, two were used: the other four are asked."""
    whole = splits(contexts=6)
    whole = {name: replace(split, samples=4) for name, split in whole.items()}
    fitted, chosen = (
        ContextSet.of([hash_context(rows_of(split.tasks)[at].context) for split in whole.values()]) for at in (0, 1)
    )
    plan = start_of(loaded, ContextRecord(fitted=fitted, chosen=chosen))
    base, how = SearchSetup.of(loaded, POLICY), settings_of()
    (prepared,) = prepare_searches(base, {BUDGET: {"mine": plan}}, how, whole)
    for name, split in whole.items():
        fresh = [hash_context(row.context) for row in rows_of(split.tasks)[2:]]
        assert list_context_hashes(prepared.encoded[name]) == fresh


SCORES = {
    "wrong anyway": {"full": 0.99, "uniform": 0.0},
    "no longer hard": {"full": 1.0, "uniform": 0.6},
    "hard": {"full": 1.0, "uniform": 0.59},
    "lost": {"full": 1.0, "uniform": 0.0},
    "better without": {"full": 0.5, "uniform": 1.0},
    "half": {"full": 1.0, "uniform": 0.5},
}


def test_what_the_full_cache_gets_right_and_eviction_below_the_bound(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evolve, "measure_difficulty", lambda *_: SCORES)

    def kept(**changes: float) -> frozenset[str]:
        (search,), words = keep_hard_questions([prepare(loaded, **changes)])
        assert words.startswith(f"searching on {len(search.kept)} of 6 questions: the full cache answers 4 right")
        return search.kept

    assert kept(hard_below=60) == {"hard", "lost", "half"}
    assert kept(hard_below=100) == {"hard", "lost", "half", "no longer hard"}
    assert kept(hard_below=60, hard_most=9) == {"hard", "lost", "half"}
    drawn = [kept(hard_below=60, hard_most=2, seed=seed) for seed in (0, 1, 2, 3, 0)]
    assert {len(some) for some in drawn} == {2}
    assert len(set(drawn)) > 1
    assert drawn[0] == drawn[-1]


def test_too_few_hard_questions(loaded: LoadedModel) -> None:
    how = settings_of(hard_below=60)
    (prepared,) = prepare_searches(SearchSetup.of(loaded, POLICY), {BUDGET: {}}, how, splits(answer="nowhere"))
    with pytest.raises(UsageError, match=r"of 8 questions the full cache answers 0 right, .* too few to search on"):
        keep_hard_questions([prepared])

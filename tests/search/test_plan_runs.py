"""Candidates of the decode phase, run whole, against caches fed token by token; what workers measure is the same."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvsearch.core.arrays import Ints
from kvsearch.core.errors import IncompatibleError
from kvsearch.evaluation.runner import run_encoded
from kvsearch.models.loading import LoadedModel, LoadOptions
from kvsearch.plan import Phase
from kvsearch.plan.schema import Protocol
from kvsearch.policies import create_policy
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import run_attention
from kvsearch.runtime.shared_prefill import JointReplies
from kvsearch.search import evaluators
from kvsearch.search.bank.samples import BankSample, list_samples
from kvsearch.search.evaluators import PlanEvaluator, make_executor, make_worker_factory
from kvsearch.search.evolve import PreparedSearch
from kvsearch.search.start_plans import SearchSetup
from kvsearch.search.trials import Evaluator
from kvsearch.workers.models import ModelSource
from kvsearch.workers.ray import import_ray
from tests import tiny
from tests.combinations import first_value, in_turn
from tests.runtime.helpers import TOLERANCE, feed, one_by_one
from tests.search.bank.cases import PROTOCOLS, SNAPKV, encoded, losses_of, random_candidates, samples_of
from tests.search.evolving import CONTEXTS, QUESTIONS, prepare

SHAPES = (40, 2), (30, 1)
PHASES: dict[str, tuple[Phase, ...]] = {"decode": ("decode",), "both": ("prefill", "decode")}


def model_of(family: str = "llama") -> LoadedModel:
    return tiny.loaded(family, tie_word_embeddings=False)


def candidates_of(loaded: LoadedModel, base: SearchSetup, count: int, most: int = 24) -> list[Ints]:
    tables = random_candidates(loaded, count * len(base.phases), most)
    return [np.concatenate(tables[n::count]) for n in range(count)]


def logits_of(loaded: LoadedModel, program: Program, sample: BankSample) -> Tensor:
    """Logits [A, V] for the answer: the prompt, then every token by itself."""
    prompt = sample.prompt[None]
    pieces = [(prompt, torch.ones_like(prompt)), *one_by_one(sample.following[None])]
    with run_attention(loaded.model):
        rows = feed(loaded.model, PlanCache(loaded.model, program), pieces)
    return torch.cat([row[0, -1:] for row in rows])[-len(sample.answer) :]


@in_turn(family=["llama", "gemma2"], protocol=PROTOCOLS, name=PHASES)
def test_losses_are_those_of_token_by_token_decoding(family: str, protocol: Protocol, name: str) -> None:
    loaded = model_of(family)
    base, samples = SearchSetup.of(loaded, SNAPKV, PHASES[name]), samples_of(loaded, protocol, *SHAPES)
    candidates = candidates_of(loaded, base, 2)
    found = PlanEvaluator(base, samples, batch=2).evaluate(candidates)
    expected = [
        [losses_of(sample, [logits_of(loaded, Program.from_plan(loaded.model, base.plan(table, {}, 0)), sample)])[0]
         for sample in samples]
        for table in candidates
    ]  # fmt: skip
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    assert np.ptp(found, axis=0).max() > 100 * TOLERANCE  # candidates do differ


@in_turn(protocol=PROTOCOLS, name=PHASES)
def test_scores_are_those_of_an_evaluation(protocol: Protocol, name: str) -> None:
    loaded = model_of()
    base, tasks = SearchSetup.of(loaded, SNAPKV, PHASES[name]), encoded(loaded, *SHAPES)
    samples, candidates = list_samples(tasks, protocol), candidates_of(loaded, base, 3, 12)
    found = PlanEvaluator(base, samples, batch=2, objective="metric").evaluate(candidates)
    programs = {
        str(number): Program.from_plan(loaded.model, base.plan(table, {}, 0)) for number, table in enumerate(candidates)
    }
    replies = run_encoded(loaded, programs, tasks, protocol)
    by_place = {(reply.method, reply.key, reply.question): reply.score for reply in replies}
    expected = [
        [by_place[method, sample.reading.prompt.key, sample.question.number] for sample in samples]
        for method in programs
    ]
    np.testing.assert_equal(found, expected)


def test_policies_without_one_order_of_entries_can_be_searched() -> None:
    """The bank refuses those that merge."""
    loaded = model_of()
    base, samples = (
        SearchSetup.of(loaded, create_policy("d2o"), PHASES["decode"]),
        samples_of(loaded, "question-agnostic"),
    )
    found = PlanEvaluator(base, samples).evaluate([np.full_like(base.floors, int(base.floors.max()) + 4)])
    assert np.isfinite(found).all()


def test_memory_for_one_candidate_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = model_of()
    base, samples = SearchSetup.of(loaded, SNAPKV, PHASES["decode"]), samples_of(loaded, "question-agnostic", *SHAPES)
    candidates = candidates_of(loaded, base, 3)
    expected = PlanEvaluator(base, samples).evaluate(candidates)
    read = evaluators.compress_prompts

    def cramped(model: Any, programs: Mapping[str, Program], *rest: Any) -> Iterator[JointReplies]:
        if len(programs) > 1:
            raise MemoryError
        return read(model, programs, *rest)

    monkeypatch.setattr(evaluators, "compress_prompts", cramped)
    np.testing.assert_allclose(PlanEvaluator(base, samples).evaluate(candidates), expected, atol=TOLERANCE)


def worker_bank(prepared: PreparedSearch, source: ModelSource) -> Evaluator:
    """Built as in a worker, of what is sent to it."""
    factory = pickle.loads(import_ray().cloudpickle.dumps(make_worker_factory(prepared, source, prepared.cap)))
    return factory()


@first_value(("objective", "phases"), [("nll", "decode"), ("metric", "prefill")])
def test_the_bank_of_a_worker_measures_the_same(objective: str, phases: str, loaded: LoadedModel) -> None:
    prepared = prepare(loaded, objective=objective, phases=phases)
    job = tuple(prepared.starts.values())
    evaluator = worker_bank(prepared, ModelSource(loaded, LoadOptions()))
    with make_executor(prepared, prepared.cap) as here:
        [(_, outcome)] = here.run([job])
    values = evaluator.evaluate(job)
    assert values.shape == (len(prepared.starts), CONTEXTS * QUESTIONS)
    np.testing.assert_equal(values, outcome.values)
    assert evaluator.tokens_spent >= outcome.tokens  # those that were read before, too
    evaluator.close()


def test_another_model_is_refused(loaded: LoadedModel) -> None:
    source = ModelSource(loaded, LoadOptions())
    source.fingerprint = source.fingerprint.model_copy(update={"weights_sha256": "0" * 64})
    with pytest.raises(IncompatibleError, match="this job was made for another model"):
        worker_bank(prepare(loaded), source)

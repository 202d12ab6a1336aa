"""The bank against the runtime: the same logits, losses, order of candidates and replies."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from kvsearch.evaluation.runner import run_encoded
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel, load
from kvsearch.plan.schema import Protocol
from kvsearch.policies import create_policy
from kvsearch.runtime.attention import run_attention
from kvsearch.runtime.decode.replies import find_stop_tokens
from kvsearch.runtime.shared_prefill import compress_prompts
from kvsearch.search.bank.bank import CandidateBank
from kvsearch.search.bank.samples import list_samples
from kvsearch.search.spaces import encode_choices
from kvsearch.tasks.base import Example, Query
from kvsearch.tasks.encode import TaskPrompts, encode_tasks
from tests import tiny
from tests.combinations import in_turn
from tests.families import EACH_FAMILY, take_families
from tests.runtime.helpers import TOLERANCE
from tests.runtime.recorder import Recorder, capturing
from tests.search.bank.cases import (
    PROTOCOLS,
    SNAPKV,
    encoded,
    losses_of,
    program_of,
    random_candidates,
    runtime_logits,
    samples_of,
    table_shape,
    tokens_of,
)


def loaded(family: str) -> LoadedModel:
    """Embeddings are not tied to the head, or a random model says its last token over and over."""
    return tiny.loaded(family, tie_word_embeddings=False)


@take_families("llama", "gemma2")
def test_each_layer_has_the_policy_that_it_has_entries_under(family: str) -> None:
    """Tables of two policies, one below the other, against plans of these policies."""
    model = loaded(family)
    keydiff = create_policy("keydiff", {"sinks": 2, "window": 3})
    samples, budgets = samples_of(model, "question-agnostic"), random_candidates(model, 3, 60)
    layers = describe(model.model).full_layers
    chosen = [np.arange(len(layers)) % 2, np.zeros(len(layers), dtype=np.int64), np.ones(len(layers), dtype=np.int64)]
    tables = [encode_choices(table, some, 2) for table, some in zip(budgets, chosen, strict=True)]
    with CandidateBank(model, dict.fromkeys(layers, (SNAPKV, keydiff)), samples, cap=60) as bank:
        found = bank.measure_losses(tables)
    for row, (table, some) in enumerate(zip(budgets, chosen, strict=True)):
        policies = {layer: (SNAPKV, keydiff)[at] for layer, at in zip(layers, some, strict=True)}
        expected = [losses_of(sample, runtime_logits(model, sample, [table], policies))[0] for sample in samples]
        np.testing.assert_allclose(found[row], expected, atol=TOLERANCE)


@in_turn(family=[*EACH_FAMILY, pytest.param("gpt_oss", marks=pytest.mark.nightly)], protocol=PROTOCOLS)
def test_losses_and_their_order_are_those_of_the_runtime(family: str, protocol: Protocol) -> None:
    """Of prompts, questions and answers of different lengths, other budgets in every head, and the whole prompt."""
    model = loaded(family)
    everything = [np.full(table_shape(model), budget) for budget in (100, 10**6)]
    samples, candidates = samples_of(model, protocol), [*random_candidates(model, 4, 60, seed=1), *everything]
    with CandidateBank(model, SNAPKV, samples, cap=100) as bank:
        found = bank.measure_losses(candidates)
    expected = np.stack([losses_of(sample, runtime_logits(model, sample, candidates)) for sample in samples], axis=1)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    assert found[:4].mean(1).argsort().tolist() == expected[:4].mean(1).argsort().tolist()
    assert np.ptp(expected, axis=0).min() > 100 * TOLERANCE  # candidates do differ


@in_turn(family=["gemma2", "gemma3"], protocol=PROTOCOLS)
def test_questions_and_answers_longer_than_a_sliding_window(family: str, protocol: Protocol) -> None:
    model, context = loaded(family), " ".join(tiny.document(70).words[1:])
    queries = (
        Query("recall " * 25, ("mark " * 9,), 9),
        Query("mark " * 3, ("recall code " * 12,), 24),
        Query("? mark", ("mark",)),
    )
    task = tiny.Listed("long", (Example("long", "0", context, queries),))
    samples = list_samples(encode_tasks(model, [task], 1), protocol)
    candidates = random_candidates(model, 3, 60)
    with CandidateBank(model, SNAPKV, samples, cap=60) as bank:
        found = bank.measure_losses(candidates)
    expected = [losses_of(sample, runtime_logits(model, sample, candidates)) for sample in samples]
    np.testing.assert_allclose(found, np.transpose(expected), atol=TOLERANCE)


@pytest.mark.parametrize(
    ("policy", "params"),
    [
        ("h2o", {"sinks": 2}),  # two stages
        ("criticalkv", {}),
        ("keydiff", {}),
        ("expected_attention", {}),
        ("streaming", {}),
    ],
)
def test_policies_of_every_kind(policy: str, params: dict[str, Any]) -> None:
    model, chosen = loaded("llama"), create_policy(policy, params)
    samples, candidates = samples_of(model, "question-agnostic", (70, 1), (50, 1)), random_candidates(model, 4, 60)
    with CandidateBank(model, chosen, samples, cap=60) as bank:
        found = bank.measure_losses(candidates)
    expected = [losses_of(sample, runtime_logits(model, sample, candidates, chosen)) for sample in samples]
    np.testing.assert_allclose(found, np.transpose(expected), atol=TOLERANCE)


def evaluator_replies(model: LoadedModel, task: TaskPrompts, protocol: Protocol, candidates: Any) -> Any:
    """Token ids by candidate and sample as the evaluator generates them, one sample at a time."""
    programs = {str(number): program_of(model, candidate) for number, candidate in enumerate(candidates)}
    found: list[list[list[int]]] = [[] for _ in candidates]
    with run_attention(model.model):
        for sample in list_samples([task], protocol):
            stop, finished = find_stop_tokens(model), sample.finished
            for joint in compress_prompts(model.model, programs, [sample.prompt], stop, finished):
                limits = [sample.limit] * len(joint.methods)
                asked = [sample.question_ids] * len(joint.methods)
                replies = joint.replies.ask(asked, limits) if len(sample.question_ids) else joint.replies.reply(limits)
                for method, reply in zip(joint.methods, replies, strict=True):
                    found[int(method)].append(reply)
    return found


def longer(task: TaskPrompts, tokens: int, **changes: Any) -> TaskPrompts:
    """The same prompts with replies of up to `tokens` tokens; `changes` are of the task."""
    prompts = []
    for prompt in task.prompts:
        questions = (
            dataclasses.replace(one, query=dataclasses.replace(one.query, max_new_tokens=tokens + one.number))
            for one in prompt.questions
        )
        prompts.append(dataclasses.replace(prompt, questions=tuple(questions)))
    return dataclasses.replace(task, task=dataclasses.replace(task.task, **changes), prompts=tuple(prompts))


@in_turn(family=["llama", "gemma3"], protocol=PROTOCOLS)
def test_replies_are_those_of_the_evaluator(family: str, protocol: Protocol) -> None:
    model = loaded(family)
    task = longer(encoded(model, (60, 3), (90, 1), (75, 2))[0], 20)  # beyond Gemma's window of 16
    candidates = random_candidates(model, 3, 70)
    with CandidateBank(model, SNAPKV, list_samples([task], protocol), cap=70) as bank:
        found = tokens_of(bank, candidates)
    assert found == evaluator_replies(model, task, protocol, candidates)
    assert len({tuple(reply) for row in found for reply in row if reply}) > len(found[0]) // 2


def test_captured_steps_reply_as_others_do() -> None:
    """Beyond Gemma's window of 16; of unequal prompts and limits, so that some replies end before others."""
    model = loaded("gemma3")
    samples = list_samples([longer(encoded(model, (60, 3), (90, 1), (75, 2))[0], 20)], PROTOCOLS[0])
    candidates = random_candidates(model, 3, 70)
    recorder = Recorder()
    with CandidateBank(model, SNAPKV, samples, cap=70) as bank:
        expected = tokens_of(bank, candidates)
        with capturing(recorder):
            assert tokens_of(bank, candidates) == expected
    assert recorder.log.count("replayed") > 15
    assert recorder.log.count("captured") <= 2


def test_replies_follow_the_generation_config_and_end_where_those_of_the_evaluator_do() -> None:
    """At a stop token, which is not a part of the reply, and with a token that brings a stop text."""
    model, protocol = loaded("llama"), PROTOCOLS[0]
    task = longer(encoded(model, (60, 2), (90, 1))[0], 8)
    candidates = random_candidates(model, 3, 70)
    with CandidateBank(model, SNAPKV, list_samples([task], protocol), cap=70) as bank:
        whole = tokens_of(bank, candidates)
    reply = next(reply for row in whole for reply in row if reply and len(set(reply)) > 4)
    model.model.generation_config.eos_token_id = reply[3]
    task = longer(task, 8, stops=(model.tokenizer.decode([reply[1]]),))
    with CandidateBank(model, SNAPKV, list_samples([task], protocol), cap=70) as bank:
        cut = tokens_of(bank, candidates)
    assert cut == evaluator_replies(model, task, protocol, candidates)
    assert cut != whole
    model.model.generation_config.repetition_penalty = 1.7
    with CandidateBank(model, SNAPKV, list_samples([task], protocol), cap=70) as bank:
        penalised = tokens_of(bank, candidates)
    assert penalised == evaluator_replies(model, task, protocol, candidates)
    assert penalised != cut


def test_scores_are_those_of_the_evaluator() -> None:
    model, protocol = load("bundled"), PROTOCOLS[0]
    task = encoded(model, (300, 2), (250, 2), (280, 2))[0]
    candidates = [*random_candidates(model, 3, 80), *random_candidates(model, 3, 8)]
    samples = list_samples([task], protocol)
    programs = {str(number): program_of(model, candidate) for number, candidate in enumerate(candidates)}
    expected = {
        (sample.method, sample.key, sample.question): sample.score
        for sample in run_encoded(model, programs, [task], protocol)
    }
    with CandidateBank(model, SNAPKV, samples, cap=80) as bank:
        found = bank.score_replies(candidates)
    for number in range(len(candidates)):
        assert found[number].tolist() == [
            expected[str(number), sample.reading.prompt.key, sample.question.number] for sample in samples
        ]
    assert set(found.flatten()) == {0.0, 1.0}


@take_families("llama", "gemma2")
def test_companions_change_nothing(family: str) -> None:
    """Bit for bit on a CPU: a search that goes on elsewhere, in other company, must find the same."""
    model = loaded(family)
    samples, candidates = samples_of(model, "question-agnostic"), random_candidates(model, 5, 100)
    with CandidateBank(model, SNAPKV, samples, cap=100) as bank:
        together = bank.measure_losses(candidates)
        alone = np.concatenate([bank.measure_losses([candidate]) for candidate in candidates])
        backwards = bank.measure_losses(candidates[::-1])[::-1]
    np.testing.assert_array_equal(alone, together)
    np.testing.assert_array_equal(backwards, together)

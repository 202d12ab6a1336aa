"""Replies from compressed batches: against single contexts, plain generation, and caches that saw one question only."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kvsearch.errors import IncompatibleError
from kvsearch.evaluate.baselines import full_cache
from kvsearch.evaluate.runner import Replies, Sample, held_entries, left_padded, run, stop_tokens
from kvsearch.models.loading import LoadedModel
from kvsearch.policies import create_policy
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.program import PhaseProgram

from .. import tiny
from ..families import FAMILIES, build, prompts
from ..runtime.helpers import feed, held_tokens, running

LENGTHS, ASKED, NEW = (23, 40, 31), (3, 7, 5), 6
families = pytest.mark.parametrize("family", FAMILIES)
some_families = pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3"])


def third(model: Any, window: int = 4) -> Program:
    policy = create_policy("snapkv", {"window": window, "kernel": 3, "sinks": 2})
    return Program.uniform(model, policy, lambda length: max(7, length // 3))


def rows(lengths: Sequence[int], seed: int) -> list[Tensor]:
    return [prompts(1, length, seed=seed + index)[0][0] for index, length in enumerate(lengths)]


CONTEXTS, QUESTIONS, OTHERS = rows(LENGTHS, 0), rows(ASKED, 10), rows((6, 2, 4), 20)


def replies_of(model: Any, program: Program, contexts: list[Tensor], stop: set[int] | None = None) -> Replies:
    return Replies(model, PlanCache(model, program), contexts, 0, stop or set())


@families
def test_a_batch_replies_as_its_contexts_do_alone(family: str) -> None:
    model = build(family)
    with running(model, NAME):
        together = replies_of(model, third(model), CONTEXTS).ask(QUESTIONS, [NEW] * len(QUESTIONS))
        for context, question, reply in zip(CONTEXTS, QUESTIONS, together, strict=True):
            alone = replies_of(model, third(model), [context]).ask([question], [NEW])
            assert alone == [reply]
    assert all(len(reply) == NEW for reply in together)


@families
def test_a_full_cache_replies_as_plain_generation_does(family: str) -> None:
    model = build(family)
    with running(model, NAME):
        together = replies_of(model, full_cache(model), CONTEXTS).ask(QUESTIONS, [NEW] * len(QUESTIONS))
    for context, question, reply in zip(CONTEXTS, QUESTIONS, together, strict=True):
        ids = torch.cat([context, question])[None]
        plain = model.generate(ids, max_new_tokens=NEW, do_sample=False)
        assert plain[0, ids.shape[1] :].tolist() == reply


@some_families
def test_a_compressed_cache_replies_as_greedy_decoding_token_by_token(family: str) -> None:
    model = build(family)
    with running(model, NAME):
        cache = PlanCache(model, third(model))
        ids = [CONTEXTS[1][None], QUESTIONS[1][None]]
        logits = feed(model, cache, [(piece, torch.ones_like(piece)) for piece in ids])[-1]
        mask, expected = torch.ones(1, sum(piece.shape[1] for piece in ids), dtype=torch.long), []
        for _ in range(NEW):
            expected.append(int(logits[0, -1].argmax()))
            mask = torch.cat([mask, mask[:, :1]], 1)
            token, position = torch.tensor([expected[-1:]]), mask.sum(-1, keepdim=True) - 1
            with torch.no_grad():
                logits = model(token, attention_mask=mask, position_ids=position, past_key_values=cache).logits
        assert replies_of(model, third(model), CONTEXTS[1:2]).ask(QUESTIONS[1:2], [NEW]) == [expected]


@families
def test_questions_do_not_see_each_other(family: str) -> None:
    """Contexts are longer than the sliding window of Gemma (16): it must be brought back after every question."""
    model = build(family)
    with running(model, NAME):
        replies = replies_of(model, third(model), CONTEXTS)
        first = replies.ask(QUESTIONS, [NEW] * len(QUESTIONS))
        second = replies.ask(OTHERS, [NEW] * len(OTHERS))
        assert replies.ask(QUESTIONS, [NEW] * len(QUESTIONS)) == first
        assert replies_of(model, third(model), CONTEXTS).ask(OTHERS, [NEW] * len(OTHERS)) == second
        assert first != second


@families
def test_a_question_is_forgotten_without_a_trace(family: str) -> None:
    model = build(family)
    with running(model, NAME):
        replies = replies_of(model, third(model), CONTEXTS)
        cache = replies.cache
        entries, length = cache.entries(), cache.get_seq_length()
        columns = {layer: held_tokens(cache, layer, 3, 2) for layer in cache.planned}
        replies.ask(QUESTIONS, [NEW] * len(QUESTIONS))
        assert torch.equal(cache.entries(), entries)
        assert cache.get_seq_length() == length
        assert {layer: held_tokens(cache, layer, 3, 2) for layer in cache.planned} == columns
        for layer in cache.layers:
            assert layer.get_seq_length() == length


def test_replies_end_before_a_stop_token() -> None:
    model = build("llama")
    with running(model, NAME):
        whole = replies_of(model, third(model), CONTEXTS).ask(QUESTIONS, [NEW] * len(QUESTIONS))
        stop = whole[1][2]
        assert all(stop not in reply for reply in (whole[0], whole[2]))  # the others go on
        cut = replies_of(model, third(model), CONTEXTS, {stop}).ask(QUESTIONS, [NEW] * len(QUESTIONS))
        assert cut == [whole[0], whole[1][: whole[1].index(stop)], whole[2]]


def test_a_batch_ends_when_all_its_replies_did() -> None:
    model = build("llama")
    calls: list[int] = []
    with running(model, NAME):
        whole = replies_of(model, third(model), CONTEXTS).ask(QUESTIONS, [NEW] * len(QUESTIONS))
        replies = replies_of(model, third(model), CONTEXTS, {reply[0] for reply in whole})
        handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
        assert replies.ask(QUESTIONS, [NEW] * len(QUESTIONS)) == [[], [], []]
        handle.remove()
    assert len(calls) == 1


@pytest.mark.parametrize("count", [1, 2, 5])
def test_replies_are_as_long_as_allowed(count: int) -> None:
    model = build("llama")
    with running(model, NAME):
        replies = replies_of(model, third(model), CONTEXTS)
        short = replies.ask(QUESTIONS, [count] * len(QUESTIONS))
        assert short == [reply[:count] for reply in replies.ask(QUESTIONS, [NEW] * len(QUESTIONS))]


def test_nan_is_refused() -> None:
    model = build("llama")
    with torch.no_grad():
        model.lm_head.weight[3] = float("inf")
    with running(model, NAME), pytest.raises(IncompatibleError, match="NaN or infinite logits"):
        replies_of(model, third(model), CONTEXTS)


def test_left_padded() -> None:
    ids, mask = left_padded([torch.tensor([5, 6]), torch.tensor([7]), torch.tensor([8, 9, 10])], 4, "cpu")
    assert ids.tolist() == [[4, 5, 6], [4, 4, 7], [8, 9, 10]]
    assert mask.tolist() == [[0, 1, 1], [0, 0, 1], [1, 1, 1]]


@pytest.mark.parametrize(("configured", "expected"), [(None, {2}), (7, {2, 7}), ([7, 8], {2, 7, 8}), (0, {0, 2})])
def test_stop_tokens(configured: Any, expected: set[int]) -> None:
    model = tiny.loaded()
    model.model.generation_config.eos_token_id = configured
    assert stop_tokens(model) == expected


def test_stop_tokens_of_a_tokenizer_without_any() -> None:
    model = tiny.loaded()
    model.tokenizer.eos_token = None
    assert stop_tokens(model) == set()


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny.loaded()


TASK = tiny.listed((60, 3), (90, 1), (75, 2), (64, 4))


def programs(model: LoadedModel) -> dict[str, Program]:
    return {"full": full_cache(model.model), "third": third(model.model)}


def without_bytes(samples: Sequence[Sample]) -> list[Sample]:
    """Padding inside blocks depends on the batch."""
    ordered = sorted(samples, key=lambda sample: (sample.method, sample.key, sample.question))
    return [dataclasses.replace(sample, bytes=0.0) for sample in ordered]


def test_methods_answer_the_same_questions(model: LoadedModel) -> None:
    samples = run(model, programs(model), [TASK, tiny.listed((50, 2), name="other")], 4)
    by_method = [
        [(s.task, s.key, s.question, s.context_tokens) for s in samples if s.method == method]
        for method in programs(model)
    ]
    assert by_method[0] == by_method[1]
    asked = [(s.key, s.question) for s in samples if (s.task, s.method) == ("listed", "full")]
    assert sorted(asked) == [(str(e), q) for e, n in enumerate((3, 1, 2, 4)) for q in range(n)]
    assert model.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("batch", [1, 3])
def test_the_size_of_a_batch_changes_no_reply(batch: int, model: LoadedModel) -> None:
    whole = run(model, programs(model), [TASK], 4, batch=8)
    assert without_bytes(run(model, programs(model), [TASK], 4, batch=batch)) == without_bytes(whole)


def test_replies_are_as_long_as_each_question_allows(model: LoadedModel) -> None:
    for sample in run(model, programs(model), [TASK], 4):
        query = TASK.rows[int(sample.key)].queries[sample.question]
        assert len(sample.reply.split()) <= query.max_new_tokens


def test_what_a_sample_says_about_memory(model: LoadedModel) -> None:
    heads = 4 * 2
    for sample in run(model, programs(model), [TASK], 4, batch=1):
        length = len(TASK.rows[int(sample.key)].context.split()) + 1
        assert sample.context_tokens == length
        assert sample.entries == heads * (length if sample.method == "full" else length // 3)
        # 16 fp32 numbers for a key and for a value, an int32 position; uniform budgets need no padding
        assert sample.bytes == sample.entries * (2 * 16 * 4 + 4)
        assert type(sample.entries) is int
        assert type(sample.score) is float


def test_layers_outside_the_plan_count_in_full(model: LoadedModel) -> None:
    plan = tiny.plan_for(model, [[10, 6], None, [7, 9], None], scaling="fixed")
    cache = PlanCache(model.model, plan)
    ids, mask = prompts(2, 30, pads=9)
    with running(model.model, NAME):
        feed(model.model, cache, [(ids, mask)])
    assert held_entries(model.model, cache, [21, 30]) == [32 + 2 * 2 * 21, 32 + 2 * 2 * 30]


def test_scores_are_those_of_the_replies(model: LoadedModel) -> None:
    samples = run(model, programs(model), [TASK], 2)
    right = {(s.key, s.question): s.reply for s in samples if s.method == "third"}
    rows = tuple(
        dataclasses.replace(
            row,
            queries=tuple(
                dataclasses.replace(q, answers=("never", right[row.key, i])) for i, q in enumerate(row.queries)
            ),
        )
        for row in TASK.rows[:2]
    )
    again = run(model, programs(model), [tiny.Listed("listed", rows)], 2)
    assert {s.score for s in again if s.method == "third"} == {1.0}
    assert all(s.score == float(s.reply == right[s.key, s.question]) for s in again)


def test_progress_and_samples(model: LoadedModel) -> None:
    told: list[tuple[int, int]] = []
    samples = run(model, programs(model), [TASK], 3, batch=2, progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert {sample.key for sample in samples} == {"0", "1", "2"}


def test_the_model_is_left_as_it_was_found_when_something_fails(model: LoadedModel) -> None:
    def fail(length: int) -> Any:
        raise IncompatibleError("no budgets today")

    broken = Program(PhaseProgram({0: third(model.model).policies[0]}, fail))
    with pytest.raises(IncompatibleError, match="no budgets today"):
        run(model, {"broken": broken}, [TASK], 1)
    assert model.model.config._attn_implementation == "sdpa"


def test_a_tokenizer_without_padding_token(model: LoadedModel) -> None:
    bare = LoadedModel("bare", model.model, tiny.tokenizer(), model.fingerprint)
    bare.tokenizer.pad_token = None
    expected = without_bytes(run(model, programs(model), [TASK], 4))
    assert without_bytes(run(bare, programs(model), [TASK], 4)) == expected

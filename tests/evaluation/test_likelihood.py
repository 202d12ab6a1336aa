"""Log-likelihoods on compressed caches: against one dense pass, a masked reference, and contexts on their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kvsearch.evaluation.likelihood import Likelihood, score
from kvsearch.policies import create_policy
from kvsearch.runtime import Program
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.program import make_full_program
from tests.combinations import in_turn
from tests.families import build, prompts, take_families
from tests.runtime.helpers import feed, random_eviction, reference, running
from tests.runtime.test_replies import both_phases

CLOSE = 1e-4
families = take_families("llama", "gemma2", "gemma3")


def ids(length: int, seed: int) -> tuple[int, ...]:
    return tuple(prompts(1, length, seed=seed)[0][0].tolist())


# longer than the sliding window of Gemma (16), and as short as can be
CONTEXTS = [ids(length, seed) for seed, length in enumerate((40, 1, 23, 2))]
TEXTS = [
    [ids(length, 10 * row + length) for length in lengths]
    for row, lengths in enumerate(((3, 1, 5), (1, 4), (2,), (1,)))
]


def third(model: Any) -> Program:
    policy = create_policy("snapkv", {"window": 2, "kernel": 3, "sinks": 1})
    return Program.uniform(model, policy, lambda length: max(min(4, length), length // 3))


def scored(
    model: Any, program: Program, contexts: Sequence[Sequence[int]], texts: Sequence[Sequence[Sequence[int]]]
) -> list[tuple[list[Likelihood], int]]:
    with running(model, NAME):
        return score(model, program, contexts, texts)


def told(logits: Tensor, text: Sequence[int]) -> Likelihood:
    """What logits [..., K, V] say of a text of K tokens."""
    wanted = torch.tensor(text)
    predicted = logits.reshape(-1, logits.shape[-1])[-len(text) :]
    chosen = predicted.log_softmax(-1)[range(len(text)), wanted]
    return float(chosen.sum()), bool((predicted.argmax(-1) == wanted).all())


def assert_same(found: Likelihood, expected: Likelihood) -> None:
    assert found == (pytest.approx(expected[0], abs=CLOSE), expected[1])


def test_a_model_that_knows_nothing() -> None:
    """Each token is as likely as any other of the 97; greedy decoding takes the first of equals."""
    model = build("llama", tie_word_embeddings=False)
    torch.nn.init.zeros_(model.lm_head.weight)
    ((found, _),) = scored(model, third(model), [ids(20, 0)], [[(5,), (5, 6, 7), (0, 0)]])
    assert [logprob for logprob, _ in found] == pytest.approx([-n * math.log(97) for n in (1, 3, 2)], rel=1e-6)
    assert [is_greedy for _, is_greedy in found] == [False, False, True]


@families
def test_a_full_cache_agrees_with_one_dense_pass(family: str) -> None:
    model = build(family)
    found = scored(model, make_full_program(model), CONTEXTS, TEXTS)
    for context, texts, (answers, _) in zip(CONTEXTS, TEXTS, found, strict=True):
        for text, answer in zip(texts, answers, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([[*context, *text[:-1]]])).logits
            assert_same(answer, told(logits[0], text))


@in_turn(family=["llama", "gemma3"], program=[third, both_phases])
def test_a_batch_scores_as_its_contexts_do_alone(family: str, program: Callable[[Any], Program]) -> None:
    model = build(family)
    together = scored(model, program(model), CONTEXTS, TEXTS)
    for context, texts, (answers, entries) in zip(CONTEXTS, TEXTS, together, strict=True):
        for text, answer in zip(texts, answers, strict=True):
            (((alone,), held),) = scored(model, program(model), [context], [[text]])
            assert_same(answer, alone)
            assert entries == held


@families
def test_every_token_is_predicted_without_what_is_evicted(family: str) -> None:
    """Against attention over all keys, the evicted ones masked: also for the first token of a continuation."""
    model = build(family)
    context, texts = CONTEXTS[0], [TEXTS[0][1], TEXTS[0][2]]
    lead = torch.tensor([context[:-1]])
    eviction = random_eviction(model, torch.ones_like(lead))
    ((found, held),) = scored(model, eviction.program, [context], [texts])
    ((everything, most),) = scored(model, make_full_program(model), [context], [texts])
    for text, answer, full in zip(texts, found, everything, strict=True):
        later = torch.tensor([[context[-1], *text[:-1]]])
        with reference(model, eviction.kept) as cache:
            logits = feed(model, cache, [(lead, torch.ones_like(lead)), (later, torch.ones_like(later))])
        assert_same(answer, told(logits[1], text))
        assert abs(answer[0] - full[0]) > 10 * CLOSE
    assert held == sum(int(kept.sum()) for kept in eviction.kept.values()) < most


def test_a_context_is_read_once_and_texts_with_one_beginning_too() -> None:
    model = build("llama")
    fed: list[int] = []
    model.register_forward_pre_hook(lambda _, __, given: fed.append(given["input_ids"].shape[1]), with_kwargs=True)
    letters = [(token,) for token in (7, 8, 9, 10)]
    ((answers, _),) = scored(model, third(model), [ids(30, 0)], [letters])
    assert fed == [29, 1]
    assert len({logprob for logprob, _ in answers}) == len(letters)
    fed.clear()
    scored(model, third(model), [ids(1, 0)], [letters])
    assert fed == [1]

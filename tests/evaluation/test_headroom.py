"""Headroom: the oracle keeps what the answers look at most, at the entries of the others."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvsearch.calibration.importance import ImportancePass
from kvsearch.core.errors import IncompatibleError
from kvsearch.evaluation import headroom as module
from kvsearch.evaluation.headroom import (
    AGNOSTIC,
    ORACLE,
    ORACLE_UNIFORM,
    Replied,
    context_importance,
    headroom,
    replied,
)
from kvsearch.models.loading import LoadedModel
from kvsearch.plan.schema import QUESTION_AGNOSTIC
from kvsearch.runtime import PlanCache
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.replay.forced_answers import forced_answers
from kvsearch.tasks.base import Example, Query
from kvsearch.tasks.encode import encode
from tests import tiny
from tests.budgets.exact import eviction_loss
from tests.runtime.helpers import feed, running

TASK = tiny.listed((60, 2), (75, 1))
METHODS = ["full", ORACLE, ORACLE_UNIFORM, AGNOSTIC, "snapkv", "keydiff", "kvzip", "streaming", "random"]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest) -> LoadedModel:
    return tiny.loaded(request.param)


def given(model: LoadedModel, example: Example, task: tiny.Listed = TASK) -> tuple[torch.Tensor, list[Replied]]:
    """The context of an example and its questions, with the right replies."""
    encoded = encode(model.tokenizer, task, [example])
    return encoded.prompts[0].context, replied(
        encoded, encoded.prompts[0], forced_answers(model, [encoded], QUESTION_AGNOSTIC, "given")
    )


def importance_of(model: LoadedModel, example: Example) -> np.ndarray:
    with running(model.model, NAME):
        found = context_importance(model, *given(model, example))
    assert found.known.dtype == torch.float32
    return (found.known * found.weights[:, None, None]).double().numpy()


def test_every_method_but_the_full_cache_holds_the_same(model: LoadedModel) -> None:
    before = model.model.config._attn_implementation
    told: list[tuple[int, int]] = []
    samples = headroom(model, [TASK], 0.7, 2, progress=lambda done, total: told.append((done, total)))
    assert model.model.config._attn_implementation == before
    assert told == [(0, 2), (1, 2), (2, 2)]
    assert list(dict.fromkeys(sample.method for sample in samples)) == METHODS
    heads = 2 * (2 if model.fingerprint.model_type == "gemma3_text" else 4)
    for sample in samples:
        share = 1.0 if sample.method == "full" else 0.3
        assert sample.entries == int(share * heads * sample.context_tokens + 0.5)
    assert len(samples) == len(METHODS) * 3


PROTECTED = [*range(4), *range(-32, 0)]  # sinks and window, as under LU-KV over SnapKV


def test_the_oracle_keeps_the_most_important_entries(model: LoadedModel) -> None:
    short = TASK.rows[0]
    # budgets must leave something to choose beside the protected entries
    example = replace(short, context=" ".join([short.context] * math.ceil(300 / len(short.context.split()))))
    importance = importance_of(model, example)
    ids = tiny.ids_of(example.context)
    lost = {}
    with running(model.model, NAME):
        programs = dict(module._programs(model, *given(model, example), 0.8))
        programs[ORACLE] = programs[f"{ORACLE}:effect, 32 recent"]
        for method in (ORACLE, ORACLE_UNIFORM, "snapkv", "random"):
            cache = PlanCache(model.model, programs[method])
            feed(model.model, cache, [(ids, torch.ones_like(ids))])
            kept = np.zeros(importance.shape, dtype=bool)
            for row, layer in enumerate(cache.planned):
                for head in range(importance.shape[1]):
                    kept[row, head, cache.kept_positions(layer, 0, head)] = True
            lost[method] = importance[~kept].sum()
            if method in (ORACLE, ORACLE_UNIFORM):  # nothing evicted is worth more than anything kept by choice
                assert kept[..., PROTECTED].all()
                budgets = programs[method].prefill.table(ids.shape[1])
                assert (kept.sum(-1) == budgets).all()
                chosen, worth = np.delete(kept, PROTECTED, -1), np.delete(importance, PROTECTED, -1)
                worst_kept = np.where(chosen, worth, np.inf).min(-1)
                assert (np.where(chosen, 0, worth).max(-1) <= worst_kept).all()
                ordered = -np.sort(-worth, axis=-1)
                assert lost[method] == pytest.approx(eviction_loss(ordered, budgets - len(PROTECTED)).sum())
    assert lost[ORACLE] < lost[ORACLE_UNIFORM] < min(lost["snapkv"], lost["random"])


def test_the_importance_of_a_context_is_the_largest_of_its_questions(model: LoadedModel) -> None:
    """Up to the weight of each layer, which all questions share."""
    whole = TASK.rows[0]
    together = importance_of(model, whole)
    single = [importance_of(model, Example("t", "k", whole.context, (query,))) for query in whole.queries]
    with running(model.model, NAME):
        passed = ImportancePass(model.model, [], tiny.ids_of(whole.context))
        asked = []
        for query in whole.queries:
            words = f"{query.question} {query.answers[0]}"
            asked.append(passed.ask(tiny.ids_of(words)[:, 1:]).importance.double().numpy())
    for layer in range(len(together)):
        expected = np.maximum(*(values[layer] for values in asked))
        np.testing.assert_allclose(together[layer] / together[layer].max(), expected / expected.max(), rtol=1e-4)
        for own, values in zip(single, asked, strict=True):
            np.testing.assert_allclose(own[layer] / own[layer].max(), values[layer] / values[layer].max(), rtol=1e-4)


def test_the_best_allocation_of_each_context_is_the_oracle(model: LoadedModel) -> None:
    samples = headroom(model, [TASK], 0.7, 1)
    one = samples[0]
    scores = {"oracle:a": (0.0, 1.0), "oracle:b": (1.0, 1.0), "agnostic oracle:c": (0.0, 0.0), "snapkv": (0.5, 0.0)}
    made = [
        replace(one, method=method, question=number, score=score)
        for method, found in scores.items()
        for number, score in enumerate(found)
    ]
    best = [(sample.method, sample.score) for sample in module._best(made)]
    assert best == [(ORACLE, 1.0), (ORACLE, 1.0), (AGNOSTIC, 0.0), (AGNOSTIC, 0.0), ("snapkv", 0.5), ("snapkv", 0.0)]


def test_questions_of_other_contexts_count_for_the_agnostic_oracle(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean and the largest over all questions; what the oracle knows stays as it is."""
    (context, own), (_, others) = (given(model, row) for row in TASK.rows)
    with running(model.model, NAME):
        alone = context_importance(model, context, own)
        strange = context_importance(model, context, others)
        both = context_importance(model, context, own, others)
        monkeypatch.setattr(module, "MANY", 0)
        none = context_importance(model, context, own, others)
    asked = len(own)
    torch.testing.assert_close(both.known, alone.known)
    torch.testing.assert_close(both.most, torch.maximum(alone.known, strange.known))
    torch.testing.assert_close(both.mean * (asked + 1), alone.mean * asked + strange.mean)
    torch.testing.assert_close(none.mean, alone.mean)
    torch.testing.assert_close(alone.most, alone.known)


def test_what_the_oracle_looks_for_is_the_reply_that_is_right(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's own where the metric takes it, else all answers in the form of the task; never the first of many."""
    first, second = TASK.rows[0].queries
    rows = (replace(TASK.rows[0], queries=(replace(first, written="lantern green"), second)),)

    class Own(tiny.Listed):
        def score(self, reply: str, query: Query) -> float:
            return float(bool(reply) and query.question == second.question)

    task = Own("own", rows)
    looked: list[list[Replied]] = []
    whole = module.context_importance

    def noted(loaded: LoadedModel, context: torch.Tensor, asked: list[Replied], others: list[Replied]) -> object:
        looked.append(asked)
        return whole(loaded, context, asked, others)

    monkeypatch.setattr(module, "context_importance", noted)
    samples = headroom(model, [task], 0.7, 1)
    said = [sample.reply for sample in samples if sample.method == "full"]
    ((written, own),) = ([model.tokenizer.decode(reply) for _, reply in asked] for asked in looked)
    assert written == "lantern green"
    assert own == said[1] != second.answers[0]


def test_a_question_without_a_right_reply(model: LoadedModel) -> None:
    class Open(tiny.Listed):
        def score(self, reply: str, query: Query) -> float:
            return 0.0

    row = replace(TASK.rows[0], queries=(Query("recall", (), 4),))
    with pytest.raises(IncompatibleError, match="task open, example 0, question 0: no right answer is known"):
        headroom(model, [Open("open", (row,))], 0.7, 1)


@pytest.mark.parametrize("chat", [False, True])
def test_importance_is_that_of_the_prompt_that_is_asked(model: LoadedModel, chat: bool) -> None:
    """With the prefix of the reply, and with the chat template only where the task wants it."""
    row = replace(TASK.rows[1], queries=(replace(TASK.rows[1].queries[0], prefix=" recall the"),))
    seen: list[list[int]] = []
    handle = model.model.register_forward_pre_hook(
        lambda _, __, given: seen.append(given["input_ids"][0].tolist()), with_kwargs=True
    )
    headroom(replace(model, tokenizer=tiny.chat_tokenizer()), [replace(TASK, rows=(row,), chat=chat)], 0.7, 1)
    handle.remove()
    context = tiny.ids_of(f"recall {row.context}" if chat else row.context)[0].tolist()
    asked = " ".join([row.queries[0].question, *([". mark ="] if chat else []), "recall the"])
    question = tiny.ids_of(asked)[0, 1:].tolist()
    read = [ids for ids in seen if len(ids) > 1]  # the rest are tokens of replies
    assert [ids for ids in read if len(ids) > 40] == [context] * 5, "for replies, importance, all methods; kvzip twice"
    begun = [ids[: len(question)] for ids in read if len(ids) <= 40]
    assert len(begun) >= 2
    assert all(ids == question for ids in begun)

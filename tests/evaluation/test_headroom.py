"""Headroom: true importance keeps what the answers look at most, at the entries of the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kvsearch.calibration.importance import ImportancePass
from kvsearch.core.errors import IncompatibleError
from kvsearch.core.items import Progress
from kvsearch.evaluation import headroom as module
from kvsearch.evaluation.headroom import (
    AGNOSTIC,
    BEST,
    EVEN,
    EVEN_ALLOCATION,
    TRUE_IMPORTANCE,
    Replied,
    attach_replies,
    measure_headroom,
)
from kvsearch.evaluation.runner import run_encoded
from kvsearch.evaluation.samples import Sample
from kvsearch.models.loading import LoadedModel
from kvsearch.plan.schema import QUESTION_AGNOSTIC
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.program import make_full_program
from kvsearch.runtime.replay.forced_answers import forced_answers
from kvsearch.tasks.base import Example, Query
from kvsearch.tasks.encode import TaskPrompts, encode, encode_tasks
from tests import tiny
from tests.budgets.samples import eviction_loss
from tests.runtime.helpers import feed, running

TASK = tiny.listed((60, 2), (75, 1))
METHODS = ["full", BEST, EVEN, AGNOSTIC, "snapkv", "keydiff", "kvzip", "streaming", "random"]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny.loaded("gemma3")


def measure(
    model: LoadedModel, encoded: Sequence[TaskPrompts], ratio: float, progress: Progress | None = None
) -> list[Sample]:
    """Measure headroom beside replies of the full cache."""
    full = run_encoded(model, {"full": make_full_program(model.model)}, encoded, QUESTION_AGNOSTIC)
    return measure_headroom(model, encoded, ratio, full, progress)


def given(model: LoadedModel, example: Example, task: tiny.Listed = TASK) -> tuple[torch.Tensor, list[Replied]]:
    """The context of an example and its questions, with the right replies."""
    encoded = encode(model.tokenizer, task, [example])
    return encoded.prompts[0].context, attach_replies(
        encoded, encoded.prompts[0], forced_answers(model, [encoded], QUESTION_AGNOSTIC, "given")
    )


def importance_of(model: LoadedModel, example: Example) -> np.ndarray:
    with running(model.model, NAME):
        context, asked = given(model, example)
        passed = ImportancePass(model.model, [], context[None])
        importance = passed.measure_importance_of([torch.cat(pair) for pair in asked])
    assert importance.dtype == torch.float32
    largest = importance.amax(0)
    return (largest / largest.sum((1, 2), keepdim=True)).double().numpy()


def test_every_method_but_the_full_cache_holds_the_same(model: LoadedModel) -> None:
    before = model.model.config._attn_implementation
    told: list[tuple[int, int]] = []
    samples = measure(
        model, encode_tasks(model, [TASK], 2), 0.7, progress=lambda done, total: told.append((done, total))
    )
    assert model.model.config._attn_implementation == before
    assert told == [(0, 2), (1, 2), (2, 2)]
    assert list(dict.fromkeys(sample.method for sample in samples)) == METHODS
    heads = 2 * 2  # of two layers with full attention
    for sample in samples:
        share = 1.0 if sample.method == "full" else 0.3
        assert sample.entries == int(share * heads * sample.context_tokens + 0.5)
    assert len(samples) == len(METHODS) * 3


PROTECTED = [*range(4), *range(-32, 0)]  # sinks and window, as under LU-KV over SnapKV


def long_example() -> Example:
    """One whose budgets leave something to choose beside the protected entries."""
    short = TASK.rows[0]
    return replace(short, context=" ".join([short.context] * math.ceil(300 / len(short.context.split()))))


def test_by_importance_the_most_important_entries_stay(model: LoadedModel) -> None:
    example = long_example()
    importance = importance_of(model, example)
    ids = tiny.ids_of(example.context)
    lost = {}
    with running(model.model, NAME):
        tried, programs = module._make_programs(model, *given(model, example), 0.8, ())
        assert len(tried) == module.TRIED
        losses = module.measure_reply_losses(model.model, *given(model, example), tried)
        programs |= tried
        by_mass = f"{TRUE_IMPORTANCE}, mass, 32 recent"
        for method in (by_mass, EVEN_ALLOCATION, "snapkv", "random"):
            cache = PlanCache(model.model, programs[method])
            feed(model.model, cache, [(ids, torch.ones_like(ids))])
            kept = np.zeros(importance.shape, dtype=bool)
            for row, layer in enumerate(cache.planned):
                for head in range(importance.shape[1]):
                    kept[row, head, cache.kept_positions(layer, 0, head)] = True
            lost[method] = importance[~kept].sum()
            if method in (by_mass, EVEN_ALLOCATION):  # nothing evicted is worth more than anything kept by choice
                assert kept[..., PROTECTED].all()
                budgets = programs[method].prefill.table(ids.shape[1])
                assert (kept.sum(-1) == budgets).all()
                chosen, worth = np.delete(kept, PROTECTED, -1), np.delete(importance, PROTECTED, -1)
                worst_kept = np.where(chosen, worth, np.inf).min(-1)
                assert (np.where(chosen, 0, worth).max(-1) <= worst_kept).all()
                ordered = -np.sort(-worth, axis=-1)
                assert lost[method] == pytest.approx(eviction_loss(ordered, budgets - len(PROTECTED)).sum())
    assert lost[by_mass] < lost[EVEN_ALLOCATION] < min(lost["snapkv"], lost["random"])
    assert losses[f"{TRUE_IMPORTANCE}, error, 32 recent"] < 1.01 * losses[EVEN_ALLOCATION]


def samples_of(made: Sample, scores: dict[str, tuple[float, ...]]) -> dict[str, list[Sample]]:
    return {
        method: [replace(made, method=method, question=number, score=score) for number, score in enumerate(row)]
        for method, row in scores.items()
    }


def test_the_best_is_of_everything_that_was_tried(model: LoadedModel) -> None:
    """Policies among it; what is agnostic is chosen on other contexts, whatever it scores on its own."""
    made = measure(model, encode_tasks(model, [TASK], 1), 0.7)[0]
    allocations = [f"{AGNOSTIC}, a", f"{AGNOSTIC}, b"]
    names = ["full", module.EVEN_ALLOCATION, *allocations, "kvzip", "random"]
    rows = [(1.0, 1.0), (0.0, 0.5), (0.0, 0.0), (0.5, 0.0), (0.5, 0.5), (0.0, 0.0)]
    elsewhere = [samples_of(made, {allocations[0]: (a,), allocations[1]: (b,)}) for a, b in ((1.0, 0.0), (0.5, 1.0))]
    best = {}
    for sample in module._compare_context(samples_of(made, dict(zip(names, rows, strict=True))), elsewhere):
        best.setdefault(sample.method, []).append(sample.score)
    assert best == {
        "full": [1.0, 1.0], BEST: [0.5, 0.5], EVEN: [0.0, 0.5], AGNOSTIC: [0.0, 0.0], "kvzip": [0.5, 0.5],
        "random": [0.0, 0.0],
    }  # fmt: skip


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Replied], list[Replied]]]:
    """What is asked of each context whose importance is measured: about it, and about others."""
    made: list[tuple[list[Replied], list[Replied]]] = []
    programs = module._make_programs

    def noted(
        loaded: LoadedModel, context: Tensor, asked: list[Replied], ratio: float, others: list[Replied]
    ) -> tuple[dict[str, Program], dict[str, Program]]:
        made.append((list(asked), list(others)))
        return programs(loaded, context, asked, ratio, others)

    monkeypatch.setattr(module, "_make_programs", noted)
    return made


def test_what_is_important_is_so_for_the_reply_that_is_right(
    model: LoadedModel, measured: list[tuple[list[Replied], list[Replied]]]
) -> None:
    """The model's own where the metric takes it, else all answers in the form of the task; never the first of many."""
    first, second = TASK.rows[0].queries
    rows = (replace(TASK.rows[0], queries=(replace(first, written="lantern green"), second)),)

    class Own(tiny.Listed):
        def score(self, reply: str, query: Query) -> float:
            return float(bool(reply) and query.question == second.question)

    samples = measure(model, encode_tasks(model, [Own("own", rows)], 1), 0.7)
    said = [sample.reply for sample in samples if sample.method == "full"]
    ((written, own),) = ([model.tokenizer.decode(reply) for _, reply in asked] for asked, _ in measured)
    assert written == "lantern green"
    assert own == said[1] != second.answers[0]


def test_a_question_without_a_right_reply(model: LoadedModel) -> None:
    class Open(tiny.Listed):
        def score(self, reply: str, query: Query) -> float:
            return 0.0

    row = replace(TASK.rows[0], queries=(Query("recall", (), 4),))
    with pytest.raises(IncompatibleError, match="task open, example 0, question 0: no right answer is known"):
        measure(model, encode_tasks(model, [Open("open", (row,))], 1), 0.7)


def test_importance_is_that_of_the_prompt_that_is_asked(model: LoadedModel) -> None:
    """With the prefix of the reply, and with the chat template."""
    row = replace(TASK.rows[1], queries=(replace(TASK.rows[1].queries[0], prefix=" recall the"),))
    seen: list[list[int]] = []
    handle = model.model.register_forward_pre_hook(
        lambda _, __, given: seen.append(given["input_ids"][0].tolist()), with_kwargs=True
    )
    chatting = replace(model, tokenizer=tiny.chat_tokenizer())
    measure(chatting, encode_tasks(chatting, [replace(TASK, rows=(row,), chat=True)], 1), 0.7)
    handle.remove()
    context = tiny.ids_of(f"recall {row.context}")[0].tolist()
    asked = f"{row.queries[0].question} . mark = recall the"
    question = tiny.ids_of(asked)[0, 1:].tolist()
    read = [ids for ids in seen if len(ids) > 1]  # the rest are tokens of replies
    assert [ids for ids in read if len(ids) > 40] == [context] * 6, (
        "for replies of the full cache, right replies, importance, what is tried, all methods; kvzip once more"
    )
    begun = [ids[: len(question)] for ids in read if len(ids) <= 40]
    assert len(begun) >= 2
    assert all(ids == question for ids in begun)

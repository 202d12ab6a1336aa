"""One reply from a compressed context."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvsearch.core.errors import UsageError
from kvsearch.evaluation import answer as replies
from kvsearch.evaluation.answer import Reply
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Plan
from tests import tiny

PLAN = [[14, 7], [25, 6], [31, 12], [9, 16]]
CONTEXT = " ".join(tiny.document(64).words[1:])


def answer(model: LoadedModel, plan: Plan | None, context: str, prompt: str, *rest: Any, **options: Any) -> Reply:
    (reply,) = replies.answer(model, plan, context, [prompt], *rest, **options)
    return reply


def plain_reply(model: LoadedModel, ids: torch.Tensor, count: int) -> str:
    model.model.generation_config.pad_token_id = 0
    out = model.model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=2)
    return str(model.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def test_without_a_plan_the_full_cache_answers(model: LoadedModel) -> None:
    reply = answer(model, None, CONTEXT, "? vote", " {question}", 6)
    assert reply.text == plain_reply(model, tiny.ids_of(CONTEXT + " ? vote"), 6)
    length = len(CONTEXT.split()) + 1
    size, most = 8 * length * 2 * 16 * 4, 8 * (length + 2 + len(reply.text.split()) - 1)  # the last word is never fed
    assert reply == Reply(reply.text, length, 8 * length, 8 * length, size + 4 * 8 * length, size, most)
    assert model.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3"])
def test_with_a_plan(family: str) -> None:
    model = tiny.loaded(family)
    layers = 4 if family == "llama" else 2
    budgets = PLAN if layers == 4 else [None, PLAN[1], None, PLAN[2]]
    plan = tiny.plan_for(model, budgets, scaling="fixed")
    reply = answer(model, plan, CONTEXT, "? vote", " {question}", 6)
    full = answer(model, None, CONTEXT, "? vote", " {question}", 6)
    assert reply.entries == plan.total
    assert reply.full_entries == full.entries == layers * 2 * reply.context_tokens
    assert reply.bytes < full.bytes
    assert reply.full_bytes == full.bytes - 4 * full.entries  # transformers' own cache has no positions


def test_without_a_question_the_context_goes_on(model: LoadedModel) -> None:
    reply = answer(model, None, CONTEXT, "", "{question}", 6)
    assert reply.text == plain_reply(model, tiny.ids_of(CONTEXT), 6)
    assert reply.context_tokens == len(CONTEXT.split())  # its last token is not compressed, it starts the reply


def test_nothing_to_compress(model: LoadedModel) -> None:
    with pytest.raises(UsageError, match="nothing to compress"):
        answer(model, None, "", "", "{question}", 6)
    assert answer(model, None, "", "? vote", "{question}", 6).context_tokens == 1  # <bos> alone

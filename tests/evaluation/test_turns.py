"""One reply from a compressed context, and conversations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.evaluation import answer as replies
from kvsearch.evaluation.answer import Reply
from kvsearch.evaluation.ready_methods import spread_evenly
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Plan
from kvsearch.plan.schema import QUESTION_AWARE
from kvsearch.policies import create_policy
from kvsearch.runtime import Program, attach
from kvsearch.runtime.decode.replies import find_stop_tokens
from kvsearch.runtime.program import make_full_program
from kvsearch.tasks.encode import encode_tasks
from kvsearch.tasks.prompts import PromptFormat
from tests import tiny
from tests.combinations import first_value
from tests.tiny import chat_tokenizer, listed, loaded, run

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
    assert reply == Reply(reply.text, length, 8 * length, 8 * length, size + 4 * 8 * length, size, most, 0.0)
    assert model.model.config._attn_implementation == "sdpa"


def test_with_a_plan() -> None:
    """Of layers that alone have full attention."""
    model = tiny.loaded("gemma3")
    plan = tiny.plan_for(model, [None, PLAN[1], None, PLAN[2]], scaling="fixed")
    reply = answer(model, plan, CONTEXT, "? vote", " {question}", 6)
    full = answer(model, None, CONTEXT, "? vote", " {question}", 6)
    assert reply.entries == plan.total
    assert reply.full_entries == full.entries == 2 * 2 * reply.context_tokens
    assert reply.bytes < full.bytes
    assert reply.full_bytes == full.bytes - 4 * full.entries  # transformers' own cache has no positions


def test_without_a_question_the_context_goes_on(model: LoadedModel) -> None:
    reply = answer(model, None, CONTEXT, "", "{question}", 6)
    assert reply.text == plain_reply(model, tiny.ids_of(CONTEXT), 6)
    assert reply.context_tokens == len(CONTEXT.split())  # its last token is not compressed, it starts the reply


APART = listed((60, 3), (90, 1), (75, 2))  # contexts, questions and replies of different lengths
TURNS = replace(APART, rows=tuple(replace(row, turns=True) for row in APART.rows))


def programs(model: LoadedModel, *phases: Any) -> dict[str, Program]:
    def evicting(name: str, **params: int) -> Program:
        policy = create_policy(name, params)
        return spread_evenly(model.model, policy, dict.fromkeys(phases or ("prefill",), lambda _: 20 * 8))

    methods = {"snapkv": evicting("snapkv", window=4, kernel=3), "keydiff": evicting("keydiff")}
    return {"full": make_full_program(model.model), **methods}


def conversation(model: LoadedModel, program: Program, row: int) -> list[str]:
    """Replies of one conversation with the cache that holds it, token after token."""
    (task,) = encode_tasks(model, [TURNS], len(TURNS.rows))
    prompt = task.prompts[row]
    said = prompt.context[None]
    replies = []
    with attach(model.model, program) as planned:
        cache = planned.read(said)
        for question in prompt.questions:
            said = torch.cat([said, question.ids[None]], 1)
            new = question.query.max_new_tokens
            output = planned.generate(said, past_key_values=cache, max_new_tokens=new, do_sample=False, pad_token_id=0)
            reply = [token for token in output[0, said.shape[1] :].tolist() if token not in find_stop_tokens(model)]
            replies.append(task.format.decode(reply))
            said = torch.cat([said, torch.tensor([reply], dtype=torch.long)], 1)
    return replies


@first_value(("batch", "penalty"), [(3, 1.6), (1, None)])
def test_replies_are_those_of_a_conversation(
    model: LoadedModel, batch: int, penalty: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a plan that evicts nothing after the context, for methods that reply together and contexts in a batch.

    A repetition penalty counts earlier questions and replies.
    """
    for name, value in {"repetition_penalty": penalty, "eos_token_id": model.tokenizer.eos_token_id}.items():
        monkeypatch.setattr(model.model.generation_config, name, value)
    methods = programs(model)
    samples = run(model, methods, [TURNS], 3, batch)
    assert len(samples) == 3 * (3 + 1 + 2)
    for name, program in methods.items():
        for row in range(3):
            own = [sample for sample in samples if (sample.method, sample.key) == (name, str(row))]
            assert [sample.reply for sample in own] == conversation(model, program, row), (name, row)
            assert len({sample.entries for sample in own}) == 1


def test_the_context_leaves_room_for_all_turns(model: LoadedModel) -> None:
    (apart,) = encode_tasks(model, [APART], 3, max_length=48)
    (turns,) = encode_tasks(model, [TURNS], 3, max_length=48)
    (first, *_), (other, *_) = apart.prompts, turns.prompts
    needs = [len(question.ids) + question.query.max_new_tokens for question in first.questions]
    assert len(first.context) == 48 - max(needs)
    assert len(other.context) == 48 - sum(needs)


def test_what_is_refused(model: LoadedModel) -> None:
    with pytest.raises(UsageError, match="turns are asked about a context that is compressed once"):
        run(model, programs(model), [TURNS], 1, protocol=QUESTION_AWARE)
    windowed = loaded("gemma2")
    with pytest.raises(IncompatibleError, match="a model with sliding windows cannot take them in a batch"):
        run(windowed, {"full": make_full_program(windowed.model)}, [TURNS], 1)


def test_the_chat_template_stands_between_turns() -> None:
    template = (
        "{% for message in messages %}{{ message.role }} {{ message.content }} . {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    tokenizer = chat_tokenizer(template)
    form = PromptFormat(tokenizer)
    talk = [("user", "recall\n\nvote"), ("assistant", "mark"), ("user", "code")]
    messages = [{"role": role, "content": content} for role, content in talk]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    parts = (form.context("recall"), form.question("vote"), form.answer("mark"), form.question("code", follows=True))
    assert torch.cat(parts, 1)[0].tolist() == tokenizer(whole, add_special_tokens=False)["input_ids"]

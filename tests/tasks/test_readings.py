"""What is compressed under each protocol, and that replies are those of plain generation where nothing is evicted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvsearch.evaluation.ready_methods import spread_evenly
from kvsearch.evaluation.samples import Sample
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.plan.arithmetic import compute_budgets
from kvsearch.plan.schema import PROTOCOLS, QUESTION_AGNOSTIC, QUESTION_AWARE, Protocol
from kvsearch.policies import create_policy
from kvsearch.runtime import Program
from kvsearch.runtime.program import make_full_program
from kvsearch.tasks.base import Example, Query
from kvsearch.tasks.encode import encode, hash_tokens, make_readings
from tests import tiny
from tests.combinations import first_value, in_turn
from tests.evaluation.results import without_bytes
from tests.tiny import run

TASK = tiny.listed((60, 3), (90, 1), (75, 2), (64, 4))
LONGER = tuple(
    replace(row, queries=tuple(replace(query, max_new_tokens=query.max_new_tokens + 5) for query in row.queries))
    for row in TASK.rows
)
BEGUN = tuple(
    replace(row, queries=tuple(replace(query, prefix=" recall the") for query in row.queries)) for row in LONGER
)
PLAIN, PREFIX = replace(TASK, rows=LONGER), replace(TASK, rows=BEGUN)


def build(family: str, chat: bool = False) -> LoadedModel:
    """Embeddings are not tied to the head (as Gemma's are), or a random model says its last token over and over."""
    made = tiny.loaded(family, tie_word_embeddings=False)
    return replace(made, tokenizer=tiny.chat_tokenizer()) if chat else made


def test_readings() -> None:
    queries = (Query("? vote", ("a",)), Query("? code amber", ("b",), 5, " recall"))
    prompts = encode(tiny.tokenizer(), TASK, [Example("t", "k", "the bell", queries)]).prompts
    (context,) = make_readings(prompts, QUESTION_AGNOSTIC)
    assert tiny.tokenizer().decode(context.ids) == "<bos> the bell"
    assert [question.number for question in context.questions] == [0, 1]
    first, second = make_readings(prompts, QUESTION_AWARE)
    assert tiny.tokenizer().decode(first.ids) == "<bos> the bell ? vote"
    assert tiny.tokenizer().decode(second.ids) == "<bos> the bell ? code amber recall"
    assert [[question.number for question in reading.questions] for reading in (first, second)] == [[0], [1]]


def whole_prompt(tokenizer: Any, task: tiny.Listed, sample: Sample) -> torch.Tensor:
    """The prompt as one text, [1, T]."""
    row = task.rows[int(sample.key)]
    query = row.queries[sample.question]
    if task.chat and tokenizer.chat_template:
        message = {"role": "user", "content": f"{row.context}\n\n{query.question}"}
        text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        return torch.tensor([tokenizer(text + query.prefix, add_special_tokens=False)["input_ids"]])
    return torch.tensor([tokenizer(f"{row.context} {query.question}{query.prefix}")["input_ids"]])


@in_turn(
    family=["llama", "qwen3", "gemma2", "gemma3", "llama", "gemma3"],
    task=[PLAIN, PREFIX, replace(PREFIX, chat=True)],
    protocol=PROTOCOLS,
)
def test_a_full_cache_replies_as_plain_generation_does(family: str, task: tiny.Listed, protocol: Protocol) -> None:
    model = build(family, chat=True)
    samples = run(model, {"full": make_full_program(model.model)}, [task], 4, batch=3, protocol=protocol)
    assert len(samples) == 10
    model.model.generation_config.pad_token_id = 0
    for sample in samples:
        ids, query = whole_prompt(model.tokenizer, task, sample), task.rows[int(sample.key)].queries[sample.question]
        out = model.model.generate(ids, max_new_tokens=query.max_new_tokens, do_sample=False, eos_token_id=2)
        expected = out[0, ids.shape[1] :].tolist()
        expected = expected[: expected.index(2)] if 2 in expected else expected
        assert sample.reply == model.tokenizer.decode(expected, skip_special_tokens=True)
        assert sample.reply_tokens == len(expected)
        assert sample.prompt_tokens == ids.shape[1]
        assert sample.prompt_sha256 == hash_tokens(ids[0])


def programs(model: LoadedModel) -> dict[str, Program]:
    shape = describe(model.model)
    heads = len(shape.full_layers) * shape.kv_heads
    snapkv = create_policy("snapkv", {"window": 4, "kernel": 3, "sinks": 2})

    def total(length: int) -> int:
        return heads * (length // 3)

    return {
        "full": make_full_program(model.model),
        "prefill": spread_evenly(model.model, snapkv, {"prefill": total}),
        "both": spread_evenly(model.model, create_policy("tova"), {"prefill": total, "decode": total}),
    }


@pytest.mark.slow
@first_value(("family", "protocol"), [("llama", PROTOCOLS[1]), ("gemma3", PROTOCOLS[0])])
def test_the_size_of_a_batch_changes_nothing(family: str, protocol: Protocol) -> None:
    model = build(family)
    alone = run(model, programs(model), [PREFIX], 4, batch=1, protocol=protocol)
    assert len({sample.prompt_tokens for sample in alone}) > 3
    together = run(model, programs(model), [PREFIX], 4, batch=3, protocol=protocol)
    assert without_bytes(together) == without_bytes(alone)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_budgets_are_for_what_is_compressed(protocol: Protocol) -> None:
    model = build("llama")
    plan = tiny.plan_for(model, [[14, 7], [25, 6], [31, 12], [9, 16]])
    samples = run(model, {"plan": Program.from_plan(model.model, plan)}, [PREFIX], 4, protocol=protocol)
    for sample in samples:
        read = sample.context_tokens if protocol == QUESTION_AGNOSTIC else sample.prompt_tokens
        assert sample.entries == int(compute_budgets(plan, "prefill", read).sum())
        asked = sample.prompt_tokens - sample.context_tokens if protocol == QUESTION_AGNOSTIC else 0
        allowed = PREFIX.rows[int(sample.key)].queries[sample.question].max_new_tokens
        fed = min(sample.reply_tokens, allowed - 1)  # what ends a reply is never fed
        assert sample.most == sample.entries + 8 * (asked + fed)
        assert sample.protocol == protocol

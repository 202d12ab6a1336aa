"""Replies from compressed batches: against single contexts, plain generation, and caches that saw one question only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kvsearch.core.errors import IncompatibleError, NonFiniteError
from kvsearch.evaluation.ready_methods import spread_evenly
from kvsearch.models.architecture import describe
from kvsearch.policies import Policy, create_policy
from kvsearch.runtime import PlanCache, Program, attach
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.decode.replies import Finished, Replies
from kvsearch.runtime.program import make_full_program
from kvsearch.runtime.shared_prefill import read
from tests import families as all_families
from tests.combinations import first_value, in_turn
from tests.families import EACH_FAMILY, FAMILIES, prompts
from tests.runtime.helpers import running

LENGTHS, NEW = (23, 40, 31), 6
families = pytest.mark.parametrize("family", EACH_FAMILY)


def build(family: str, **changes: Any) -> Any:
    """Embeddings are not tied to the head (as Gemma's are), or a random model says its last token over and over."""
    return all_families.build(family, tie_word_embeddings=False, **changes)


def third(model: Any) -> Program:
    policy = create_policy("snapkv", {"window": 4, "kernel": 3, "sinks": 2})
    return Program.uniform(model, policy, lambda length: max(7, length // 3))


def rows(lengths: Sequence[int], seed: int) -> list[Tensor]:
    return [prompts(1, length, seed=seed + index)[0][0] for index, length in enumerate(lengths)]


CONTEXTS, ASKED = rows(LENGTHS, 0), rows((3, 7, 5), 10)
# sliding windows leave no room for padding between a context and its question
QUESTIONS = {family: rows((5, 5, 5), 10) if family.startswith("gemma") else ASKED for family in FAMILIES}
OTHERS = {family: rows((3, 3, 3) if family.startswith("gemma") else (6, 2, 4), 20) for family in FAMILIES}


def replies_of(
    model: Any,
    program: Program,
    contexts: list[Tensor],
    stop: set[int] | None = None,
    finished: Finished | None = None,
) -> Replies:
    replies = read(model, PlanCache(model, program), contexts, stop or set())
    replies.finished = finished
    return replies


def both_phases(model: Any) -> Program:
    """A third of the prompt, and no more than that while the reply grows."""
    shape = describe(model)
    heads = len(shape.full_layers) * shape.kv_heads

    def total(length: int) -> int:
        return heads * max(1, length // 3)

    return spread_evenly(model, create_policy("tova"), {"prefill": total, "decode": total})


@families
def test_a_full_cache_replies_as_plain_generation_does(family: str) -> None:
    model, questions = build(family), QUESTIONS[family]
    with running(model, NAME):
        together = replies_of(model, make_full_program(model), CONTEXTS).ask(questions, [NEW] * 3)
    for context, question, reply in zip(CONTEXTS, questions, together, strict=True):
        output = model.generate(torch.cat([context, question])[None], max_new_tokens=NEW, do_sample=False)
        assert output[0, -NEW:].tolist() == reply


@families
def test_questions_do_not_see_each_other(family: str) -> None:
    """Contexts are longer than the sliding window of Gemma (16): it must be brought back after every question."""
    model, questions, others = build(family), QUESTIONS[family], OTHERS[family]
    with running(model, NAME):
        replies = replies_of(model, third(model), CONTEXTS)
        first = replies.ask(questions, [NEW] * 3)
        second = replies.ask(others, [NEW] * 3)
        assert replies.ask(questions, [NEW] * 3) == first
        assert replies_of(model, third(model), CONTEXTS).ask(others, [NEW] * 3) == second
        assert first != second


def test_replies_end_before_a_stop_token() -> None:
    model = build("llama")
    with running(model, NAME):
        whole = replies_of(model, third(model), CONTEXTS).ask(ASKED, [NEW] * 3)
        stop = whole[1][2]
        assert all(stop not in reply for reply in (whole[0], whole[2]))  # the others go on
        cut = replies_of(model, third(model), CONTEXTS, {stop}).ask(ASKED, [NEW] * 3)
        assert cut == [whole[0], whole[1][: whole[1].index(stop)], whole[2]]


@in_turn(family=EACH_FAMILY, program=[third, both_phases])
def test_a_batch_continues_as_its_prompts_do_alone(family: str, program: Callable[[Any], Program]) -> None:
    model = build(family)
    limits = [NEW, NEW + 3, NEW - 2]
    with running(model, NAME):
        together = replies_of(model, program(model), CONTEXTS)
        replies, held = together.reply(limits), together.most
        for row, context in enumerate(CONTEXTS):
            alone = replies_of(model, program(model), [context])
            assert alone.reply(limits[row : row + 1]) == [replies[row]]
            assert alone.most == [held[row]]
    assert [len(reply) for reply in replies] == limits


# --- rows whose replies have ended ------------------------------------------------------------------------------------


def evicting(name: str, **params: Any) -> Callable[[Any], Program]:
    """Nothing leaves the prompt; from then on each head holds so many entries, less than most prompts have."""

    def program(model: Any) -> Program:
        heads = len(describe(model).full_layers) * describe(model).kv_heads
        return spread_evenly(model, create_policy(name, params), {"decode": lambda _: 26 * heads})

    program.__name__ = f"evicting_{name}"
    return program


PROGRAMS = {
    made.__name__: made
    for made in (
        third, both_phases, evicting("h2o"), evicting("snapkv", window=4, kernel=3), evicting("cam"),
        evicting("scissorhands", window=4, history=8, drop=3),
    )
}  # fmt: skip
MANY, LIMITS = rows((23, 40, 31, 23, 52, 28), 30), [3, 17, 2, 9, 24, 1]
LEAVING = first_value(
    ("family", "program"),
    [
        *(("llama", "both_phases"), ("gemma2", "evicting_h2o"), ("qwen3", "third")),
        *(("llama", name) for name in ("evicting_snapkv", "evicting_scissorhands", "evicting_cam")),
        *((family, "both_phases") for family in ("gemma3", "jamba", "gpt_oss")),
    ],
    usual=2,
)


def held_by(cache: PlanCache) -> str:
    """All that a cache holds, in words: positions of planned layers, tensors of the others."""
    held: list[Any] = []
    for index, layer in enumerate(cache.layers):
        if index in cache.planned:
            batch, heads = layer.evicted.entries().shape
            held += [layer.evicted.kept_positions(row, head) for row in range(batch) for head in range(heads)]
        else:
            held += [getattr(layer, name, None) for name in ("conv_states", "recurrent_states")]
            held += [getattr(layer, name)[..., -8:, :] for name in ("keys", "values") if hasattr(layer, name)]
    return str([*held, cache.get_seq_length(), cache.read_mask.columns(cache.get_seq_length())])


@LEAVING
def test_rows_that_have_ended_leave_and_nothing_else_changes(family: str, program: str) -> None:
    """Replies, what was held, and the cache after them are those of each row alone; questions can follow."""
    model, same = build(family), family in all_families.SPECIAL or family.startswith("gemma")
    questions = rows([1 if family == "jamba" else 4] * 6 if same else (3, 7, 5, 1, 4, 6), 50)
    fed: list[int] = []
    with running(model, NAME):
        together = replies_of(model, PROGRAMS[program](model), MANY)
        logits = together.force(questions, 1)
        before = held_by(together.cache)
        model.register_forward_pre_hook(lambda _, __, given: fed.append(len(given["input_ids"])), with_kwargs=True)
        said, most = together.ask(questions, LIMITS), together.most
        assert fed == [6, 6, 6, *[3] * 14, *[1] * 7]  # the questions, and every step
        assert list(map(len, said)) == LIMITS
        assert held_by(together.cache) == before
        torch.testing.assert_close(together.force(questions, 1), logits)
        together.ask(questions[::-1], LIMITS[::-1])
        assert (together.ask(questions, LIMITS), together.most) == (said, most)
        for row, context in enumerate(MANY):
            alone = replies_of(model, PROGRAMS[program](model), [context])
            assert alone.ask([questions[row]], [LIMITS[row]]) == [said[row]]
            assert alone.most == [most[row]]


def test_a_finished_reply_ends_with_what_finished_it() -> None:
    model = build("llama")
    with running(model, NAME):
        whole = replies_of(model, third(model), CONTEXTS).ask(ASKED, [NEW] * 3)
        pair = whole[2][1:3]
        seen: list[list[int]] = []

        def finished(reply: list[int]) -> bool:
            seen.append(list(reply))
            return reply[-2:] == pair

        cut = replies_of(model, third(model), CONTEXTS, finished=finished).ask(ASKED, [NEW] * 3)
    assert cut == [whole[0], whole[1], whole[2][:3]]
    assert max(len(reply) for reply in seen if reply[0] == whole[2][0]) == 3  # it is not asked again


@pytest.mark.parametrize("row", [0, 2])
def test_the_sequence_that_breaks_a_model_is_known(row: int) -> None:
    model = build("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[96] = float("nan")
    clean = [tokens.clamp(max=95) for tokens in CONTEXTS]
    broken = [torch.cat([tokens, torch.tensor([96])]) if at == row else tokens for at, tokens in enumerate(clean)]
    asked = [tokens.clamp(max=95) for tokens in ASKED]
    with running(model, NAME):
        with pytest.raises(NonFiniteError) as caught:
            replies_of(model, make_full_program(model), broken)
        assert caught.value.row == row
        asked[row][0] = 96
        with pytest.raises(NonFiniteError) as caught:
            replies_of(model, make_full_program(model), clean).ask(asked, [1, 1, 1])
        assert caught.value.row == row


@in_turn(policy=[create_policy("h2o"), create_policy("snapkv", {"window": 4})], row=range(2))
def test_the_sequence_whose_scores_are_nan_is_known(policy: Policy, row: int) -> None:
    model = build("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[96] = float("nan")
    ids = prompts(2, 30)[0].clamp(max=95)
    program = spread_evenly(model, policy, dict.fromkeys(("prefill", "decode"), lambda _: 160))
    with attach(model, program) as planned:
        cache = planned.read(ids)
        token = torch.zeros(2, 1, dtype=torch.long)
        token[row] = 96
        model(token, past_key_values=cache)
        with pytest.raises(NonFiniteError, match="the scores of") as caught:
            cache.check_scores()
        assert caught.value.row == row
        ids[row, 3] = 96
        with pytest.raises(NonFiniteError, match="the scores of") as caught:
            planned.generate(ids, max_new_tokens=2)
        assert caught.value.row == row


def test_a_prompt_longer_than_the_model_takes() -> None:
    model = build("llama", max_position_embeddings=40)
    with running(model, NAME), pytest.raises(IncompatibleError, match="has 40 tokens, the model takes at most 40"):
        replies_of(model, third(model), CONTEXTS)

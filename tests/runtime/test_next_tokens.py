"""Choosing the next token: every processor of a generation config, alone and in a batch, against `model.generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from kvsearch.core.errors import IncompatibleError, KvsearchWarning
from kvsearch.runtime import PlanCache
from kvsearch.runtime.attention import run_attention
from kvsearch.runtime.decode.next_tokens import (
    PROCESSORS,
    UNFOLLOWED,
    WARPERS,
    Draws,
    NextTokens,
)
from kvsearch.runtime.program import make_full_program
from kvsearch.runtime.shared_prefill import read
from kvsearch.tasks.base import Sampling
from tests.combinations import first_value
from tests.families import build, prompts

LENGTHS = (23, 40, 31, 40)
NEW = (8, 5, 7, 8)
CONTEXTS = [prompts(1, length, seed=index)[0][0] for index, length in enumerate(LENGTHS)]
QUESTIONS = [prompts(1, length, seed=index)[0][0] for index, length in enumerate((3, 7, 5, 2), 10)]


def model_with(**settings: Any) -> Any:
    model = build("llama", tie_word_embeddings=False)
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return model


def stops_of(model: Any) -> set[int]:
    configured = model.generation_config.eos_token_id
    return {configured} if isinstance(configured, int) else set(configured or ())


def generated(model: Any, ids: Tensor, limit: int, **options: Any) -> list[int]:
    """What `model.generate` says to one prompt, without the token that ends it."""
    output = model.generate(ids[None], max_new_tokens=limit, do_sample=False, **options)[0, len(ids) :].tolist()
    stops = stops_of(model)
    return output[: next((at for at, token in enumerate(output) if token in stops), None)]


def replies(model: Any, contexts: Sequence[Tensor], questions: Sequence[Tensor], limits: Sequence[int]) -> Any:
    with run_attention(model):
        held = read(model, PlanCache(model, make_full_program(model)), contexts, stops_of(model))
        return held.ask(questions, limits)


WHOLE = [torch.cat(both) for both in zip(CONTEXTS, QUESTIONS, strict=True)]
PLAIN = [generated(model_with(eos_token_id=None), ids, limit) for ids, limit in zip(WHOLE, NEW, strict=True)]
FIRST, SECOND = PLAIN[0][0], PLAIN[0][1]
OPTIONS: dict[str, dict[str, Any]] = {
    "forced_eos_token_id": {"forced_eos_token_id": [SECOND], "eos_token_id": None},
    "begin_suppress_tokens": {"begin_suppress_tokens": [reply[0] for reply in PLAIN]},
    "guidance_scale": {"guidance_scale": 3.0},
    "several": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 3, "suppress_tokens": [FIRST]},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 3.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[FIRST, SECOND], [PLAIN[1][2]]]},
    "min_new_tokens": {"min_new_tokens": 4, "eos_token_id": SECOND},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 3.0), "eos_token_id": 2},
    "sequence_bias": {"sequence_bias": [[[SECOND], -20.0], [[7, 9], 5.0], [[7], 5.0]]},
}


@first_value("name", OPTIONS, usual=4)
def test_replies_are_those_of_generate(name: str) -> None:
    settings = {"eos_token_id": None, **OPTIONS[name]}
    model = model_with(**settings)
    expected = [generated(model, ids, limit) for ids, limit in zip(WHOLE, NEW, strict=True)]
    ending = model_with(eos_token_id=settings["eos_token_id"])
    assert expected != [generated(ending, ids, limit) for ids, limit in zip(WHOLE, NEW, strict=True)]
    assert replies(model, CONTEXTS, QUESTIONS, NEW) == expected
    assert replies(model, CONTEXTS[:1], QUESTIONS[:1], NEW[:1]) == expected[:1]
    with run_attention(model):  # the same tokens as a prompt that goes on by itself
        assert read(model, PlanCache(model, make_full_program(model)), WHOLE, stops_of(model)).reply(NEW) == expected


def test_every_option_that_makes_a_processor_is_known() -> None:
    """An option of a newer transformers is neither here nor there: it must be looked at."""
    elsewhere = set(  # lengths and ends, ways of searching, caches, speed and outputs
        "max_length max_new_tokens stop_strings do_sample early_stopping length_penalty diversity_penalty "
        "num_return_sequences use_cache cache_implementation cache_config max_cache_len temperature top_p "
        "output_attentions output_hidden_states output_scores output_logits return_dict_in_generate pad_token_id "
        "bos_token_id eos_token_id decoder_start_token_id is_assistant num_assistant_tokens use_mtp speculation_type "
        "num_assistant_tokens_schedule assistant_confidence_threshold prompt_lookup_num_tokens low_memory "
        "max_matching_ngram_size assistant_early_exit assistant_lookbehind target_lookbehind compile_config "
        "assistant_ensemble_weight disable_compile continuous_batching_config prefill_chunk_size transformers_version "
        "_from_model_config".split()
    )
    assert vars(GenerationConfig()).keys() <= elsewhere | PROCESSORS.keys() | WARPERS.keys() | UNFOLLOWED.keys()


def test_drawn_replies_follow_what_else_a_config_says_of_drawing() -> None:
    chances = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2])
    logits = chances.log().expand(4_000, 5)
    prompt = torch.tensor([1])
    for settings, expected in (
        ({}, chances),
        ({"top_k": 2}, torch.tensor([0, 0.4, 0, 0.25, 0])),
        ({"min_p": 0.4}, torch.tensor([0, 0.4, 0, 0.25, 0.2])),
        ({"suppress_tokens": [1]}, torch.tensor([0.1, 0, 0.05, 0.25, 0.2])),
    ):
        choose = NextTokens(model_with(**settings), [prompt] * 4_000, [3] * 4_000, Draws(Sampling(1.0), range(4_000)))
        drawn = choose(logits).flatten()
        assert torch.allclose(drawn.bincount(minlength=5) / 4_000, expected / expected.sum(), atol=0.03)


def test_a_config_that_generate_refuses_is_refused_in_one_line() -> None:
    with pytest.raises(IncompatibleError, match=r"generation config cannot be followed: .*strictly positive float"):
        replies(model_with(repetition_penalty=2), CONTEXTS, QUESTIONS, NEW)
    with pytest.warns(KvsearchWarning, match="num_beams 4, token_healing True: replies here do not follow that"):
        assert (
            replies(model_with(eos_token_id=None, num_beams=4, token_healing=True), CONTEXTS, QUESTIONS, NEW) == PLAIN
        )


@first_value("drawn", [True, False])
@pytest.mark.parametrize("name", ["guidance_scale", "several", "begin_suppress_tokens"])
def test_rows_that_leave_a_batch_change_nothing_for_those_processed_with_them(name: str, drawn: bool) -> None:
    """Prompts of one length share processors, some of which remember how many rows there were."""
    model = model_with(eos_token_id=None, **OPTIONS[name])
    contexts = [prompts(1, 30, seed=seed)[0][0] for seed in range(4)]

    def said(rows: Sequence[int]) -> list[list[int]]:
        held = read(model, PlanCache(model, make_full_program(model)), [contexts[row] for row in rows], set())
        held.finished = lambda reply: len(reply) >= 2 + reply[0] % 13
        held.draws = Draws(Sampling(1.0), [100 + row for row in rows]) if drawn else None
        return held.reply([20] * len(rows))

    with run_attention(model):
        together = said(range(4))
        assert len({len(reply) for reply in together}) >= 3
        assert [said([row])[0] for row in range(4)] == together

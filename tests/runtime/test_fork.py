"""One prefill for many plans leaves every cache as a prefill of its own would."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvsearch.budgets.adakv import AdaKVAllocation
from kvsearch.budgets.lava import LAVaAllocation
from kvsearch.models.architecture import describe
from kvsearch.policies import Policy, create_policy
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.program import PhaseProgram, make_full_program
from kvsearch.runtime.shared_prefill import can_join, join_caches, prefill_all
from tests.families import DEVICES, build, prompts, take_families
from tests.runtime.helpers import assert_close, held_tokens, running
from tests.runtime.policies import SMALL
from tests.runtime.test_sharing import go_on, read


def programs(model: Any) -> list[Program]:
    """Plans of many kinds: several policies, phases and allocations, one that governs the second half only."""
    layers = describe(model).full_layers

    def phase(policy: Policy, budget: int, of: tuple[int, ...] = layers) -> PhaseProgram:
        return PhaseProgram(
            dict.fromkeys(of, policy), lambda _: budget + np.arange(len(of))[:, None] + np.array([[0, 2]])
        )

    snapkv, h2o = SMALL["snapkv{'window': 4, 'kernel': 3, 'sinks': 1}"], SMALL["h2o"]
    small = create_policy("lava", {"window": 3, "kernel": 3})
    return [
        make_full_program(model),
        Program(phase(snapkv, 9)),
        Program(phase(h2o, 9), phase(h2o, 9)),
        Program(None, phase(SMALL["tova"], 12)),
        Program(phase(small, 9), allocation=LAVaAllocation()),
        Program(phase(snapkv, 9), allocation=AdaKVAllocation()),
        Program(phase(small, 9), phase(small, 9), LAVaAllocation()),
        Program(phase(snapkv, 9, layers[len(layers) // 2 :])),
        Program(phase(SMALL["criticalkv{'window': 2, 'kernel': 3}"], 9)),
    ]


def fork(model: Any, made: list[Program], ids: Tensor, mask: Tensor) -> tuple[list[PlanCache], Tensor]:
    caches = [PlanCache(model, program) for program in made]
    with running(model, NAME):
        logits = prefill_all(model, caches, ids, mask)
    return caches, logits


@pytest.mark.parametrize("device", DEVICES)
@take_families("llama", "gemma2", "gemma3")
def test_it_is_as_if_every_plan_had_run_alone(family: str, device: str) -> None:
    model = build(family, device)
    ids, mask = prompts(2, 40, pads=9, device=device)
    made = programs(model)
    if describe(model).kv_heads != 2:
        pytest.fail("the budgets of this test are for two kv heads")
    caches, logits = fork(model, made, ids, mask)
    for number, (cache, program) in enumerate(zip(caches, made, strict=True)):
        alone = read(model, program, ids, mask)
        assert cache.get_seq_length() == alone.get_seq_length() == 40
        assert cache.entries().tolist() == alone.entries().tolist(), number
        for layer in alone.planned:
            assert held_tokens(cache, layer, 2, 2) == held_tokens(alone, layer, 2, 2), number
        ours, theirs = (go_on(model, one, ids[:, :5], mask) for one in (cache, alone))
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.equal(mine, other), number
    with running(model, NAME), torch.no_grad():
        expected = model(
            ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
            past_key_values=PlanCache(model, made[0]), logits_to_keep=1,
        ).logits  # fmt: skip
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("device", DEVICES)
@take_families("llama", "qwen3", "gemma3")
def test_joined_caches_answer_as_each_does(family: str, device: str) -> None:
    model = build(family, device)
    ids, mask = prompts(2, 40, pads=9, device=device)
    made = [program for program in programs(model) if program.decode is None]
    made = [program for program in made if program.layers == describe(model).full_layers]
    caches, _ = fork(model, made, ids, mask)
    apart, _ = fork(model, made, ids, mask)
    assert all(can_join(cache) for cache in caches)
    entries = torch.cat([cache.entries() for cache in caches], 1)
    count = len(made)
    whole = join_caches(caches, mask.repeat(count, 1), [40, 31] * count)
    assert whole.entries().tolist() == entries.tolist()
    for cache in (whole, *apart):
        cache.activate_past_recording()
    mark = whole.mark()
    for _ in range(2):  # the second time after going back
        together = go_on(model, whole, ids[:, :5].repeat(count, 1), mask.repeat(count, 1))
        for number, cache in enumerate(apart):
            back = cache.mark()
            for mine, other in zip(together, go_on(model, cache, ids[:, :5], mask), strict=True):
                assert_close(mine[2 * number : 2 * number + 2], other)
            cache.rewind(back)
        whole.rewind(mark)


def test_a_cache_that_evicts_while_decoding_cannot_join() -> None:
    model = build("llama")
    caches, _ = fork(model, programs(model)[1:3], *prompts(1, 30))
    assert [can_join(cache) for cache in caches] == [True, False]

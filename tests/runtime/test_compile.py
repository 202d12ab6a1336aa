"""A decode step is one graph: it compiles as a whole, for what every kind of policy does, and does the same then."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor

from kvsearch.policies import create_policy
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import run_attention
from kvsearch.runtime.eviction import evict
from kvsearch.runtime.store.flat import FlatBlock
from tests.families import build, prompts
from tests.policies.probes import zap
from tests.runtime.layers import Layer, Scene, held
from tests.runtime.policies import FIRST, SMALL
from tests.torture.device import counting

BUDGETS = 7, 10  # of two heads


def plain(step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return step


def steps(name: str, made: Callable[..., Callable[..., Tensor]] = plain) -> tuple[Tensor, object]:
    """Outputs of some tokens whose steps are run by what is made of a function, and what is held at the end.

    As room is reserved steps are alike: all tensors stay where they are from the first one on.
    """
    layer, policy = Layer(Scene(2, 2, 14, (0, 3), 8, BUDGETS, 0)), SMALL[name]
    holder = evict(layer.observation(policy), layer.rule(policy), layer.rule(policy))
    holder.reserve(8)
    packed, outputs = holder.packed, []
    run = made(lambda *states: holder.step(*states, layer.logits))
    for index, states in enumerate(zip(*(t.split(1, 2) for t in layer.tokens()), strict=True)):
        holder.prepare_step()
        outputs.append(run(*states, layer.valid.sum(-1, keepdim=True) + index))
        holder.finish_step()
    assert holder.packed == packed
    return torch.cat(outputs, 2), held(holder)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [FIRST[name] for name in ("tova", "scissorhands", "cake", "d2o", "probe", "snapkv")])
@torch.no_grad()
def test_a_step_compiles_without_a_break(name: str) -> None:
    torch._dynamo.reset()
    whole = steps(name, lambda step: torch.compile(step, fullgraph=True, backend="eager"))
    expected = steps(name)
    assert torch.equal(whole[0], expected[0])
    assert whole[1] == expected[1]


WHOLE = {"h2o": create_policy("h2o"), "kvzap": zap(1, 2, 64)}  # KVzap reads hidden states: a layer alone has none


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "phases"), [("h2o", 1), ("kvzap", 2)])
@torch.no_grad()
def test_a_step_of_a_whole_model_compiles_without_a_break(name: str, phases: int) -> None:
    """Over flat entries, too."""
    with counting.flat() if phases == 1 else nullcontext():
        cache = compiles_whole(name, phases)
    assert isinstance(cache.planned[0].holder.blocks[0], FlatBlock) == (phases == 1)  # type: ignore[union-attr]


def compiles_whole(name: str, phases: int) -> PlanCache:
    model, (ids, mask) = build("llama", num_hidden_layers=1), prompts(2, 20, pads=5)
    tables = dict.fromkeys(("prefill", "decode")[:phases], lambda _: np.array([BUDGETS]))
    program = Program.of_policy(model, WHOLE[name], tables)
    everything, found = torch.ones(2, 1, 1, 1, dtype=torch.bool), []
    for compiled in (True, False):
        torch._dynamo.reset()
        cache = PlanCache(model, program)
        step = torch.compile(model.__call__, fullgraph=True, backend="eager") if compiled else model
        with run_attention(model):
            model(ids, attention_mask=mask, past_key_values=cache)
            cache.reserve(8)
            for token in range(4):
                place = mask.sum(-1, keepdim=True) + token
                given = {"position_ids": place, "attention_mask": everything, "past_key_values": cache}
                with cache.reserve_positions(place):
                    logits = step(ids[:, token : token + 1], **given).logits
        found.append((logits, cache.entries()))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    return cache

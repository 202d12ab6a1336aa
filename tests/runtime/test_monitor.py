"""The attention at the end of a prompt that is on what has left: beside transformers' own attention weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvsearch.core.errors import UsageError
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Plan
from kvsearch.plan.schema import PolicySpec
from kvsearch.runtime import PlanCache
from kvsearch.runtime.attention import run_attention, use_attention
from kvsearch.runtime.layer import MONITOR_ROWS
from kvsearch.runtime.shared_prefill import read_prompts
from tests import tiny
from tests.combinations import in_turn
from tests.families import prompts

PROMPTS = [prompts(1, length)[0][0] for length in (60, 41, 7)]  # the last is shorter than the window of queries


def attentions(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The attention weights [Hq, T, T] of every layer."""
    with use_attention(model, "eager"), torch.no_grad():
        return tuple(layer[0] for layer in model(ids[None], output_attentions=True).attentions)


def expected(model: Any, cache: PlanCache, row: int, ids: torch.Tensor) -> float:
    masses = []
    for index, weights in enumerate(attentions(model, ids)):
        heads = model.config.num_key_value_heads
        for head, of_head in enumerate(weights.unflatten(0, (heads, -1))):
            held = [place for place in cache.kept_positions(index, row, head) if place < len(ids)]
            masses.append(1 - of_head[:, -MONITOR_ROWS:][..., held].sum(-1).mean())
    return float(torch.stack(masses).mean())


def read(loaded: LoadedModel, plan: Plan, chunk: int | None = None, **options: Any) -> PlanCache:
    with run_attention(loaded.model):
        cache = PlanCache(loaded.model, plan, **options)
        read_prompts(loaded.model, [cache], PROMPTS, chunk)
    return cache


def make_plan(loaded: LoadedModel, **changes: Any) -> Plan:
    shape = loaded.fingerprint
    budgets: list[list[int] | None] = [[12 + 2 * layer] * shape.kv_heads for layer in range(shape.layers)]
    return tiny.plan_for(loaded, budgets, scaling="fixed", length=None, **changes)


@in_turn(allocation=["static", "adakv", "lava"], chunk=[9, None])
def test_it_is_what_transformers_attends_to(model: LoadedModel, allocation: str, chunk: int | None) -> None:
    """Whatever decides the budgets, of padded prompts, read whole or in parts."""
    plan = make_plan(model, allocation=PolicySpec(name=allocation))
    cache = read(model, plan, chunk, monitor=True)
    wanted = [expected(model.model, cache, row, ids) for row, ids in enumerate(PROMPTS)]
    assert cache.evicted_mass == pytest.approx(wanted, abs=1e-5)
    assert cache.evicted_mass[2] == pytest.approx(0.0, abs=1e-6)  # nothing left a prompt of seven tokens
    assert cache.evicted_mass[0] > cache.evicted_mass[2]
    assert cache.of_rows([1, 0]).evicted_mass == pytest.approx(wanted[1::-1], abs=1e-5)
    cache.reorder_cache(torch.tensor([1, 1]))
    assert cache.evicted_mass == pytest.approx([wanted[1]] * 2, abs=1e-5)


def test_it_is_measured_where_it_is_wanted(model: LoadedModel) -> None:
    cache, measured = (read(model, make_plan(model), monitor=monitor) for monitor in (False, True))
    assert torch.equal(cache.entries(), measured.entries())
    with pytest.raises(UsageError, match=r"measured where it is wanted: PlanCache\(model, plan, monitor=True\)"):
        _ = cache.evicted_mass
    with pytest.raises(UsageError, match="run the model on the whole prompt first"):
        _ = PlanCache(model.model, make_plan(model), monitor=True).evicted_mass

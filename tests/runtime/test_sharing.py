"""Dynamic allocation at run time: trimming layer by layer ends where deciding at the end would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvsearch.budgets.adakv import AdaKVAllocation
from kvsearch.budgets.allocator import share_above
from kvsearch.budgets.cake import CAKEAllocation
from kvsearch.budgets.dynamic import Allocation
from kvsearch.budgets.lava import LAVaAllocation
from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.models.architecture import describe
from kvsearch.policies import Observation, Policy, create_policy, rank_under
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.program import PhaseProgram
from kvsearch.runtime.sharing import Sharing
from kvsearch.signals.attention_rows import measure_dispersion
from tests.budgets.known import OfScores
from tests.combinations import in_turn
from tests.examples import at_most
from tests.families import DEVICES, build, prompts
from tests.runtime.helpers import assert_close, columns, feed, one_by_one, reference, running
from tests.runtime.policies import SMALL

SINGLE = ["lava{'window': 3, 'kernel': 3}", "snapkv{'window': 4, 'kernel': 3, 'sinks': 1}"]
ALLOCATIONS = {
    "adakv": AdaKVAllocation(),
    "adakv, kvpress": AdaKVAllocation(0.4, "kvpress"),
    "lava": LAVaAllocation(),
    "lava, no floor": LAVaAllocation(0.0),
    "lava, planned layers": LAVaAllocation(layers="planned"),
    "lava, scores": LAVaAllocation(0.0, layers="scores"),
    "lava, scores, equal heads": LAVaAllocation(heads="equal", layers="scores"),
    "lava, equal heads": LAVaAllocation(heads="equal"),
    "cake": CAKEAllocation(),
    "cake, tempered": CAKEAllocation(1.6, 0.4, window=6),
}


def uneven(family: str = "llama", device: str = "cpu", **changes: Any) -> Any:
    """A model whose layers differ in how sharp their attention is."""
    model = build(family, device, **changes)
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            name = "qkv_proj" if family == "phi3" else "q_proj"
            getattr(layer.self_attn, name).weight.mul_((3.0, 0.2, 1.0, 0.02)[index])
    return model


def shared(model: Any, policy: Policy, allocation: Allocation, budget: int, decode: int | None = None) -> Program:
    """Budgets that fall from layer to layer and differ between heads, so that planned totals matter."""
    layers = describe(model).full_layers
    offset = np.arange(len(layers))[::-1, None] + np.array([[1, 0]])

    def phase(entries: int) -> PhaseProgram:
        return PhaseProgram(dict.fromkeys(layers, policy), lambda _: entries + offset)

    return Program(phase(budget), None if decode is None else phase(decode), allocation)


def record(monkeypatch: pytest.MonkeyPatch) -> dict[int, Observation]:
    """The observations of the forward passes that follow, by layer."""
    observations: dict[int, Observation] = {}
    end = Sharing.end

    def ending(sharing: Sharing, index: int, observation: Observation) -> None:
        observations[index] = observation
        end(sharing, index, observation)

    monkeypatch.setattr(Sharing, "end", ending)
    return observations


def read(model: Any, program: Program, ids: Tensor, mask: Tensor) -> PlanCache:
    cache = PlanCache(model, program)
    with running(model, NAME):
        feed(model, cache, [(ids, mask)])
    return cache


def go_on(model: Any, cache: PlanCache, ids: Tensor, mask: Tensor) -> list[Tensor]:
    """Logits of tokens [B, n] that follow the prompt of `mask` one by one."""
    with running(model, NAME):
        return feed(model, cache, one_by_one(ids), mask)


def decided_at_the_end(
    program: Program, observations: dict[int, Observation], sequence: int, table: np.ndarray
) -> tuple[np.ndarray, dict[int, list[list[int]]]]:
    """Budgets [L, Hkv] of one sequence and the kept indices, all layers known, by the allocators on plain scores."""
    allocation, scores, signals, ranks = program.allocation, [], [], {}
    length = int(next(iter(observations.values())).lengths[sequence])
    for layer, observation in sorted(observations.items()):
        policy = program.prefill.policies[layer]
        here = observation.valid[sequence]
        ranks[layer] = rank_under(policy, observation)[sequence][:, here]
        candidates = ranks[layer][0] >= policy.protected(length)
        scores.append(policy.score(observation)[sequence][:, here][:, candidates].double().numpy())
        if isinstance(allocation, CAKEAllocation):
            rows = allocation.window or policy.observed
            found = measure_dispersion(observation, rows)
            entropy, variance = (float(value[sequence]) for value in found)
            signals.append(entropy ** (1 / allocation.tau1) * variance ** (1 / allocation.tau2))
    floors, caps = np.full_like(table, policy.protected(length)), np.full_like(table, length)
    total = int(min(table.sum(), caps.sum()))
    if isinstance(allocation, CAKEAllocation):
        budgets = share_above(np.array(signals)[:, None], total, floors, caps)
    elif allocation.shares_layers:
        budgets = OfScores(allocation).allocate(np.stack(scores), total, floors, caps)
    else:
        totals = np.minimum(table.sum(-1), caps.sum(-1)).tolist()
        rows = [
            OfScores(allocation).allocate(scores[i][None], totals[i], floors[i][None], caps[i][None])
            for i in range(len(scores))
        ]
        budgets = np.concatenate(rows)
    kept = {
        layer: [torch.nonzero(ranks[layer][h] < budgets[row, h]).flatten().tolist() for h in range(table.shape[1])]
        for row, layer in enumerate(sorted(observations))
    }
    return budgets, kept


@at_most(25)
@given(
    st.integers(0, 2**20), st.sampled_from(list(ALLOCATIONS)), st.sampled_from(SINGLE), st.integers(1, 45),
    st.integers(1, 60), st.integers(0, 12),
)  # fmt: skip
def test_any_budget_and_length(seed: int, how: str, name: str, budget: int, length: int, pads: int) -> None:
    model = uneven(num_hidden_layers=3)
    ids, mask = prompts(2, length, pads=min(pads, length - 1), seed=seed)
    program = shared(model, SMALL[name], ALLOCATIONS[how], budget)
    with pytest.MonkeyPatch.context() as monkeypatch:
        observations = record(monkeypatch)
        cache = read(model, program, ids, mask)
    table = program.prefill.table(length)  # type: ignore[union-attr]
    protected = SMALL[name].sink_count + SMALL[name].recent_count
    for sequence, tokens in enumerate(mask.sum(-1).tolist()):
        total = program.prefill.entries(tokens)  # type: ignore[union-attr]
        assert np.minimum(table, tokens).sum() <= total <= min(table.sum(), tokens * table.size)
        entries = cache.entries()[:, sequence]
        assert entries.sum() == total
        if budget < min(protected, tokens):
            continue
        budgets, kept = decided_at_the_end(program, observations, sequence, table)
        assert entries.tolist() == budgets.tolist()
        for layer, heads in kept.items():
            assert [cache.kept_positions(layer, sequence, head) for head in range(len(heads))] == heads


@pytest.mark.parametrize("device", DEVICES)
@in_turn(family=["llama", "gemma2", "gemma3"], how=["adakv", "lava", "cake"])
def test_decoding_equals_masking(how: str, family: str, device: str) -> None:
    model = uneven(family, device)
    ids, mask = prompts(2, 30, pads=5, device=device)
    program = shared(model, create_policy("lava", {"window": 3, "kernel": 3}), ALLOCATIONS[how], 8)
    pieces = [(ids[:, :24], mask[:, :24]), *one_by_one(ids[:, 24:])]
    cache = PlanCache(model, program)
    with running(model, NAME):
        output = feed(model, cache, pieces[:1])
        kept = columns(cache, mask[:, :24], describe(model).kv_heads, 24)
        assert all((~shown).any() for shown in kept.values())
    output += go_on(model, cache, ids[:, 24:], mask[:, :24])
    with reference(model, kept) as full:
        for ours, theirs in zip(output[1:], feed(model, full, pieces)[1:], strict=True):
            assert_close(ours, theirs)


@in_turn(how=ALLOCATIONS, name=[*SINGLE, "h2o", "cake{'window': 3, 'kernel': 3}"])
def test_decode_budgets_follow_the_prompt(how: str, name: str) -> None:
    """With the same totals in both phases a head may hold while decoding what it was left with."""
    model = build("llama")
    ids, mask = prompts(2, 40, pads=9)
    policy = SMALL[name]
    program = shared(model, policy, ALLOCATIONS[how], 9, decode=9)
    cache = read(model, program, ids, mask)
    after = cache.entries()
    alone = read(model, Program(program.prefill, None, program.allocation), ids, mask).entries()
    assert after.tolist() == alone.tolist()
    go_on(model, cache, ids[:, :12], mask)
    assert (cache.most_entries() <= after + 1).all()
    assert cache.entries().sum() <= after.sum()
    limits = [layer.holder.rule.budgets.sum() for layer in cache.planned.values()]  # type: ignore[union-attr]
    assert sum(limits) == 2 * program.decode.table(40).sum()  # type: ignore[union-attr]


def test_negative_scores_have_no_entropy() -> None:
    model = build("llama")
    ids, mask = prompts(1, 30)
    with pytest.raises(UsageError, match="layer 0: keydiff scores entries below 0"):
        shared(model, create_policy("keydiff"), LAVaAllocation(), 9)
    assert read(model, shared(model, create_policy("keydiff"), AdaKVAllocation(), 9), ids, mask).entries().sum() == 88


def test_scores_that_are_not_finite_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    ids, mask = prompts(1, 30)
    policy = SMALL[SINGLE[0]]
    score: Callable[[Any, Observation], Tensor] = type(policy).score
    monkeypatch.setattr(type(policy), "score", lambda self, seen: score(self, seen) * float("nan"))
    for allocation in (LAVaAllocation(), AdaKVAllocation()):
        with pytest.raises(IncompatibleError, match="layer 0: the scores of lava are not finite: the model"):
            read(model, shared(model, policy, allocation, 9), ids, mask)


def test_drafted_tokens_need_final_budgets() -> None:
    model = build("llama")
    ids, mask = prompts(1, 30)
    lava, adakv = (
        PlanCache(model, shared(model, SMALL[SINGLE[0]], allocation, 9), prompt_length=26)
        for allocation in (LAVaAllocation(), AdaKVAllocation())
    )
    with running(model, NAME), torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=adakv)
        assert adakv.entries().sum() == 88 + 8 * 4
        with pytest.raises(UsageError, match="prompt lookup and assisted decoding draft tokens"):
            model(ids, attention_mask=mask, past_key_values=lava)

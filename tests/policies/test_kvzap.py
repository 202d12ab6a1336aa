"""KVzap's published format: what is read and refused, and scores of hidden states in prompts and while decoding."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.models.architecture import find_attention_modules
from kvsearch.policies import create_policy, rank_under
from kvsearch.policies.fitted import SCORE_STATE, parse_policy
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.eviction import PhaseRule
from kvsearch.runtime.observe import DensePass
from kvsearch.runtime.program import PhaseProgram
from tests import tiny
from tests.families import build, prompts
from tests.policies.probes import zap, zap_weights
from tests.runtime.helpers import feed, running

LAYERS, HEADS, WIDTH = 4, 2, 64  # of the tiny llama


def directory(path: Path, tensors: dict[str, Tensor]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "model.safetensors").write_bytes(save(tensors))
    return path


def expected(tensors: dict[str, Tensor], layer: int, states: Tensor) -> Tensor:
    """exp of the network of a layer on hidden states [T, d], [T, Hkv]."""
    if f"layers.{layer}.weight" in tensors:
        return (states @ tensors[f"layers.{layer}.weight"].T + tensors[f"layers.{layer}.bias"]).exp()
    inner = states @ tensors[f"layers.{layer}.0.weight"].T + tensors[f"layers.{layer}.0.bias"]
    inner = inner * 0.5 * (1 + torch.erf(inner / 2**0.5))
    return (inner @ tensors[f"layers.{layer}.2.weight"].T + tensors[f"layers.{layer}.2.bias"]).exp()


@pytest.mark.parametrize("hidden", [None, 3])
def test_every_token_is_scored_by_its_hidden_state(hidden: int | None, tmp_path: Path) -> None:
    """Whole or in chunks, while decoding token by token or several at once: what is held has the network's scores."""
    model, (ids, _) = build("llama"), prompts(1, 26)
    tensors = zap_weights(LAYERS, HEADS, WIDTH, hidden)
    name, params = parse_policy(f"kvzap={directory(tmp_path / 'zap', tensors)}")
    policy = create_policy(name, {**params, "sinks": 1, "protect": 2})
    entered: dict[int, list[Tensor]] = {}
    for index, module in find_attention_modules(model).items():
        module.register_forward_pre_hook(
            lambda _, __, kwargs, index=index: entered.setdefault(index, []).append(kwargs["hidden_states"][0]),
            with_kwargs=True,
        )
    phase = PhaseProgram(dict.fromkeys(range(LAYERS), policy), lambda _: torch.full((LAYERS, HEADS), 12).numpy())
    kept = []
    for parts in ((20, 1, 1, 1, 1, 1, 1), (20, 4, 2), (8, 12, 6)):
        entered.clear()
        with running(model, NAME), torch.no_grad():
            cache = PlanCache(model, Program(phase, phase), prompt_length=20)
            feed(model, cache, [(part, torch.ones_like(part)) for part in torch.split(ids, parts, 1)])
        for layer, found in cache.planned.items():
            states = torch.cat(entered[layer])
            wanted = expected(tensors, layer, states)
            assert len(states) == 26
            for block in found.holder.blocks:
                held = block.first(block.width)
                for row, head in enumerate(held.heads.tolist()):
                    there = held.positions[row] >= 0
                    scores = wanted[held.positions[row][there], head]
                    torch.testing.assert_close(
                        held.state.entries[SCORE_STATE][row][there], scores, rtol=1e-3, atol=1e-5
                    )
        kept.append([cache.kept_positions(layer, 0, head) for layer in range(LAYERS) for head in range(HEADS)])
    assert kept[0] == kept[1] == kept[2]


def test_a_replay_knows_the_hidden_states() -> None:
    """Teacher-forced tokens leave the entries that decoding leaves."""
    model, (ids, _) = build("llama"), prompts(1, 26)
    policy = zap(LAYERS, HEADS, WIDTH, sinks=1, protect=2)
    budgets = torch.full((1, HEADS), 12)
    phase = PhaseProgram({0: policy}, lambda _: budgets.numpy())  # the first layer, whose input no eviction changes
    with running(model, NAME), torch.no_grad():
        cache = PlanCache(model, Program(phase, phase))
        feed(model, cache, [(part, torch.ones_like(part)) for part in torch.split(ids, (20, *[1] * 6), 1)])
        passed = DensePass(model, {0: [policy.needs()]}, lambda prompt: prompt, ids[:, :20])
        rule = PhaseRule(policy, lambda _: budgets)
        with passed.following(ids[:, 20:]):
            (layer,) = passed.continuations()
            found = layer.replay(rule, rule)
    left = found.shown[0, :, -1]  # what the last token saw: the entries that are left, and the one that it evicts
    for head in range(HEADS):
        kept = set(cache.kept_positions(0, 0, head))
        seen = set(left[head].nonzero()[:, 0].tolist())
        assert kept <= seen
        assert len(seen - kept) == 1


def test_it_needs_hidden_states_that_are_there() -> None:
    policy = zap(LAYERS, HEADS, WIDTH)
    model, (ids, _) = build("llama"), prompts(1, 20)
    assert policy.needs().describe() == ["hidden states"]
    with running(model, NAME), torch.no_grad():
        passed = DensePass(model, {0: [policy.needs()]}, lambda prompt: prompt, ids)
        blind = dataclasses.replace(passed.noted[0], hidden={})
        rank_under(policy, passed.noted[0])
        with pytest.raises(UsageError, match="a policy wants hidden states"):
            rank_under(policy, blind)
        with pytest.raises(IncompatibleError, match="read hidden states of 9 numbers, and this model's have 64"):
            DensePass(model, {0: [zap(LAYERS, HEADS, 9).needs()]}, lambda prompt: prompt, ids)
    zap(LAYERS, HEADS, WIDTH).check_model(tiny.loaded().fingerprint)
    with pytest.raises(IncompatibleError, match="its weights are for 3 layers of 2 kv heads, and tiny has 4 of 2"):
        zap(3, HEADS, WIDTH).check_model(tiny.loaded().fingerprint)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"extra": torch.zeros(1)}, "has no weights of KVzap"),
        ({"layers.1.weight": torch.full((2, 6), float("nan"))}, "some of its weights are not finite"),
    ],
)
def test_files_that_cannot_be_used(change: dict[str, Tensor], problem: str, tmp_path: Path) -> None:
    made = directory(tmp_path / "zap", {**zap_weights(2, 2, 6, None), **change})
    with pytest.raises(UsageError, match=problem):
        parse_policy(f"kvzap={made}")

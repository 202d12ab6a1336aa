"""A cache on disk answers as the one that was saved does: every policy, phase, allocation and kind of layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache as once
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.models.architecture import FORGETFUL, describe
from kvsearch.plan import Plan
from kvsearch.plan.arithmetic import add_carry
from kvsearch.plan.schema import LayerPlan, PhasePlan, PolicySpec
from kvsearch.policies import Policy, create_policy, list_policy_names
from kvsearch.policies.registry import build_policy
from kvsearch.runtime import PlanCache
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.program import make_full_program
from kvsearch.runtime.shared_prefill import prefill_all
from kvsearch.runtime.store.tensor_file import read_tensors, write_tensors
from tests.combinations import in_turn
from tests.families import DEVICES, SPECIAL, build, prompts
from tests.policies import probes
from tests.runtime.helpers import plan_for, running
from tests.runtime.policies import SMALL

LENGTH, PADS = 24, 5
PHASES = ("prefill", "decode", "both")


@once
def tiny(family: str = "llama") -> Any:
    return build(family, num_hidden_layers=2) if family == "llama" else build(family)


def plan_of(model: Any, spec: PolicySpec, phases: str, budget: int = 9, **changes: Any) -> Plan:
    """Budgets that differ between heads and layers."""
    shape = describe(model)
    layers = tuple(
        LayerPlan(policy=spec, budget=(budget + index % 3, budget + 4)) if index in shape.full_layers else None
        for index in range(shape.layers)
    )
    phase, total = PhasePlan(layers=layers), sum(sum(layer.budget) for layer in layers if layer)
    parts = {"prefill": phase if phases != "decode" else None, "decode": phase if phases != "prefill" else None}
    start = plan_for(model, [[9, 9] if layer else None for layer in layers])
    return Plan.model_validate({**start.model_dump(), **parts, "total": total, **changes})


def read(model: Any, plan: Plan, ids: Tensor, mask: Tensor) -> PlanCache:
    cache = PlanCache(model, plan)
    prefill_all(model, [cache], ids, mask)
    return cache


def say(model: Any, cache: PlanCache, mask: Tensor, steps: int = 6, seed: int = 1, question: int = 3) -> Tensor:
    """Logits of a question, if the model takes one, and of the greedy reply, [B, steps, V]."""
    ids = prompts(len(mask), question, seed=seed)[0]
    seen, found = mask, []
    for _ in range(steps):
        seen = torch.cat([seen, torch.ones_like(ids)], 1)
        positions = (seen.cumsum(-1) - 1)[:, -ids.shape[1] :]
        with torch.no_grad():
            logits = model(ids, attention_mask=seen, position_ids=positions, past_key_values=cache).logits[:, -1:]
        found.append(logits)
        ids = logits.argmax(-1)
    return torch.cat(found, 1)


def same_after(model: Any, plan: Plan, path: Path, batch: int = 2, question: int = 3) -> None:
    """What is answered from the file is what is answered without it, to the bit; the file stays as it is."""
    ids, mask = prompts(batch, LENGTH, pads=PADS if batch > 1 else 0)
    with running(model, NAME):
        cache = read(model, plan, ids, mask)
        size = cache.save(path, ids, mask)
        written = path.read_bytes()
        assert size == len(written)
        expected = say(model, cache, mask, question=question)
        again = PlanCache.load(path, model)
        assert torch.equal(again.tokens, ids)
        assert torch.equal(say(model, again, mask, question=question), expected)
        assert again.entries().tolist() == cache.entries().tolist()
        assert again.most_entries().tolist() == cache.most_entries().tolist()
        assert [again.kept_positions(layer) for layer in again.planned] == [
            cache.kept_positions(layer) for layer in cache.planned
        ]
    assert path.read_bytes() == written


def example(name: str) -> PolicySpec:
    """A built-in policy with settings for a prompt of two dozen tokens, and weights for the tiny model."""
    small = {"sinks": 1, "protect": 2}
    made: dict[str, Callable[[], Policy]] = {
        "probe": lambda: probes.fitted(probes.ranking(layers=range(2), heads=2), **small),
        "query_bank": lambda: probes.bank(dim=16, layers=range(2), **small),
        "kvzap": lambda: probes.zap(layers=2, heads=2, width=64, **small),
        "kvzip": lambda: create_policy("kvzip", small),
    }
    known = [policy for policy in SMALL.values() if policy.name == name]
    policy = made.get(name, lambda: known[0])()
    return PolicySpec(name=name, params=policy.parameters())


SNAPKV = example("snapkv")


@in_turn(name=list_policy_names(), phases=PHASES)
def test_every_policy_answers_as_without_the_detour(
    name: str, phases: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = example(name)
    if phases != "prefill" and build_policy(spec).no_decode_rule():
        pytest.skip("decides nothing while decoding")
    monkeypatch.setattr(type(build_policy(spec)), "check_model", lambda *_: None)  # random weights are of no model
    same_after(tiny(), plan_of(tiny(), spec, phases), tmp_path / "a.kv")


@in_turn(allocation=["adakv", "lava", "cake"], phases=PHASES)
def test_budgets_of_the_prompt_are_kept(allocation: str, phases: str, tmp_path: Path) -> None:
    spec = example("cake" if allocation == "cake" else "lava")
    plan = plan_of(tiny(), spec, phases, allocation=PolicySpec(name=allocation))
    same_after(tiny(), plan, tmp_path / "a.kv")


def test_log_weights_come_back(tmp_path: Path) -> None:
    plan = add_carry(plan_of(tiny(), SNAPKV, "both", allocation=PolicySpec(name="adakv")), "match")
    same_after(tiny(), plan, tmp_path / "a.kv")
    _, tensors = read_tensors(tmp_path / "a.kv")
    assert all(bool(tensor.any()) for name, tensor in tensors.items() if name.endswith("log_weights"))


@in_turn(family=["gemma3", *SPECIAL], phases=["prefill", "both"])
def test_layers_outside_the_plan_keep_their_own(family: str, phases: str, tmp_path: Path) -> None:
    model = tiny(family)
    question = 1 if family in FORGETFUL else 3
    same_after(model, plan_of(model, SNAPKV, phases), tmp_path / "a.kv", batch=1, question=question)


@in_turn(family=["llama", "gemma3"], phases=["both", "prefill"])
def test_the_middle_of_a_conversation_is_a_state_too(family: str, phases: str, tmp_path: Path) -> None:
    """And one file answers any number of questions, each as if it were the first."""
    model = tiny(family)
    ids, mask = prompts(2, LENGTH, pads=PADS)
    with running(model, NAME):
        cache = read(model, plan_of(model, SNAPKV, phases), ids, mask)
        say(model, cache, mask)
        cache.save(tmp_path / "a.kv")
        longer = torch.cat([mask, torch.ones(2, cache.get_seq_length() - LENGTH, dtype=mask.dtype)], 1)
        again = PlanCache.load(tmp_path / "a.kv", model)
        again.activate_past_recording()
        mark, said = again.mark(), []
        for seed in (1, 2, 1):
            said.append(say(model, again, longer, seed=seed))
            again.rewind(mark)
        assert torch.equal(said[0], said[2])
        assert not torch.equal(said[0], said[1])
        assert torch.equal(say(model, cache, longer), said[0])


@pytest.mark.cuda
@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a CUDA device")
def test_it_moves_to_another_device(tmp_path: Path) -> None:
    model, there, (ids, mask) = tiny(), build("llama", "cuda", num_hidden_layers=2), prompts(1, LENGTH)
    with running(model, NAME):
        read(model, plan_of(model, SNAPKV, "both"), ids, mask).save(tmp_path / "a.kv")
    with running(there, NAME):
        loaded = PlanCache.load(tmp_path / "a.kv", there)
        assert all(layer.holder.blocks[0].cached.keys.is_cuda for layer in loaded.planned.values())  # type: ignore[union-attr]


def saved(path: Path) -> Path:
    model, (ids, mask) = tiny(), prompts(2, LENGTH, pads=PADS)
    with running(model, NAME):
        read(model, plan_of(model, SNAPKV, "both"), ids, mask).save(path, ids, mask)
    return path


def refusal(path: Path, model: Any = None, error: type[UsageError] = UsageError, **options: Any) -> str:
    with pytest.raises(error) as caught:
        PlanCache.load(path, tiny() if model is None else model, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_damaged_byte_is_found(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.kv")
    whole = path.read_bytes()
    generator = torch.Generator().manual_seed(0)
    places = [*range(8), *torch.randint(len(whole), (20,), generator=generator).tolist()]
    for place in places:
        broken = bytearray(whole)
        broken[place] ^= 1 << (place % 8)
        path.write_bytes(broken)
        refusal(path)
    for length in (0, 8, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        refusal(path)
    path.write_bytes(whole + b"x")
    assert "is damaged, its content is not what was written" in refusal(path)


def test_what_is_no_cache_is_refused(tmp_path: Path) -> None:
    assert "there is no file" in refusal(tmp_path / "nothing.kv")
    assert "is a folder" in refusal(tmp_path)
    write_tensors(tmp_path / "other", {}, '{"format": "kvsearch.profile", "version": 1}')
    assert "is not a kvsearch.cache file: its format is 'kvsearch.profile'" in refusal(tmp_path / "other")


def test_another_model_dtype_or_plan_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.kv")
    assert "was made for another model" in refusal(path, build("qwen3"), IncompatibleError)
    half = build("llama", num_hidden_layers=2).to(torch.bfloat16)
    words = "holds float32 and the model runs in bfloat16: load it with --dtype float32"
    assert words in refusal(path, half, IncompatibleError)
    other = plan_of(tiny(), SNAPKV, "both", budget=10)
    assert "was compressed under another plan" in refusal(path, error=IncompatibleError, plan=other)
    assert PlanCache.load(path, tiny(), plan_of(tiny(), SNAPKV, "both")).get_seq_length() == LENGTH
    with safe_open(path, "pt") as file:  # type: ignore[no-untyped-call]  # which others can read
        positions, keys = (file.get_tensor(f"layers.0.blocks.0.{name}") for name in ("positions", "keys"))
    assert not keys[positions < 0].any()  # nothing of what was evicted


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    model, (ids, mask) = tiny(), prompts(1, LENGTH)
    plan = plan_of(model, SNAPKV, "both")
    with running(model, NAME):
        with pytest.raises(UsageError, match="run the model on the whole prompt first"):
            PlanCache(model, plan).save(tmp_path / "a.kv")
        with pytest.raises(UsageError, match="was made of a Plan"):
            PlanCache(model, make_full_program(model)).save(tmp_path / "a.kv")
        cache = read(model, plan, ids, mask)
        cache.save(tmp_path / "a.kv")
        with pytest.raises(UsageError, match="exists already"):
            cache.save(tmp_path / "a.kv")

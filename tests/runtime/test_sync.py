"""A decode step waits for nothing: on an accelerator every look at a tensor's value would stall it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvsearch.policies import create_policy
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.program import PhaseProgram
from tests.families import DEVICES, FAMILIES, build, prompts
from tests.runtime.helpers import feed, random_eviction, running
from tests.runtime.policies import SMALL, for_model

LOOKS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "cpu", "numpy")


class Synchronised(Exception):
    pass


class NoSync(TorchDispatchMode):
    """Refuses the operations that copy a value to the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func._opname in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero"):
            raise Synchronised(func._opname)
        return func(*args, **(kwargs or {}))


def refuse(name: str) -> Any:
    def look(*_: Any, **__: Any) -> None:
        raise Synchronised(name)

    return look


@pytest.fixture
def no_sync(monkeypatch: pytest.MonkeyPatch) -> Any:
    def start() -> NoSync:
        for name in LOOKS:
            monkeypatch.setattr(torch.Tensor, name, refuse(name))
        return NoSync()

    return start


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("exact", [False, True])
def test_decode_steps_do_not_synchronise(
    family: str, exact: bool, device: str, no_sync: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(family, device)
    ids, mask = prompts(2, 30, device=device)
    with running(model, NAME), torch.no_grad():
        cache = PlanCache(model, random_eviction(model, mask).program, exact=exact)
        feed(model, cache, [(ids, mask)])
        cache.activate_past_recording()
        with no_sync():
            for _ in range(40):  # blocks grow twice on the way
                model(ids[:, :1], position_ids=ids[:, :1], past_key_values=cache)
            cache.crop(-3)
            model(ids[:, :1], position_ids=ids[:, :1], past_key_values=cache)
        monkeypatch.undo()
    assert cache.get_seq_length() == 68


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SMALL)
def test_steps_that_evict_do_not_synchronise(
    name: str, device: str, no_sync: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = for_model(SMALL[name])
    if policy.drop_at(9) > 1:
        pytest.skip("many entries leave at once now and then, and are packed anew")
    if policy.needs().projection and not policy.online:
        pytest.skip("scoring anew goes through the heads' own projections")
    model = build("llama", device)
    ids, mask = prompts(2, 20, device=device)
    phase = PhaseProgram(dict.fromkeys(range(4), policy), lambda length: np.array([[9, 12]] * 4))
    with running(model, NAME), torch.no_grad():
        cache = PlanCache(model, Program(phase, phase))
        feed(model, cache, [(ids, mask)])
        model(ids[:, :1], position_ids=ids[:, :1], past_key_values=cache)
        with no_sync():
            monkeypatch.setattr(torch, "from_numpy", refuse("from_numpy"))
            for _ in range(12):
                model(ids[:, :1], position_ids=ids[:, :1], past_key_values=cache)
        monkeypatch.undo()
    assert cache.get_seq_length() == 33


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("phases", ["prefill", "both"])
def test_the_mask_of_a_padded_batch_is_looked_at_once_per_step(
    phases: str, device: str, no_sync: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many layers there are: transformers itself looks at it once in every step, too."""
    model = build("llama", device)
    ids, mask = prompts(2, 20, pads=5, device=device)
    phase = PhaseProgram(dict.fromkeys(range(4), create_policy("tova")), lambda length: np.array([[9, 12]] * 4))
    looks: list[str] = []

    def look(flag: torch.Tensor) -> bool:
        looks.append("bool")
        return bool(flag.numpy())

    with running(model, NAME), torch.no_grad():
        cache = PlanCache(model, Program(phase, phase if phases == "both" else None))
        feed(model, cache, [(ids, mask)])
        for step in range(1, 4):
            seen = torch.cat([mask, mask.new_ones(2, step)], 1)
            shown = seen[:, None, None].bool()
            with monkeypatch.context() as patched:
                patched.setattr(torch.Tensor, "__bool__", look)
                model(ids[:, :1], attention_mask=shown, position_ids=ids[:, :1], past_key_values=cache)
    assert len(looks) == 3


def test_the_detector_detects(no_sync: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    ids, _ = prompts(1, 10)
    program = Program.uniform(model, create_policy("streaming"), lambda length: 5)
    with running(model, NAME), torch.no_grad(), pytest.raises(Synchronised), no_sync():
        model(ids, past_key_values=PlanCache(model, program))  # prefill may synchronise, and does
    monkeypatch.undo()

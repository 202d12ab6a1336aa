"""Kernels, waits and copies of a decode step and of a prompt: they only ever become fewer."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import pytest
import torch

from kvsearch.policies import Policy, list_policy_names
from kvsearch.runtime import PlanCache
from kvsearch.runtime.attention import run_attention
from kvsearch.runtime.observe import read_again
from tests.device import counting
from tests.device.accelerator import device
from tests.device.counting import Cost, Costs
from tests.families import build, prompts
from tests.policies.probes import bank, example, zap

pytestmark = pytest.mark.nightly

BUDGETS = {"even": counting.even, "ragged": counting.ragged, "flat": counting.ragged}
STEPS = 4
# The usual decode step: kernels per layer beyond those of DynamicCache, by phases and budgets. `benchmarks/
# bench_kernels.py --lines 20` says where they come from. Lower a number when a change lowers it.
KERNELS = {
    ("prefill", "even"): dict.fromkeys(("streaming", "snapkv", "h2o", "tova", "keydiff", "probe"), 2),
    ("prefill", "ragged"): dict.fromkeys(("streaming", "snapkv", "h2o", "tova", "keydiff", "probe"), 2),
    ("prefill", "flat"): dict.fromkeys(("streaming", "snapkv", "h2o", "tova", "keydiff", "probe"), 3),
    ("both", "even"): {
        "streaming": 9, "snapkv": 14, "h2o": 14, "tova": 13, "keydiff": 12, "knorm": 13, "probe": 11, "cake": 19,
        "vatp": 18, "scissorhands": 40,
    },
    ("both", "ragged"): {
        "streaming": 9, "snapkv": 14, "h2o": 15, "tova": 14, "keydiff": 15, "knorm": 15, "probe": 11, "cake": 20,
        "vatp": 19, "scissorhands": 47,
    },
}  # fmt: skip
# Of a prompt, per layer: what the host waits for (one more is of the mask, in transformers), and copies to the device.
PROMPT = (1.5, 1)


@cache
def model() -> Any:
    return build("llama", num_hidden_layers=2, num_key_value_heads=8, head_dim=8).to(device())


@cache
def baseline() -> Costs:
    return counting.costs(model(), lambda: counting.stock(model(), static=False), prompt(), STEPS)


def prompt() -> torch.Tensor:
    ids = torch.randint(3, 97, (2, counting.LENGTH), generator=torch.Generator().manual_seed(0))
    return ids.to(device())


def stored(budgets: str) -> AbstractContextManager[None]:
    """Entries are stored as these budgets say."""
    return counting.flat() if budgets == "flat" else nullcontext()


def fitting(name: str) -> Policy:
    """A built-in policy, its weights for the model."""
    made = {"query_bank": partial(bank, dim=8), "kvzap": partial(zap, 2, 8, 64)}
    return made.get(name, partial(example, name))()


@pytest.mark.parametrize("budgets", BUDGETS)
@pytest.mark.parametrize("name", list_policy_names())
def test_a_prompt_is_waited_for_once_per_layer(name: str, budgets: str) -> None:
    """And once for the lengths of prompts that are read again, however many there are; transformers' own apart."""
    policy = fitting(name)
    limit = {"wait": 2 + (policy.needs().reread is not None), "copy": 2}
    ids, mask = prompts(3, counting.LENGTH, pads=40, device=str(device()))
    for decode in (False, True)[: 1 if budgets == "flat" or policy.no_decode_rule() else 2]:
        program = counting.program(model(), policy, BUDGETS[budgets](model()), decode=decode)
        with run_attention(model()), stored(budgets):
            counting.read_prompt(model(), PlanCache(model(), program), ids, mask)  # weights are on the device then
            with counting.by_line() as lines:
                counting.read_prompt(model(), PlanCache(model(), program), ids, mask)
        found = Counter((kind, what, line) for kind, what, line in lines.found.elements() if kind in limit and line)
        for kind, most in limit.items():
            assert sum(times for (one, *_), times in found.items() if one == kind) <= most, found


def test_what_is_read_again_ahead_is_not_waited_for() -> None:
    """As `generate` has it: the layers have their scores before the prompt comes."""
    ids, mask = prompts(3, counting.LENGTH, pads=40, device=str(device()))
    cache = PlanCache(model(), counting.program(model(), example("kvzip"), counting.even(model()), decode=False))
    with run_attention(model()):
        for index, found in read_again(model(), [example("kvzip").needs()], ids, mask).items():
            cache.planned[index].rereads = found
        with counting.by_line() as lines, torch.no_grad():
            model()(ids, attention_mask=mask, past_key_values=cache)
    found = {(what, line): times for (kind, what, line), times in lines.found.items() if kind == "wait" and line}
    assert sum(found.values()) == 2, found


@pytest.mark.parametrize(("phases", "budgets"), KERNELS)
def test_kernels_waits_and_copies(phases: str, budgets: str) -> None:
    limits = KERNELS[phases, budgets]
    for name, limit in limits.items():
        program = counting.program(model(), example(name), BUDGETS[budgets](model()), decode=phases == "both")
        with stored(budgets):
            found = counting.costs(model(), lambda program=program: PlanCache(model(), program), prompt(), STEPS)
        assert found.step.kernels - baseline().step.kernels <= limit, name
        assert (found.most.waits, found.most.copies) == (0, 0), name
        assert found.prefill.waits <= PROMPT[0], name
        assert found.prefill.copies <= PROMPT[1], name


def test_what_is_counted() -> None:
    """DynamicCache waits for nothing, and the counter sees what it is for."""
    assert baseline().most == Cost(baseline().step.kernels, 0, 0)
    assert baseline().step.kernels > 30
    x = torch.randn(3, 4).to(device(1))
    with counting.by_line() as lines:
        x[x > 0] = 0.0  # as a mask is filled
        x[x > 0]
        x[x > 0] = x[x > 0]
        x[[0, 1]]
        torch.tensor([1, 2], device=x.device)
        (x * 2).sum().item()
        x.tolist()
        x.repeat_interleave(torch.ones(3, dtype=torch.long, device=x.device), 0)
    kinds = {(kind, what): times for (kind, what, _), times in lines.found.items()}
    assert {key: times for key, times in kinds.items() if key[0] != "kernel"} == {
        ("wait", "nonzero"): 2, ("wait", "_index_put_impl_"): 1, ("copy", "copy_"): 2, ("wait", "item"): 1,
        ("wait", "copy_"): 1, ("wait", "repeat_interleave"): 1,
    }  # fmt: skip
    assert kinds["kernel", "gt"] == 4

"""Kernels, waits and copies of a decode step and of a prompt: they only ever become fewer."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from kvsearch.runtime import PlanCache
from tests.device import counting
from tests.device.accelerator import device
from tests.device.counting import Cost, Costs
from tests.families import build
from tests.policies.probes import example

BUDGETS = {"even": counting.even, "ragged": counting.ragged}
STEPS = 4
# The usual decode step: kernels per layer beyond those of DynamicCache, by phases and budgets. `benchmarks/
# bench_kernels.py --lines 20` says where they come from. Lower a number when a change lowers it.
KERNELS = {
    ("prefill", "even"): dict.fromkeys(("streaming", "snapkv", "h2o", "tova", "keydiff", "probe"), 3),
    ("prefill", "ragged"): dict.fromkeys(("streaming", "snapkv", "h2o", "tova", "keydiff", "probe"), 3),
    ("both", "even"): {"streaming": 9, "snapkv": 14, "h2o": 14, "tova": 13, "keydiff": 12, "knorm": 13, "probe": 11},
    ("both", "ragged"): {"streaming": 9, "snapkv": 14, "h2o": 15, "tova": 14, "keydiff": 15, "knorm": 15, "probe": 11},
}
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


@pytest.mark.parametrize(("phases", "budgets"), KERNELS)
def test_kernels_waits_and_copies(phases: str, budgets: str) -> None:
    limits = KERNELS[phases, budgets]
    for name, limit in limits.items():
        program = counting.program(model(), example(name), BUDGETS[budgets](model()), decode=phases == "both")
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

"""The contracts of the kernels against fp64 on the GPU that is there; without one, some of them in the interpreter."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from kvsearch.kernels.attention import attend
from kvsearch.kernels.step import Rule, step
from kvsearch.policies import create_policy
from kvsearch.runtime import Program, attach
from tests.families import DEVICES, build, prompts
from tests.kernels.reference import Case, relative_error
from tests.kernels.serving import interpreted
from tests.kernels.test_rows import Prompt
from tests.kernels.test_step import DV, D, G, Head, S

PLACE = DEVICES[-1]
GPU = PLACE == "cuda"
pytestmark = [pytest.mark.cuda, pytest.mark.nightly]
on_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA device")
BOUNDS = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-5}
KINDS: dict[str, dict[str, Any]] = {
    "even": {}, "ragged": {"ragged": True}, "holes": {"holes": True, "softcap": 30.0}, "sinks": {"sinks": True},
}  # fmt: skip
kinds_of_numbers = pytest.mark.parametrize(
    ("dtype", "dim"),
    [
        pytest.param(dtype, dim, marks=[] if (dtype, dim) == (torch.bfloat16, 64) else on_gpu)
        for dtype, dim in product(BOUNDS, (64, 96, 128, 256))
    ],
)


def place(case: Any) -> None:
    for name, part in vars(case).items():
        if isinstance(part, torch.Tensor):
            setattr(case, name, part.to(PLACE))


@kinds_of_numbers
def test_attention(dtype: torch.dtype, dim: int) -> None:
    """Blocks and flat stores, which have what is nobody's between segments; 1 to 8 tokens."""
    for kind, rows in product(KINDS, (1, 3, 5, 8) if GPU else (1, 3)):
        case = Case(3, 4, dim, dim, 3000 if GPU else 300, rows=rows, dtype=dtype, **KINDS[kind])
        expected, expected_row = case.expected()
        place(case)
        for entries in [case.flat()] if case.lengths is not None else [case.flat(), case.block()]:
            how = (case.scaling, case.softcap, case.sink, rows)
            output, row = attend(case.query, entries, *how, want_row=rows == 1 and entries.starts is None)
            assert relative_error(output.cpu(), expected) < BOUNDS[dtype], (kind, rows)
            if row is not None:
                assert relative_error(row.cpu(), expected_row) < 1e-5


@kinds_of_numbers
def test_scores(dtype: torch.dtype, dim: int) -> None:
    for causal in (False, True):
        prompt = Prompt(2, 4, 32, 2000 if GPU else 100, dim, dtype=dtype, pads=7, sinks=causal)
        received = prompt.expected().sum(-2)
        place(prompt)
        found = prompt.given(causal).received("mean")
        assert relative_error(found.cpu(), received.mean(2)) < 1e-4


@pytest.mark.parametrize("rule", ["position", "mass", "stored"])
def test_steps(rule: Rule) -> None:
    """Over several programs for a segment, from below the budgets on."""
    capacity = 5000 if GPU else 600
    head = Head(capacity, [capacity - 1, capacity - 3, 4], sinks=2, recent=1)
    slots = head.slots(rule)
    held = {name: part.to(PLACE) for name, part in vars(slots).items() if isinstance(part, torch.Tensor)}
    moved = replace(slots, **held, state=tuple(part.to(PLACE) for part in slots.state))
    for token in range(20 if GPU else 3):
        states = head.normal(S, G, D), head.normal(S, D), head.normal(S, DV)
        arriving = head.normal(S).abs()
        active = torch.tensor([True, token != 1, True])
        output = step(
            *(state.to(PLACE) for state in states), moved, capacity, rule, D**-0.5,
            arriving=arriving.to(PLACE).clone, active=active.to(PLACE),
        )  # fmt: skip
        assert relative_error(output.cpu(), head.step(*states, rule, arriving, active)) < 1e-5
        assert torch.equal(moved.positions.cpu(), head.positions)
        assert torch.equal(moved.slot.cpu(), head.slot)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "tova" else on_gpu)
        for name in ("tova", "h2o", "scissorhands", "cake", "snapkv", "streaming")
    ],
)
def test_rules_keep_what_operations_of_pytorch_keep(name: str) -> None:
    """Over a whole generation, captured where that is possible; on the CPU without kernels."""
    found = []
    for place in (PLACE, "cpu"):
        model = build("llama", place, num_hidden_layers=2)
        budgets = np.array([[9, 9], [9, 9]])
        program = Program.of_policy(
            model, create_policy(name), dict.fromkeys(("prefill", "decode"), lambda _, budgets=budgets: budgets)
        )
        ids, mask = prompts(2, 20, device=place)
        with interpreted(len(found) == 0) if not GPU else nullcontext(), attach(model, program) as planned:
            said = planned.generate(ids, attention_mask=mask, max_new_tokens=30 if GPU else 4, do_sample=False)
        kept = [planned.cache.kept_positions(layer, row, head) for layer in (0, 1) for row in (0, 1) for head in (0, 1)]
        found.append((said.tolist(), kept))
    assert found[0] == found[1]

"""Budgets of a plan at the prompt at hand, and what differs between two plans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsearch.errors import IncompatibleError, UsageError
from kvsearch.plan.rounding import water_fill
from kvsearch.plan.schema import Phase, Plan

Ints = NDArray[np.int64]


class BudgetChange(NamedTuple):
    """A kv head's budget in two plans, in entries; None where its layer keeps the full cache or the phase is absent."""

    phase: Phase
    layer: int
    head: int
    before: int | None
    after: int | None


def budgets_at(plan: Plan, phase: Phase, length: int) -> Ints:
    """Integer budgets [planned layers, Hkv] for a prompt of `length` tokens.

    "fixed" budgets are those of the plan, in the prefill phase clipped to `length`; what that frees is not handed to
    other heads. "proportional" ones are
    budget * length / plan.length, water-filled and rounded over all layers at once to the phase's total
    times length / plan.length, halves up; bounds are the floor, at least one entry, and `length`. Where a very short
    prompt puts that total out of reach, the nearest possible one is used.

    Raises:
        UsageError: `length` is below 1 or the plan has no such phase.
    """
    if length < 1:
        raise UsageError(f"a prompt has at least one token, got a length of {length}")
    wanted = np.array([budget for budget in plan.budgets(phase) if budget is not None], dtype=np.int64)
    if plan.scaling == "fixed" or plan.length is None:
        return np.minimum(wanted, length) if phase == "prefill" else wanted
    if length == plan.length:
        return wanted
    low = min(max(plan.floor, 1), length)
    total = _scaled_half_up(int(wanted.sum()), length, plan.length)
    return water_fill(wanted, min(max(total, low * wanted.size), length * wanted.size), low, length)


def diff(a: Plan, b: Plan) -> list[BudgetChange]:
    """Every budget that differs between two plans, by phase (prefill first), layer and kv head.

    Raises:
        IncompatibleError: the plans' models differ in layers or kv heads.
    """
    if (a.model.layers, a.model.kv_heads) != (b.model.layers, b.model.kv_heads):
        raise IncompatibleError(
            f"cannot compare plans of {a.model.short()} and {b.model.short()}: other layers or heads"
        )
    phases: tuple[Phase, Phase] = ("prefill", "decode")
    return [change for phase in phases for change in _phase_changes(a, b, phase)]


def _phase_changes(a: Plan, b: Plan, phase: Phase) -> Iterator[BudgetChange]:
    heads = range(a.model.kv_heads)
    for layer, (before, after) in enumerate(zip(_all_layers(a, phase), _all_layers(b, phase), strict=True)):
        for head in heads if before != after else ():
            old = None if before is None else before[head]
            new = None if after is None else after[head]
            if old != new:
                yield BudgetChange(phase, layer, head, old, new)


def _all_layers(plan: Plan, phase: Phase) -> tuple[tuple[int, ...] | None, ...]:
    found = plan.prefill if phase == "prefill" else plan.decode
    return (None,) * plan.model.layers if found is None else found.budgets


def _scaled_half_up(total: int, length: int, base: int) -> int:
    """Round total * length / base, halves up, in whole numbers."""
    return (2 * total * length + base) // (2 * base)

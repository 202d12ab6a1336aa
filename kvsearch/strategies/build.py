"""The one way from policies and budgets of layers to a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsearch.budgets.dynamic import Allocation
from kvsearch.plan import AllocationSpec, LayerPlan, ModelFingerprint, Phase, PhasePlan, Plan, PolicySpec, Provenance


class Chosen(NamedTuple):
    """What is kept in one phase: a policy and budgets for every planned layer, ascending."""

    policies: tuple[PolicySpec, ...]
    budgets: NDArray[np.int64]  # [L, Hkv]


def build_plan(
    model: ModelFingerprint,
    layers: Sequence[int],
    chosen: Mapping[Phase, Chosen],
    origin: Provenance,
    floor: int,
    scaling: Literal["fixed", "proportional"] = "fixed",
    length: int | None = None,
    allocation: Allocation | None = None,
) -> Plan:
    """Return the plan of what was `chosen` for model layers `layers` in its phases; other layers keep everything."""
    phases = {phase: _phase_plan(part, layers, model.layers) for phase, part in chosen.items()}
    shared = {} if allocation is None else {"name": allocation.name, "params": allocation.parameters()}
    return Plan(
        model=model,
        length=length,
        scaling=scaling,
        allocation=AllocationSpec.model_validate(shared),
        floor=floor,
        prefill=phases.get("prefill"),
        decode=phases.get("decode"),
        total=next(iter(phases.values())).total,
        provenance=origin,
    )


def _phase_plan(chosen: Chosen, layers: Sequence[int], count: int) -> PhasePlan:
    planned: list[LayerPlan | None] = [None] * count
    for layer, policy, budget in zip(layers, chosen.policies, chosen.budgets.tolist(), strict=True):
        planned[layer] = LayerPlan(policy=policy, budget=tuple(budget))
    return PhasePlan(layers=tuple(planned))

"""Plans of a search: what it starts from, what it is judged by, and what its result is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsearch.arrays import Ints
from kvsearch.budgets.pyramidkv import Pyramid
from kvsearch.budgets.uniform import Uniform
from kvsearch.errors import UsageError
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import PhasePlan, Plan
from kvsearch.plan.arithmetic import scale
from kvsearch.plan.fields import MOST_ENTRIES
from kvsearch.plan.origin import provenance
from kvsearch.plan.rounding import water_fill
from kvsearch.plan.schema import STATIC
from kvsearch.policies import Policy
from kvsearch.policies.registry import policy_of
from kvsearch.strategies.build import Chosen, build_plan

UNIFORM, PYRAMID, STREAMING = "uniform", "pyramid", "streaming"
METHOD = "evolkv"
RESERVED = (UNIFORM, PYRAMID, STREAMING, "full", "evolved", "expanded")


@dataclass(frozen=True, eq=False)
class Base:
    """The policy of every full-attention layer, ascending, and what it always keeps of every head, [L, Hkv]."""

    loaded: LoadedModel
    policies: tuple[Policy, ...]

    @classmethod
    def of(cls, loaded: LoadedModel, policy: Policy | Plan) -> Base:
        """Take one policy in all layers, or those of a plan's prefill phase.

        Raises:
            IncompatibleError: the plan is of another model.
            UsageError: the plan is no static one that evicts in all full-attention layers when the prompt has passed.
        """
        layers = describe(loaded.model).full_layers
        if isinstance(policy, Policy):
            return cls(loaded, (policy,) * len(layers))
        specs = [_require_static(loaded, policy, "this plan").layers[layer] for layer in layers]
        return cls(loaded, tuple(policy_of(one.policy) for one in specs if one is not None))

    @property
    def heads(self) -> tuple[int, int]:
        """Layers and kv heads."""
        return len(self.policies), describe(self.loaded.model).kv_heads

    @property
    def floors(self) -> Ints:
        """Entries that are always kept, at least 1, [L, Hkv]."""
        least = np.array([policy.floor for policy in self.policies], dtype=np.int64)
        return np.repeat(least[:, None], self.heads[1], axis=1)

    @property
    def by_layer(self) -> dict[int, Policy]:
        """The policies by model layer."""
        return dict(zip(describe(self.loaded.model).full_layers, self.policies, strict=True))

    def plan(self, table: Ints, settings: Mapping[str, Any], seed: int, data: str | None = None) -> Plan:
        """Return the plan of budgets [L, Hkv], as entries for prompts of any length."""
        return build_plan(
            self.loaded.fingerprint,
            describe(self.loaded.model).full_layers,
            {"prefill": Chosen(tuple(policy.spec for policy in self.policies), table)},
            provenance(METHOD, seed, data, settings, None),
            int(min(self.floors.min(), table.min())),
        )


def check_names(names: Iterable[str]) -> None:
    """Raise UsageError if a start plan has a name that something else has in a search or its report."""
    for name in names:
        if name in RESERVED or name.startswith("#"):
            raise UsageError(
                f"a start plan cannot be called {name!r}: that names something else in the report, rename the file"
            )


def start_tables(base: Base, budget: int, plans: Mapping[str, Plan]) -> dict[str, Ints]:
    """Return even budgets, PyramidKV's, and those of plans scaled to `budget` entries per kv head; equal ones once.

    Raises:
        UsageError: the budget is below what some policy always keeps, or a plan cannot be a start.
        IncompatibleError: a plan is of another model.
    """
    check_names(plans)
    floors, (layers, heads) = base.floors, base.heads
    if budget < floors.max():
        worst = max(base.policies, key=lambda policy: policy.floor)
        raise UsageError(
            f"a budget of {budget} is below the {int(floors.max())} entries that {worst.name} always keeps: give a "
            f"larger --budget, or lower --set {' or '.join(worst.protecting)}"
        )
    total, caps = budget * layers * heads, np.full_like(floors, MOST_ENTRIES)
    signals = np.zeros((layers, heads))
    found = {UNIFORM: Uniform().allocate(signals, total, floors, caps)}
    if layers > 1:
        found[PYRAMID] = Pyramid(window=int(floors.max())).allocate(signals, total, floors, caps)
    for name, plan in plans.items():
        phase = _require_static(base.loaded, plan, f"start plan {name}")
        scaled = scale(plan, total=total).prefill or phase
        rows = [one.budget for one in scaled.layers if one is not None]
        found[name] = water_fill(np.array(rows, dtype=np.float64), total, floors, caps)
    distinct: dict[str, Ints] = {}
    for name, table in found.items():
        if not any(np.array_equal(table, other) for other in distinct.values()):
            distinct[name] = table
    return distinct


def _require_static(loaded: LoadedModel, plan: Plan, name: str) -> PhasePlan:
    plan.model.require(loaded.fingerprint, name)
    phase = plan.prefill
    if phase is None or plan.decode is not None or plan.allocation.name != STATIC:
        raise UsageError(f"{name} is no static plan of the prefill phase alone, which is what is searched")
    if set(describe(loaded.model).full_layers) - set(phase.planned_layers):
        raise UsageError(f"{name} leaves layers their full cache: a search shares a total among all of them")
    return phase

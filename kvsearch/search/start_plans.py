"""Plans of a search: what it starts from, what it is judged by, and what its result is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsearch.arrays import Ints
from kvsearch.budgets.pyramidkv import Pyramid
from kvsearch.budgets.uniform import Uniform
from kvsearch.errors import UsageError
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Phase, PhasePlan, Plan
from kvsearch.plan.arithmetic import scale
from kvsearch.plan.contexts import ContextRecord
from kvsearch.plan.fields import MOST_ENTRIES
from kvsearch.plan.origin import provenance
from kvsearch.plan.rounding import water_fill
from kvsearch.plan.schema import STATIC
from kvsearch.policies import Policy
from kvsearch.policies.registry import policy_of
from kvsearch.runtime.rule import decode_needs
from kvsearch.strategies.build import Chosen, build_plan

UNIFORM, PYRAMID, STREAMING = "uniform", "pyramid", "streaming"
METHOD = "evolkv"
RESERVED = (UNIFORM, PYRAMID, STREAMING, "full", "evolved", "expanded")


@dataclass(frozen=True, eq=False)
class Base:
    """The policy of every full-attention layer, ascending, in the phases that are searched, one after the other."""

    loaded: LoadedModel
    policies: tuple[Policy, ...]
    phases: tuple[Phase, ...] = ("prefill",)

    @classmethod
    def of(cls, loaded: LoadedModel, policy: Policy | Plan, phases: tuple[Phase, ...] = ("prefill",)) -> Base:
        """Take one policy in all layers and phases, or those of a plan.

        Raises:
            IncompatibleError: the plan is of another model.
            UsageError: the plan is no static one that evicts in all full-attention layers in just these phases, or a
                policy without a decode rule is to evict while decoding.
        """
        layers = describe(loaded.model).full_layers
        if isinstance(policy, Policy):
            found = cls(loaded, (policy,) * len(layers) * len(phases), phases)
        else:
            tables = [part.layers for part in _require_static(loaded, policy, "this plan", phases)]
            specs = [table[layer] for table in tables for layer in layers]
            found = cls(loaded, tuple(policy_of(one.policy) for one in specs if one is not None), phases)
        if "decode" in phases:
            for one in dict.fromkeys(found.policies[-len(layers) :]):
                decode_needs(one)
        return found

    @property
    def heads(self) -> tuple[int, int]:
        """Layers and kv heads."""
        return len(self.policies) // len(self.phases), describe(self.loaded.model).kv_heads

    @property
    def in_prefill(self) -> bool:
        """Whether the prompt alone is evicted, once, so that its entries in the order of their ranks say everything."""
        return self.phases == ("prefill",)

    @property
    def floors(self) -> Ints:
        """Entries that are always kept, at least 1, by row of a candidate, [phases * L, Hkv]."""
        least = np.array([policy.floor for policy in self.policies], dtype=np.int64)
        return np.repeat(least[:, None], self.heads[1], axis=1)

    @property
    def by_layer(self) -> dict[int, Policy]:
        """The policies of the first phase by model layer."""
        return dict(zip(describe(self.loaded.model).full_layers, self.policies, strict=False))

    def plan(
        self,
        table: Ints,
        settings: Mapping[str, Any],
        seed: int,
        data: str | None = None,
        contexts: ContextRecord | None = None,
    ) -> Plan:
        """Return the plan of budgets [phases * L, Hkv], as entries for prompts of any length."""
        layers = self.heads[0]
        chosen = {}
        for number, phase in enumerate(self.phases):
            rows = slice(number * layers, (number + 1) * layers)
            chosen[phase] = Chosen(tuple(policy.spec for policy in self.policies[rows]), table[rows])
        return build_plan(
            self.loaded.fingerprint,
            describe(self.loaded.model).full_layers,
            chosen,
            provenance(METHOD, seed, data, settings, contexts),
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

    Of several phases each has that size, and the first two have the same budgets in all of them.

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
    total, signals = budget * layers * heads, np.zeros((layers, heads))
    parts = np.split(floors, len(base.phases))
    caps = np.full_like(parts[0], MOST_ENTRIES)
    found = {UNIFORM: np.concatenate([Uniform().allocate(signals, total, low, caps) for low in parts])}
    if layers > 1:
        pyramid = Pyramid(window=int(floors.max()))
        found[PYRAMID] = np.concatenate([pyramid.allocate(signals, total, low, caps) for low in parts])
    for name, plan in plans.items():
        _require_static(base.loaded, plan, f"start plan {name}", base.phases)
        scaled, tables = scale(plan, total=total), []
        for phase, low in zip(base.phases, parts, strict=True):
            rows = [budget for budget in scaled.budgets(phase) if budget is not None]
            tables.append(water_fill(np.array(rows, dtype=np.float64), total, low, caps))
        found[name] = np.concatenate(tables)
    distinct: dict[str, Ints] = {}
    for name, table in found.items():
        if not any(np.array_equal(table, other) for other in distinct.values()):
            distinct[name] = table
    return distinct


def _require_static(loaded: LoadedModel, plan: Plan, name: str, phases: Sequence[Phase]) -> list[PhasePlan]:
    plan.model.require(loaded.fingerprint, name)
    found = {"prefill": plan.prefill, "decode": plan.decode}
    there = [phase for phase, part in found.items() if part is not None]
    if there != list(phases) or plan.allocation.name != STATIC:
        what = f"the {phases[0]} phase alone" if len(phases) == 1 else "both phases"
        raise UsageError(f"{name} is no static plan of {what}, which is what is searched: see --phases")
    parts = [part for part in found.values() if part is not None]
    if any(set(describe(loaded.model).full_layers) - set(part.planned_layers) for part in parts):
        raise UsageError(f"{name} leaves layers their full cache: a search shares a total among all of them")
    return parts

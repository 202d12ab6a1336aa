"""Plans of a search: what it starts from, what it is judged by, and what its result is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsearch.budgets.allocator import Allocator, Uniform
from kvsearch.budgets.pyramidkv import Pyramid
from kvsearch.core.arrays import Ints
from kvsearch.core.errors import UsageError
from kvsearch.core.items import group_by_key
from kvsearch.core.limits import MOST_ENTRIES
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Phase, PhasePlan, Plan
from kvsearch.plan.arithmetic import scale
from kvsearch.plan.origin import ContextRecord, make_provenance
from kvsearch.plan.rounding import water_fill
from kvsearch.plan.schema import STATIC
from kvsearch.policies import Policy
from kvsearch.policies.registry import build_policy
from kvsearch.runtime.decode.rule import decode_needs
from kvsearch.search.spaces import chosen_of, placed
from kvsearch.strategies.build import Chosen, build_plan
from kvsearch.strategies.names import PYRAMID, STREAMING, UNIFORM

METHOD = "evolkv"
RESERVED = (UNIFORM, PYRAMID, STREAMING, "full", "evolved", "expanded")


@dataclass(frozen=True, eq=False)
class Base:
    """The policy of every full-attention layer, ascending, in the phases that are searched, one after the other.

    Where layers may have one of several policies, `choices` of them, there are all layers under the first, then under
    the next, and so have tables of budgets: [choices * L, Hkv], with entries under one of them.
    """

    loaded: LoadedModel
    policies: tuple[Policy, ...]
    phases: tuple[Phase, ...] = ("prefill",)
    choices: int = 1

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
            base = cls(loaded, (policy,) * len(layers) * len(phases), phases)
        else:
            tables = [part.layers for part in _require_static(loaded, policy, "this plan", phases)]
            specs = [table[layer] for table in tables for layer in layers]
            base = cls(loaded, tuple(build_policy(spec.policy) for spec in specs if spec is not None), phases)
        if "decode" in phases:
            for member in dict.fromkeys(base.policies[-len(layers) :]):
                decode_needs(member)
        return base

    @classmethod
    def choosing(cls, loaded: LoadedModel, policies: Sequence[Policy]) -> Base:
        """Let every layer have any of several policies, in the prefill phase.

        Raises:
            UsageError: there is only one.
        """
        known = list(dict.fromkeys(policies))
        if len(known) < 2:
            raise UsageError(
                f"space joint chooses between policies, and there is only {known[0].name}: name others with --policy, "
                "or give a --start that has some"
            )
        layers = describe(loaded.model).full_layers
        return cls(loaded, tuple(policy for policy in known for _ in layers), choices=len(known))

    @property
    def heads(self) -> tuple[int, int]:
        """Layers and kv heads."""
        return len(self.policies) // len(self.phases) // self.choices, describe(self.loaded.model).kv_heads

    @property
    def in_prefill(self) -> bool:
        """Whether the prompt alone is evicted, once, so that its entries in the order of their ranks say everything."""
        return self.phases == ("prefill",)

    @property
    def floors(self) -> Ints:
        """Entries that are always kept of a layer, at least 1, by row of a candidate, [phases * choices * L, Hkv]."""
        least = np.array([policy.least for policy in self.policies], dtype=np.int64)
        return np.repeat(least[:, None], self.heads[1], axis=1)

    @property
    def by_layer(self) -> dict[int, tuple[Policy, ...]]:
        """The policies of the first phase by model layer, as many as there are choices."""
        layers = describe(self.loaded.model).full_layers
        rows = [self.policies[at * len(layers) : (at + 1) * len(layers)] for at in range(self.choices)]
        return dict(zip(layers, zip(*rows, strict=True), strict=True))

    def plan(
        self,
        table: Ints,
        settings: Mapping[str, Any],
        seed: int,
        data: str | None = None,
        contexts: ContextRecord | None = None,
    ) -> Plan:
        """Return the plan of a table of budgets, as entries for prompts of any length."""
        layers = self.heads[0]
        rows = np.arange(len(table))
        if self.choices > 1:
            rows = chosen_of(table, self.choices) * layers + np.arange(layers)
        chosen = {
            phase: Chosen(tuple(self.policies[row].spec for row in part), table[part])
            for phase, part in zip(self.phases, np.split(rows, len(self.phases)), strict=True)
        }
        return build_plan(
            self.loaded.fingerprint,
            describe(self.loaded.model).full_layers,
            chosen,
            make_provenance(METHOD, seed, data, settings, contexts),
            int(min(self.floors.min(), table[rows].min())),
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
    if base.choices > 1:
        return _joint_tables(base, budget, plans)
    floors = base.floors
    (layers, heads) = base.heads
    if budget < floors.max():
        worst = max(base.policies, key=lambda policy: policy.least)
        raise UsageError(
            f"a budget of {budget} is below the {int(floors.max())} entries that {worst.name} always keeps: give a "
            f"larger --budget, or lower --set {' or '.join(worst.protecting)}"
        )
    total = budget * layers * heads
    signals = np.zeros((layers, heads))
    parts = np.split(floors, len(base.phases))
    caps = np.full_like(parts[0], MOST_ENTRIES)
    allocators: dict[str, Allocator] = {UNIFORM: Uniform()}
    if layers > 1:
        allocators[PYRAMID] = Pyramid(window=int(floors.max()))
    starts = {
        name: np.concatenate([allocator.allocate(signals, total, low, caps) for low in parts])
        for name, allocator in allocators.items()
    }
    for name, plan in plans.items():
        _require_static(base.loaded, plan, f"start plan {name}", base.phases)
        scaled = scale(plan, total=total)
        tables = []
        for phase, low in zip(base.phases, parts, strict=True):
            rows = [budget for budget in scaled.budgets(phase) if budget is not None]
            tables.append(water_fill(np.array(rows, dtype=np.float64), total, low, caps))
        starts[name] = np.concatenate(tables)
    return _distinct(starts)


def _distinct(tables: Mapping[str, Ints]) -> dict[str, Ints]:
    alike = group_by_key(tables, lambda name: tables[name].tobytes())
    return {name: tables[name] for name, *_ in alike.values()}


def _joint_tables(base: Base, budget: int, plans: Mapping[str, Plan]) -> dict[str, Ints]:
    """Return the tables of start plans with their own policies; even budgets and PyramidKV's have the first one's.

    Each is made as it would be if there were nothing to choose from.
    """
    if not plans:
        raise UsageError("space joint begins with the policies of a plan: give one with --start")
    layers = base.heads[0]
    known = list(base.policies[::layers])
    starts: dict[str, Ints] = {}
    for name, plan in plans.items():
        alone = Base.of(base.loaded, plan)
        for policy in alone.policies:
            if policy not in known:
                raise UsageError(f"start plan {name} has policy {policy.name} with other parameters than are searched")
        chosen = np.array([known.index(policy) for policy in alone.policies])
        own = start_tables(alone, budget, {name: plan})
        table = own.get(name, own[UNIFORM])  # equal to even budgets
        if not starts:
            starts = {even: placed(own[even], chosen, base.choices) for even in (UNIFORM, PYRAMID) if even in own}
        starts[name] = placed(table, chosen, base.choices)
    return _distinct(starts)


def _require_static(loaded: LoadedModel, plan: Plan, name: str, phases: Sequence[Phase]) -> list[PhasePlan]:
    plan.model.require(loaded.fingerprint, name)
    if list(plan.phases) != list(phases) or plan.allocation.name != STATIC:
        what = f"the {phases[0]} phase alone" if len(phases) == 1 else "both phases"
        raise UsageError(f"{name} is no static plan of {what}, which is what is searched: see --phases")
    parts = list(plan.phases.values())
    if any(set(describe(loaded.model).full_layers) - set(part.planned_layers) for part in parts):
        raise UsageError(f"{name} leaves layers their full cache: a search shares a total among all of them")
    if plan.carries:
        raise UsageError(
            f"{name} has entries that carry what leaves, and what is searched has not: start from it without carry, "
            "with_carry(plan, 'none')"
        )
    return parts

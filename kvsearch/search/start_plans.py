"""Start plans of a search, which are also its baselines, and the setup of policies and phases."""

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
from kvsearch.evaluation.names import PYRAMID, STREAMING, UNIFORM
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Phase, PhasePlan, Plan
from kvsearch.plan.arithmetic import scale
from kvsearch.plan.build import PhaseChoice, build_plan
from kvsearch.plan.origin import ContextRecord, make_provenance
from kvsearch.plan.rounding import water_fill
from kvsearch.plan.schema import STATIC
from kvsearch.policies import Policy
from kvsearch.policies.registry import build_policy
from kvsearch.runtime.decode.rule import decode_needs
from kvsearch.search.spaces import decode_choices, encode_choices

EVOLKV = "evolkv"
RESERVED_NAMES = (UNIFORM, PYRAMID, STREAMING, "full", "evolved", "expanded")


@dataclass(frozen=True, eq=False)
class SearchSetup:
    """The model of a search, with the eviction policy of every full-attention layer (ascending) in each searched phase.

    Where layers may have one of several policies, `choices` of them, there are all layers under the first, then under
    the next, and so have tables of budgets: [choices * L, Hkv], with entries under one of them.
    """

    loaded: LoadedModel
    policies: tuple[Policy, ...]
    phases: tuple[Phase, ...] = ("prefill",)
    choices: int = 1

    @classmethod
    def of(cls, loaded: LoadedModel, policy: Policy | Plan, phases: tuple[Phase, ...] = ("prefill",)) -> SearchSetup:
        """Set up a search under one policy in all layers and phases, or under the policies of a plan.

        Raises:
            IncompatibleError: the plan is of another model.
            UsageError: the plan is no static one that evicts in all full-attention layers in just these phases, or a
                policy without a decode rule is to evict while decoding.
        """
        layers = describe(loaded.model).full_layers
        if isinstance(policy, Policy):
            setup = cls(loaded, (policy,) * len(layers) * len(phases), phases)
        else:
            tables = [part.layers for part in _require_static(loaded, policy, "this plan", phases)]
            specs = [table[layer] for table in tables for layer in layers]
            setup = cls(loaded, tuple(build_policy(spec.policy) for spec in specs if spec is not None), phases)
        if "decode" in phases:
            for member in dict.fromkeys(setup.policies[-len(layers) :]):
                decode_needs(member)
        return setup

    @classmethod
    def with_choices(cls, loaded: LoadedModel, policies: Sequence[Policy]) -> SearchSetup:
        """Set up a search that also chooses the policy of every layer, in the prefill phase.

        Raises:
            UsageError: there is only one.
        """
        distinct = list(dict.fromkeys(policies))
        if len(distinct) < 2:
            raise UsageError(
                f"space joint chooses between policies, and there is only {distinct[0].name}: name others with "
                "--policy, or give a --start that has some"
            )
        layers = describe(loaded.model).full_layers
        return cls(loaded, tuple(policy for policy in distinct for _ in layers), choices=len(distinct))

    @property
    def heads(self) -> tuple[int, int]:
        """Full-attention layers and kv heads, (L, Hkv)."""
        return len(self.policies) // len(self.phases) // self.choices, describe(self.loaded.model).kv_heads

    @property
    def evicts_prompts_only(self) -> bool:
        """Whether eviction happens once, after the prompt: entries sorted by rank then describe every candidate."""
        return self.phases == ("prefill",)

    @property
    def floors(self) -> Ints:
        """Entries per head that policies always keep, at least 1, like a candidate [phases * choices * L, Hkv]."""
        floors = np.array([policy.least for policy in self.policies], dtype=np.int64)
        return np.repeat(floors[:, None], self.heads[1], axis=1)

    @property
    def policies_by_layer(self) -> dict[int, tuple[Policy, ...]]:
        """Policies of the first phase by model layer, one per choice."""
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
        """Make the plan of a table of budgets [phases * choices * L, Hkv], in entries for prompts of any length."""
        layers = self.heads[0]
        rows = np.arange(len(table))
        if self.choices > 1:
            rows = decode_choices(table, self.choices) * layers + np.arange(layers)
        chosen = {
            phase: PhaseChoice(tuple(self.policies[row].spec for row in part), table[part])
            for phase, part in zip(self.phases, np.split(rows, len(self.phases)), strict=True)
        }
        return build_plan(
            self.loaded.fingerprint,
            describe(self.loaded.model).full_layers,
            chosen,
            make_provenance(EVOLKV, seed, data, settings, contexts),
            int(min(self.floors.min(), table[rows].min())),
        )


def check_start_names(names: Iterable[str]) -> None:
    """Raise UsageError if the name of a start plan is reserved in the search or its report."""
    for name in names:
        if name in RESERVED_NAMES or name.startswith("#"):
            raise UsageError(
                f"a start plan cannot be called {name!r}: that names something else in the report, rename the file"
            )


def make_start_tables(setup: SearchSetup, budget: int, plans: Mapping[str, Plan]) -> dict[str, Ints]:
    """Make the budgets a search starts from: uniform, PyramidKV's and given plans, all at `budget` per kv head.

    Equal tables are returned once, under the first name. Every phase has that size; uniform and PyramidKV budgets are
    the same in all phases.

    Raises:
        UsageError: the budget is below what some policy always keeps, or a plan cannot be a start.
        IncompatibleError: a plan is of another model.
    """
    check_start_names(plans)
    if setup.choices > 1:
        return _make_joint_tables(setup, budget, plans)
    floors = setup.floors
    (layers, heads) = setup.heads
    if budget < floors.max():
        worst = max(setup.policies, key=lambda policy: policy.least)
        raise UsageError(
            f"a budget of {budget} is below the {int(floors.max())} entries that {worst.name} always keeps: give a "
            f"larger --budget, or lower --set {' or '.join(worst.protecting)}"
        )
    total = budget * layers * heads
    signals = np.zeros((layers, heads))
    parts = np.split(floors, len(setup.phases))
    caps = np.full_like(parts[0], MOST_ENTRIES)
    allocators: dict[str, Allocator] = {UNIFORM: Uniform()}
    if layers > 1:
        allocators[PYRAMID] = Pyramid(window=int(floors.max()))
    starts = {
        name: np.concatenate([allocator.allocate(signals, total, low, caps) for low in parts])
        for name, allocator in allocators.items()
    }
    for name, plan in plans.items():
        _require_static(setup.loaded, plan, f"start plan {name}", setup.phases)
        scaled = scale(plan, total=total)
        tables = []
        for phase, low in zip(setup.phases, parts, strict=True):
            rows = [budget for budget in scaled.budgets(phase) if budget is not None]
            tables.append(water_fill(np.array(rows, dtype=np.float64), total, low, caps))
        starts[name] = np.concatenate(tables)
    return _drop_duplicates(starts)


def _drop_duplicates(tables: Mapping[str, Ints]) -> dict[str, Ints]:
    alike = group_by_key(tables, lambda name: tables[name].tobytes())
    return {name: tables[name] for name, *_ in alike.values()}


def _make_joint_tables(setup: SearchSetup, budget: int, plans: Mapping[str, Plan]) -> dict[str, Ints]:
    """Make start tables [choices * L, Hkv] whose layers have the policies of their plans.

    Uniform and PyramidKV budgets take the policies of the first plan.
    """
    if not plans:
        raise UsageError("space joint begins with the policies of a plan: give one with --start")
    layers = setup.heads[0]
    policies = list(setup.policies[::layers])
    starts: dict[str, Ints] = {}
    for name, plan in plans.items():
        alone = SearchSetup.of(setup.loaded, plan)
        for policy in alone.policies:
            if policy not in policies:
                raise UsageError(f"start plan {name} has policy {policy.name} with other parameters than are searched")
        chosen = np.array([policies.index(policy) for policy in alone.policies])
        own_tables = make_start_tables(alone, budget, {name: plan})
        table = own_tables.get(name, own_tables[UNIFORM])  # equal to even budgets
        if not starts:
            starts = {
                even: encode_choices(own_tables[even], chosen, setup.choices)
                for even in (UNIFORM, PYRAMID)
                if even in own_tables
            }
        starts[name] = encode_choices(table, chosen, setup.choices)
    return _drop_duplicates(starts)


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

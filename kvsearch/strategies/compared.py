"""What is compared: the full cache, methods or plans of one or several sizes, and baselines of a plan's size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsearch.errors import IncompatibleError, UsageError
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.naming import unknown
from kvsearch.plan import PHASES, Phase, Plan, Size
from kvsearch.plan.canonical import sha256_of
from kvsearch.plan.contexts import ContextRecord
from kvsearch.plan.rounding import largest_remainder
from kvsearch.plan.weights import WEIGHTS
from kvsearch.policies import Policy, create_policy
from kvsearch.policies.random import RandomEviction
from kvsearch.runtime import Program
from kvsearch.runtime.key_norms import warn_unfit
from kvsearch.runtime.program import BudgetTable, PhaseProgram, full_cache
from kvsearch.strategies.methods import Method
from kvsearch.strategies.names import FULL, RANDOM

Total = Callable[[int], int]  # entries of all layers and heads, by prompt length
BASELINES = ("uniform", "snapkv", "streaming", "random")
SNAPKV_SINKS = 4
ALIKE = ("sinks", "window", "protect", "kernel", "pooling", "group")  # parameters that mean the same in every policy


@dataclass(frozen=True)
class ReadyMethod:
    """A method at a size (None: the full cache, or plans and baselines of the plan's size), ready to run.

    `definition` is all that decides what it keeps on a given model, as JSON. `contexts` is what it was made on, by
    default nothing; None: that is not known.
    """

    name: str
    program: Program
    definition: dict[str, Any]
    size: Size | None = None
    contexts: ContextRecord | None = field(default_factory=ContextRecord)

    @property
    def label(self) -> str:
        """The name, with the size where there are several: `lava@128`."""
        return self.name if self.size is None else f"{self.name}@{self.size}"

    @property
    def phases(self) -> str:
        """When it evicts: prefill, decode or both; none for the full cache."""
        there = {"prefill": self.program.prefill, "decode": self.program.decode}
        mine = tuple(name for name, phase in there.items() if phase is not None)
        return next((name for name, phases in PHASES.items() if phases == mine), "none")


def sweep(
    loaded: LoadedModel,
    methods: Sequence[Method],
    sizes: Sequence[Size],
    phases: str = "prefill",
    plans: Mapping[str, tuple[Plan, Size]] | None = None,
) -> list[ReadyMethod]:
    """Return the full cache, then at every size all methods and the plans of that size.

    Raises:
        IncompatibleError: a plan or profile is of another model, or a plan leaves layers their full cache.
        UsageError: see `Method.program`.
    """
    found = [full_method(loaded)]
    for size in sizes:
        for method in methods:
            program = method.program(loaded, size, phases)
            found.append(ReadyMethod(method.name, program, method.definition(size, phases), size, method.contexts))
        for name, (plan, at) in (plans or {}).items():
            if at == size:
                program = Program.from_plan(loaded.model, plan)
                _check_whole(loaded, name, program)
                found.append(ReadyMethod(name, program, {"plan": sha256_of(plan)}, size, plan.provenance.contexts))
    warn_unfit(loaded.model, {policy for one in found for policy in one.program.policies})
    return found


def with_baselines(
    loaded: LoadedModel, plans: Mapping[str, Plan], names: Sequence[str], subject: str
) -> list[ReadyMethod]:
    """Return the full cache, plans of one size, and baselines of that size; "uniform" has the policy of the subject.

    Raises:
        IncompatibleError, UsageError: see `Program.from_plan`.
    """
    programs = {label: Program.from_plan(loaded.model, plan) for label, plan in plans.items()}
    found = [
        ReadyMethod(label, program, {"plan": sha256_of(plans[label])}, contexts=plans[label].provenance.contexts)
        for label, program in programs.items()
    ]
    for name, program in baselines(loaded.model, programs[subject], tuple(names)).items():
        policy = program.policies[0]
        kept = {"name": policy.name, "params": policy.parameters()}
        found.append(ReadyMethod(name, program, {"policy": kept, "entries_of_plan": sha256_of(plans[subject])}))
    return [full_method(loaded), *found]


def different_settings(methods: Sequence[ReadyMethod]) -> str | None:
    """Return in words which settings of their policies compared methods differ in, and who has which; None if in none.

    Parameters of `ALIKE` are compared between all policies, others between methods of one policy; controls have none.
    """
    found: dict[str, dict[object, list[str]]] = {}
    protects = any("protect" in policy.parameters() for method in methods for policy in method.program.policies)
    for method in methods:
        for policy in () if method.name in (FULL, RANDOM) else method.program.policies:
            stated = policy.parameters()
            stated.pop(WEIGHTS, None)  # what a policy is, not how it is set
            if protects and hasattr(policy, "protect"):
                stated["protect"] = policy.protect
            for name, value in stated.items():
                setting = name if name in ALIKE else f"{policy.name}.{name}"
                having = found.setdefault(setting, {}).setdefault(value, [])
                if method.name not in having:
                    having.append(method.name)
    told = [
        f"{setting} " + ", ".join(f"{value} ({', '.join(names)})" for value, names in by_value.items())
        for setting, by_value in sorted(found.items(), key=lambda item: (item[0] not in ALIKE, item[0]))
        if len(by_value) > 1
    ]
    return f"settings differ: {'; '.join(told)}" if told else None


def full_method(loaded: LoadedModel) -> ReadyMethod:
    """Return the full cache, as what is compared."""
    return ReadyMethod(FULL, full_cache(loaded.model), {"policy": {"name": FULL, "params": {}}})


def equal_uniform(model: Any, policy: Policy, totals: Mapping[Phase, Total]) -> Program:
    """Spread the total of every phase evenly over all full-attention layers and kv heads, exactly, under one policy."""
    shape = describe(model)
    heads = (len(shape.full_layers), shape.kv_heads)

    def table(phase: Phase, total: Total) -> BudgetTable:
        def budgets(length: int) -> NDArray[np.int64]:
            wanted, most = total(length), length if phase == "prefill" else None
            return largest_remainder(np.full(heads, wanted / (heads[0] * heads[1])), wanted, 0, most)

        return budgets

    return Program.of_policy(model, policy, {phase: table(phase, total) for phase, total in totals.items()})


def baselines(model: Any, plan: Program, names: tuple[str, ...] = BASELINES) -> dict[str, Program]:
    """Return the named baselines, in the phases of the plan, each with the entries it holds at every prompt length.

    Full-attention layers outside the plan hold their full cache, which counts.

    "uniform" is the plan's own policy with even budgets; "snapkv" and "streaming" are those methods; "random" evicts at
    random. A baseline that equals another one is left out.
    """
    shape = describe(model)

    def total(phase: PhaseProgram) -> Total:
        unplanned = (len(shape.full_layers) - len(phase.policies)) * shape.kv_heads
        return lambda length: phase.entries(length) + unplanned * length

    phases: dict[Phase, PhaseProgram | None] = {"prefill": plan.prefill, "decode": plan.decode}
    totals = {name: total(phase) for name, phase in phases.items() if phase is not None}
    policies = set(plan.policies)
    made: dict[str, Policy] = {}
    for name in names:
        if name == "uniform" and len(policies) > 1:
            continue  # a plan of several policies has no uniform counterpart of its own
        policy = next(iter(policies)) if name == "uniform" else _policy(name)
        if policy not in made.values():
            made[name] = policy
    return {name: equal_uniform(model, policy, totals) for name, policy in made.items()}


def _policy(name: str) -> Policy:
    if name == "random":
        return RandomEviction()
    if name == "snapkv":
        return create_policy("snapkv", {"sinks": SNAPKV_SINKS})
    if name == "streaming":
        return create_policy("streaming")
    raise UsageError(unknown("baseline", name, list(BASELINES)))


def _check_whole(loaded: LoadedModel, name: str, program: Program) -> None:
    """Raise IncompatibleError if a plan is not of all full-attention layers: it holds more than its budgets say."""
    for phase in program.phases:
        left = sorted(set(describe(loaded.model).full_layers) - set(phase.policies))
        if left:
            raise IncompatibleError(
                f"plan {name} leaves layers {left} their full cache, the methods evict in all: compare it without "
                "--methods, with baselines of its own size"
            )

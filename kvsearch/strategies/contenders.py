"""What is compared: the full cache, and methods or plans of one or several sizes, by label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvsearch.errors import IncompatibleError
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import PHASES, Plan, Size
from kvsearch.plan.canonical import sha256_of
from kvsearch.runtime import Program
from kvsearch.runtime.plan_checks import warn_unfit
from kvsearch.strategies.baselines import baselines, full_cache
from kvsearch.strategies.methods import FULL, Method


@dataclass(frozen=True)
class Contender:
    """A method at a size (None: the full cache, or plans and baselines of the plan's size), ready to run.

    `definition` is all that decides what it keeps on a given model, as JSON.
    """

    name: str
    program: Program
    definition: dict[str, Any]
    size: Size | None = None

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
) -> list[Contender]:
    """The full cache, then at every size all methods and the plans of that size.

    Raises:
        IncompatibleError: a plan or profile is of another model, or a plan leaves layers their full cache.
        UsageError: see `Method.program`.
    """
    found = [full_contender(loaded)]
    for size in sizes:
        for method in methods:
            program = method.program(loaded, size, phases)
            found.append(Contender(method.name, program, method.definition(size, phases), size))
        for name, (plan, at) in (plans or {}).items():
            if at == size:
                found.append(_whole(loaded, name, plan, size))
    warn_unfit(loaded.model, {policy for one in found for policy in one.program.policies})
    return found


def with_baselines(
    loaded: LoadedModel, plans: Mapping[str, Plan], names: Sequence[str], subject: str
) -> list[Contender]:
    """The full cache, plans of one size, and baselines of that size; "uniform" has the policy of the subject.

    Raises:
        IncompatibleError, UsageError: see `Program.from_plan`.
    """
    programs = {label: Program.from_plan(loaded.model, plan) for label, plan in plans.items()}
    found = [Contender(label, program, {"plan": sha256_of(plans[label])}) for label, program in programs.items()]
    for name, program in baselines(loaded.model, programs[subject], tuple(names)).items():
        policy = program.policies[0]
        kept = {"name": policy.name, "params": policy.parameters()}
        found.append(Contender(name, program, {"policy": kept, "entries_of_plan": sha256_of(plans[subject])}))
    return [full_contender(loaded), *found]


def full_contender(loaded: LoadedModel) -> Contender:
    """The full cache."""
    return Contender(FULL, full_cache(loaded.model), {"policy": {"name": FULL, "params": {}}})


def _whole(loaded: LoadedModel, name: str, plan: Plan, size: Size) -> Contender:
    """A plan of all full-attention layers; others hold more than their budgets say."""
    program = Program.from_plan(loaded.model, plan)
    for phase in program.phases:
        left = sorted(set(describe(loaded.model).full_layers) - set(phase.policies))
        if left:
            raise IncompatibleError(
                f"plan {name} leaves layers {left} their full cache, the methods evict in all: compare it without "
                "--methods, with baselines of its own size"
            )
    return Contender(name, program, {"plan": sha256_of(plan)}, size)

"""Methods that are ready to evaluate: the full cache, methods or plans at sizes, and baselines of a plan.

`read_request` parses and checks the options of a comparison before a model is loaded; `Request.prepare` makes it ready
to run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvsearch.budgets.plan_checks import check_plan
from kvsearch.core.arrays import Ints
from kvsearch.core.canonical import hash_json
from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.core.naming import require_known
from kvsearch.evaluation.methods import Method, parse_methods, parse_sizes
from kvsearch.evaluation.names import FULL, RANDOM
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import PHASES, Phase, Plan, Size, load_plan, parse_phases
from kvsearch.plan.origin import ContextRecord
from kvsearch.plan.rounding import largest_remainder
from kvsearch.plan.saved import WEIGHTS
from kvsearch.policies import Policy, create_policy
from kvsearch.policies.random import RandomEviction
from kvsearch.runtime import Program
from kvsearch.runtime.program import BudgetTable, PhaseProgram, make_full_program, warn_unfit

EntryCount = Callable[[int], int]  # entries of all layers and heads, by prompt length
BASELINES: dict[str, Callable[[], Policy] | None] = {
    "uniform": None,  # the plan's own policy
    "snapkv": lambda: create_policy("snapkv", {"sinks": 4}),
    "streaming": lambda: create_policy("streaming"),
    RANDOM: RandomEviction,
}
DEFAULT_BASELINES = "uniform,snapkv,streaming"
SHARED_PARAMETERS = (
    "sinks",
    "window",
    "protect",
    "kernel",
    "pooling",
    "group",
)  # parameters that mean the same in every policy


@dataclass(frozen=True)
class ReadyMethod:
    """A method with its program at a size, ready to run (size None: the full cache, plans and their baselines).

    `definition` are all settings that decide what it keeps on a given model, as JSON. `contexts` are those it was
    fitted on, by default none; None: unknown.
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
        """Phases in which it evicts: prefill, decode or both; none for the full cache."""
        evicting = tuple(phase for phase in PHASES["both"] if getattr(self.program, phase) is not None)
        return next((name for name, phases in PHASES.items() if phases == evicting), "none")


@dataclass(frozen=True)
class Request:
    """A checked request; without methods, plans are compared with baselines of their size.

    `subject` is the name of the first method or plan, with which the others are compared.
    """

    subject: str
    methods: Sequence[Method] = ()
    sizes: Sequence[Size] = ()
    phases: str = "prefill"
    plans: Mapping[str, Plan] = field(default_factory=dict)
    baselines: tuple[str, ...] = ()

    def prepare(self, loaded: LoadedModel) -> list[ReadyMethod]:
        """Make all methods ready to run on a model; errors as `prepare_methods` and `prepare_with_baselines`."""
        if not self.methods:
            return prepare_with_baselines(loaded, self.plans, self.baselines, self.subject)
        return prepare_methods(loaded, self.methods, self.sizes, self.phases, self.plans)

    def as_json(self) -> dict[str, Any]:
        """Return the request in names."""
        content: dict[str, Any] = {"subject": self.subject, "plans": list(self.plans)}
        if not self.methods:
            return {**content, "baselines": list(self.baselines)}
        sizes = [size.as_json() for size in self.sizes]
        return {**content, "methods": [method.name for method in self.methods], "sizes": sizes, "phases": self.phases}


def read_request(
    plans: Sequence[Path] = (),
    methods: str | None = None,
    budgets: str | None = None,
    ratios: str | None = None,
    phases: str | None = None,
    settings: Sequence[str] = (),
    baselines: str | None = None,
) -> Request:
    """Parse and check the options of a comparison, before a model is loaded.

    Raises:
        UsageError: nothing to compare, options that do not go together, and what `parse_methods`, `parse_sizes`,
            `Method.check` and `check_plans` refuse; a plan beside methods of other phases, or of none of their sizes.
    """
    stated = {path.stem: load_plan(path) for path in plans}
    if methods is None:
        values = {"--budgets": budgets, "--ratios": ratios, "--phases": phases, "--set": settings or None}
        unused = [name for name, value in values.items() if value is not None]
        if unused:
            raise UsageError(f"{' and '.join(unused)} are for --methods: a plan has its own")
        if not plans:
            raise UsageError("nothing to compare: give --methods with --budgets or --ratios, or --plan")
        names = tuple(name for name in (DEFAULT_BASELINES if baselines is None else baselines).split(",") if name)
        check_plans(stated, plans, names)
        return Request(next(iter(stated)), plans=stated, baselines=names)
    if baselines is not None:
        raise UsageError("--baselines go with --plan alone: beside --methods, name them as methods")
    phases = phases or "prefill"
    parse_phases(phases)
    chosen = parse_methods(methods, settings)
    sizes = parse_sizes(budgets, ratios)
    for method in chosen:
        method.check(sizes)
    names = tuple(method.name for method in chosen)
    _check_files(stated, plans, (FULL, *names), "a method")
    for label, plan in stated.items():
        _find_size(label, plan, sizes, phases)
    return Request(names[0], chosen, sizes, phases, stated)


def check_plans(plans: Mapping[str, Plan], paths: Sequence[Path], names: Sequence[str]) -> None:
    """Check plans that are compared with each other and with the baselines `names`.

    Raises:
        UsageError: two plans of one name, different totals, unknown policies or baselines.
    """
    for name in names:
        require_known("baseline", name, BASELINES)
    _check_files(plans, paths, (FULL, *BASELINES), "a baseline")
    totals = {label: _list_entries(_count_entries(plan)) for label, plan in plans.items()}
    scalings = {
        label: "whatever the prompt"
        if plan.scaling == "fixed"
        else f"those of {plan.length} tokens, in proportion for others"
        for label, plan in plans.items()
    }
    for shown, which in ((totals, "these"), (scalings, "of other prompts than those they are for these")):
        if len(set(shown.values())) > 1:
            listed = ", ".join(f"{label}: {words}" for label, words in shown.items())
            raise UsageError(f"plans are compared at equal entries, {which} have different totals ({listed})")


def _check_files(plans: Mapping[str, Plan], paths: Sequence[Path], taken: Collection[str], by: str) -> None:
    if len(plans) != len(paths):
        raise UsageError("two plan files have the same name: rename one, the name labels its results")
    for (label, plan), path in zip(plans.items(), paths, strict=True):
        if label in taken:
            raise UsageError(f"a plan file cannot be called {label}.json: the name is taken by {by}")
        check_plan(plan, str(path))


def _find_size(label: str, plan: Plan, sizes: Sequence[Size], phases: str) -> Size:
    """Find the size of a plan among the methods' sizes; UsageError if it is none of them, or for other phases."""
    totals = _count_entries(plan)
    if tuple(totals) != PHASES[phases]:
        raise UsageError(
            f"plan {label} evicts in {' and '.join(totals)}, the methods in {' and '.join(PHASES[phases])}: compare "
            "the same --phases"
        )
    length = None if plan.scaling == "fixed" else plan.length
    heads = {name: len(plan.planned_layers(name)) * plan.model.kv_heads for name in PHASES[phases]}
    for size in sizes:
        alike = (length is None) == (size.ratio is None)
        if alike and all(totals[name] == size.held(length or 0, count) for name, count in heads.items()):
            return size
    known = ", ".join(size.words for size in sizes)
    raise UsageError(f"plan {label} holds {_list_entries(totals)}, which is none of the sizes to compare ({known})")


def _count_entries(plan: Plan) -> dict[str, int]:
    """Count the entries of each phase of a plan."""
    return {name: phase.total for name, phase in plan.phases.items()}


def _list_entries(totals: Mapping[str, int]) -> str:
    return " and ".join(f"{total} in {name}" for name, total in totals.items())


def prepare_methods(
    loaded: LoadedModel,
    methods: Sequence[Method],
    sizes: Sequence[Size],
    phases: str = "prefill",
    plans: Mapping[str, Plan] | None = None,
) -> list[ReadyMethod]:
    """Make the full cache ready, then at every size all methods and the plans of that size.

    Raises:
        IncompatibleError: a plan or profile is of another model, or a plan leaves layers their full cache.
        UsageError: as `Method.program` raises it.
    """
    ready = [make_full_cache_method(loaded)]
    for size in sizes:
        for method in methods:
            program = method.program(loaded, size, phases)
            ready.append(ReadyMethod(method.name, program, method.definition(size, phases), size, method.contexts))
        for name, plan in (plans or {}).items():
            if _find_size(name, plan, sizes, phases) == size:
                program = Program.from_plan(loaded.model, plan)
                for phase in program.phases:
                    if left := sorted(set(describe(loaded.model).full_layers) - set(phase.policies)):
                        raise IncompatibleError(
                            f"plan {name} leaves layers {left} their full cache, the methods evict in all: compare it "
                            "without --methods, with baselines of its own size"
                        )
                ready.append(ReadyMethod(name, program, {"plan": hash_json(plan)}, size, plan.provenance.contexts))
    warn_unfit(loaded.model, {policy for method_at_size in ready for policy in method_at_size.program.policies})
    return ready


def prepare_with_baselines(
    loaded: LoadedModel, plans: Mapping[str, Plan], names: Sequence[str], subject: str
) -> list[ReadyMethod]:
    """Make ready the full cache, plans of one size, and baselines of that size.

    Raises:
        IncompatibleError, UsageError: see `Program.from_plan`.
    """
    programs = {label: Program.from_plan(loaded.model, plan) for label, plan in plans.items()}
    ready = [
        ReadyMethod(label, program, {"plan": hash_json(plans[label])}, contexts=plans[label].provenance.contexts)
        for label, program in programs.items()
    ]
    for name, program in make_baselines(loaded.model, programs[subject], names).items():
        policy = program.policies[0]
        kept = {"name": policy.name, "params": policy.parameters()}
        ready.append(ReadyMethod(name, program, {"policy": kept, "entries_of_plan": hash_json(plans[subject])}))
    return [make_full_cache_method(loaded), *ready]


def describe_different_settings(methods: Sequence[ReadyMethod]) -> str | None:
    """Describe the settings in which the policies of methods differ, with the methods of each value; None if in none.

    Parameters of `SHARED_PARAMETERS` are compared between all policies, others between methods of one policy; controls
    have none.
    """
    by_setting: dict[str, dict[object, list[str]]] = {}
    protects = any("protect" in policy.parameters() for method in methods for policy in method.program.policies)
    for method in methods:
        for policy in () if method.name in (FULL, RANDOM) else method.program.policies:
            stated = policy.parameters()
            stated.pop(WEIGHTS, None)  # what a policy is, not how it is set
            if protects and hasattr(policy, "protect"):
                stated["protect"] = policy.protect
            for name, value in stated.items():
                setting = name if name in SHARED_PARAMETERS else f"{policy.name}.{name}"
                having = by_setting.setdefault(setting, {}).setdefault(value, [])
                if method.name not in having:
                    having.append(method.name)
    differences = [
        f"{setting} " + ", ".join(f"{value} ({', '.join(names)})" for value, names in by_value.items())
        for setting, by_value in sorted(
            by_setting.items(), key=lambda item: (item[0] not in SHARED_PARAMETERS, item[0])
        )
        if len(by_value) > 1
    ]
    return f"settings differ: {'; '.join(differences)}" if differences else None


def make_full_cache_method(loaded: LoadedModel) -> ReadyMethod:
    """Make the full cache as a ready method."""
    return ReadyMethod(FULL, make_full_program(loaded.model), {"policy": {"name": FULL, "params": {}}})


def spread_evenly(model: Any, policy: Policy, totals: Mapping[Phase, EntryCount]) -> Program:
    """Spread the total of every phase evenly over all full-attention layers and kv heads, exactly, under one policy."""
    shape = describe(model)
    heads = (len(shape.full_layers), shape.kv_heads)

    def table(phase: Phase, total: EntryCount) -> BudgetTable:
        def budgets(length: int) -> Ints:
            entries = total(length)
            cap = length if phase == "prefill" else None
            return largest_remainder(np.full(heads, entries / (heads[0] * heads[1])), entries, 0, cap)

        return budgets

    return Program.of_policy(model, policy, {phase: table(phase, total) for phase, total in totals.items()})


def make_baselines(model: Any, plan: Program, names: Iterable[str] = BASELINES) -> dict[str, Program]:
    """Make the named baselines in the phases of a plan, each with the plan's entries at every prompt length.

    Full-attention layers outside the plan hold their full cache, which counts.

    "uniform" is the plan's own policy with even budgets; "snapkv" and "streaming" are those methods; "random" evicts at
    random. A baseline that equals another one is left out.
    """
    shape = describe(model)

    def total(phase: PhaseProgram) -> EntryCount:
        unplanned = (len(shape.full_layers) - len(phase.policies)) * shape.kv_heads
        return lambda length: phase.entries(length) + unplanned * length

    totals = {name: total(phase) for name in PHASES["both"] if (phase := getattr(plan, name)) is not None}
    plan_policies = set(plan.policies)
    policies: dict[str, Policy] = {}
    for name in names:
        require_known("baseline", name, BASELINES)
        make = BASELINES[name]
        if make is None and len(plan_policies) > 1:
            continue  # a plan of several policies has no uniform counterpart of its own
        policy = next(iter(plan_policies)) if make is None else make()
        if policy not in policies.values():
            policies[name] = policy
    return {name: spread_evenly(model, policy, totals) for name, policy in policies.items()}

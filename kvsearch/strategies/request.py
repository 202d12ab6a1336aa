"""What a user asks to compare: methods at sizes, plans beside them, or plans with baselines."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvsearch.budgets.plan_checks import check_plan
from kvsearch.errors import UsageError
from kvsearch.models.loading import LoadedModel
from kvsearch.naming import unknown
from kvsearch.plan import PHASES, Plan, Size, load_plan, phases_of
from kvsearch.strategies.compared import BASELINES, ReadyMethod, sweep, with_baselines
from kvsearch.strategies.method_list import find_methods, find_sizes
from kvsearch.strategies.methods import Method
from kvsearch.strategies.names import FULL

DEFAULT_BASELINES = "uniform,snapkv,streaming"


@dataclass(frozen=True)
class Request:
    """A checked request; without methods, plans are compared with baselines of their size.

    `subject` is the name of what the others are compared with.
    """

    subject: str
    methods: Sequence[Method] = ()
    sizes: Sequence[Size] = ()
    phases: str = "prefill"
    plans: Mapping[str, Plan] = field(default_factory=dict)
    plan_sizes: Mapping[str, Size] = field(default_factory=dict)
    baselines: tuple[str, ...] = ()

    def ready(self, loaded: LoadedModel) -> list[ReadyMethod]:
        """Return everything to run on a model; see `sweep` and `with_baselines` for the errors."""
        if not self.methods:
            return with_baselines(loaded, self.plans, self.baselines, self.subject)
        plans = {name: (plan, self.plan_sizes[name]) for name, plan in self.plans.items()}
        return sweep(loaded, self.methods, self.sizes, self.phases, plans)

    def as_json(self) -> dict[str, Any]:
        """Return the request in names."""
        told: dict[str, Any] = {"subject": self.subject, "plans": list(self.plans)}
        if not self.methods:
            return {**told, "baselines": list(self.baselines)}
        sizes = [size.as_json() for size in self.sizes]
        return {**told, "methods": [method.name for method in self.methods], "sizes": sizes, "phases": self.phases}


def read_request(
    plans: Sequence[Path] = (),
    methods: str | None = None,
    budgets: str | None = None,
    ratios: str | None = None,
    phases: str | None = None,
    settings: Sequence[str] = (),
    baselines: str | None = None,
    subject: str | None = None,
) -> Request:
    """Read what was typed, and find what is wrong with it before a model is loaded.

    Raises:
        UsageError: nothing to compare, options that do not go together, and what `find_methods`, `find_sizes`,
            `Method.check`, `check_plans` and `plan_sizes` refuse.
    """
    found = {path.stem: load_plan(path) for path in plans}
    if methods is not None:
        if baselines is not None:
            raise UsageError("--baselines go with --plan alone: beside --methods, name them as methods")
        return _sweep(found, plans, methods, budgets, ratios, phases or "prefill", settings, subject)
    for_methods = {"budgets": budgets, "ratios": ratios, "phases": phases, "set": settings or None}
    unused = [f"--{name}" for name, value in for_methods.items() if value is not None]
    if unused:
        raise UsageError(f"{' and '.join(unused)} are for --methods: a plan has its own")
    if not plans:
        raise UsageError("nothing to compare: give --methods with --budgets or --ratios, or --plan")
    names = tuple(name for name in (DEFAULT_BASELINES if baselines is None else baselines).split(",") if name)
    check_plans(found, plans, names, subject)
    return Request(subject or next(iter(found)), plans=found, baselines=names)


def _sweep(
    plans: Mapping[str, Plan],
    paths: Sequence[Path],
    methods: str,
    budgets: str | None,
    ratios: str | None,
    phases: str,
    settings: Sequence[str],
    subject: str | None,
) -> Request:
    """Return the request of methods at sizes, with the plans of these sizes."""
    phases_of(phases)
    found, sizes = find_methods(methods, settings), find_sizes(budgets, ratios)
    for method in found:
        method.check(sizes)
    named = [method.name for method in found]
    at = plan_sizes(plans, paths, named, sizes, phases)
    known = [*named, *(plans if len(sizes) == 1 else ()), FULL]
    if subject is not None and subject not in known:
        raise UsageError(f"{unknown('subject', subject, known)}: it is compared at every size")
    return Request(subject or known[0], found, sizes, phases, plans, at)


def check_plans(
    plans: Mapping[str, Plan], paths: Sequence[Path], names: Sequence[str], subject: str | None = None
) -> None:
    """Check plans that are compared with each other and with the baselines `names`.

    Raises:
        UsageError: two plans of one name, different totals, unknown policies or baselines, a subject that is no plan.
    """
    for name in names:
        if name not in BASELINES:
            raise UsageError(unknown("baseline", name, BASELINES))
    _check_each(plans, paths, (FULL, *BASELINES), "a baseline")
    if subject is not None and subject not in plans:
        raise UsageError(f"{unknown('plan', subject, list(plans))}: the subject is one of the plans")
    sizes = {
        (*_totals(plan).items(), plan.scaling, plan.length if plan.scaling == "proportional" else None)
        for plan in plans.values()
    }
    if len(sizes) > 1:
        same = len({_listed(_totals(plan)) for plan in plans.values()}) == 1
        told = ", ".join(
            f"{label}: {_follows(plan) if same else _listed(_totals(plan))}" for label, plan in plans.items()
        )
        what = "of other prompts than those they are for these" if same else "these"
        raise UsageError(f"plans are compared at equal entries, {what} have different totals ({told})")


def plan_sizes(
    plans: Mapping[str, Plan], paths: Sequence[Path], taken: Sequence[str], sizes: Sequence[Size], phases: str
) -> dict[str, Size]:
    """Return the size of each plan that is compared with methods called `taken`, in the same phases.

    Raises:
        UsageError: two plans of one name, a name that is taken, unknown policies, other phases, or none of the sizes.
    """
    _check_each(plans, paths, (FULL, *taken), "a method")
    return {label: _size(label, plan, sizes, phases) for label, plan in plans.items()}


def _check_each(plans: Mapping[str, Plan], paths: Sequence[Path], taken: Collection[str], by: str) -> None:
    if len(plans) != len(paths):
        raise UsageError("two plan files have the same name: rename one, the name labels its results")
    for (label, plan), path in zip(plans.items(), paths, strict=True):
        if label in taken:
            raise UsageError(f"a plan file cannot be called {label}.json: the name is taken by {by}")
        check_plan(plan, str(path))


def _size(label: str, plan: Plan, sizes: Sequence[Size], phases: str) -> Size:
    totals = _totals(plan)
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
    raise UsageError(f"plan {label} holds {_listed(totals)}, which is none of the sizes to compare ({known})")


def _totals(plan: Plan) -> dict[str, int]:
    """Return the entries of each phase of a plan."""
    phases = {"prefill": plan.prefill, "decode": plan.decode}
    return {name: phase.total for name, phase in phases.items() if phase is not None}


def _follows(plan: Plan) -> str:
    return (
        "whatever the prompt" if plan.scaling == "fixed" else f"those of {plan.length} tokens, in proportion for others"
    )


def _listed(totals: Mapping[str, int]) -> str:
    return " and ".join(f"{total} in {name}" for name, total in totals.items())

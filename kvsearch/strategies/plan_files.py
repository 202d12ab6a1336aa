"""What can be wrong with plan files that are to be compared, found before a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kvsearch.errors import UsageError
from kvsearch.naming import suggest
from kvsearch.plan import PHASES, Plan, Size
from kvsearch.runtime.plan_checks import check_plan
from kvsearch.strategies.baselines import BASELINES
from kvsearch.strategies.methods import FULL


def check_plans(
    plans: Mapping[str, Plan], paths: Sequence[Path], names: Sequence[str], subject: str | None = None
) -> dict[str, Plan]:
    """Check plans that are compared with each other and with the baselines `names`.

    Raises:
        UsageError: two plans of one name, different totals, unknown policies or baselines, a subject that is no plan.
    """
    for name in names:
        if name not in BASELINES:
            raise UsageError(f"unknown baseline {name!r}{suggest(name, BASELINES)}")
    _check_each(plans, paths, (FULL, *BASELINES), "a baseline")
    if subject is not None and subject not in plans:
        raise UsageError(f"unknown plan {subject!r}{suggest(subject, list(plans))}: the subject is one of the plans")
    totals = {label: _totals(plan) for label, plan in plans.items()}
    if len({(*total.items(), plans[label].scaling, _length(plans[label])) for label, total in totals.items()}) > 1:
        told = ", ".join(f"{label}: {_listed(total)}" for label, total in totals.items())
        raise UsageError(f"plans are compared at equal entries, these have different totals ({told})")
    return dict(plans)


def plan_sizes(
    plans: Mapping[str, Plan], paths: Sequence[Path], taken: Sequence[str], sizes: Sequence[Size], phases: str
) -> dict[str, Size]:
    """The size of each plan that is compared with methods called `taken`, in the same phases.

    Raises:
        UsageError: two plans of one name, a name that is taken, unknown policies, other phases, or none of the sizes.
    """
    _check_each(plans, paths, (FULL, *taken), "a method")
    return {label: _size(label, plan, sizes, phases) for label, plan in plans.items()}


def _check_each(plans: Mapping[str, Plan], paths: Sequence[Path], taken: Sequence[str], by: str) -> None:
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
    for size in sizes:
        if all(_fits(plan, len(plan.planned_layers(name)), totals[name], size) for name in PHASES[phases]):
            return size
    known = ", ".join(size.words for size in sizes)
    raise UsageError(f"plan {label} holds {_listed(totals)}, which is none of the sizes to compare ({known})")


def _fits(plan: Plan, layers: int, total: int, size: Size) -> bool:
    heads = layers * plan.model.kv_heads
    if plan.scaling == "fixed" or plan.length is None:
        return size.budget is not None and total == size.held(0, heads)
    return size.ratio is not None and total == size.held(plan.length, heads)


def _totals(plan: Plan) -> dict[str, int]:
    """Entries of each phase of a plan."""
    phases = {"prefill": plan.prefill, "decode": plan.decode}
    return {name: phase.total for name, phase in phases.items() if phase is not None}


def _length(plan: Plan) -> int | None:
    return plan.length if plan.scaling == "proportional" else None


def _listed(totals: dict[str, int]) -> str:
    return " and ".join(f"{total} in {name}" for name, total in totals.items())

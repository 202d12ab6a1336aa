"""What a user asks to compare: methods at sizes, plans beside them, or plans with baselines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvsearch.errors import UsageError
from kvsearch.models.loading import LoadedModel
from kvsearch.naming import suggest
from kvsearch.plan import Plan, Size, load_plan, phases_of
from kvsearch.strategies.contenders import Contender, sweep, with_baselines
from kvsearch.strategies.method_list import find_methods, find_sizes
from kvsearch.strategies.methods import FULL, Method
from kvsearch.strategies.plan_files import check_plans, plan_sizes

DEFAULT_BASELINES = "uniform,snapkv,streaming"


@dataclass(frozen=True)
class Contest:
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

    def contenders(self, loaded: LoadedModel) -> list[Contender]:
        """Everything to run on a model; see `sweep` and `with_baselines` for the errors."""
        if not self.methods:
            return with_baselines(loaded, self.plans, self.baselines, self.subject)
        plans = {name: (plan, self.plan_sizes[name]) for name, plan in self.plans.items()}
        return sweep(loaded, self.methods, self.sizes, self.phases, plans)

    def as_json(self) -> dict[str, Any]:
        """The request in names."""
        told: dict[str, Any] = {"subject": self.subject, "plans": list(self.plans)}
        if not self.methods:
            return {**told, "baselines": list(self.baselines)}
        sizes = [size.as_json() for size in self.sizes]
        return {**told, "methods": [method.name for method in self.methods], "sizes": sizes, "phases": self.phases}


def read_contest(
    plans: Sequence[Path] = (),
    methods: str | None = None,
    budgets: str | None = None,
    ratios: str | None = None,
    phases: str | None = None,
    settings: Sequence[str] = (),
    baselines: str | None = None,
    subject: str | None = None,
) -> Contest:
    """Read what was typed, and find what is wrong with it before a model is loaded.

    Raises:
        UsageError: nothing to compare, options that do not go together, and what `find_methods`, `find_sizes`,
            `Method.check`, `check_plans` and `plan_sizes` refuse.
    """
    loaded_plans = {path.stem: load_plan(path) for path in plans}
    if methods is None:
        _refuse_sweeping(budgets=budgets, ratios=ratios, phases=phases, set=settings or None)
        if not plans:
            raise UsageError("nothing to compare: give --methods with --budgets or --ratios, or --plan")
        names = tuple(name for name in (DEFAULT_BASELINES if baselines is None else baselines).split(",") if name)
        checked = check_plans(loaded_plans, plans, names, subject)
        return Contest(subject or next(iter(checked)), plans=checked, baselines=names)
    if baselines is not None:
        raise UsageError("--baselines go with --plan alone: beside --methods, name them as methods")
    when = phases or "prefill"
    phases_of(when)
    found, sizes = find_methods(methods, settings), find_sizes(budgets, ratios)
    for method in found:
        method.check(sizes)
    named = [method.name for method in found]
    at = plan_sizes(loaded_plans, plans, named, sizes, when)
    known = [*named, *(loaded_plans if len(sizes) == 1 else ()), FULL]
    return Contest(_subject(subject, known), found, sizes, when, loaded_plans, at)


def _subject(wanted: str | None, known: Sequence[str]) -> str:
    """By default the first."""
    if wanted is not None and wanted not in known:
        raise UsageError(f"unknown subject {wanted!r}{suggest(wanted, known)}: it is compared at every size")
    return wanted or known[0]


def _refuse_sweeping(**given: object) -> None:
    unused = [f"--{name}" for name, value in given.items() if value is not None]
    if unused:
        raise UsageError(f"{' and '.join(unused)} are for --methods: a plan has its own")

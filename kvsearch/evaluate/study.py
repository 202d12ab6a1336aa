"""One evaluation: plans, the full cache and baselines on the same samples, at the same entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from kvsearch.errors import UsageError
from kvsearch.evaluate.baselines import BASELINES, baselines, full_cache
from kvsearch.evaluate.runner import Sample, run
from kvsearch.evaluate.statistics import Row, summarize
from kvsearch.models.loading import LoadedModel
from kvsearch.naming import suggest
from kvsearch.plan import Plan
from kvsearch.policies.checks import check_plan
from kvsearch.runtime import Program
from kvsearch.tasks.base import Task

FULL = "full"
PROTOCOL = "question-agnostic"
LEAST_USEFUL = 0.1


class Held(NamedTuple):
    """Entries and bytes after the context, and the most entries at a time until the reply was complete."""

    entries: float
    bytes: float
    most: float


@dataclass(frozen=True)
class Study:
    """Samples and summary of an evaluation; differences are those of `subject`, the first plan."""

    model: str
    subject: str
    samples: list[Sample]
    rows: list[Row]
    seed: int

    @property
    def doubt(self) -> str | None:
        """Why the comparison may say little, if it does."""
        full = self.rows[-1].scores[FULL].mean
        if full >= LEAST_USEFUL:
            return None
        return f"the full cache itself scores {full:.2f}: these questions cannot tell methods apart on this model"

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(sample.method for sample in self.samples))

    def held(self, method: str) -> Held:
        """What `method` held in the cache, means over the questions."""
        mine = [sample for sample in self.samples if sample.method == method]
        return Held(*(fmean(getattr(sample, name) for sample in mine) for name in Held._fields))


def check_plans(plans: Mapping[str, Plan], paths: Sequence[Path], names: Sequence[str]) -> dict[str, Plan]:
    """Find what is wrong with a request before a model is loaded.

    Raises:
        UsageError: two plans of one name, different totals, unknown policies or baselines.
    """
    if len(plans) != len(paths):
        raise UsageError("two plan files have the same name: rename one, the name labels its column")
    for name in names:
        if name not in BASELINES:
            raise UsageError(f"unknown baseline {name!r}{suggest(name, BASELINES)}")
    for (label, plan), path in zip(plans.items(), paths, strict=True):
        if label in (FULL, *BASELINES):
            raise UsageError(f"a plan file cannot be called {label}.json: the name is taken by a baseline")
        check_plan(plan, str(path))
    totals = {label: _totals(plan) for label, plan in plans.items()}
    if len({(*total.items(), plans[label].scaling, _length(plans[label])) for label, total in totals.items()}) > 1:
        listed = ", ".join(f"{label}: {_listed(total)}" for label, total in totals.items())
        raise UsageError(f"plans are compared at equal entries, these have different totals ({listed})")
    return dict(plans)


def _totals(plan: Plan) -> dict[str, int]:
    """Entries of each phase of a plan."""
    phases = {"prefill": plan.prefill, "decode": plan.decode}
    return {name: phase.total for name, phase in phases.items() if phase is not None}


def _length(plan: Plan) -> int | None:
    return plan.length if plan.scaling == "proportional" else None


def _listed(totals: dict[str, int]) -> str:
    return " and ".join(f"{total} in {name}" for name, total in totals.items())


def study(
    loaded: LoadedModel,
    plans: Mapping[str, Plan],
    names: Sequence[str],
    tasks: Sequence[Task],
    samples: int,
    seed: int = 0,
    batch: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> Study:
    """Run everything and summarise it; see `check_plans` and `Program.from_plan` for the errors."""
    programs: dict[str, Program] = {label: Program.from_plan(loaded.model, plan) for label, plan in plans.items()}
    subject = next(iter(programs))
    methods: dict[str, Any] = {
        FULL: full_cache(loaded.model), **programs, **baselines(loaded.model, programs[subject], tuple(names)),
    }  # fmt: skip
    results = run(loaded, methods, tasks, samples, seed, batch, progress)
    return Study(loaded.name, subject, results, summarize(results, subject, seed), seed)

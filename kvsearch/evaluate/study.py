"""One evaluation: plans, the full cache and baselines on the same samples, at the same entries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from kvsearch.errors import UsageError
from kvsearch.evaluate.baselines import BASELINES, baselines, full_cache
from kvsearch.evaluate.encoding import Coverage, encode_tasks, listed, most_tokens
from kvsearch.evaluate.protocol import QUESTION_AGNOSTIC, Protocol
from kvsearch.evaluate.runner import Progress, run_encoded
from kvsearch.evaluate.samples import Sample
from kvsearch.evaluate.statistics import Row, summarize
from kvsearch.models.loading import LoadedModel
from kvsearch.naming import suggest
from kvsearch.plan import Plan
from kvsearch.policies.checks import check_plan
from kvsearch.runtime import Program
from kvsearch.tasks.base import Task

FULL = "full"
LEAST_USEFUL = 0.1


class Held(NamedTuple):
    """Entries and bytes once context or prompt were compressed, the most entries until the reply was complete."""

    entries: float
    bytes: float
    most: float


@dataclass(frozen=True)
class Study:
    """Samples and summary of an evaluation. `subject` is the plan that the tables compare with the other methods.

    `summaries` holds, per plan, the rows whose differences are that plan's. `most_tokens` is what prompt and reply
    could have together.
    """

    model: str
    subject: str
    protocol: Protocol
    coverage: list[Coverage]
    samples: list[Sample]
    summaries: dict[str, list[Row]]
    seed: int
    most_tokens: int | None

    @property
    def rows(self) -> list[Row]:
        """Tasks, categories and the average, with the differences of the subject."""
        return self.summaries[self.subject]

    @property
    def doubt(self) -> str | None:
        """Why the comparison may say little, if it does."""
        full = self.rows[-1].scores[FULL].mean
        if full >= LEAST_USEFUL:
            return None
        return f"the full cache itself scores {full:.2f}: these questions cannot tell methods apart on this model"

    @property
    def notes(self) -> list[str]:
        """What was not asked, or not as it was written; nothing if all went in."""
        return [note for covered in self.coverage for note in _notes(covered, self.most_tokens)]

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(sample.method for sample in self.samples))

    def held(self, method: str) -> Held:
        """What `method` held in the cache, means over the questions."""
        mine = [sample for sample in self.samples if sample.method == method]
        return Held(*(fmean(getattr(sample, name) for sample in mine) for name in Held._fields))


def _notes(covered: Coverage, most_tokens: int | None) -> Iterator[str]:
    if covered.found < covered.wanted:
        yield f"{covered.task}: {covered.wanted} contexts were asked for, it has {covered.found}"
    if covered.truncated:
        yield (
            f"{covered.task}: the middle of {covered.truncated} of {covered.contexts} contexts was cut out, so that "
            f"prompt and reply fit {most_tokens} tokens"
        )
    if covered.excluded:
        yield f"{covered.task}: questions left out ({listed(covered.excluded)})"


def check_plans(
    plans: Mapping[str, Plan], paths: Sequence[Path], names: Sequence[str], subject: str | None = None
) -> dict[str, Plan]:
    """Find what is wrong with a request before a model is loaded.

    Raises:
        UsageError: two plans of one name, different totals, unknown policies or baselines, a subject that is no plan.
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
    if subject is not None and subject not in plans:
        raise UsageError(f"unknown plan {subject!r}{suggest(subject, list(plans))}: the subject is one of the plans")
    totals = {label: _totals(plan) for label, plan in plans.items()}
    if len({(*total.items(), plans[label].scaling, _length(plans[label])) for label, total in totals.items()}) > 1:
        told = ", ".join(f"{label}: {_listed(total)}" for label, total in totals.items())
        raise UsageError(f"plans are compared at equal entries, these have different totals ({told})")
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
    progress: Progress | None = None,
    *,
    protocol: Protocol = QUESTION_AGNOSTIC,
    max_length: int | None = None,
    subject: str | None = None,
) -> Study:
    """Run everything and summarise it; see `check_plans`, `encode_tasks` and `Program.from_plan` for the errors.

    `subject` (default: the first plan) is compared with the other methods, and lends "uniform" its policy.
    """
    programs: dict[str, Program] = {label: Program.from_plan(loaded.model, plan) for label, plan in plans.items()}
    subject = subject or next(iter(programs))
    methods = {FULL: full_cache(loaded.model), **programs, **baselines(loaded.model, programs[subject], tuple(names))}
    encoded = encode_tasks(loaded, tasks, samples, seed, max_length)
    results = run_encoded(loaded, methods, encoded, protocol, batch, progress)
    summaries = {label: summarize(results, label, seed) for label in programs}
    coverage, most = [task.coverage for task in encoded], most_tokens(loaded.model, max_length)
    return Study(loaded.name, subject, protocol, coverage, results, summaries, seed, most)

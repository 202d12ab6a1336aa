"""kvsearch headroom: could any plan keep the score at this ratio, and can these tasks tell methods apart?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from kvsearch.config.options import Option, Seeded
from kvsearch.jobs.groups import ASKED, DEFAULT_TASKS, WithModel, default_tasks
from kvsearch.jobs.public import job
from kvsearch.jobs.talk import Talk

if TYPE_CHECKING:
    from kvsearch.evaluation.statistics import Row
    from kvsearch.tasks.base import Task

FULL = "full"
MEANING = (
    "oracle: true importance for the questions to come, which it knows; of several allocations the best for a context",
    "agnostic oracle: the same over its own and up to 24 other questions, for what no method can know",
)


class HeadroomOptions(WithModel, Seeded):
    """At which ratio the oracle and simple policies evict, and what is asked."""

    job: ClassVar[str] = "headroom"

    ratio: Annotated[float, Field(gt=0, lt=1), Option("Share of the cache to evict, above 0 and below 1.")] = 0.8
    tasks: Annotated[str | None, Option("As for evaluate.", panel=ASKED, shown=DEFAULT_TASKS)] = None
    samples: Annotated[int, Field(ge=1), Option("Contexts per task.", panel=ASKED)] = 20
    length: Annotated[
        int | None,
        Field(ge=1),
        Option("As for evaluate.", panel=ASKED, shown="synthetic 1024, ruler 4096"),
    ] = None

    def find_tasks(self) -> list[Task]:
        """Return what is asked; see `kvsearch.tasks.catalog.find_tasks` for the errors."""
        from kvsearch.tasks.catalog import TaskOptions, find_tasks

        lengths = None if self.length is None else (self.length,)
        return find_tasks(self.tasks or default_tasks(self.model), TaskOptions(lengths=lengths))


@dataclass(frozen=True)
class Headroom:
    """Scores of the full cache, of oracles and of simple policies: a row per task, the mean of all last."""

    options: HeadroomOptions
    rows: list[Row]

    @property
    def methods(self) -> list[str]:
        """The names of everything that was compared."""
        return list(self.rows[-1].scores)

    @property
    def shares(self) -> dict[str, float]:
        """The mean score of each method as a share of the full cache's."""
        mean = {method: score.mean for method, score in self.rows[-1].scores.items()}
        return {method: score / mean[FULL] if mean[FULL] else 0.0 for method, score in mean.items()}

    def as_json(self) -> dict[str, Any]:
        """Return the scores by task and method."""
        scores = {row.task: {method: row.scores[method].mean for method in self.methods} for row in self.rows}
        stated = {"model": self.options.model, "ratio": self.options.ratio}
        return {**stated, "scores": scores, "share_of_full": self.shares}


@job(HeadroomOptions)
def dry_run(options: HeadroomOptions, talk: Talk) -> dict[str, Any]:  # noqa: ARG001 - as others have it
    """Return what would be asked, as JSON; UsageError if there are no such tasks."""
    names = [task.name for task in options.find_tasks()]
    return {"tasks": names, "ratio": options.ratio, "samples": options.samples}


@job(HeadroomOptions)
def headroom(options: HeadroomOptions, talk: Talk) -> Headroom:
    """Evict by true oracle importance, by simple policies and at random, and compare with the full cache.

    Raises:
        UsageError: there are no such tasks.
        IncompatibleError: the model cannot be loaded, a context does not fit it, or the full cache itself scores next
            to nothing.
    """
    from kvsearch.evaluation.compare import Settings, prepare
    from kvsearch.evaluation.headroom import headroom as measure
    from kvsearch.evaluation.statistics import summarize
    from kvsearch.strategies.compared import full_method
    from kvsearch.tasks.encode import contexts_of

    tasks, samples, seed = options.find_tasks(), options.samples, options.seed
    loaded = options.load(options.model, talk)
    full = prepare(loaded, [full_method(loaded)], FULL, tasks, Settings(samples, seed=seed))
    with talk.progress("batches of the full cache") as progress:
        full.require_answers(progress)
    with talk.progress("contexts") as progress:
        results = measure(loaded, tasks, options.ratio, samples, seed, progress)
    return Headroom(options, summarize(results, FULL, seed, contexts_of(full.encoded)))

"""kvsearch headroom: could any plan keep the score at this ratio, and can these tasks tell methods apart?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from kvsearch.config.options import Option, Seeded
from kvsearch.jobs.foretell import foretold
from kvsearch.jobs.groups import ASKED, DEFAULT_TASKS, WithModel, WithWorkers, default_tasks
from kvsearch.jobs.public import job
from kvsearch.jobs.talk import Talk
from kvsearch.plan.fields import Samples

if TYPE_CHECKING:
    from kvsearch.evaluation.compare import Evaluation
    from kvsearch.report.headroom import HeadroomResult
    from kvsearch.tasks.base import Task


class HeadroomOptions(WithModel, WithWorkers, Seeded):
    """At which ratio the oracle and simple policies evict, and what is asked."""

    job: ClassVar[str] = "headroom"

    ratio: Annotated[float, Field(gt=0, lt=1), Option("Share of the cache to evict, above 0 and below 1.")] = 0.8
    tasks: Annotated[str | None, Option("As for evaluate.", panel=ASKED, shown=DEFAULT_TASKS)] = None
    samples: Annotated[Samples, Option("Contexts per task.", panel=ASKED)] = 20
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


@job(HeadroomOptions, dry=True)
def dry_run(options: HeadroomOptions, talk: Talk) -> dict[str, Any]:
    """Return what would be asked, and how long the full cache takes for it, as JSON; errors as `headroom`."""
    full = _full(options, talk)
    stated = {"tasks": [task.task.name for task in full.encoded], "ratio": options.ratio, "samples": options.samples}
    return {**stated, **foretold(full.loaded, full.work, talk)}


@job(HeadroomOptions)
def headroom(options: HeadroomOptions, talk: Talk) -> HeadroomResult:
    """Evict by true oracle importance, by simple policies and at random, and compare with the full cache.

    Raises:
        UsageError: there are no such tasks.
        IncompatibleError: the model cannot be loaded, a context does not fit it, or the full cache itself scores next
            to nothing.
    """
    from kvsearch.evaluation.headroom import headroom as measure
    from kvsearch.evaluation.statistics import summarize
    from kvsearch.report.headroom import HeadroomResult
    from kvsearch.strategies.names import FULL
    from kvsearch.tasks.encode import contexts_of

    full, samples, seed = _full(options, talk), options.samples, options.seed
    tasks = [task.task for task in full.encoded]
    with talk.progress("batches of the full cache") as progress:
        full.require_answers(progress)
    with talk.progress("contexts") as progress:
        results = measure(full.loaded, tasks, options.ratio, samples, seed, progress)
    rows = summarize(results, FULL, seed, contexts_of(full.encoded))
    asked = tuple(task.coverage for task in full.encoded)
    return HeadroomResult(
        model=options.model, ratio=options.ratio, methods=tuple(rows[-1].scores), rows=tuple(rows), asked=asked
    )


def _full(options: HeadroomOptions, talk: Talk) -> Evaluation:
    """Return the evaluation of the full cache, with the model."""
    from kvsearch.evaluation.compare import Settings, prepare
    from kvsearch.strategies.compared import full_method
    from kvsearch.strategies.names import FULL

    tasks = options.find_tasks()
    loaded = options.load(options.model, talk)
    return prepare(loaded, [full_method(loaded)], FULL, tasks, Settings(options.samples, seed=options.seed))

"""kvsearch headroom: what can be kept of the score at this ratio, and can these tasks tell methods apart?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator

from kvsearch.config.options import Seeded
from kvsearch.core.fields import Samples
from kvsearch.evaluation.statistics import summarize
from kvsearch.jobs.groups import RATIO, SAMPLES_OPTION, WithModel, WithTasks, WithWorkers
from kvsearch.jobs.public import job
from kvsearch.jobs.reporter import Reporter
from kvsearch.plan import Size
from kvsearch.report.costs import Forecast
from kvsearch.results.evaluation import HeadroomResult
from kvsearch.strategies.names import FULL

if TYPE_CHECKING:
    from kvsearch.evaluation.compare import Evaluation


class HeadroomOptions(WithModel, WithWorkers, WithTasks, Seeded):
    """At which ratio is evicted, and what is asked."""

    ratio: Annotated[float, AfterValidator(lambda ratio: Size(ratio=ratio).ratio), RATIO] = 0.8
    samples: Annotated[Samples, SAMPLES_OPTION] = 20


@job(HeadroomOptions, dry=True)
def dry_run(options: HeadroomOptions, reporter: Reporter) -> Forecast:
    """Return what would be asked, and what that costs; errors as `headroom`."""
    from kvsearch.evaluation.headroom import importance_cost

    full = _full(options, reporter)
    stated = {"tasks": [task.task.name for task in full.encoded], "ratio": options.ratio, "samples": options.samples}
    stages = [full.cost("full cache"), importance_cost(full.loaded, full.encoded)]
    return Forecast(stated, stages, full.loaded.speed)


@job(HeadroomOptions)
def headroom(options: HeadroomOptions, reporter: Reporter) -> HeadroomResult:
    """Evict by true importance, by simple policies and at random, and compare with the full cache.

    Raises:
        UsageError: there are no such tasks.
        IncompatibleError: the model cannot be loaded, a context does not fit it, or the full cache itself scores next
            to nothing.
    """
    full = _full(options, reporter)
    from kvsearch.evaluation.headroom import headroom as measure
    from kvsearch.tasks.encode import contexts_of

    tasks = [task.task for task in full.encoded]
    with reporter.progress("batches of the full cache") as progress:
        full.require_answers(progress)
    with reporter.progress("contexts") as progress:
        results = measure(full.loaded, tasks, options.ratio, options.samples, options.seed, progress)
    rows = summarize(results, FULL, contexts_of(full.encoded))
    asked = tuple(task.coverage for task in full.encoded)
    return HeadroomResult(
        model=options.model, ratio=options.ratio, methods=tuple(rows[-1].scores), rows=tuple(rows), asked=asked
    )


def _full(options: HeadroomOptions, reporter: Reporter) -> Evaluation:
    """Return the evaluation of the full cache, with the model."""
    tasks = options.find_tasks(options.model)
    from kvsearch.evaluation.compare import Settings, Split, prepare
    from kvsearch.strategies.compared import full_method

    loaded = options.load(options.model, reporter)
    return prepare(loaded, [full_method(loaded)], FULL, Split(tasks, Settings(options.samples, seed=options.seed)))

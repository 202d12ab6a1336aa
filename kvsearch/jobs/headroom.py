"""kvsearch headroom: what can be kept of the score at this ratio, and can these tasks tell methods apart?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator

from kvsearch.config.options import Seeded, option
from kvsearch.core.fields import Samples
from kvsearch.evaluation.statistics import summarize
from kvsearch.jobs.groups import OUTPUT_OPTION, RATIO, SAMPLES_OPTION, WithModel, WithTasks, WithWorkers
from kvsearch.jobs.public import job
from kvsearch.jobs.reporter import Reporter, open_replies, warn_of_coverage
from kvsearch.plan import Size
from kvsearch.report.costs import Forecast
from kvsearch.results.evaluation import HeadroomResult
from kvsearch.runs.identity import REPORT
from kvsearch.runs.run import run_in, write_json
from kvsearch.strategies.names import FULL

if TYPE_CHECKING:
    from kvsearch.evaluation.compare import Evaluation


class HeadroomOptions(WithModel, WithWorkers, WithTasks, Seeded):
    """At which ratio is evicted, and what is asked."""

    ratio: Annotated[float, AfterValidator(lambda ratio: Size(ratio=ratio).ratio)] = option(0.8, RATIO)
    samples: Samples = option(20, SAMPLES_OPTION)
    output: Path | None = option(None, OUTPUT_OPTION)
    force: bool = option(False, "Start the run in --output anew.", recorded=False)


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

    With `output`, a run that is interrupted goes on where it stopped when the same call is repeated.

    Raises:
        UsageError: there are no such tasks, or another run is in `output`.
        IncompatibleError: the model cannot be loaded, a context does not fit it, or the full cache itself scores next
            to nothing.
    """
    full = _full(options, reporter)
    from kvsearch.evaluation.headroom import PROGRAMS
    from kvsearch.evaluation.headroom import headroom as measure
    from kvsearch.tasks.encode import contexts_of

    tasks = [task.task for task in full.encoded]
    config = full.stage_config("headroom", ratio=options.ratio).changed(options=options.recorded())
    with open_replies(options.output, config, (1 + PROGRAMS) * full.replies, reporter, options.force) as store:
        with reporter.progress("batches of the full cache") as progress:
            full.require_answers(progress, store)
        with reporter.progress("contexts") as progress:
            results = measure(full.loaded, tasks, options.ratio, options.samples, options.seed, progress, store)
        rows = summarize(results, FULL, contexts_of(full.encoded))
        asked = tuple(task.coverage for task in full.encoded)
        result = HeadroomResult(
            model=options.model, ratio=options.ratio, methods=tuple(rows[-1].scores), rows=tuple(rows), asked=asked
        )
        if options.output is not None:
            write_json(options.output / REPORT, result.as_json())
    return result


def _full(options: HeadroomOptions, reporter: Reporter) -> Evaluation:
    """Return the evaluation of the full cache, with the model."""
    tasks = options.find_tasks(options.model)
    if options.output is not None:
        run_in(options.output, "headroom")
    from kvsearch.evaluation.compare import Settings, Split, prepare
    from kvsearch.strategies.compared import full_method

    loaded = options.load(options.model, reporter)
    full = prepare(loaded, [full_method(loaded)], FULL, Split(tasks, Settings(options.samples, seed=options.seed)))
    warn_of_coverage(reporter, full.encoded)
    return full

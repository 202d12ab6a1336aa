"""What `kvsearch evolve` does once everything fits together: search, choose, report, and write it all down."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsearch.cli.common import Common, Progress
from kvsearch.errors import UsageError

if TYPE_CHECKING:
    from kvsearch.evaluation.compare import Evaluation
    from kvsearch.evaluation.reply_store import Ledger
    from kvsearch.search.evolve import Keep, PreparedSearch
    from kvsearch.search.executors.base import Executor
    from kvsearch.search.executors.cluster import RayWorkers
    from kvsearch.search.front import PreparedFront
    from kvsearch.search.ledger import SearchRun
    from kvsearch.search.loop import Watcher
    from kvsearch.search.settings import SearchLimits


@dataclass(frozen=True)
class Work:
    """What changes no result: when to stop, who evaluates (None: this process), bytes for prompts and passes."""

    limits: SearchLimits
    workers: RayWorkers | None
    max_memory: int | None

    def as_json(self) -> dict[str, Any]:
        """For the configuration of a run."""
        return {
            "limits": self.limits.model_dump(mode="json"),
            "workers": None if self.workers is None else asdict(self.workers),
        }


def parse_limits(evaluations: int | None, seconds: float | None, tokens: int | None) -> SearchLimits:
    """UsageError for limits out of range."""
    from pydantic import ValidationError

    from kvsearch.plan.parsing import describe_validation_error
    from kvsearch.search.settings import SearchLimits

    try:
        return SearchLimits(evaluations=evaluations, seconds=seconds, tokens=tokens)
    except ValidationError as error:
        raise UsageError(describe_validation_error(error, "the limits of the search")) from error


def foretell(prepared: PreparedSearch | PreparedFront, common: Common) -> None:
    """Print what would be searched."""
    first = _searches(prepared)[0]
    questions = {name: sum(task.coverage.questions for task in encoded) for name, encoded in first.encoded.items()}
    common.print_json({**_config(prepared), "questions": questions})


def deliver(
    prepared: PreparedSearch | PreparedFront, output: Path, work: Work, resume: bool, force: bool, common: Common
) -> None:
    """Search into the directory `output`, print what was found."""
    from kvsearch.cli.evolve_panel import watching
    from kvsearch.runs.identity import RunConfig
    from kvsearch.search.evolve import PreparedSearch
    from kvsearch.search.ledger import open_search, require_same

    config = RunConfig(job="evolve", content=_config(prepared), execution=work.as_json())
    if resume:
        require_same(output, config)
    # who evaluates comes first: with --force the old run is gone only once the new one can begin
    with (
        _evaluating(_searches(prepared)[0], prepared.cap, work, common) as executor,
        open_search(output, config, resume, force) as run,
        watching(common, run, work.limits) as watcher,
    ):
        if isinstance(prepared, PreparedSearch):
            _search_one(prepared, run, work, common, executor, watcher)
        else:
            _search_front(prepared, run, work, common, executor, watcher)


def _searches(prepared: PreparedSearch | PreparedFront) -> tuple[PreparedSearch, ...]:
    from kvsearch.search.evolve import PreparedSearch

    return (prepared,) if isinstance(prepared, PreparedSearch) else prepared.searches


def _config(prepared: PreparedSearch | PreparedFront) -> dict[str, Any]:
    """All that decides the result, as JSON."""
    from kvsearch.evaluation.identity import environment, metric_of, rows_hash

    searches = _searches(prepared)
    first = searches[0]
    starts = [{name: table.tolist() for name, table in one.starts.items()} for one in searches]
    return {
        **environment(first.loaded),
        "settings": first.settings.as_json(),
        "budgets": [one.settings.budget for one in searches],
        "policies": [{"name": one.name, "params": one.parameters()} for one in first.base.policies],
        "starts": starts,
        "asked": {"samples": first.asked.samples, "max_length": first.asked.max_length},
        "metrics": {task.task.name: metric_of(task.task) for task in first.encoded["search"]},
        "splits": {name: {task.task.name: rows_hash(task) for task in encoded}
                   for name, encoded in first.encoded.items()},
    }  # fmt: skip


def _search_one(
    prepared: PreparedSearch, run: SearchRun, work: Work, common: Common, executor: Executor, watcher: Watcher
) -> None:
    from kvsearch.plan import save_plan
    from kvsearch.report.search import as_json, decision, tables
    from kvsearch.runs.directory import write_json
    from kvsearch.search.evolve import Evolved
    from kvsearch.search.ledger import PLAN, REPORT

    outcome = prepared.search(executor, run.ledger, work.limits, watcher)
    executor.close()  # its memory is for the replies now
    choice = prepared.choose(outcome, _keep(run, common))
    save_plan(choice.plan, run.directory / PLAN, overwrite=True)
    evolved = Evolved(outcome, choice, prepared.report(choice, _keep(run, common)))
    told = as_json(prepared, evolved, run.ledger.spent)
    write_json(run.directory / REPORT, told)
    _show(told, tables(prepared, evolved), common)
    common.say(decision(evolved))
    common.say(f"{_spent(run)}; wrote {run.directory / PLAN} and {run.directory / REPORT}")


def _search_front(
    prepared: PreparedFront, run: SearchRun, work: Work, common: Common, executor: Executor, watcher: Watcher
) -> None:
    from kvsearch.plan import save_plan
    from kvsearch.report.search import decision, front_as_json, front_tables
    from kvsearch.runs.directory import write_json
    from kvsearch.search.ledger import FRONT

    points = prepared.run(executor, run.ledger, work.limits, watcher, _keep(run, common))
    for point in points:
        save_plan(point.evolved.choice.plan, run.directory / f"plan-{point.budget}.json", overwrite=True)
    told = front_as_json(points, run.ledger.spent)
    write_json(run.directory / FRONT, told)
    _show(told, front_tables(points), common)
    for point in points:
        common.say(f"{point.budget} entries per kv head: {decision(point.evolved)}")
    common.say(f"{_spent(run)}; wrote {run.directory / FRONT} and a plan for each budget")


@contextmanager
def _evaluating(prepared: PreparedSearch, cap: int, work: Work, common: Common) -> Iterator[Executor]:
    """Who evaluates candidates, with the prompts read."""
    from kvsearch.models.loading import LoadOptions
    from kvsearch.search.workers import make_executor

    who = "" if work.workers is None else f" by each of {work.workers.workers} workers"
    common.say(f"reading {len(prepared.samples)} questions once for all candidates{who}")
    options = LoadOptions(
        dtype=common.dtype, revision=common.revision, trust_remote_code=common.trust_remote_code, offline=common.offline
    )
    with common.progress("prompts") as progress:
        executor = make_executor(prepared, options, work.workers, cap, work.max_memory, progress)
    with executor:
        yield executor


def _keep(run: SearchRun, common: Common) -> Keep:
    """Keeps the replies of choice and report in the directory of the run; those of other finalists are thrown away."""

    @contextmanager
    def keep(stage: str, evaluation: Evaluation) -> Iterator[tuple[Ledger, Progress]]:
        from kvsearch.cli.strategies import kept_replies
        from kvsearch.evaluation.kept import begins_anew

        place, config = run.directory / stage, evaluation.config()
        anew, again = begins_anew(place, config, True), "give the same command with --resume to go on"
        with (
            kept_replies(place, config, evaluation.replies, anew, common, again) as ledger,
            common.progress(f"{stage}: batches") as progress,
        ):
            yield ledger, progress

    return keep


def _spent(run: SearchRun) -> str:
    spent = run.ledger.spent
    return f"{spent.evaluations} candidates, {spent.tokens:,} tokens, {spent.seconds:.0f} s"


def _show(told: dict[str, Any], tables: list[Any], common: Common) -> None:
    from kvsearch.report.table_files import on_screen

    if common.as_json:
        common.print_json(told)
        return
    for table in tables:
        common.out.print(on_screen(table))

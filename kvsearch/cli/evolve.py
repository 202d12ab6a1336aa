"""kvsearch evolve: search the budgets on a task, choose on fresh questions, report on others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsearch.cli import evaluate_options as own
from kvsearch.cli import task_options as asked
from kvsearch.cli.common import Common, Progress, command
from kvsearch.errors import UsageError

if TYPE_CHECKING:
    from kvsearch.evaluate.ledger import Ledger
    from kvsearch.evaluate.study import Evaluation
    from kvsearch.models.loading import LoadedModel
    from kvsearch.search.contest import Base
    from kvsearch.search.evolve import PreparedSearch
    from kvsearch.search.run_directory import SearchRun
    from kvsearch.search.settings import Limits

SPLITS = "train", "select", "report"
WHAT, LIMITS, WORK = "What is searched", "When to stop", "Who does the work"

Starts = Annotated[
    list[Path] | None,
    typer.Option(
        "--start",
        help="A plan to start from; repeatable. The policies of the first one are searched, unless --policy is given.",
        show_default=False,
        rich_help_panel=WHAT,
    ),
]
Policy = Annotated[
    str | None,
    typer.Option(
        help="Eviction policy of all layers.",
        show_default="snapkv, or those of the first --start",
        rich_help_panel=WHAT,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="A policy parameter, as in --set window=16; repeatable.", rich_help_panel=WHAT),
]
Space = Annotated[
    str,
    typer.Option(
        help="groups: one group of layers after the other; layers: all at once; heads: multipliers around the first "
        "--start; basis: the directions in which the --start plans differ.",
        rich_help_panel=WHAT,
    ),
]
GroupSize = Annotated[int, typer.Option("--group-size", help="Layers of a group.", min=1, rich_help_panel=WHAT)]
Optimiser = Annotated[str, typer.Option(help="cma, random or coordinate.", rich_help_panel=WHAT)]
Objective = Annotated[
    str,
    typer.Option(
        help="What the search lowers or raises: nll or kl of the right answers (cheap), or metric, the task's own of "
        "free replies. The best are judged by the metric in any case.",
        rich_help_panel=WHAT,
    ),
]
Parity = Annotated[
    bool, typer.Option("--parity", help="The paper's literal choices (soft total, cache term).", rich_help_panel=WHAT)
]
Whole = Annotated[int | None, typer.Option(min=1, show_default=False, rich_help_panel=LIMITS)]


@command
def evolve(
    model: own.Model,
    common: Common,
    budget: Annotated[int, typer.Option(help="Entries to keep per kv head, on average.", min=1, show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory of the run.", show_default=False)],
    starts: Starts = None,
    policy: Policy = None,
    settings: Settings = None,
    space: Space = "groups",
    group_size: GroupSize = 8,
    optimiser: Optimiser = "cma",
    objective: Objective = "nll",
    generations: Annotated[int, typer.Option(help="Of each group.", min=1, rich_help_panel=WHAT)] = 10,
    population: Annotated[
        int | None,
        typer.Option(help="Of each generation.", min=2, show_default="4 + 3 ln dimension", rich_help_panel=WHAT),
    ] = None,
    sigma: Annotated[float, typer.Option(help="First step, in units of the budget.", rich_help_panel=WHAT)] = 0.3,
    parity: Parity = False,
    minibatch: Annotated[
        int | None,
        typer.Option(help="Questions that a generation sees.", min=1, show_default="all", rich_help_panel=WHAT),
    ] = None,
    finalists: Annotated[
        int, typer.Option(help="Candidates that are judged by the metric at the end.", min=1, rich_help_panel=WHAT)
    ] = 8,
    tasks: asked.Tasks = "synthetic",
    length: asked.Length = None,
    data: asked.Data = None,
    data_revision: asked.DataRevision = None,
    prompts: asked.Prompts = None,
    haystack: asked.Haystack = None,
    squad: asked.Squad = None,
    hotpot: asked.Hotpot = None,
    depths: asked.Depths = None,
    shots: asked.Shots = None,
    shots_from: asked.ShotsFrom = None,
    metric: asked.Metric = None,
    protocol: Annotated[
        str, typer.Option(help="question-agnostic or question-aware.", rich_help_panel=own.ASKED)
    ] = "question-agnostic",
    samples: Annotated[
        int, typer.Option(help="Contexts per task in each of the three splits.", min=1, rich_help_panel=own.ASKED)
    ] = 10,
    max_length: own.MaxLength = None,
    batch: own.Batch = 8,
    max_memory: own.MaxMemory = None,
    max_evals: Annotated[
        int | None, typer.Option(help="Different candidates.", min=1, show_default=False, rich_help_panel=LIMITS)
    ] = None,
    max_time: Annotated[
        float | None, typer.Option(help="Seconds of search, all sessions.", show_default=False, rich_help_panel=LIMITS)
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens read under candidates.", min=1, show_default=False, rich_help_panel=LIMITS),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Evaluate on so many Ray workers.", min=1, show_default="this process", rich_help_panel=WORK),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the directory.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Start anew, whatever run is in the directory.")] = False,
) -> None:
    """Search the budgets that serve a task best, at an exact total; never worse than what it starts from.

    Searched on split train, chosen on split select, reported on split report. Writes plan.json, report.json and a
    ledger to the directory; an interrupted search goes on with --resume.

    Example: kvsearch evolve bundled --budget 64 --set window=8 --group-size 2 -o runs/evolve
    """
    from pydantic import ValidationError

    from kvsearch.evaluate.protocol import find_protocol
    from kvsearch.evaluate.study import Settings as Asked
    from kvsearch.plan.parsing import describe_validation_error
    from kvsearch.search.evolve import Splits, prepare_search
    from kvsearch.search.run_directory import check_directory, open_search
    from kvsearch.search.settings import EvolveSettings, Limits
    from kvsearch.tasks.catalog import find_tasks

    try:
        how = EvolveSettings.model_validate(
            {
                "budget": budget, "space": space, "group_size": group_size, "optimiser": optimiser,
                "objective": objective, "generations": generations, "population": population, "sigma": sigma,
                "parity": parity, "protocol": find_protocol(protocol), "minibatch": minibatch,
                "finalists": finalists, "seed": common.seed,
            }
        )  # fmt: skip
        limits = Limits(evaluations=max_evals, seconds=max_time, tokens=max_tokens)
    except ValidationError as error:
        raise UsageError(describe_validation_error(error, "the search")) from error
    options = asked.task_options(
        length=length, data=data, data_revision=data_revision, prompts=prompts, haystack=haystack, squad=squad,
        hotpot=hotpot, depths=depths, shots=shots, shots_from=shots_from, metric=metric,
    )  # fmt: skip
    splits = Splits(*(find_tasks(tasks, replace(options, split=split)) for split in SPLITS))
    bytes_ = own.memory_bytes(max_memory)
    asking = Asked(samples, how.protocol, common.seed, batch, bytes_, max_length)
    check_directory(output, resume, force)
    given = _plans(starts)
    chosen = _policy(policy, settings, given)
    loaded = common.load(model)
    base = _base(loaded, chosen, given)
    prepared = prepare_search(base, how, splits, asking, given)
    if common.dry_run:
        common.print_json(_foretold(prepared))
        return
    config = {**_config(prepared), "execution": {"limits": limits.model_dump(mode="json"), "workers": workers}}
    with open_search(output, config, resume, force) as run:
        _search(prepared, run, limits, workers, bytes_, common)


def _plans(paths: list[Path] | None) -> dict[str, Any]:
    """Start plans by the names of their files."""
    from kvsearch.cli.common import checked_plan

    found: dict[str, Any] = {}
    for path in paths or ():
        if path.stem in found:
            raise UsageError(f"two start plans are called {path.stem}: rename one of the files")
        found[path.stem] = checked_plan(path)
    return found


def _policy(name: str | None, settings: list[str] | None, plans: dict[str, Any]) -> Any:
    """The policy that was typed; None: those of the first start plan."""
    from kvsearch.calibrate.recipe import parse_setting
    from kvsearch.policies import create_policy

    if name is None and plans:
        if settings:
            raise UsageError("--set is for a --policy: the policies of --start plans have their own parameters")
        return None
    return create_policy(name or "snapkv", dict(parse_setting(item) for item in settings or ()))


def _base(loaded: LoadedModel, policy: Any, plans: dict[str, Any]) -> Base:
    from kvsearch.search.contest import Base

    return Base.of(loaded, next(iter(plans.values())) if policy is None else policy)


def _foretold(prepared: PreparedSearch) -> dict[str, Any]:
    """What would be searched."""
    return {
        **_config(prepared),
        "questions": {
            name: sum(task.coverage.questions for task in encoded) for name, encoded in prepared.encoded.items()
        },
    }


def _config(prepared: PreparedSearch) -> dict[str, Any]:
    """All that decides the result, as JSON."""
    from kvsearch.evaluate.identity import environment, rows_hash

    return {
        **environment(prepared.loaded),
        "settings": prepared.settings.as_json(),
        "policies": [{"name": one.name, "params": one.parameters()} for one in prepared.base.policies],
        "starts": {name: table.tolist() for name, table in prepared.starts.items()},
        "splits": {name: {task.task.name: rows_hash(task) for task in encoded}
                   for name, encoded in prepared.encoded.items()},
    }  # fmt: skip


def _search(
    prepared: PreparedSearch,
    run: SearchRun,
    limits: Limits,
    workers: int | None,
    max_memory: int | None,
    common: Common,
) -> None:
    from kvsearch.cli.evolve_panel import watching
    from kvsearch.evaluate.table_files import on_screen
    from kvsearch.search.evolve import BankEvaluator
    from kvsearch.search.executors.serial import SerialExecutor
    from kvsearch.search.report import as_json, decision, tables

    common.say(f"reading {len(prepared.samples)} questions once for all candidates")
    with common.progress("prompts") as progress:
        bank = prepared.bank(max_memory, progress)
    with SerialExecutor(BankEvaluator(bank)) as executor, watching(common, run, limits) as watcher:
        outcome = prepared.search(executor, run.ledger, limits, watcher)
    spent = run.ledger.spent
    common.say(f"search ended: {outcome.ended}; {spent.evaluations} candidates, {spent.seconds:.0f} s")

    @contextmanager
    def keep(stage: str, evaluation: Evaluation) -> Iterator[tuple[Ledger, Progress]]:
        from kvsearch.cli.strategies import kept_replies

        with (
            kept_replies(run.directory / stage, evaluation.config(), evaluation.replies, True, common) as ledger,
            common.progress(f"{stage}: batches") as progress,
        ):
            yield ledger, progress

    choice = prepared.choose(outcome, keep)
    run.write_plan(choice.plan)
    from kvsearch.search.evolve import Evolved

    evolved = Evolved(outcome, choice, prepared.report(choice, keep))
    told = as_json(prepared, evolved, spent)
    run.write_report(told)
    if common.as_json:
        common.print_json(told)
    else:
        for table in tables(prepared, evolved):
            common.out.print(on_screen(table))
    common.say(decision(evolved))
    common.say(f"wrote {run.directory / 'plan.json'} and {run.directory / 'report.json'}")

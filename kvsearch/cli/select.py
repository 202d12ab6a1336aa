"""kvsearch select: choose the strategy of a calibration on fresh questions, or fall back to the best baseline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsearch.cli import evaluate_options as own
from kvsearch.cli import task_options as asked
from kvsearch.cli.common import Common, command
from kvsearch.cli.plan_output import Output, check_output
from kvsearch.cli.strategies import Directory, ModelName, comma_separated, load_calibrated, load_signals
from kvsearch.errors import UsageError
from kvsearch.jobs.stages import kept_replies

if TYPE_CHECKING:
    from kvsearch.choose.select import Kept, PreparedSelection
    from kvsearch.choose.selection import Selection
    from kvsearch.evaluation.compare import Evaluation
    from kvsearch.plan import Profile, Size

ALL = "all"
SPLITS = "select", "report"
CHOICE = "What is chosen from, and how"

Budget = Annotated[
    int | None,
    typer.Option(help="Entries to keep per kv head, on average.", min=1, show_default="the one that was measured"),
]
Ratio = Annotated[
    float | None, typer.Option(help="Share of the cache to evict, 0 to 1, in place of a budget.", show_default=False)
]
Phases = Annotated[
    str,
    typer.Option(
        help="When to evict: prefill, decode or both; all tries the three, each against baselines of its own phases.",
        rich_help_panel=CHOICE,
    ),
]
Explore = Annotated[
    str,
    typer.Option(
        metavar="LEVEL",
        help="Candidates: paper (the paper's signals), standard, or full (every signal for every use).",
        rich_help_panel=CHOICE,
    ),
]
Routes = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...",
        help="Only these routes: cosine, error, ppl, nll, a pattern (in all layers), none (every pattern alone).",
        show_default="those of --explore",
        rich_help_panel=CHOICE,
    ),
]
Allocators = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...",
        help="Only these budgets: uniform, pyramid, curves, curves-joint, or a signal such as entropy or nll-chosen, "
        "also to a power: nll-chosen^2, nll-chosen^0.5.",
        show_default="those of --explore",
        rich_help_panel=CHOICE,
    ),
]
Top = Annotated[int, typer.Option(help="Candidates that reach the second stage.", rich_help_panel=CHOICE)]
Margin = Annotated[
    float | None,
    typer.Option(
        help="Accept a mean lead above this in the second stage, whether or not it may be chance; 0.01 is one point.",
        show_default="a lead beyond chance",
        rich_help_panel=CHOICE,
    ),
]
Run = Annotated[
    Path | None,
    typer.Option(
        "--run",
        metavar="DIR2",
        help="Keep replies and selection.json here; the same command goes on where it stopped.",
        show_default="DIR/selection/SIZE-PROTOCOL-PHASES",
    ),
]
Force = Annotated[
    bool, typer.Option("--force", help="Replace the plan file, and replies to other questions in the run's directory.")
]
Samples = Annotated[
    int, typer.Option(help="Contexts per task in each of the two splits.", min=2, rich_help_panel=own.ASKED)
]


@command
def select(
    *,
    directory: Directory,
    output: Output,
    common: Common,
    model: ModelName = None,
    budget: Budget = None,
    ratio: Ratio = None,
    phases: Phases = "prefill",
    explore: Explore = "standard",
    routes: Routes = None,
    allocators: Allocators = None,
    top: Top = 5,
    margin: Margin = None,
    tasks: asked.Tasks = "synthetic",
    length: asked.Length = None,
    details: asked.TaskDetails,
    protocol: Annotated[
        str | None,
        typer.Option(
            help="As for evaluate: question-agnostic or question-aware.",
            show_default="as calibrated",
            rich_help_panel=own.ASKED,
        ),
    ] = None,
    samples: Samples = 20,
    max_length: own.MaxLength = None,
    batch: own.Batch = 8,
    max_memory: own.MaxMemory = None,
    run: Run = None,
    force: Force = False,
) -> None:
    """Choose the best strategy of a PolyKV calibration, unless a single-policy baseline is as good: then choose that.

    All candidates and baselines answer the first half of split select, the best of them the other half. A strategy is
    written only if it leads the best baseline there by more than chance. What is written is reported on split report.

    Example: kvsearch select runs/polykv --budget 64 -o plan.json
    """
    from kvsearch.choose.acceptance import Rule
    from kvsearch.choose.candidates import explore as find_explored
    from kvsearch.choose.select import prepare_selection
    from kvsearch.choose.splits import Questions
    from kvsearch.evaluation.compare import Settings
    from kvsearch.evaluation.reply_store import check_place
    from kvsearch.plan.protocol import find_protocol
    from kvsearch.runs.lock import locked, refuse_locked
    from kvsearch.signals.table import SignalTable
    from kvsearch.tasks.catalog import find_tasks

    profile = load_signals(directory)
    rule, size, when = Rule(top, margin=margin), _size(profile, budget, ratio), _phase_settings(phases)
    explored = find_explored(
        profile, size, explore, comma_separated("--routes", routes), comma_separated("--allocators", allocators)
    )
    options = details.options(length)
    questions = Questions(*(find_tasks(tasks, replace(options, split=split)) for split in SPLITS))
    how = Settings(
        samples, find_protocol(protocol or SignalTable(profile).axes.protocol), common.seed, batch,
        own.memory_bytes(max_memory), max_length,
    )  # fmt: skip
    check_output(output, force)
    place = run or directory / "selection" / f"{size.budget or size.ratio}-{how.protocol}-{phases}"
    check_place(place)
    refuse_locked(place)
    loaded = load_calibrated(common, directory, model, profile)
    prepared = prepare_selection(loaded, profile, size, questions, how, when, explored, rule)
    if common.dry_run:
        _foretell(prepared, place, common)
        return

    def keep(stage: str, evaluation: Evaluation) -> Kept:
        kept, config = place / stage, prepared.config(evaluation)
        told = f"{kept.parent.name}, {kept.name}: batches"
        return kept_replies(kept, config, evaluation.replies, force, common, told)  # type: ignore[arg-type]

    with locked(place):
        _deliver(prepared.run(keep), output, place, force, common)


def _size(profile: Profile, budget: int | None, ratio: float | None) -> Size:
    """The size that was typed, or the one that was measured."""
    from kvsearch.plan import Size
    from kvsearch.signals.table import SignalTable

    measured = SignalTable(profile).axes.budgets
    if budget is not None or ratio is not None:
        return Size(budget, ratio)
    if len(measured) > 1:
        known = ", ".join(map(str, measured))
        raise UsageError(f"signals were measured at {known} entries per kv head: say how many to keep with --budget")
    return Size(budget=measured[0])


def _phase_settings(phases: str) -> tuple[str, ...]:
    from kvsearch.naming import suggest
    from kvsearch.plan import PHASES

    if phases not in (*PHASES, ALL):
        raise UsageError(f"unknown phases {phases!r}{suggest(phases, [*PHASES, ALL])}")
    return tuple(PHASES) if phases == ALL else (phases,)


def _foretell(prepared: PreparedSelection, place: Path, common: Common) -> None:
    from kvsearch.choose.candidates import Field

    def counted(field: Field) -> dict[str, Any]:
        return {"candidates": len(field.candidates), "baselines": list(field.baselines), "notes": list(field.notes)}

    told = {contest.field.phases: counted(contest.field) for contest in prepared.evaluations}
    common.print_json({"phases": told, "most_replies": prepared.replies, "run": str(place)})


def _deliver(result: Selection, output: Path, place: Path, force: bool, common: Common) -> None:
    """Write the plan and selection.json, and print tables or JSON."""
    from kvsearch.plan import canonical_json, save_plan
    from kvsearch.plan.files import atomic_write
    from kvsearch.report.selection import FILE, as_json, tables
    from kvsearch.report.table import on_screen
    from kvsearch.runtime.plan_checks import check_plan

    told = as_json(result)
    check_plan(result.plan, f"the plan for {output}")
    save_plan(result.plan, output, overwrite=force)
    atomic_write(place / FILE, canonical_json(told))
    if common.as_json:
        common.print_json({**told, "plan": str(output)})
    else:
        for table in tables(result):
            common.out.print(on_screen(table))
    common.say(f"wrote {output} and {place / FILE}")

"""kvsearch validate: find out which signals of a PolyKV calibration are worth following."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsearch.cli import evaluate_options as how_asked
from kvsearch.cli import strategies as own
from kvsearch.cli import task_options as asked
from kvsearch.cli.common import Common, command
from kvsearch.errors import UsageError
from kvsearch.jobs.stages import kept_replies

if TYPE_CHECKING:
    from kvsearch.choose.validate import PreparedValidation
    from kvsearch.choose.verdicts import Validation

PANEL, REPLIES = "What is judged", "validation"

Phases = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...",
        help="When strategies evict: prefill, decode, both; each is judged by itself.",
        show_default="all that were measured",
        rich_help_panel=PANEL,
    ),
]
Signals = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...",
        help="Signals to judge, as routes or for budgets: cosine, ppl, entropy, error, nll, ppl-chosen and others; "
        "route:NAME and budgets:NAME say which of the two.",
        show_default="cosine,ppl,entropy, as far as they were measured",
        rich_help_panel=PANEL,
    ),
]
Permutations = Annotated[int, typer.Option(help="Random controls of every signal, at least 5.", rich_help_panel=PANEL)]
Split = Annotated[
    str,
    typer.Option(help="Part of the examples: select or train, never what is reported on.", rich_help_panel=asked.PANEL),
]
ProtocolName = Annotated[
    str | None,
    typer.Option(
        help="question-agnostic or question-aware; see `evaluate`.",
        show_default="that of the calibration",
        rich_help_panel=how_asked.ASKED,
    ),
]


@command
def validate(
    *,
    directory: own.Directory,
    common: Common,
    model: own.ModelName = None,
    budget: own.Budget = None,
    ratio: own.Ratio = None,
    phases: Phases = None,
    signals: Signals = None,
    permutations: Permutations = 5,
    tasks: asked.Tasks = "synthetic",
    length: asked.Length = None,
    split: Split = "select",
    details: asked.TaskDetails,
    protocol: ProtocolName = None,
    samples: how_asked.Samples = 20,
    max_length: how_asked.MaxLength = None,
    batch: how_asked.Batch = 8,
    max_memory: how_asked.MaxMemory = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace what was found, and replies, about other questions or another profile."),
    ] = False,
) -> None:
    """Score the strategy of every signal against its inverse, a uniform strategy and random ones of the same size.

    A signal is useful if its strategy is better than its inverse, and than the uniform strategy or random ones by more
    than strategies differ by chance; harmful if it is worse than the uniform one; else useless. What was found is kept
    in DIR/validation.json, and finished replies in DIR/validation, so the same command goes on where it stopped.

    Example: kvsearch validate runs/polykv --samples 40
    """
    from kvsearch.choose.splits import refuse_reported
    from kvsearch.choose.validate import check_permutations, find_uses, prepare_validation
    from kvsearch.choose.verdicts import FILE
    from kvsearch.evaluation.compare import Settings
    from kvsearch.plan.protocol import find_protocol
    from kvsearch.runs.lock import locked, refuse_locked
    from kvsearch.signals.table import SignalTable
    from kvsearch.tasks.catalog import find_tasks

    check_permutations(permutations)
    options = details.options(length, split)
    chosen = find_tasks(tasks, options)
    refuse_reported(chosen)
    profile = own.load_signals(directory)
    table = SignalTable(profile)
    names = own.comma_separated("--signals", signals), own.comma_separated("--phases", phases)
    uses = find_uses(table, *names)
    sizes = own.sizes_of(profile, budget, ratio)
    memory = how_asked.memory_bytes(max_memory)
    protocol_used = find_protocol(protocol or table.axes.protocol)
    settings = Settings(samples, protocol_used, common.seed, batch, memory, max_length)
    refuse_locked(directory)
    loaded = own.load_calibrated(common, directory, model, profile)
    prepared = [prepare_validation(loaded, profile, size, chosen, settings, uses, permutations) for size in sizes]
    for note in (note for one in prepared for note in one.notes):
        common.warn(note)
    if common.dry_run:
        _before(directory / FILE, prepared[0], force)
        common.print_json(_to_do(prepared))
        return
    with locked(directory):
        before = _before(directory / FILE, prepared[0], force)
        found = _found(prepared[0], before, directory, force, common)
        for one in prepared[1:]:
            found = _found(one, found, directory, force, common)
    _show(found, prepared, directory / FILE, common)


def _to_do(prepared: Sequence[PreparedValidation]) -> dict[str, object]:
    conditions = prepared[0].conditions
    sizes = [
        {
            "budget": one.budget, "ratio": one.size.ratio, "strategies": one.strategies,
            "replies": one.evaluation.replies,
        }
        for one in prepared
    ]  # fmt: skip
    return {
        "tasks": list(conditions.tasks),
        "split": conditions.split,
        "protocol": conditions.protocol,
        "signals": [use._asdict() for use in prepared[0].compared],
        "budgets": sizes,
    }


def _found(
    one: PreparedValidation, before: Validation | None, directory: Path, force: bool, common: Common
) -> Validation:
    """Run one size; what was found so far is in the file when this returns."""
    from kvsearch.choose.verdicts import FILE, save_validation

    place = directory / REPLIES / f"{_slug(one)}-{one.evaluation.settings.protocol}"
    needed = one.evaluation.replies
    common.say(
        f"{one.strategies} strategies and the full cache at {one.budget:g} entries per kv head: {needed} replies"
    )
    with kept_replies(place, one.config(), needed, force, common) as (store, progress):  # type: ignore[arg-type]
        result = one.run(progress, store)
    found = result if before is None else result.merged(before)
    save_validation(found, directory / FILE)
    return found


def _before(path: Path, prepared: PreparedValidation, force: bool) -> Validation | None:
    """What the file has already; with `force`, only if it can be read and was found under the same conditions."""
    from kvsearch.choose.verdicts import load_validation

    try:
        found = load_validation(path)
    except UsageError:
        if force:
            return None
        raise
    changed = None if found is None else prepared.conditions.difference(found)
    if changed is None or force:
        return found if changed is None else None
    raise UsageError(f"{path} is about other questions or another profile: {changed}; --force replaces it")


def _show(found: Validation, prepared: Sequence[PreparedValidation], path: Path, common: Common) -> None:
    from kvsearch.choose.verdicts import as_json
    from kvsearch.report.validation import validation_tables, verdict_lines

    sizes = [(one.budget, one.size.ratio) for one in prepared]
    now = [at for at in found.budgets if (at.budget, at.ratio) in sizes]
    for at in now:
        if at.doubt is not None:
            common.warn(at.doubt)
    if common.as_json:
        common.print_json(as_json(found))
    else:
        for at in now:
            for table in validation_tables(found, at):
                common.out.print(table)
            for line in verdict_lines(at):
                common.out.print(line, markup=False, soft_wrap=True)
    others = ", ".join(at.size for at in found.budgets if at not in now)
    common.say(f"kept in {path}" + (f", beside what was found before at {others}" if others else ""))


def _slug(prepared: PreparedValidation) -> str:
    """The size in the name of a directory."""
    size = prepared.size
    return str(size.budget) if size.budget is not None else f"ratio-{size.ratio}"

"""kvsearch validate: find out which signals of a PolyKV calibration are worth following."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from kvsearch.config.options import Option
from kvsearch.errors import UsageError
from kvsearch.jobs.calibrated import OnSignals, load_signals
from kvsearch.jobs.foretell import foretold
from kvsearch.jobs.groups import BUDGET, TASKS, Names
from kvsearch.jobs.public import job
from kvsearch.jobs.stages import FINISHED, kept_replies
from kvsearch.jobs.talk import Talk

if TYPE_CHECKING:
    from kvsearch.choose.validate import PreparedValidation
    from kvsearch.choose.verdicts import AtBudget, Validation

JUDGED, REPLIES = "What is judged", "validation"


class ValidateOptions(OnSignals):
    """Which signals are judged, at which sizes, and by which questions."""

    job: ClassVar[str] = "validate"

    budget: Annotated[int | None, Field(ge=1), replace(BUDGET, shown="those that were measured, one by one")] = None
    phases: Annotated[
        Names | None,
        Option(
            "When strategies evict: prefill, decode, both; each is judged by itself.",
            metavar="NAME,...",
            panel=JUDGED,
            shown="all that were measured",
        ),
    ] = None
    signals: Annotated[
        Names | None,
        Option(
            "Signals to judge, as routes or for budgets: cosine, ppl, entropy, error, nll, ppl-chosen and others; "
            "route:NAME and budgets:NAME say which of the two.",
            metavar="NAME,...",
            panel=JUDGED,
            shown="routes cosine,ppl and budgets entropy,ppl-chosen, as far as they were measured",
        ),
    ] = None
    permutations: Annotated[
        int,
        Option(
            "Random controls of every signal, at least 5; of budgets all other orders of the layers, if these are no "
            "more. From 19 on the rank among them decides.",
            panel=JUDGED,
        ),
    ] = 5
    split: Annotated[str, Option("Part of the examples: select or train, never what is reported on.", panel=TASKS)] = (
        "select"
    )
    force: Annotated[
        bool,
        Option("Replace what was found, and replies, about other questions or another profile.", recorded=False),
    ] = False

    @property
    def directories(self) -> tuple[Path, ...]:
        """See `JobOptions.directories`; one that is not there is not made."""
        return (self.directory,) if self.directory.is_dir() else ()


@dataclass(frozen=True)
class Validated:
    """All verdicts that the file at `path` has now; those at the sizes in `now` are of this run."""

    found: Validation
    now: tuple[AtBudget, ...]
    path: Path

    def as_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        from kvsearch.choose.verdicts import as_json

        return as_json(self.found)


@job(ValidateOptions, dry=True)
def dry_run(options: ValidateOptions, talk: Talk) -> dict[str, Any]:
    """Return what would be judged and asked, as JSON; errors as `validate` before anything is asked."""
    from kvsearch.models.speed import Work

    prepared = _prepared(options, talk)
    _found_before(prepared[0], options)
    conditions = prepared[0].conditions
    work = sum((one.evaluation.work for one in prepared), Work(0, 0))
    return {
        **foretold(prepared[0].evaluation.loaded, work, talk),
        "tasks": list(conditions.tasks),
        "split": conditions.split,
        "protocol": conditions.protocol,
        "signals": [use._asdict() for use in prepared[0].compared],
        "budgets": [
            {
                "budget": one.budget, "ratio": one.size.ratio, "strategies": one.strategies,
                "replies": one.evaluation.replies,
            }
            for one in prepared
        ],
    }  # fmt: skip


@job(ValidateOptions)
def validate(options: ValidateOptions, talk: Talk) -> Validated:
    """Score the strategy of every signal against its inverse, a uniform strategy and random ones of the same size.

    What was found is kept in the directory of the calibration, and finished replies beside it, so the same call goes on
    where it stopped.

    Raises:
        UsageError: no calibration, signals that were not measured, too few questions or controls, or another validation
            that is kept there.
        IncompatibleError: model, profile and questions do not fit together, or the full cache itself scores next to
            nothing.
    """
    from kvsearch.choose.verdicts import FILE, save_validation
    from kvsearch.runs.sums import finish, unfinish

    prepared = _prepared(options, talk)
    path, protocol = options.directory / FILE, prepared[0].evaluation.settings.protocol
    before = found = _found_before(prepared[0], options)
    unfinish(options.directory, (FILE, REPLIES))
    for one in prepared:
        size = str(one.size.budget) if one.size.budget is not None else f"ratio-{one.size.ratio}"
        replies = one.evaluation.replies
        many = f"{one.strategies} strategies and the full cache"
        talk.say(f"{many} at {one.budget:g} entries per kv head: {replies} replies")
        place = options.directory / REPLIES / f"{size}-{protocol}"
        with kept_replies(place, one.config().with_options(options.recorded()), replies, options.force, talk) as (
            store,
            progress,
        ):
            one.evaluation.require_answers(progress, store)
            result = one.run(progress, store)
        found = so_far = result if found is None else result.merged(found)
        save_validation(so_far, path)
    finish(options.directory, (FILE, REPLIES))
    if found == before:
        talk.say(FINISHED)
    sizes = [(one.budget, one.size.ratio) for one in prepared]
    return Validated(so_far, tuple(at for at in so_far.budgets if (at.budget, at.ratio) in sizes), path)


def _prepared(options: ValidateOptions, talk: Talk) -> list[PreparedValidation]:
    """Check everything and load the model; return what is to be judged at every size."""
    from kvsearch.choose.splits import refuse_reported
    from kvsearch.choose.validate import check_permutations, find_uses, prepare_validation
    from kvsearch.plan import Size
    from kvsearch.signals.table import SignalTable

    check_permutations(options.permutations)
    tasks = options.find_tasks(options.measured, options.split)
    refuse_reported(tasks)
    profile = load_signals(options.directory)
    table = SignalTable(profile)
    uses = find_uses(table, options.signals, options.phases)
    sizes = [Size(budget=measured) for measured in table.axes.budgets]
    if options.budget is not None or options.ratio is not None:
        sizes = [Size(options.budget, options.ratio)]
    settings = options.settings(profile)
    loaded = options.load_calibrated(profile, talk)
    prepared = [
        prepare_validation(loaded, profile, size, tasks, settings, uses, options.permutations) for size in sizes
    ]
    for note in (note for one in prepared for note in one.notes):
        talk.warn(note)
    return prepared


def _found_before(prepared: PreparedValidation, options: ValidateOptions) -> Validation | None:
    """Return what the file has already; with `force`, only if it was found under the same conditions."""
    from kvsearch.choose.verdicts import FILE, load_validation
    from kvsearch.runs.sums import require_unchanged

    path = options.directory / FILE
    try:
        require_unchanged(options.directory, FILE, "restore it, or --force to replace it")
        found = load_validation(path)
    except UsageError:
        if options.force:
            return None
        raise
    changed = None if found is None else prepared.conditions.difference(found)
    if changed is not None and not options.force:
        raise UsageError(f"{path} is about other questions or another profile: {changed}; --force replaces it")
    return found if changed is None else None

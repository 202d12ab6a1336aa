"""kvsearch select: choose the strategy of a calibration on fresh questions, or fall back to the best baseline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, model_validator

from kvsearch.config.options import Option, one_of
from kvsearch.errors import UsageError
from kvsearch.jobs.calibrated import OnSignals, load_signals
from kvsearch.jobs.following import evaluation
from kvsearch.jobs.foretell import foretold
from kvsearch.jobs.groups import ASKED, BUDGET, Names, Numbers
from kvsearch.jobs.public import job
from kvsearch.jobs.stages import FINISHED, kept_replies
from kvsearch.jobs.talk import Talk
from kvsearch.plan.fields import Entries, Samples, refuse

if TYPE_CHECKING:
    from kvsearch.choose.select import PreparedSelection
    from kvsearch.choose.selection import Selection
    from kvsearch.evaluation.compare import Evaluation
    from kvsearch.evaluation.plan_comparison import KeptStage
    from kvsearch.plan import Profile, Size
    from kvsearch.report.table import Table

ALL = "all"
CHOICE = "What is chosen from, and how"


class SelectOptions(OnSignals):
    """What is chosen from, by which questions, and where the choice is written."""

    job: ClassVar[str] = "select"

    output: Annotated[Path, Option("The plan file.", short="-o", recorded=False)]
    budget: Annotated[int | None, Field(ge=1), replace(BUDGET, shown="the one that was measured")] = None
    budgets: Annotated[
        tuple[Entries, ...] | None,
        Numbers,
        Option(
            "Several budgets, each chosen at by itself, all reported on the same questions: writes PLAN-N.json for "
            "each.",
            metavar="N,N...",
        ),
    ] = None
    phases: Annotated[
        str,
        Option(
            "When to evict: prefill, decode or both; all tries the three, each against baselines of its own phases.",
            panel=CHOICE,
        ),
    ] = "prefill"
    explore: Annotated[
        str,
        Option(
            "Candidates: paper (the paper's signals), standard, or full (every signal for every use).",
            metavar="LEVEL",
            panel=CHOICE,
        ),
    ] = "standard"
    routes: Annotated[
        Names | None,
        Option(
            "Only these routes: cosine, error, ppl, nll, a pattern (in all layers), none (every pattern alone).",
            metavar="NAME,...",
            panel=CHOICE,
            shown="those of --explore",
        ),
    ] = None
    allocators: Annotated[
        Names | None,
        Option(
            "Only these budgets: uniform, pyramid, curves, curves-joint, or a signal such as entropy or nll-chosen, "
            "also to a power: nll-chosen^2, nll-chosen^0.5.",
            metavar="NAME,...",
            panel=CHOICE,
            shown="those of --explore",
        ),
    ] = None
    top: Annotated[int, Option("Candidates that reach the second stage.", panel=CHOICE)] = 5
    margin: Annotated[
        float | None,
        Option(
            "Accept a mean lead above this in the second stage, whether or not it may be chance; 0.01 is one point.",
            panel=CHOICE,
            shown="a lead beyond chance",
        ),
    ] = None
    samples: Annotated[Samples, Field(ge=2), Option("Contexts per task in each of the two splits.", panel=ASKED)] = 20
    run: Annotated[
        Path | None,
        Option(
            "Keep replies and selection.json here; the same command goes on where it stopped.",
            metavar="DIR2",
            shown="DIR/selection/SIZE-PROTOCOL-PHASES",
            recorded=False,
        ),
    ] = None
    force: Annotated[
        bool, Option("Replace the plan file, and replies to other questions in the run's directory.", recorded=False)
    ] = False

    @model_validator(mode="after")
    def _one_size_or_several(self) -> SelectOptions:
        if self.budgets is not None and (self.budget is not None or self.ratio is not None):
            refuse([(("budgets",), "is in place of budget and ratio: give one of them")])
        if self.budgets is not None and len(set(self.budgets)) < len(self.budgets):
            refuse([(("budgets",), "has a budget twice: give each once")])
        return self

    @classmethod
    def merged(cls, stated: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """See `JobOptions.merged`; one size takes the place of others."""
        return {**one_of(stated, given, ("budget", "budgets", "ratio")), **given}

    @property
    def directories(self) -> tuple[Path, ...]:
        """See `JobOptions.directories`; the profile says where they are if the options do not."""
        from kvsearch.evaluation.reply_store import check_place

        places = self.places(load_signals(self.directory))
        for place in places:
            check_place(place)
        return places

    def places(self, profile: Profile) -> tuple[Path, ...]:
        """Return where replies and results are kept, by size; errors as for `sizes`."""
        names = [f"{size}-{self.settings(profile).protocol}-{self.phases}" for size in self.sizes(profile)]
        if self.run is None:
            return tuple(self.directory / "selection" / name for name in names)
        return (self.run,) if self.budgets is None else tuple(self.run / name for name in names)

    def outputs(self, profile: Profile) -> tuple[Path, ...]:
        """Return the plan files, by size."""
        if self.budgets is None:
            return (self.output,)
        return tuple(self.output.with_stem(f"{self.output.stem}-{size}") for size in self.sizes(profile))

    def sizes(self, profile: Profile) -> list[Size]:
        """Return the sizes that were given, or the one that was measured; UsageError if there are several of these."""
        from kvsearch.plan import Size
        from kvsearch.signals.table import SignalTable

        measured = SignalTable(profile).axes.budgets
        if self.budgets is not None:
            return [Size(budget) for budget in self.budgets]
        if self.budget is not None or self.ratio is not None:
            return [Size(self.budget, self.ratio)]
        if len(measured) > 1:
            known = ", ".join(map(str, measured))
            raise UsageError(
                f"signals were measured at {known} entries per kv head: say how many to keep with --budget, or several "
                "with --budgets"
            )
        return [Size(budget=measured[0])]

    def phase_settings(self) -> tuple[str, ...]:
        """Return the phase settings to try; UsageError if there is none of that name."""
        from kvsearch.naming import unknown
        from kvsearch.plan import PHASES

        if self.phases not in (*PHASES, ALL):
            raise UsageError(unknown("phases", self.phases, [*PHASES, ALL]))
        return tuple(PHASES) if self.phases == ALL else (self.phases,)


@dataclass(frozen=True)
class AtSize:
    """A finished selection at one size, the file of its plan, and the file of everything that was found."""

    selection: Selection
    plan: Path
    file: Path

    def as_json(self) -> dict[str, Any]:
        """Return everything that was found."""
        from kvsearch.report.selection import as_json

        return {**as_json(self.selection), "plan": str(self.plan)}


@dataclass(frozen=True)
class Selected:
    """Finished selections, one for each size; `several` if budgets were asked for by that option."""

    found: tuple[AtSize, ...]
    several: bool

    def as_json(self) -> dict[str, Any]:
        """Return everything that was found, of several budgets by budget."""
        from kvsearch.report.selection import SEVERAL

        if not self.several:
            return self.found[0].as_json()
        return {"schema": SEVERAL, "budgets": {str(one.selection.size): one.as_json() for one in self.found}}

    def tables(self) -> list[Table]:
        """Return what was found as tables."""
        from kvsearch.report.selection import tables

        return tables(*(one.selection for one in self.found))


@job(SelectOptions, dry=True)
def dry_run(options: SelectOptions, talk: Talk) -> dict[str, Any]:
    """Return what would be compared and asked, as JSON; errors as `select` before anything is asked."""
    from kvsearch.models.speed import Work

    found: dict[str, dict[str, Any]] = {}
    selections = _prepared(options, talk)
    for prepared, place, _ in selections:
        counted = {
            one.found.phases: {
                "candidates": len(one.found.candidates), "baselines": list(one.found.baselines),
                "notes": list(one.found.notes),
            }
            for one in prepared.contests
        }  # fmt: skip
        tasks = [task.name for task in prepared.questions.selection]
        asked = {"tasks": tasks, "most_replies": prepared.replies}
        found[str(prepared.size)] = {"phases": counted, **asked, "run": str(place)}
    work = sum((prepared.work for prepared, *_ in selections), Work(0, 0))
    told = {"budgets": found} if options.budgets is not None else next(iter(found.values()))
    return {**told, **foretold(selections[0][0].loaded, work, talk)}


@job(SelectOptions)
def select(options: SelectOptions, talk: Talk) -> Selected:
    """Choose the best strategy of a PolyKV calibration, unless a single-policy baseline is as good: then choose that.

    The plan is written to `output`, everything that was found to selection.json in `run`, where finished replies are
    kept, too: the same call goes on where it stopped, and of a finished run it repeats the result.
    With `budgets` there is a plan and a directory for each.

    Raises:
        UsageError: no calibration, options that do not go together, or too few questions.
        IncompatibleError: model, profile and questions do not fit together, or the full cache itself scores next to
            nothing.
    """
    selections = _prepared(options, talk)
    were_finished = not options.force and all(output.exists() for *_, output in selections)
    found = tuple(_select_at(options, talk, *one) for one in selections)
    if were_finished:
        talk.say(FINISHED)
    return Selected(found, options.budgets is not None)


def following_commands(options: SelectOptions, done: Selected) -> Iterator[list[object]]:
    """Yield the words of commands that use the first plan."""
    plan, model = done.found[0].plan, options.measured
    yield ["show", plan]
    if model is not None:
        yield list(evaluation(options, model, plan, options.tasks))


def _select_at(options: SelectOptions, talk: Talk, prepared: PreparedSelection, place: Path, output: Path) -> AtSize:
    """Choose at one size, and write what was found, the plan last: it has its evidence beside it."""
    from kvsearch.budgets.plan_checks import check_plan
    from kvsearch.choose.verdicts import SETTINGS
    from kvsearch.plan import canonical_json, save_plan
    from kvsearch.plan.files import read_bytes
    from kvsearch.report.selection import FILE, as_json
    from kvsearch.runs.contexts import CONTEXTS, write_contexts
    from kvsearch.runs.directory import write_json
    from kvsearch.runs.sums import finish, unfinish

    def keep(stage: str, evaluation: Evaluation) -> KeptStage:
        kept, config = place / stage, prepared.config(evaluation).with_options(options.recorded())
        what = f"{kept.parent.name}, {kept.name}: batches"
        if options.budgets is not None:
            what = f"{prepared.size} entries, {what}"
        return kept_replies(kept, config, evaluation.replies, options.force, talk, what)

    written = (FILE, CONTEXTS, *SETTINGS)
    unfinish(place, written)
    result = prepared.run(keep, answered=True)
    check_plan(result.plan, f"the plan for {output}")
    if not options.force and output.exists() and read_bytes(output) != canonical_json(result.plan):
        raise UsageError(f"{output} is another plan than is chosen now: choose another file, or --force to replace it")
    write_contexts(place, prepared.hashes)
    write_json(place / FILE, as_json(result))
    finish(place, written)
    save_plan(result.plan, output, overwrite=options.force)
    return AtSize(result, output, place / FILE)


def _prepared(options: SelectOptions, talk: Talk) -> list[tuple[PreparedSelection, Path, Path]]:
    """Check everything and load the model; return the selections, the directories they are kept in, and their plans."""
    from kvsearch.choose.acceptance import Rule
    from kvsearch.choose.candidates import explore
    from kvsearch.choose.select import prepare_selection
    from kvsearch.choose.splits import Questions
    from kvsearch.plan.files import PLAN_FILE, check_output
    from kvsearch.runs.directory import CONFIG, other_kind

    profile = load_signals(options.directory)
    rule, sizes, phases = Rule(options.top, margin=options.margin), options.sizes(profile), options.phase_settings()
    explored = [explore(profile, size, options.explore, options.routes, options.allocators) for size in sizes]
    questions = Questions(*(options.find_tasks(options.measured, split) for split in ("select", "report")))
    settings = options.settings(profile)
    places, outputs = options.places(profile), options.outputs(profile)
    for place, output in zip(places, outputs, strict=True):
        if not _is_repeated(options, place):
            check_output(output, options.force, PLAN_FILE)
        if (place / CONFIG).exists():  # of a run of another kind: here every stage has a directory of its own
            raise other_kind(place, "select")
    loaded = options.load_calibrated(profile, talk)
    selections = [
        prepare_selection(loaded, profile, size, questions, settings, phases, candidates, rule)
        for size, candidates in zip(sizes, explored, strict=True)
    ]
    return list(zip(selections, places, outputs, strict=True))


def _is_repeated(options: SelectOptions, place: Path) -> bool:
    """Tell whether a finished selection that was asked for by the same options is in `place`."""
    from kvsearch.report.selection import FILE
    from kvsearch.runs.identity import CONFIG, read_config

    if options.force or not (place / FILE).exists():
        return False
    there = next(filter(None, (read_config(path.parent) for path in sorted(place.rglob(CONFIG)))), None)
    return there is not None and there.options == there.with_options(options.recorded()).options

"""kvsearch select: pick the strategy of a calibration on held-out questions, or fall back to the best baseline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kvsearch.budgets.plan_checks import check_plan
from kvsearch.commands.groups import BUDGET, BUDGETS, BudgetList, SelectionOptions, suggest_plan_commands
from kvsearch.commands.model_loader import ModelLoader
from kvsearch.commands.plan import resolve_size
from kvsearch.commands.public import job
from kvsearch.commands.reporter import FINISHED_NOTE, Reporter, make_stage_store, warn_about_coverage
from kvsearch.commands.validate import SignalOptions
from kvsearch.config.options import RESULT, Names, option
from kvsearch.core.errors import UsageError
from kvsearch.core.files import check_output, read_bytes
from kvsearch.plan import Size, canonical_json, parse_phases, save_plan
from kvsearch.report.costs import Forecast
from kvsearch.report.selections import describe_retained, make_selection_result, report_ahead_words
from kvsearch.results.selection import SelectionsResult
from kvsearch.runs.identity import CONTEXTS, SELECTION, RunConfig
from kvsearch.runs.run import Run, read_run, write_contexts
from kvsearch.selection.records import compute_shared_level
from kvsearch.selection.verdicts import PHASE_SETTINGS

if TYPE_CHECKING:
    from kvsearch.results.selection import SelectionResult
    from kvsearch.selection.records import PhaseResult
    from kvsearch.selection.selection_job import SelectionJob


class SelectOptions(SignalOptions, SelectionOptions):
    """Options of `select`: the profile, candidates, questions and output."""

    job: ClassVar[str] = "select"
    alternatives: ClassVar[tuple[str, ...]] = ("budget", "ratio", "budgets")

    output: Path = option(..., "The plan file.", RESULT, short="-o", recorded=False)
    budget: int | None = option(None, BUDGET, shown="the one that was measured", ge=1)
    budgets: BudgetList = option(None, BUDGETS, help="Several budgets, each with a plan of its own: PLAN-N.json.")
    phases: str = option("prefill", "When to evict: prefill, decode or both.")
    routes: Names | None = None  # this and the next are for tables of papers, see `find_measured`
    allocators: Names | None = None
    run: Path | None = option(
        None,
        "Keep replies and selection.json here; the same command goes on where it stopped.",
        metavar="DIR2",
        shown="DIR/selection/SIZE-PROTOCOL-PHASES",
        recorded=False,
    )
    force: bool = option(
        False, "Replace the plan file, and start anew, whatever run is in the directory.", recorded=False
    )

    @property
    def directories(self) -> tuple[Path, ...]:
        """Where replies and results are kept, by size; errors as for `sizes`."""
        names = [f"{size}-{self.asked_protocol}-{self.phases}" for size in self.sizes]
        if self.run is None:
            return tuple(self.directory / "selection" / name for name in names)
        return (self.run,) if self.budgets is None else tuple(self.run / name for name in names)

    @property
    def outputs(self) -> tuple[Path, ...]:
        """The plan files, by size."""
        if self.budgets is None:
            return (self.output,)
        return tuple(self.output.with_stem(f"{self.output.stem}-{size}") for size in self.sizes)

    @property
    def sizes(self) -> list[Size]:
        """The sizes that were given, or the one that was measured; UsageError if there are several of these."""
        if self.budgets is not None:
            return [Size(budget) for budget in self.budgets]
        return [resolve_size(self.budget, self.ratio, None, self.table.axes.budgets)]


def remarks(options: SelectOptions, result: SelectionResult | SelectionsResult) -> Iterator[str]:
    """Yield commands that use the written plans."""
    first = result.choices[0]
    evaluated = options.model_copy(update={**options.stated_loading(), "protocol": first.protocol})
    yield from suggest_plan_commands(first.plan, first.model, evaluated)


def dry_run(options: SelectOptions, reporter: Reporter, models: ModelLoader) -> Forecast:
    """Forecast `select`; errors as `select` before any reply."""
    selections = [selection for *_, selection in _prepare(options, reporter, models)]
    content = {
        "tasks": [task.task.name for task in selections[0].race.encoded],
        "candidates": {
            str(selection.size): {options.phases: list(selection.race.candidate_set.plans)} for selection in selections
        },
    }
    costs = [cost for selection in selections for cost in selection.costs]
    return Forecast(content, costs, selections[0].race.prepared.loaded.model)


@job(SelectOptions)
def select(options: SelectOptions, reporter: Reporter, models: ModelLoader) -> SelectionResult | SelectionsResult:
    """Choose the best strategy of a PolyKV calibration, unless a single-policy baseline is as good: then choose that.

    The plan is written to `output`, everything that was found to selection.json in `run`, where finished replies are
    kept, too: the same call goes on where it stopped, and of a finished run it repeats the result.
    With `budgets` there is a plan and a directory for each, and the result has them by size.

    Raises:
        UsageError: no calibration, options that do not go together, or too few questions.
        IncompatibleError: model, profile and questions do not fit together, or the full cache itself scores next to
            nothing.
    """
    prepared = _prepare(options, reporter, models)
    recorded = options.to_recipe()
    results = []
    were_finished = True
    ended: list[PhaseResult] = []
    for place, output, selection in prepared:
        were_finished &= output.exists()
        config = RunConfig(job="select", options=recorded, content=selection.content)
        with Run.open(place, config, force=options.force, files=(SELECTION, CONTEXTS, *PHASE_SETTINGS)) as run:
            store = make_stage_store(place, selection.race.config, reporter, title=f"{selection.size}, ")
            level = compute_shared_level(options.rule.level, len(prepared), ended)
            selected = selection.run(store, level, answered=True)
            ended.append(selected.chosen)
            check_plan(selected.plan, f"the plan for {output}")
            if not options.force and output.exists() and read_bytes(output) != canonical_json(selected.plan):
                raise UsageError(
                    f"{output} is another plan than is chosen now: choose another file, or --force to replace it"
                )
            write_contexts(place, selection.hashes)
            run.write(SELECTION, make_selection_result(selected).as_json())
            save_plan(selected.plan, output, overwrite=True)  # it has its evidence beside it
            run.finish()
            were_finished &= run.state == "finished"
        if ahead := report_ahead_words(selected.report):
            reporter.warn(ahead)
        results.append(make_selection_result(selected, plan=str(output)))
        if warning := describe_retained(results[-1]):
            reporter.warn(warning)
        reporter.say(f"wrote {output} and {place / SELECTION}")
    if were_finished:
        reporter.say(FINISHED_NOTE)
    if options.budgets is None:
        return results[0]
    return SelectionsResult(sizes={str(result.size): result for result in results})


def _prepare(options: SelectOptions, reporter: Reporter, models: ModelLoader) -> list[tuple[Path, Path, SelectionJob]]:
    """Check all options and load the model; return the directory, plan file and selection of each size."""
    profile = options.table.profile
    rule = options.rule
    sizes = options.sizes
    parse_phases(options.phases)
    tasks = {name: options.find_tasks(options.measured, name) for name in ("select", "report")}
    from kvsearch.selection.selection_job import prepare_selection
    from kvsearch.selection.signal_candidates import find_signal_candidates

    protocol = options.asked_protocol
    choice, reported = (
        options.split(name, questions, protocol).without(options.used) for name, questions in tasks.items()
    )
    places = options.directories
    outputs = options.outputs
    for place, output in zip(places, outputs, strict=True):
        read_run(place, "select")
        if options.force or not (place / SELECTION).exists():
            check_output(output, options.force)
    loaded = options.load_calibrated(models)
    selections = []
    for size in sizes:
        plans = find_signal_candidates(loaded, profile, size, options.phases, options.routes, options.allocators)
        selections.append(prepare_selection(loaded, plans, size, choice, reported, rule))
    if options.samples is not None:
        warn_about_coverage(reporter, [*selections[0].race.encoded, *selections[0].report_prompts])
    return list(zip(places, outputs, selections, strict=True))

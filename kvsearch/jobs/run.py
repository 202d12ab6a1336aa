"""kvsearch run: from a model to its best plan in one command; it goes on where it was killed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, model_validator

from kvsearch.calibration.options import PROTECTED
from kvsearch.config.options import Option, one_of
from kvsearch.errors import UsageError
from kvsearch.jobs.calibrate import CalibrateLukv, CalibrateOptions, CalibrateProbe, CalibrateQueryBank, calibrate
from kvsearch.jobs.calibrate import dry_run as calibration_dry_run
from kvsearch.jobs.following import evaluation, following
from kvsearch.jobs.groups import (
    ASKED,
    BUDGET,
    TASKS,
    Asking,
    Loading,
    Names,
    Numbers,
    TaskDetails,
    WithModel,
    WithRun,
    WithTasks,
    WithWorkers,
    default_tasks,
)
from kvsearch.jobs.public import job
from kvsearch.jobs.run_progress import Overall, StageTalk, overall
from kvsearch.jobs.stages import FINISHED, kept_replies, on_interruption
from kvsearch.jobs.talk import Talk
from kvsearch.plan.fields import Entries, Samples, refuse

if TYPE_CHECKING:
    from kvsearch.calibration.data import CalibrationData
    from kvsearch.choose.contenders import Measured
    from kvsearch.choose.overall import Overall as Chosen
    from kvsearch.choose.overall import OverallChoice
    from kvsearch.choose.smallest import Smallest
    from kvsearch.evaluation.compare import Evaluation
    from kvsearch.evaluation.plan_comparison import Keep, KeptStage
    from kvsearch.jobs.evolve import EvolveOptions
    from kvsearch.jobs.refine import Refined
    from kvsearch.models.loading import LoadedModel
    from kvsearch.plan import Size
    from kvsearch.plan.contexts import ContextSet
    from kvsearch.report.table import Table
    from kvsearch.tasks.base import Task, TokenCount
    from kvsearch.tasks.encode import TaskPrompts

SIZE, FITTED = "How much is kept", "What is fitted"
SIZES = ("budget", "ratio", "budgets", "smallest")
FIT, CURVES, REFINE, CHOICE, PLAN, REPORT = "fit", "curves", "refine", "choice", "plan.json", "run.json"
WRITTEN = (FIT, CURVES, REFINE, CHOICE, "plan*.json", REPORT, "contexts.json", "*.safetensors")
FIRST = 0.25  # of the contexts to choose by: what the first stage asks
RANKINGS: dict[str, type[CalibrateOptions]] = {"probe": CalibrateProbe, "query_bank": CalibrateQueryBank}
PACE = {FIT: 8.0, CURVES: 7.0, REFINE: 2.0}  # of a token, where one that a choice reads is 1
Calibration = TypeVar("Calibration", bound=CalibrateOptions)


class Curves(CalibrateLukv):
    """LU-KV's measurement, of policies with the settings that they are compared with."""

    protection: ClassVar[dict[str, dict[str, Any]]] = {
        name: {**CalibrateLukv.protection.get(name, {}), **PROTECTED.get(name, {})}
        for name in (*CalibrateLukv.protection, *PROTECTED)
    }

    @classmethod
    def chosen(cls, stated: Mapping[str, Any], given: Mapping[str, Any], path: Path | None) -> type[Self]:  # noqa: ARG003
        """See `JobOptions.chosen`."""
        return cls

    def used(self) -> ContextSet:
        """See `CalibrateOptions.used`: what the rankings were fitted on, which look better there than they are."""
        from kvsearch.plan.contexts import ContextSet
        from kvsearch.policies.fitted import Fitted, profile_of

        found = ContextSet()
        for policy in self.policies():
            if isinstance(policy, Fitted):
                contexts = profile_of(policy.weights, policy.name).metadata.provenance.contexts
                found = found if contexts is None else found.union(contexts.used)
        return found


def planned_size(size: Size, measured: int, longest: int) -> Size:
    """Return the size that plans are made at: for prompts as long as those `measured`, in tokens.

    A budget that is all of these is for longer ones: then plans are for the `longest` that is chosen by.
    """
    return replace(size, length=longest) if measured < longest and size.mean(measured) >= measured else size


class RunOptions(WithModel, WithWorkers, WithRun, WithTasks, Asking):
    """The size, what plans are made of, and the questions that decide between them."""

    job: ClassVar[str] = "run"
    recipes: ClassVar[str | None] = "recipes/run"
    example: ClassVar[str] = "budget: 128"

    budget: Annotated[Entries | None, replace(BUDGET, panel=SIZE)] = None
    ratio: Annotated[
        float | None, Option("Share of the prompt to evict, between 0 and 1, in place of a budget.", panel=SIZE)
    ] = None
    budgets: Annotated[
        tuple[Entries, ...] | None,
        Numbers,
        Option("Several budgets, each with a plan of its own: plan-N.json.", metavar="N,N...", panel=SIZE),
    ] = None
    smallest: Annotated[
        bool, Option("Find the smallest budget that loses at most --within of the full cache's score.", panel=SIZE)
    ] = False
    within: Annotated[float, Field(gt=0, lt=100), Option("--smallest: points of 100 that may be lost.", panel=SIZE)] = (
        1.0
    )
    policies: Annotated[
        Names,
        Option("Built-in policies to measure budgets for.", metavar="NAME,...", panel=FITTED),
    ] = ("snapkv", "keydiff", "expected_attention", "cake")
    rankings: Annotated[
        Names, Option("Rankings to fit, and to measure budgets for, too.", metavar="NAME,...", panel=FITTED)
    ] = tuple(RANKINGS)
    form: Annotated[Literal["network", "linear"], Option("probe: the largest fit that is tried.", panel=FITTED)] = (
        "network"
    )
    fit: Annotated[Samples, Option("Contexts per task to fit rankings on.", panel=FITTED)] = 6
    measure: Annotated[Samples, Option("Contexts per task to measure budgets on.", panel=FITTED)] = 4
    refine: Annotated[
        bool,
        Option(
            "Leave out the search that begins at the best solved plan.", flag="--no-refine", panel=FITTED, negated=True
        ),
    ] = True
    evaluations: Annotated[
        int, Field(ge=1), Option("Plans that the search tries at each size, cheaply.", panel=FITTED)
    ] = 200
    data: Annotated[
        str | None,
        Option(
            "A calibration file in place of tasks: every other context to fit rankings on, the others to measure "
            "budgets on; with --tasks longbench, infinitebench or gsm8k their file, folder or dataset id.",
            panel=TASKS,
        ),
    ] = None
    samples: Annotated[
        Samples,
        Field(ge=2),
        Option("Contexts per task to choose by, and as many others to report on.", panel=ASKED),
    ] = 20

    @model_validator(mode="after")
    def _one_size(self) -> RunOptions:
        given = [name for name in SIZES if getattr(self, name) not in (None, False)]
        if len(given) > 1:
            refuse([((given[1],), f"is in place of {given[0]}: give one of them")])
        if "within" in self.model_fields_set and not self.smallest:
            refuse([(("within",), "is for --smallest: leave it out, or give --smallest")])
        if self.budgets is not None and len(set(self.budgets)) < len(self.budgets):
            refuse([(("budgets",), "has a budget twice: give each once")])
        return self

    @classmethod
    def merged(cls, stated: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """See `JobOptions.merged`; one size takes the place of others."""
        return {**one_of(stated, given, (*SIZES, "within")), **given}

    def recorded(self) -> dict[str, Any]:
        """See `JobOptions.recorded`; what may be lost is a part of --smallest."""
        return {name: value for name, value in super().recorded().items() if name != "within" or self.smallest}

    @property
    def sizes(self) -> list[Size]:
        """The sizes that were given, none if one is to be found; UsageError if there are none, or one out of range."""
        from kvsearch.plan import Size

        if self.smallest:
            return []
        if self.budgets is not None:
            return [Size(budget) for budget in self.budgets]
        if self.budget is None and self.ratio is None:
            raise UsageError(
                "how much may be kept? Give --budget (entries per kv head), several with --budgets, --ratio (the "
                "share to evict), or --smallest"
            )
        return [Size(self.budget, self.ratio)]

    def plan_file(self, size: Size) -> Path:
        """Return where the plan of a size is written."""
        return self.output / (PLAN if self.budgets is None else f"plan-{size}.json")

    @property
    def asked_tasks(self) -> str:
        """The spec of what is asked."""
        return self.tasks or default_tasks(self.model)

    def questions(self, split: str) -> list[Task]:
        """Return what is asked of a split; a file to fit on is not for the default tasks."""
        from kvsearch.tasks.catalog import find_tasks

        details = self if self.tasks is not None else self.model_copy(update={"data": None})
        return find_tasks(self.asked_tasks, details.task_options(split))

    @cached_property
    def texts(self) -> dict[str, CalibrationData] | None:
        """The contexts of --data, by the stages that they are for; None where tasks are calibrated on.

        Raises:
            UsageError: there is no such file, it is not valid, or it has too few contexts.
        """
        if self.tasks is not None or self.data is None:
            return None
        from kvsearch.calibration.data import load_calibration_data
        from kvsearch.calibration.probe.reading import LEAST_CONTEXTS

        whole = load_calibration_data(self.data)
        if not self.rankings:
            return {CURVES: whole}
        least, found = 2 * LEAST_CONTEXTS - 1, len({one.text for one in whole.contexts})
        if found < least:
            raise UsageError(
                f"--data {self.data} has {found} different context{'' if found == 1 else 's'}: rankings are fitted on "
                f"every other one and budgets measured on the others, so give at least {least}, better dozens"
            )
        return dict(zip((FIT, CURVES), whole.by_turns(2), strict=True))

    def calibration(self, kind: type[Calibration], stage: str, samples: int, seed: int, **more: Any) -> Calibration:
        """Return the options of a stage that calibrates, on contexts of the tasks' split train or on --data.

        `stage` is the name of its directory, or begins with FIT.
        """
        shared = {name: getattr(self, name) for name in (*Loading.model_fields, "max_length")}
        if self.texts is None:
            details = {name: getattr(self, name) for name in TaskDetails.model_fields}
            shared |= {name: value for name, value in details.items() if value is not None}
            shared |= {"tasks": self.asked_tasks, "samples": samples}
        else:
            shared |= {"data": self.data}
        method = kind.model_fields["method"].default
        found = kind.of(model=self.model, output=self.output / stage, method=method, seed=seed, **shared, **more)
        return found if self.texts is None else found.with_texts(self.texts[stage.partition("/")[0]])

    def fits(self) -> dict[str, CalibrateOptions]:
        """Return the calibration of every ranking that is fitted, by its name."""
        from kvsearch.naming import unknown

        for at, name in enumerate(self.rankings):
            if name not in RANKINGS:
                raise UsageError(unknown("ranking", name, list(RANKINGS)))
            if name in self.rankings[:at]:
                raise UsageError(f"--rankings has {name} twice: name each once")
        forms = {"probe": {"form": self.form}}
        return {
            name: self.calibration(RANKINGS[name], f"{FIT}/{name}", self.fit, self.seed, **forms.get(name, {}))
            for name in self.rankings
        }

    def refuse_policies(self) -> None:
        """Raise UsageError if a policy is there twice, or is one that is fitted."""
        from kvsearch.policies.registry import FITTED

        for at, name in enumerate(self.policies):
            if name.partition("=")[0] in FITTED:
                raise UsageError(
                    f"--policies {name}: policies that are fitted are not for --policies; a run fits its own, those of "
                    f"--rankings ({', '.join(RANKINGS)})"
                )
            if name in self.policies[:at]:
                raise UsageError(f"--policies has {name} twice: name each once")

    def refuse_few(self, count: TokenCount) -> None:
        """Raise UsageError if rankings are fitted on all that a task has, so that there is nothing to measure on."""
        if self.texts is not None:
            return
        for task in self.questions("train") if self.rankings else ():
            found = len(task.examples(self.fit + 1, self.seed, count))
            if found <= self.fit:
                lower = f"lower --fit to at most {found - 1}" if found > 1 else "give more"
                raise UsageError(
                    f"task {task.name}: --fit {self.fit} takes all {found} contexts of the split train, but budgets "
                    f"are measured on others: {lower}"
                )

    def curves(self, policies: Sequence[str], rankings: Sequence[str]) -> CalibrateLukv:
        """Return the measurement of what policies and fitted rankings keep.

        It is on other contexts than rankings are fitted on: there they look better than they are.
        """
        first, *rivals = (*policies, *(f"{name}={self.output / FIT / name}" for name in rankings))
        more: dict[str, Any] = {"policy": first, "rivals": tuple(rivals), "check": False}  # the choice checks
        return self.calibration(Curves, CURVES, self.measure, self.seed + 1, **more)

    def refinement(self) -> EvolveOptions:
        """Return the search that refines plans, on contexts of the tasks' split train; it always goes on."""
        from kvsearch.jobs.evolve import EvolveOptions

        names = (*Loading.model_fields, "max_length", "batch", "max_memory", "protocol")
        return EvolveOptions.of(
            model=self.model, output=self.output / REFINE, space="joint", seed=self.seed + 2, samples=self.measure,
            generations=self.evaluations, resume=True, **{name: getattr(self, name) for name in names},
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Ran:
    """A finished run: what was chosen at each size, and where its plan is; `asked`: whether anything was left to do."""

    options: RunOptions
    found: tuple[Chosen, ...]
    asked: bool
    smallest: Smallest | None = None

    def as_json(self) -> dict[str, Any]:
        """Return everything that was found, by size."""
        from kvsearch.report.run import as_json

        files = [self.options.plan_file(one.selection.size).name for one in self.found]
        return as_json(self.found, files, self.smallest)

    def tables(self) -> list[Table]:
        """Return what was found as tables."""
        from kvsearch.report.run import tables

        return tables([one.selection for one in self.found])

    def remarks(self) -> Iterator[str]:
        """Say what was chosen, how good that is, where it is, and what to do with it."""
        from kvsearch.report.run import sentences, smallest_words

        if self.smallest is not None:
            yield smallest_words(self.smallest, self.options.within, self.found[0].loss)
        for one in self.found:
            yield from sentences(one, several=len(self.found) > 1)
        files = [self.options.plan_file(one.selection.size) for one in self.found]
        if not self.asked:
            yield FINISHED
        yield f"wrote {', '.join(map(str, files))}"
        yield following("show", files[0])
        yield following(*evaluation(self.options, self.options.model, files[0], self.options.tasks))


@job(RunOptions, dry=True)
def dry_run(options: RunOptions, talk: Talk) -> dict[str, Any]:
    """Return the stages with their costs, as JSON; errors as `run` before anything is measured."""
    prepared = _Run.prepared(options, talk)
    return {"model": options.model, "sizes": [one.as_json() for one in options.sizes], "stages": prepared.costs(talk)}


@job(RunOptions)
def run(options: RunOptions, talk: Talk) -> Ran:
    """Fit rankings, measure budgets, choose the best plan on fresh questions and report it on others.

    Writes plan.json (plan-N.json of several budgets) and run.json to `output`. Every stage is kept in a directory of
    its own below it: the same call goes on where it stopped, and of a finished run it repeats the result.

    Raises:
        UsageError: options that do not go together, a size that evicts nothing or that no policy can keep, too few
            contexts, or something else in `output`.
        IncompatibleError: the model computes NaN, or its full cache scores next to nothing.
        EnvironmentFault: the disk is full, or the model cannot be loaded here.
    """
    from kvsearch.runs.directory import begin, run_in
    from kvsearch.runs.identity import CONFIG, RunConfig
    from kvsearch.runs.sums import finish, unfinish

    options.sizes  # noqa: B018 - told before anything is loaded
    there = run_in(options.output, "run")
    prepared = _Run.prepared(options, talk)
    config = RunConfig(job="run", options=options.recorded(), content=prepared.content())
    different = None if there is None else config.difference(there)
    if different is not None and not options.force:
        raise UsageError(
            f"{options.output} holds another run: {different}; repeat its command to go on with it, choose another "
            "--output, or --force to start anew"
        )
    again = f"what is finished is kept in {options.output}: give the same command again to go on"
    with on_interruption(talk, lambda: again):
        if there is None or options.force:
            begin(options.output, config, WRITTEN if options.force else ())
        unfinish(options.output)
        result = prepared.run(talk)
        finish(options.output, (CONFIG, *WRITTEN))
    return result


@dataclass(frozen=True, eq=False)
class _Run:
    """A run whose model and questions fit together."""

    options: RunOptions
    loaded: LoadedModel
    encoded: Mapping[str, list[TaskPrompts]]  # of the splits select and report, before anything was fitted
    policies: Sequence[str]  # those of the built-in ones that can be used on this model

    @classmethod
    def prepared(cls, options: RunOptions, talk: Talk) -> _Run:
        """Check all that can be before anything is measured; the sizes against the longest context."""
        from kvsearch.choose.contenders import find_contenders
        from kvsearch.choose.contest import refuse_shared
        from kvsearch.choose.splits import halves
        from kvsearch.errors import IncompatibleError
        from kvsearch.runtime.cache import check_rotary
        from kvsearch.tasks.encode import counter, encode_tasks

        sizes, splits = options.sizes, {split: options.questions(split) for split in ("select", "report")}
        options.fits()
        options.refuse_policies()
        measured = options.curves(options.policies, ()).policies()
        loaded = options.load(options.model, talk)
        usable = []
        for policy in measured:
            try:
                check_rotary(loaded.model, [policy])
                usable.append(policy.name)
            except IncompatibleError as error:  # it needs what this model does not have
                talk.warn(f"no budgets for {policy.name}: {error}")
        encoded = {
            split: encode_tasks(loaded, tasks, options.samples, options.seed, options.max_length)
            for split, tasks in splits.items()
        }
        refuse_shared(encoded)
        found = cls(options.with_model(loaded), loaded, encoded, usable)
        for task in encoded["select"]:
            halves([task], FIRST, options.seed)  # a task with one context leaves a stage empty: told before any fit
        options.refuse_few(counter(loaded.tokenizer))
        if options.texts is not None:  # a context may be too short, or too long: told before any stage
            for fit in options.fits().values():
                calibration_dry_run(found._new(fit), talk=talk)
        least = min(policy.floor for policy in measured)
        for size in sizes:
            if size.mean(found.longest) < least:
                raise UsageError(
                    f"{size.words}: every policy of --policies always keeps more (sinks and recent entries), {least} "
                    "at least: keep more"
                )
            find_contenders(loaded, None, replace(size, length=found.longest))
        return found

    @property
    def longest(self) -> int:
        """Tokens of the longest context that is chosen by."""
        return max(len(prompt.context) for task in self.encoded["select"] for prompt in task.prompts)

    def content(self) -> dict[str, Any]:
        """Return all that decides the result, as JSON; what is fitted on is in the configurations of the stages."""
        from kvsearch.evaluation.identity import environment, metric_of, rows_hash

        left = {"batch", "max_memory", *Loading.model_fields}
        stated = {name: value for name, value in self.options.recorded().items() if name not in left}
        rows = {split: {one.task.name: rows_hash(one) for one in tasks} for split, tasks in self.encoded.items()}
        metrics = {one.task.name: metric_of(one.task) for one in self.encoded["select"]}
        return {**environment(self.loaded), "options": stated, "rows": rows, "metrics": metrics}

    # --- stages -------------------------------------------------------------------------------------------------------

    @property
    def work(self) -> dict[str, float]:
        """The stages in their order, with about how long each takes, in tokens that a choice reads.

        A token that a stage before fits, measures or stores by takes longer, as `PACE` says of the bundled model.
        """
        options, asked = self.options, self.encoded["select"]
        length = sum(len(prompt.context) for task in asked for prompt in task.prompts) / sum(
            len(task.prompts) for task in asked
        )
        whole = {name: self._tokens(split) for name, split in (("choice", "select"), ("report", "report"))}
        fitted, measured = (count * len(asked) * length for count in (options.fit, options.measure))
        stages = {f"{FIT}/{name}": PACE[FIT] * fitted for name in options.rankings}
        stages[CURVES] = PACE[CURVES] * measured
        if options.refine and options.sizes:
            stages[REFINE] = PACE[REFINE] * measured * (1 + len(options.sizes))
        for size in options.sizes:
            stages[f"{CHOICE}/{size}"] = sum(whole.values())
        if options.smallest:  # some six budgets on half of the questions, under a few methods
            stages[f"{CHOICE}/smallest"] = 2 * whole["choice"] + sum(whole.values())
        return stages

    def _tokens(self, split: str) -> float:
        """Return about how many tokens are read to ask a split of some 15 methods."""
        prompts = [prompt for task in self.encoded[split] for prompt in task.prompts]
        asked = sum(len(one.ids) + one.query.max_new_tokens for prompt in prompts for one in prompt.questions)
        return sum(len(prompt.context) for prompt in prompts) + 15.0 * asked

    def costs(self, talk: Talk) -> dict[str, Any]:
        """Return what every stage costs, as far as that can be told before the first one has run."""
        options, found = self.options, dict[str, Any]()
        for name, fit in options.fits().items():
            found[f"{FIT}/{name}"], _ = calibration_dry_run(self._new(fit), talk=talk)
        # without the rankings, which are not there yet: they add a look at what is read anyway
        found[CURVES], _ = calibration_dry_run(self._new(options.curves(self.policies, ())), talk=talk)
        asked = {
            split: {
                "contexts": sum(task.coverage.contexts for task in tasks),
                "questions": sum(task.coverage.questions for task in tasks),
            }
            for split, tasks in self.encoded.items()
        }
        if REFINE in self.work:
            found[REFINE] = {
                "contexts": options.measure * len(self.encoded["select"]),
                "evaluations": options.evaluations * len(options.sizes),
            }
        for size in ["smallest"] if options.smallest else options.sizes:
            found[f"{CHOICE}/{size}"] = asked
        whole = sum(self.work.values())
        return {name: {**cost, "share": round(self.work[name] / whole, 3)} for name, cost in found.items()}

    def _new(self, options: Calibration) -> Calibration:
        """Return options of a stage with the model, as of one that begins anew."""
        return options.model_copy(update={"force": True}).with_model(self.loaded)

    def run(self, talk: Talk) -> Ran:
        """Do all stages."""
        from kvsearch.budgets.plan_checks import check_plan
        from kvsearch.plan import save_plan
        from kvsearch.runs.contexts import write_contexts
        from kvsearch.runs.directory import write_json

        options, asked = self.options, not (self.options.output / REPORT).exists()
        with overall(talk, self.work) as stages:
            measured = self._measured(stages)
            refined = self._refined(measured, stages)
            found, hashes = [], {}
            for size in options.sizes:
                with stages.stage(f"{CHOICE}/{size}", f"choosing at {size.words}, then the report") as stage:
                    choice = self._choice(measured, size, refined)
                    found.append(choice.run(self._keep(choice, stage)))
                    hashes = choice.hashes
            smallest = None
            if options.smallest:
                words = f"finding the smallest budget that loses at most {options.within:g} points"
                with stages.stage(f"{CHOICE}/smallest", words) as stage:
                    smallest = self._smallest(measured, stage)
                    choice = smallest.choice
                    found.append(choice.reported(smallest.result, self._keep(choice, stage)))
                    hashes = choice.hashes
        for one in found:
            place = options.plan_file(one.selection.size)
            check_plan(one.selection.plan, f"the plan for {place}")
            save_plan(one.selection.plan, place, overwrite=True)
        result = Ran(options, tuple(found), asked, smallest)
        write_contexts(options.output, hashes)
        write_json(options.output / REPORT, result.as_json())
        return result

    def _measured(self, stages: Overall) -> Measured:
        """Fit the rankings, then measure what every policy and every ranking keeps."""
        from kvsearch.choose.contenders import Measured
        from kvsearch.report.ranking import RankingView
        from kvsearch.strategies.joint import policy_curves

        options, rankings = self.options, {}
        for name, fit in options.fits().items():
            with stages.stage(f"{FIT}/{name}", f"fitting the ranking {name}") as stage:
                profile = calibrate(fit.with_model(self.loaded), talk=stage)
                if RankingView(profile).is_last:
                    stage.warn(f"the ranking {name} is left out: every built-in one is better on held-out contexts")
                else:
                    rankings[name] = profile
        named = ", ".join((*self.policies, *rankings))
        with stages.stage(CURVES, f"measuring what {named} keep") as stage:
            measuring = options.curves(self.policies, list(rankings)).with_model(self.loaded)
            return Measured(policy_curves([calibrate(measuring, talk=stage)]), rankings)

    def _refined(self, measured: Measured, stages: Overall) -> Refined | None:
        """Search on from what was solved at every size; None where that is not wanted, or not possible."""
        from kvsearch.choose.contenders import find_contenders
        from kvsearch.jobs.refine import search_on

        options = self.options
        if REFINE not in self.work:
            return None
        with stages.stage(REFINE, f"searching on, {options.evaluations} plans of each size") as stage:
            search = options.refinement().with_model(self.loaded)
            sizes = [self._planned(measured, size) for size in options.sizes]
            starts = {size: measured.made_of(find_contenders(self.loaded, measured, size).plans) for size in sizes}
            return search_on(
                self.loaded, measured, search, options.questions("train"), starts, options.evaluations, stage
            )

    def _planned(self, measured: Measured, size: Size) -> Size:
        """Return the size that plans are made at, with its length."""
        found = planned_size(size, measured.length, self.longest)
        return replace(found, length=found.length or measured.length)

    def _choice(self, measured: Measured, size: Size, refined: Refined | None = None) -> OverallChoice:
        """Prepare the choice at a size, on contexts that nothing was fitted on."""
        from kvsearch.choose.acceptance import Rule
        from kvsearch.choose.contenders import find_contenders
        from kvsearch.choose.contest import prepare_contest
        from kvsearch.choose.overall import OverallChoice
        from kvsearch.plan.contexts import joined

        options, known = self.options, measured.contexts
        known = joined([known, *([] if refined is None else [refined.contexts])])
        settings = replace(options.asking(options.protocol), used=None if known is None else known.used)
        planned = self._planned(measured, size)
        more = {} if refined is None else refined.candidates(planned)
        found = find_contenders(self.loaded, measured, planned, more)
        # a few candidates need few questions to be ranked: most are for what is decided on. Fallbacks are chosen there,
        # too: few questions may have put the best one behind others
        rule = Rule(share=FIRST, kept=5)
        contest = prepare_contest(self.loaded, found, options.questions("select"), settings, rule, size)
        choice = OverallChoice(contest, size, options.questions("report"), max(len(options.sizes), 1))
        choice.check()
        return choice

    def _smallest(self, measured: Measured, talk: StageTalk) -> Smallest:
        """Find the smallest budget, between what policies always keep and the longest context."""
        from kvsearch.choose.smallest import find_smallest, ladder
        from kvsearch.plan import Size

        least = min(policy.floor for policy in self.options.curves(self.policies, ()).policies())
        budgets = ladder(least + 1, self.longest - 1)

        def choice_at(budget: int) -> tuple[OverallChoice, Keep]:
            choice = self._choice(measured, Size(budget))
            return choice, self._keep(choice, talk)

        return find_smallest(budgets, self.options.within / 100, choice_at)

    def _keep(self, choice: OverallChoice, talk: StageTalk) -> Keep:
        """Return what keeps the replies of both stages and of the report."""
        place, steps = self.options.output / CHOICE / str(choice.size), choice.replies

        def keep(stage: str, evaluation: Evaluation) -> KeptStage:
            name = stage.rpartition("/")[2]
            before = sum(list(steps.values())[: list(steps).index(name)])
            part = talk.part(before / sum(steps.values()), steps[name] / sum(steps.values()))
            config = choice.config(evaluation)
            return kept_replies(place / name, config, evaluation.replies, False, part, name)

        return keep

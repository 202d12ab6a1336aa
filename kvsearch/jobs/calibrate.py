"""kvsearch calibrate: measure which cache entries a model can live without, and write a profile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, cast

from pydantic import Field, PrivateAttr
from pydantic.fields import FieldInfo

from kvsearch.calibration.directory import State, check_new, is_finished, kept_words, state_of
from kvsearch.calibration.options import (
    AdakvOptions,
    CakeOptions,
    CalibrationOptions,
    DynamicOptions,
    LavaOptions,
    LukvOptions,
    ProbeOptions,
    QueryBankOptions,
    QueryStatisticsOptions,
    RankingOptions,
)
from kvsearch.calibration.polykv.options import PolykvOptions
from kvsearch.calibration.sample_files import SAMPLES, forget_samples, has_samples
from kvsearch.config.options import Option, parse_setting
from kvsearch.errors import UsageError
from kvsearch.jobs.following import loading_flags
from kvsearch.jobs.foretell import foretold, measured_tflops
from kvsearch.jobs.groups import TASKS, TaskDetails, WithModel, WithWorkers
from kvsearch.jobs.public import job
from kvsearch.jobs.stages import FINISHED, on_interruption
from kvsearch.jobs.talk import Talk
from kvsearch.naming import suggest, unknown
from kvsearch.plan.fields import Samples
from kvsearch.plan.parsing import list_problems
from kvsearch.plan.saved import PROFILE
from kvsearch.progress import Progress
from kvsearch.runs.contexts import CONTEXTS
from kvsearch.runs.directory import begin
from kvsearch.runs.identity import CONFIG, RunConfig
from kvsearch.runs.sums import finish, finish_late, require_unchanged

if TYPE_CHECKING:
    from kvsearch.calibration.data import CalibrationData
    from kvsearch.calibration.polykv.cost import CostEstimate
    from kvsearch.calibration.probe.cost import RankingCost
    from kvsearch.models.loading import LoadedModel
    from kvsearch.plan import Profile
    from kvsearch.plan.contexts import ContextSet
    from kvsearch.plan.profile import TableCheck

DEFAULT_METHOD = "lukv"
WRITTEN = (CONFIG, PROFILE, CONTEXTS, "*.safetensors")
TFLOPS = 100.0
RESUMED = (PolykvOptions, RankingOptions)  # go on where they were stopped
RATIOS = 0.8, 0.5, 0.2  # shares of the prompt to evict that a first plan may have
OF_TASKS = {"split", "samples", *TaskDetails.model_fields} - {"data"}  # what only --tasks reads


class CalibrateOptions(WithModel, WithWorkers, TaskDetails, CalibrationOptions):
    """Where a profile goes and what it is measured on; what is measured is the method's to say, see `METHODS`."""

    output: Annotated[Path, Option("Directory for the profile.", short="-o", recorded=False)]
    data: Annotated[
        str | None,
        Option(
            "Calibration file; of probe and query_bank also FILE.txt,... or a folder of these, a context each; with "
            "--tasks longbench or gsm8k their file, folder or dataset id, as for evaluate.",
            shown="the shipped one for this model",
        ),
    ] = None
    tasks: Annotated[
        str | None,
        Option(
            "Calibrate on the questions of tasks, and their right answers, in place of a file: KIND or KIND:NAME,NAME, "
            "several joined by +, as for evaluate.",
            metavar="SPEC",
            panel=TASKS,
        ),
    ] = None
    split: Annotated[
        str, Option("--tasks: part of the examples, train or select, never what is reported on.", panel=TASKS)
    ] = "train"
    samples: Annotated[Samples, Option("--tasks: contexts per task.", panel=TASKS)] = 10
    questions: Annotated[int | None, Field(ge=1), Option("Use only so many questions, and their contexts.")] = None
    force: Annotated[bool, Option("Replace results already in the directory.", recorded=False)] = False
    tflops: Annotated[
        float | None,
        Option(
            "--dry-run of polykv, probe and query_bank: 10^12 operations a second that times are estimated for.",
            metavar="TFLOPS",
            shown=f"polykv: measured here, others {TFLOPS:g}",
            recorded=False,
        ),
    ] = None
    option: Annotated[
        tuple[str, ...],
        Option(
            "An option of the method by its name, as in --option floor_share=0.",
            repeated=True,
            recorded=False,
            hidden=True,
        ),
    ] = ()

    @classmethod
    def offered(cls) -> dict[str, tuple[FieldInfo, Option]]:
        """Return the options of all methods; those of one method where that is chosen."""
        found = super().offered()
        if cls is CalibrateOptions:
            for method in METHODS.values():
                found = {**found, **{name: item for name, item in method.offered().items() if name not in found}}
        return found

    @classmethod
    def of(cls, recipe: str | Path | None = None, **given: Any) -> Self:
        """See `JobOptions.of`; `option` has options of the method as key=value, which win over the others."""
        options = dict(parse_setting(item, "--option") for item in given.pop("option", None) or ())
        return super().of(recipe, **{**given, **options})

    @classmethod
    def chosen(cls, stated: Mapping[str, Any], given: Mapping[str, Any], path: Path | None) -> type[Self]:
        """Return the model of the method that was given or that the recipe at `path` has stated.

        Raises:
            UsageError: they differ, there is no such method, or something is given that the method does not have.
        """
        known, typed = list(METHODS), given.get("method")
        name = stated.get("method", typed or DEFAULT_METHOD)
        if typed is not None and typed not in known:
            raise UsageError(unknown("method", typed, known))
        if not isinstance(name, str) or name not in known:
            problem = f"method: {name!r} is unknown{suggest(str(name), known)}"
            raise UsageError(list_problems([problem], str(path)))
        if typed not in (None, name):
            raise UsageError(f"{path} is a recipe of method {name}, not {typed}: leave --method or --recipe out")
        method = METHODS[name]
        method.check_given(given)
        return cast("type[Self]", method)

    def recorded(self) -> dict[str, Any]:
        """See `JobOptions.recorded`; without tasks there are no options of theirs."""
        unread = set() if self.tasks is not None else OF_TASKS
        return {key: value for key, value in super().recorded().items() if key not in unread}

    _texts: Any = PrivateAttr(default=None)  # CalibrationData

    def with_texts(self, texts: CalibrationData) -> Self:
        """Return the options with what is measured, in place of a file: for the stages of a longer job."""
        found = self.model_copy()
        found._texts = texts
        return found

    @property
    def texts_given(self) -> CalibrationData | None:
        """What `with_texts` was given."""
        return cast("CalibrationData | None", self._texts)

    @property
    def directories(self) -> tuple[Path, ...]:
        """See `JobOptions.directories`."""
        return (self.output,)

    def used(self) -> ContextSet | None:
        """Return contexts in whose place others are drawn from tasks."""
        return None

    def configuration(self, texts: CalibrationData) -> RunConfig:
        """Return the configuration of the run, on `texts`."""
        content: dict[str, Any] = {
            "model": self.model, "data": texts.name, "data_sha256": texts.sha256, "questions": texts.questions,
            "recipe": self.resolved(), "seed": self.seed, "dtype": self.dtype, "revision": self.revision,
        }  # fmt: skip
        return RunConfig(job="calibrate", options=self.recorded(), content=content)


class CalibrateLukv(LukvOptions, CalibrateOptions):
    """See `LukvOptions`."""


class CalibrateLava(LavaOptions, CalibrateOptions):
    """See `LavaOptions`."""


class CalibrateCake(CakeOptions, CalibrateOptions):
    """See `CakeOptions`."""


class CalibrateProbe(ProbeOptions, CalibrateOptions):
    """See `ProbeOptions`."""


class CalibrateQueryBank(QueryBankOptions, CalibrateOptions):
    """See `QueryBankOptions`."""


class CalibrateQueryStatistics(QueryStatisticsOptions, CalibrateOptions):
    """See `QueryStatisticsOptions`."""


class CalibrateAdakv(AdakvOptions, CalibrateOptions):
    """See `AdakvOptions`."""


class CalibratePolykv(PolykvOptions, CalibrateOptions):
    """See `PolykvOptions`."""


METHODS: dict[str, type[CalibrateOptions]] = {
    "lukv": CalibrateLukv, "lava": CalibrateLava, "cake": CalibrateCake, "adakv": CalibrateAdakv,
    "polykv": CalibratePolykv, "probe": CalibrateProbe, "query_bank": CalibrateQueryBank,
    "query_statistics": CalibrateQueryStatistics,
}  # fmt: skip


@job(CalibrateOptions, dry=True)
def dry_run(options: CalibrateOptions, talk: Talk) -> tuple[dict[str, Any], CostEstimate | RankingCost | None]:
    """Return the configuration of the run and, of PolyKV and rankings, what it would cost; say how long others take.

    Whatever would stop the calibration at its start is found out; errors as `calibrate`. For a ranking the weights of
    the model are not loaded.
    """
    if isinstance(options, RankingOptions):
        options = options.without_weights(options.model)
    texts, config, loaded = _checked(options, talk, tflops=True)
    state = _state(options, config)
    if state == "finished":
        talk.say(FINISHED)
    loaded = loaded or options.load(options.model, talk)
    for policy in options.policies():
        policy.check_model(loaded.fingerprint)
    if isinstance(options, RankingOptions):
        from kvsearch.calibration.probe.cost import ranking_cost

        cost = ranking_cost(loaded, texts, options, TFLOPS if options.tflops is None else options.tflops)
        return {**config.content, **options.work(texts), "estimate": cost.as_json()}, cost
    if not isinstance(options, PolykvOptions):
        return {**config.content, **options.work(texts), **_foretold(options, loaded, texts, talk)}, None
    from kvsearch.calibration.polykv.checks import checked_prompts
    from kvsearch.calibration.polykv.cost import ModelSize, SweepWork, estimate
    from kvsearch.calibration.polykv.measurement import Measurement
    from kvsearch.calibration.polykv.samples import SampleFiles
    from kvsearch.runtime.key_norms import warn_unfit

    policies = options.policies()
    warn_unfit(loaded.model, policies)
    prompts = checked_prompts(loaded, texts, options, policies)
    rate = measured_tflops(loaded) if options.tflops is None else options.tflops
    found = estimate(ModelSize.of(loaded.model), SweepWork.of(prompts, policies, options), rate, options.memory_bytes)
    if state == "unfinished":
        SampleFiles(options.output / SAMPLES, Measurement.of(loaded, texts, prompts, options, policies))
    return {**config.content, "estimate": found.as_json()}, found


def _foretold(options: CalibrateOptions, loaded: LoadedModel, texts: CalibrationData, talk: Talk) -> dict[str, Any]:
    """Say about how long reading the texts takes, a pass over a context for each of its questions, and own replies."""
    from kvsearch.models.speed import Work
    from kvsearch.tasks.encode import counter

    count, passes, tokens = counter(loaded.tokenizer), 0, 0
    for context in texts.contexts:
        times = max(1, len(context.questions))
        passes, tokens = passes + times, tokens + times * count(context.text)
    return foretold(loaded, Work(passes, tokens, options.work(texts).get("own_reply_tokens", 0)), talk)


@job(CalibrateOptions)
def calibrate(options: CalibrateOptions, talk: Talk) -> Profile:
    """Measure which cache entries a model can live without, and write a profile into `output`.

    lukv: from the true importance of entries for later answers. lava, cake, adakv: what these rules decide prompt by
    prompt, averaged to static budgets. polykv: what every layer loses under each of several patterns. probe,
    query_bank: a ranking. A run of these three that was interrupted goes on when the call is repeated; of a finished
    one, of any method, the profile is read. query_statistics: mean and covariance of queries, which `export_to` hands
    to other tools.

    Raises:
        UsageError: options that do not go together, unreadable texts, or results of something else in `output`.
        IncompatibleError: the model computes NaN, or a prompt does not fit it.
        EnvironmentFault: the disk is full, or the model cannot be loaded here.
    """
    from kvsearch.plan.profile import load_profile, save_profile
    from kvsearch.runs.contexts import write_contexts

    texts, config, loaded = _checked(options, talk)
    state, place = _state(options, config), options.output / PROFILE
    if state == "finished":
        require_unchanged(options.output, PROFILE, "restore it, or start anew with --force")
        talk.say(FINISHED)
        profile = load_profile(place)
        write_contexts(options.output, {"fitted": texts.hashes})  # the last file of a calibration but its checksums
        finish_late(options.output, PROFILE, WRITTEN)
        return profile
    loaded = loaded or options.load(options.model, talk)

    from kvsearch.evaluation.identity import environment
    from kvsearch.runtime.key_norms import warn_unfit

    policies = options.policies()
    for policy in policies:
        policy.check_model(loaded.fingerprint)
    warn_unfit(loaded.model, policies)
    named = ", ".join(policy.name for policy in policies)
    among = "beside" if isinstance(options, RankingOptions) else "for"  # a ranking is compared with others
    talk.say(f"calibrating {options.model} by {options.method} {among} {named} on {options.scope(texts)} "
             f"from {texts.name}")  # fmt: skip
    config = config.model_copy(update={"execution": environment(loaded)})
    with _resumable(options, config, state == "unfinished", talk) as start, talk.progress(options.unit) as progress:
        profile = _measure(options, loaded, texts, progress, start)
    profile = _checked_table(options, loaded, texts, profile, talk)
    save_profile(profile, place, overwrite=True)
    write_contexts(options.output, {"fitted": texts.hashes})
    forget_samples(options.output)
    finish(options.output, WRITTEN)
    return profile


def _checked_table(
    options: CalibrateOptions, loaded: LoadedModel, texts: CalibrationData, profile: Profile, talk: Talk
) -> Profile:
    """Return the profile with what its table is worth beside even budgets, and say that; as it is where it has none."""
    from kvsearch.calibration.tables import HELD_OUT, LEAST_CONTEXTS
    from kvsearch.choose.table_check import check_table, shrunk

    if not getattr(options, "check", False):
        return profile
    checks: tuple[TableCheck, ...] = ()
    if HELD_OUT in profile.arrays:
        with talk.progress("contexts checked") as progress:
            checks = check_table(loaded, texts, options, profile, progress)
    if not checks:
        talk.say(f"the table was not checked against even budgets: that takes {LEAST_CONTEXTS} different contexts with "
                 "answers, and a table by ratios")  # fmt: skip
        return profile
    for one in checks:
        if one.verdict == "harmful":
            talk.warn(f"the table loses to even budgets: {one.words}; export refuses it without --allow-harmful")
        else:
            talk.say(f"{one.verdict}: {one.words}")
    profile = shrunk(profile, checks)
    return replace(profile, metadata=profile.metadata.model_copy(update={"checks": checks}))


def following_commands(options: CalibrateOptions, profile: Profile) -> Iterator[list[str]]:
    """Yield the words of commands that use what was measured."""
    from kvsearch.plan.profile import QUERIES
    from kvsearch.policies.registry import FITTED

    place = str(options.output)
    if options.method == QUERIES:
        yield ["export", place, "--to", "kvpress-ea", "-o", f"{place.rstrip('/')}-kvpress"]
    elif options.method in FITTED:
        policy = f"{options.method}={place}"
        beside = f"{place.rstrip('/')}-budgets"
        yield ["calibrate", options.model, "--policy", policy, "-o", beside, *loading_flags(options)]
    elif isinstance(options, PolykvOptions):
        size = ["--budget", str(options.budgets[0])]
        yield ["validate", place] if options.signals != ("entropy",) else ["show", place]
        # entropy alone can share out budgets only
        alone = options.signals == ("entropy",) and options.budget_signal is None
        yield ["export", place, *size, *["--budget-signal", "entropy"] * alone, "-o", str(options.output / "plan.json")]
    else:
        for ratio in RATIOS:
            if _reaches(profile, ratio):
                yield ["export", place, "--ratio", str(ratio), "-o", str(options.output / "plan.json")]
                return


def _reaches(profile: Profile, ratio: float) -> bool:
    """Tell whether a plan that evicts this share can be made of a profile: what a policy always keeps may be more."""
    from kvsearch.plan import Size
    from kvsearch.strategies.from_profile import plan_from_profile

    if profile.metadata.policies is not None:  # measured for several policies, with a solver over all of them
        return True
    try:
        plan_from_profile(profile, Size(ratio=ratio))
    except UsageError:
        return False
    return True


def _checked(
    options: CalibrateOptions, talk: Talk, *, tflops: bool = False
) -> tuple[CalibrationData, RunConfig, LoadedModel | None]:
    """Return the texts and the configuration, once all is checked that can be without a model.

    The questions of tasks are made for a tokenizer: with them the model, which is loaded.
    """
    options.policies()
    if options.tflops is not None and not (tflops and isinstance(options, PolykvOptions | RankingOptions)):
        raise UsageError("--tflops is for what --dry-run says of methods polykv, probe and query_bank: leave it out")
    if isinstance(options, PolykvOptions):
        for remark in options.remarks():
            talk.warn(remark)
    texts, loaded = _texts(options, talk)
    texts = texts.limited(options.questions)
    return texts, options.configuration(texts), loaded


def _texts(options: CalibrateOptions, talk: Talk) -> tuple[CalibrationData, LoadedModel | None]:
    """Return the texts of the file, or of the tasks with the model that they are made for."""
    from kvsearch.calibration.data import default_data, load_calibration_data

    if options.texts_given is not None:
        return options.texts_given, None
    if options.tasks is None:
        for name in sorted(OF_TASKS & options.model_fields_set):
            raise UsageError(f"--{name.replace('_', '-')} is for --tasks: leave it out, or name tasks")
        return load_calibration_data(options.data or default_data(options.model), options.bare), None
    from kvsearch.calibration.task_data import data_of_tasks
    from kvsearch.choose.splits import refuse_reported
    from kvsearch.tasks.catalog import find_tasks
    from kvsearch.tasks.facts import describe_tasks

    tasks = find_tasks(options.tasks, options.task_options(options.split))
    refuse_reported(tasks)
    may_go_on = isinstance(options, RESUMED) and has_samples(options.output)
    if not (may_go_on or is_finished(options.output)):
        check_new(options.output, options.force)
    if any(one.split == "all" for one in describe_tasks(options.tasks)):
        talk.say(f"evaluate asks all examples of {options.tasks} by default: give it --split report for fresh ones")
    loaded = options.load(options.model, talk)
    return data_of_tasks(loaded, tasks, options.samples, options.seed, options.max_length, options.used()), loaded


def _state(options: CalibrateOptions, config: RunConfig) -> State:
    """Return how far the run is; UsageError if something else is in the directory."""
    return state_of(options.output, config, isinstance(options, RESUMED), options.force)


@contextmanager
def _resumable(options: CalibrateOptions, config: RunConfig, goes_on: bool, talk: Talk) -> Iterator[Callable[[], None]]:
    """Give what to call once all is checked: samples of another calibration go, and the configuration is written.

    After Ctrl-C it says what is kept of a calibration that goes on, and how to go on.
    """
    begun = goes_on

    def start() -> None:
        nonlocal begun
        if not goes_on:
            forget_samples(options.output)
        # an old profile beside a new configuration would pass for that of it; unfinished samples tell of themselves
        begin(options.output, config, (CONTEXTS,) if isinstance(options, PolykvOptions) else (CONTEXTS, PROFILE))
        begun = True

    def words() -> str:
        if not begun or not (kept := kept_words(options.output)):
            return f"no {options.unit.removesuffix('s')} is finished: the same command begins anew"
        how = "the same command, without --force," if options.force else "the same command"
        return f"kept in {options.output}: {kept}; {how} goes on with the others"

    with on_interruption(talk, words) if isinstance(options, RESUMED) else nullcontext():
        yield start


def _measure(
    options: CalibrateOptions,
    loaded: LoadedModel,
    texts: CalibrationData,
    progress: Progress,
    start: Callable[[], None],
) -> Profile:
    """Run the method; `start` is called once all is checked."""
    if isinstance(options, PolykvOptions):
        from kvsearch.calibration.polykv.measure import calibrate_polykv

        return calibrate_polykv(loaded, texts, options, options.policies(), progress, options.output, start)
    start()
    if isinstance(options, ProbeOptions):
        from kvsearch.calibration.probe.measure import calibrate_probe

        return calibrate_probe(loaded, texts, options, progress, options.output)
    if isinstance(options, QueryBankOptions):
        from kvsearch.calibration.probe.bank import calibrate_query_bank

        return calibrate_query_bank(loaded, texts, options, progress, options.output)
    policy = options.make_policy()
    if isinstance(options, LukvOptions):
        from kvsearch.calibration.lukv import calibrate_lukv

        return calibrate_lukv(loaded, texts, policy, options, progress, options.make_rivals())
    if isinstance(options, QueryStatisticsOptions):
        from kvsearch.calibration.query_statistics import calibrate_query_statistics

        return calibrate_query_statistics(loaded, texts, policy, options, progress)
    if isinstance(options, CakeOptions):
        from kvsearch.calibration.cake_exponents import calibrate_cake

        return calibrate_cake(loaded, texts, policy, options, progress)
    assert isinstance(options, DynamicOptions)
    from kvsearch.calibration.dynamic import calibrate_dynamic

    return calibrate_dynamic(loaded, texts, policy, options.make_allocation(), options, progress)

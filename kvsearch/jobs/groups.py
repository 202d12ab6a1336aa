"""Options that several jobs have: which model, how it is loaded, which tasks are asked, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, cast

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, ValidationInfo, model_validator

from kvsearch.config.options import JobOptions, Option, Seeded, above_zero, asked_by_name, bytes_of
from kvsearch.core.errors import UsageError
from kvsearch.core.fields import Samples, refuse
from kvsearch.jobs.reporter import Reporter, Silent
from kvsearch.models import loading
from kvsearch.models.loading import BUNDLED, LoadedModel, LoadOptions
from kvsearch.plan.schema import QUESTION_AGNOSTIC, Protocol, find_protocol
from kvsearch.search.settings import WORK
from kvsearch.selection.rule import Rule
from kvsearch.tasks.base import Task
from kvsearch.tasks.catalog import NO_QA, SYNTHETIC, TaskOptions, find_tasks
from kvsearch.workers.cluster import RayWorkers, import_ray
from kvsearch.workers.models import ModelWorkers

if TYPE_CHECKING:
    from kvsearch.evaluation.compare import Split

ASKED, KEPT, TASKS, LOADING = "How it is asked", "What is kept and shown", "Tasks", "The model"
DEFAULT_TASKS = "synthetic for the bundled models, ruler:no-qa for others"


def _numbers(value: object) -> object:
    """Read whole numbers as they are typed, "8,16"."""
    if not isinstance(value, str):
        return [value] if isinstance(value, int) else value
    try:
        return [int(item) for item in value.split(",")]
    except ValueError:
        raise ValueError(f"takes whole numbers with commas between them, got {value!r}") from None


def _names(value: object, info: ValidationInfo) -> object:
    """Read names as they are typed, "cosine,ppl"; UsageError if one of them is empty."""
    if not isinstance(value, str):
        return value
    names = [name.strip() for name in value.split(",")]
    if not all(names):
        raise UsageError(f"--{info.field_name} takes names with commas between them, got {value!r}")
    return names


Numbers = BeforeValidator(_numbers)
WholeNumbers = Annotated[tuple[Annotated[int, Field(strict=True)], ...], Numbers]
Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
BUDGET = Option("Entries to keep per kv head, on average.")
RATIO = Option("Share of the cache to evict, above 0 and below 1.")
CONTEXTS = {"train": 80, "select": 160, "report": 120}  # of all tasks together, the most that are asked by default
SAMPLES_OPTION = Option("Contexts per task.", panel=ASKED)
TASKS_OPTION = Option(
    "KIND or KIND:NAME,NAME, several joined by +: synthetic, synthetic:ruler, synthetic:sparse, ruler, "
    "ruler:no-qa, longbench, longbench:english, longbench:e, infinitebench, gsm8k, niah, jsonl:FILE; see "
    "`kvsearch tasks`.",
    metavar="SPEC",
    panel=TASKS,
    shown=DEFAULT_TASKS,
)


class Loading(JobOptions):
    """How the model of a job is loaded."""

    device: Annotated[str, Option("auto, cpu, cuda or cuda:1.", panel=LOADING)] = "auto"
    device_map: Annotated[
        str | None, Option("Spread the model over several GPUs: auto, balanced, sequential.", panel=LOADING)
    ] = None
    dtype: Annotated[str, Option("auto, float32, bfloat16 or float16.", panel=LOADING)] = "auto"
    revision: Annotated[str | None, Option("Branch, tag or commit of a hub model.", panel=LOADING)] = None
    trust_remote_code: Annotated[bool, Option("Run code that a model brings along.", panel=LOADING, recorded=False)] = (
        False
    )
    offline: Annotated[bool, Option("Never touch the network.", panel=LOADING, recorded=False)] = False

    def loading(self) -> LoadOptions:
        """Return the options of `kvsearch.models.loading.load`; UsageError if they contradict each other."""
        return LoadOptions(**{name: getattr(self, name) for name in Loading.model_fields})

    _loaded: Any = PrivateAttr(default=None)  # a LoadedModel

    def with_model(self, loaded: LoadedModel) -> Self:
        """Return the options with their model, which is then not loaded again: for the stages of a longer job."""
        found = self.model_copy()
        found._loaded = loaded
        return found

    def without_weights(self, name: str) -> Self:
        """Return the options with the shape of a model, which is all that is loaded: see `load_shape`."""
        return self if self._loaded is not None else self.with_model(loading.load_shape(name, self.loading()))

    def load(self, name: str, reporter: Reporter | None = None, **instead: Any) -> LoadedModel:
        """Load the model of that name as these options say, but for those given `instead`; errors: see `load`."""
        if self._loaded is not None:
            return cast("LoadedModel", self._loaded)
        with (reporter or Silent()).loading(name):
            return loading.load(name, replace(self.loading(), **instead))


class WithWorkers(Loading):
    """Which processes do the work; they decide nothing, so they are no part of a run's configuration."""

    workers: Annotated[
        int | None,
        Field(ge=1),
        Option(
            "Share out the work to so many Ray workers, with a GPU each if the model is on one.",
            panel=WORK,
            shown="this process",
            recorded=False,
        ),
    ] = None
    ray_address: Annotated[
        str | None,
        Option("A running Ray cluster: auto, or host:port.", panel=WORK, shown="one is started here", recorded=False),
    ] = None

    _opened: list[ModelWorkers] = PrivateAttr(default_factory=list)  # copies of the options have the same list

    @model_validator(mode="after")
    def _workers_are_named(self) -> Self:
        if self.workers is None and self.ray_address is not None:
            raise UsageError("--ray-address is for Ray workers: say how many with --workers")
        return self

    def ray_workers(self) -> RayWorkers | None:
        """Return the Ray workers that are asked for."""
        return None if self.workers is None else RayWorkers(self.workers, address=self.ray_address)

    def without_work(self) -> Self:
        return self.model_copy(update={"workers": None, "ray_address": None})

    def load(self, name: str, reporter: Reporter | None = None, **instead: Any) -> LoadedModel:
        """See `Loading.load`; the workers load the model, too, when there is something to do.

        Raises:
            EnvironmentFault: Ray is missing, the cluster does not answer or has no room for the workers.
        """
        wanted = self.ray_workers() if self._loaded is None else None
        if wanted is None:
            return super().load(name, reporter, **instead)
        import_ray()  # before a model is loaded
        loaded = super().load(name, reporter, **instead)
        self._opened.append(ModelWorkers(loaded, replace(self.loading(), **instead), wanted))
        return replace(loaded, workers=self._opened[-1])

    def close(self) -> None:
        while self._opened:
            self._opened.pop().close()


class WithModel(Loading):
    """A model, by name, and how it is loaded."""

    model: Annotated[str, Option("A hub id, a local directory, `bundled` or `bundled-redundant`.", argument=True)]


class WithRun(JobOptions):
    """A directory in which a run is kept."""

    output: Annotated[Path, Option("Directory of the run.", short="-o", recorded=False)]
    force: Annotated[bool, Option("Start anew, whatever run is in the directory.", recorded=False)] = False

    @property
    def directories(self) -> tuple[Path, ...]:
        return (self.output,)


def refuse_two_sizes(options: JobOptions, names: Sequence[str]) -> None:
    """Refuse options of a job if several of these `names`, each a size, are given, or a budget twice."""
    given = [name for name in names if getattr(options, name) is not None and getattr(options, name) is not False]
    budgets = getattr(options, "budgets", None) or ()
    if len(given) > 1:
        refuse([((given[1],), f"is in place of {given[0]}: give one of them")])
    if len(set(budgets)) < len(budgets):
        refuse([(("budgets",), "has a budget twice: give each once")])


def default_tasks(model: str | None) -> str:
    """Return the spec of what a model is asked by default: bundled ones in their own language, others in English.

    Both are generated, so nothing is downloaded, and the latter is as long in the tokens of any model.
    """
    return SYNTHETIC if model in BUNDLED else NO_QA


class TaskDetails(JobOptions):
    """What tasks are made of; most options are read by some of them only."""

    length: Annotated[
        WholeNumbers | None,
        Option(
            "Tokens of a context (synthetic, niah) or of a whole prompt (ruler); several for niah.",
            metavar="N[,N...]",
            panel=TASKS,
            shown="synthetic 1024, ruler 4096, niah 1000,2000,4000,8000",
        ),
    ] = None
    data: Annotated[
        str | None,
        Option(
            "longbench, infinitebench, gsm8k: a file or folder, or a dataset id of the hub.",
            panel=TASKS,
            shown="the hub's own",
        ),
    ] = None
    data_revision: Annotated[str | None, Option("Branch, tag or commit of a dataset of the hub.", panel=TASKS)] = None
    prompts: Annotated[
        Path | None, Option("longbench, infinitebench: a JSON file of prompts in place of kvsearch's.", panel=TASKS)
    ] = None
    haystack: Annotated[
        Path | None,
        Option(
            "niah, ruler: the text file in which needles are hidden.",
            panel=TASKS,
            shown="a story that kvsearch brings along",
        ),
    ] = None
    squad: Annotated[Path | None, Option("ruler:qa_1: questions, a JSON file in SQuAD's format.", panel=TASKS)] = None
    hotpot: Annotated[Path | None, Option("ruler:qa_2: questions, a JSON file in HotpotQA's format.", panel=TASKS)] = (
        None
    )
    depths: Annotated[
        WholeNumbers | None,
        Option(
            "niah: where the needle is, in percent of the context.",
            metavar="N[,N...]",
            panel=TASKS,
            shown="ten even steps from 0 to 100",
        ),
    ] = None
    shots: Annotated[int | None, Option("gsm8k: how many worked examples.", panel=TASKS, shown="4")] = None
    metric: Annotated[
        str | None,
        Option(
            "gsm8k: gsm8k or gsm8k_official; niah: niah_recall, niah_recall_lava, niah_rouge1 or another.",
            panel=TASKS,
            shown="gsm8k, niah_recall",
        ),
    ] = None

    def task_options(self, split: str | None = None) -> TaskOptions:
        """Return what tasks are made with, of one split (None: the default of each)."""
        details = {name: getattr(self, name) for name in TaskDetails.model_fields if name != "length"}
        return TaskOptions(lengths=self.length, split=split, **details)


class WithTasks(TaskDetails):
    """Which tasks are asked."""

    tasks: Annotated[str | None, TASKS_OPTION] = None

    def find_tasks(self, model: str | None, split: str | None = None) -> list[Task]:
        """Return the tasks for a model, of one split; see `kvsearch.tasks.catalog.find_tasks` for the errors."""
        return find_tasks(self.tasks or default_tasks(model), self.task_options(split))


class Batches(Seeded):
    """How long prompts may be, and how many are asked at a time."""

    max_length: Annotated[
        int | None,
        Field(ge=1),
        Option(
            "Most tokens of prompt and reply together; the middle of longer contexts is cut out. At most, and by "
            "default, what the model takes.",
            panel=ASKED,
        ),
    ] = None
    batch: Annotated[int, Field(ge=1), Option("Prompts per forward pass.", panel=ASKED)] = 8
    max_memory: Annotated[
        float | None,
        AfterValidator(above_zero),
        Option(
            "Most memory for compressed caches at a time; prompts are read again for methods that do not fit.",
            metavar="GB",
            panel=ASKED,
            shown="8.6, of a GPU half of what is free",
        ),
    ] = None

    @property
    def memory_bytes(self) -> int | None:
        """`max_memory` in bytes."""
        return bytes_of(self.max_memory)

    def asked_of(self, tasks: Sequence[Task], samples: int, protocol: Protocol) -> Split:
        """Return tasks that are asked about up to `samples` contexts each, under a protocol."""
        from kvsearch.evaluation.compare import Settings, Split

        return Split(tasks, Settings(samples, protocol, self.seed, self.batch, self.memory_bytes, self.max_length))


class Deciding(Batches):
    """On how many contexts a plan is chosen and reported, and how sure a choice has to be."""

    samples: Annotated[
        Annotated[Samples, Field(ge=2)] | None,
        Option(
            "Contexts per task to choose by, at most, and as many others to report on.",
            panel=ASKED,
            shown=f"{CONTEXTS['select']} to choose by and {CONTEXTS['report']} to report on, of all tasks together",
        ),
    ] = None
    sure: Annotated[
        float,
        Option(
            "How sure to be that what is written is better than the best baseline: 0.9 takes what is likely better, "
            "0.95 or more only what beats it.",
            panel=ASKED,
        ),
    ] = Rule.sure

    @property
    def rule(self) -> Rule:
        """How sure to be; UsageError if that is out of range."""
        return Rule(self.sure)

    def split(self, name: str, tasks: Sequence[Task], protocol: Protocol) -> Split:
        """Return a split of some tasks as it is asked; of each task two contexts at least."""
        return self.asked_of(tasks, self.samples or max(CONTEXTS[name] // len(tasks), 2), protocol)


class WithProtocol(Batches):
    """What is compressed before a question is asked."""

    protocol: Annotated[
        Protocol,
        asked_by_name(find_protocol),
        Option(
            "question-agnostic: the context is compressed first, then the questions are asked; question-aware: "
            "context and question are compressed as one.",
            panel=ASKED,
        ),
    ] = QUESTION_AGNOSTIC

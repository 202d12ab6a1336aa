"""Options that several jobs share: model, tasks and prompts; and suggestions of next commands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from kvsearch.config.options import (
    FIRST,
    MACHINE,
    QUESTIONS,
    RESULT,
    RULE,
    SIZE,
    JobOptions,
    Listed,
    Option,
    Seeded,
    Specs,
    WholeNumbers,
    option,
)
from kvsearch.core.errors import UsageError
from kvsearch.core.fields import Entries, Samples
from kvsearch.core.printed import format_command_line
from kvsearch.models.loading import BUNDLED, LoadOptions
from kvsearch.plan.schema import QUESTION_AGNOSTIC, Protocol
from kvsearch.selection.records import Rule
from kvsearch.tasks.base import Task
from kvsearch.tasks.catalog import NO_QA, SYNTHETIC, find_tasks
from kvsearch.tasks.catalog import TASKS as TASK_REGISTRY
from kvsearch.tasks.metrics import is_forced

if TYPE_CHECKING:
    from kvsearch.evaluation.compare import Split

ASKED, KEPT, TASKS = "How it is asked", "What is kept and shown", "Tasks"
DEFAULT_TASKS = "synthetic for the bundled models, ruler:no-qa for others"


MODEL = Option(
    "A hub id, a local directory, a GGUF file, `smollm2`, `bundled` or `bundled-redundant`.",
    argument=True,
    completes="kvsearch.models.loading:SHORT_NAMES",
)
BUDGET = Option("Entries to keep per kv head, on average.", SIZE)
BUDGETS = Option("Several budgets, each with a plan of its own: plan-N.json.", metavar="N,N...")
RATIO = Option("Share of the cache to evict, above 0 and below 1.", SIZE)
DEFAULT_CONTEXTS = {"train": 80, "select": 80, "report": 60}  # of all tasks together, at most
SAMPLES_OPTION = Option("Contexts per task.", QUESTIONS, panel=ASKED)
LOSE_AT_MOST = Option(
    "Share of the score, such as 2%, that the mean loss to the full cache may reach, on contexts that nothing was "
    "fitted or chosen by."
)
PROTOCOL = Option(
    "question-agnostic: the context is compressed first, then the questions are asked; question-aware: context and "
    "question are compressed as one.",
    panel=ASKED,
)
OUTPUT_OPTION = Option(
    "Keep the run here, reply by reply; the same command goes on where it stopped.",
    RESULT,
    short="-o",
    metavar="DIR",
    recorded=False,
    locked=True,
)


BudgetList = Annotated[tuple[Entries, ...] | None, Listed]


class ModelOptions(JobOptions):
    """Options of how a model is loaded."""

    panel: ClassVar[str] = "The model"

    device: str = option("auto", "auto, cpu, cuda or cuda:1.", MACHINE)
    device_map: str | None = option(None, "Spread the model over several GPUs: auto, balanced, sequential.")
    dtype: str = option("auto", "auto, float32, bfloat16 or float16.")
    revision: str | None = option(None, "Branch, tag or commit of a hub model.")
    trust_remote_code: bool = option(False, "Run code that a model brings along.", recorded=False)
    offline: bool = option(False, "Never touch the network.", recorded=False)

    @model_validator(mode="after")
    def _can_be_loaded(self) -> Self:
        self.loading()
        return self

    def loading(self) -> LoadOptions:
        """Return how the model is loaded; UsageError for settings that are unknown or do not go together."""
        return LoadOptions(**{name: getattr(self, name) for name in LOADING})


LOADING = tuple(ModelOptions.model_fields)


class WorkerOptions(JobOptions):
    """Options of worker processes; they change no result and are not part of a run's configuration."""

    panel: ClassVar[str] = "Who does the work"

    workers: int | None = option(
        None,
        "Divide the work among so many Ray workers, with a GPU each if the model is on one.",
        shown="this process",
        recorded=False,
        ge=1,
    )
    ray_address: str | None = option(
        None, "A running Ray cluster: auto, or host:port.", shown="one is started here", recorded=False
    )

    @model_validator(mode="after")
    def _workers_are_named(self) -> Self:
        if self.workers is None and self.ray_address is not None:
            raise UsageError("--ray-address is for Ray workers: say how many with --workers")
        return self


class RunDirOptions(JobOptions):
    """Options of the run directory."""

    output: Path = option(..., "Directory of the run.", RESULT, short="-o", recorded=False, locked=True)
    force: bool = option(False, "Start anew, whatever run is in the directory.", recorded=False)


def choose_default_tasks(model: str | None) -> str:
    """Choose the default tasks of a model: bundled models in their own language, others in English.

    Both are generated, so nothing is downloaded, and the latter is as long in the tokens of any model.
    """
    return SYNTHETIC if model in BUNDLED else NO_QA


class TaskOptions(JobOptions):
    """Options of tasks; most details are read by some tasks only."""

    panel: ClassVar[str] = TASKS

    tasks: Specs | None = option(
        None,
        "KIND or KIND:NAME,NAME, several joined by +: synthetic, synthetic:ruler, synthetic:sparse, ruler, "
        "ruler:no-qa, longbench, longbench:english, longbench:e, longbench:v2, infinitebench, gsm8k, math500, aime, "
        f"{', '.join(TASK_REGISTRY.built_in)}, jsonl:FILE, ppl:FILE; see `kvsearch tasks`.",
        FIRST,
        metavar="SPEC",
        shown=DEFAULT_TASKS,
        completes="kvsearch.tasks.catalog:list_specs",
    )
    length: WholeNumbers | None = option(
        None,
        "Tokens of a context (synthetic, niah, ppl) or of a whole prompt (ruler); several for niah.",
        QUESTIONS,
        metavar="N[,N...]",
        shown="synthetic 1024, ruler 4096, niah 1000,2000,4000,8000, ppl 512",
    )
    data: str | None = option(
        None, "longbench, infinitebench, gsm8k, math500, aime: a file, folder or dataset id.", shown="the hub's own"
    )
    data_revision: str | None = option(None, "Branch, tag or commit of a dataset of the hub.")
    prompts: Path | None = option(None, "longbench, infinitebench, math500, aime: a JSON file of other prompts.")
    max_new_tokens: int | None = option(None, "math500, aime: most tokens of a reply.", shown="16384", ge=1)
    haystack: Path | None = option(
        None, "niah, ruler: the text file in which needles are hidden.", shown="a story that kvsearch brings along"
    )
    squad: Path | None = option(None, "ruler:qa_1: questions, a JSON file in SQuAD's format.")
    hotpot: Path | None = option(None, "ruler:qa_2: questions, a JSON file in HotpotQA's format.")
    depths: WholeNumbers | None = option(
        None,
        "niah: where the needle is, in percent of the context.",
        metavar="N[,N...]",
        shown="ten even steps from 0 to 100",
    )
    shots: int | None = option(None, "gsm8k: how many worked examples.", shown="4")
    metric: str | None = option(
        None,
        "gsm8k: gsm8k or gsm8k_official; niah: niah_recall, niah_recall_lava, niah_rouge1 or another.",
        shown="gsm8k, niah_recall",
    )

    def task_options(self, split: str | None = None) -> dict[str, Any]:
        """Return the options for making tasks of one split (None: the default of each)."""
        return {"split": split, **{name: getattr(self, name) for name in TASK_DETAILS}}

    def find_tasks(self, model: str | None, split: str | None = None) -> list[Task]:
        """Find the tasks for a model, of one split; errors as `kvsearch.tasks.catalog.find_tasks`."""
        return find_tasks(self.tasks or choose_default_tasks(model), self.task_options(split))


TASK_DETAILS = [name for name in TaskOptions.model_fields if name != "tasks"]


class BatchOptions(Seeded):
    """Options of prompt length, batches and memory."""

    panel: ClassVar[str] = ASKED

    max_length: int | None = option(
        None,
        "Most tokens of prompt and reply together; the middle of longer contexts is cut out. At most, and by "
        "default, what the model takes.",
        ge=1,
    )
    batch: int = option(8, "Prompts per forward pass.", ge=1)
    max_memory: float | None = option(
        None,
        "Most memory for compressed caches at a time; prompts are read again for methods that do not fit.",
        metavar="GB",
        shown="8.6, of a GPU half of what is free",
        gt=0,
    )

    def make_split(self, tasks: Sequence[Task], samples: int, protocol: Protocol) -> Split:
        """Make a split with up to `samples` contexts per task; UsageError if a task does not support `protocol`."""
        for task in tasks:
            if is_forced(task) and protocol != QUESTION_AGNOSTIC:
                raise UsageError(f"--protocol {protocol}: task {task.name} is text without questions: leave it out")
        from kvsearch.evaluation.compare import Split

        memory = None if self.max_memory is None else int(self.max_memory * 10**9)
        return Split(tasks, samples, protocol, self.seed, self.batch, memory, self.max_length)


class SelectionOptions(BatchOptions):
    """Options of choosing a plan: contexts to choose and report on, and the confidence of the choice."""

    panel: ClassVar[str] = ASKED

    samples: Annotated[Samples, Field(ge=2)] | None = option(
        None,
        "Contexts per task to choose by, at most, and as many others to report on.",
        QUESTIONS,
        shown=f"{DEFAULT_CONTEXTS['select']} to choose by and {DEFAULT_CONTEXTS['report']} to report on, "
        "of all tasks together",
    )
    confidence: float | None = option(
        None,
        "How sure to be that what is written is better than the best baseline: 0.9 takes what is likely better, "
        "0.95 or more only what beats it.",
        RULE,
        shown="0.9",
    )
    former: ClassVar[Mapping[str, tuple[str, str]]] = {"sure": ("X", "--confidence")}

    @classmethod
    def translate_former(cls, options: dict[str, Any]) -> dict[str, Any]:
        return {"confidence" if name == "sure" else name: value for name, value in options.items()}

    @property
    def rule(self) -> Rule:
        """The rule of the choice; UsageError if `confidence` is out of range."""
        return Rule() if self.confidence is None else Rule(self.confidence)

    def split(self, name: str, tasks: Sequence[Task], protocol: Protocol) -> Split:
        """Make the split `name` of some tasks, with at least two contexts per task."""
        return self.make_split(tasks, self.samples or max(DEFAULT_CONTEXTS[name] // len(tasks), 2), protocol)


# --- commands that naturally follow another one, quoted: whoever pastes the line goes on ------------------------------

FORWARDED_OPTIONS = (
    *TaskOptions.model_fields,
    "samples",
    *BatchOptions.model_fields,
    "protocol",
    *LOADING,
)


def format_command(*words: object) -> str:
    """Format the line that suggests a command, given without the word kvsearch."""
    return f"next: {format_command_line(['kvsearch', *map(str, words)])}"


def list_changed_flags(options: JobOptions, names: Iterable[str]) -> Iterator[str]:
    """Yield the flags of options that differ from their defaults, as they are typed."""
    offered = options.list_options()
    fields = type(options).model_fields
    for name in names:
        value = getattr(options, name, None)
        if name not in offered or value is None or value == fields[name].get_default(call_default_factory=True):
            continue
        yield offered[name][1].format_flag(name)
        if not isinstance(value, bool):
            yield ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def changed_flags(options: JobOptions) -> Iterator[str]:
    """Yield the changed flags for tasks, prompts and loading the model, as they are typed.

    A file without tasks is one to calibrate on, which no other command reads.
    """
    has_tasks = getattr(options, "tasks", None) is not None
    yield from list_changed_flags(options, [name for name in FORWARDED_OPTIONS if name != "data" or has_tasks])


def suggest_plan_commands(plan: object, model: str, options: JobOptions) -> Iterator[str]:
    """Yield lines that suggest to show a plan, and to evaluate it with the options of a job.

    It is evaluated on the split "report" of its tasks: some tasks ask all of their contexts by default, also the ones
    that the plan was chosen on. Without tasks the default ones are asked.
    """
    yield format_command("show", plan)
    split = () if getattr(options, "tasks", None) is None else ("--split", "report")
    yield format_command("evaluate", model, "--plan", plan, *split, *changed_flags(options))

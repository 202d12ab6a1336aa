"""The catalogue of tasks: names, metrics, data sources and options of every task.

A spec is a kind of task, or a kind with names: `ruler`, `ruler:vt,cwe`, `longbench:english`, `aime:25`, `jsonl:FILE`.
Several specs are joined by `+`, as in `ruler:vt+gsm8k`. `SETS` has the names that stand for several tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvsearch.core.errors import UsageError
from kvsearch.core.naming import suggest
from kvsearch.core.parsing import format_error
from kvsearch.core.plugins import PluginRegistry
from kvsearch.tasks.base import Task
from kvsearch.tasks.dataset_task import DatasetTask
from kvsearch.tasks.longbench import (
    INFINITEBENCH_LAVA,
    INFINITEBENCH_TASKS,
    LONGBENCH_E,
    LONGBENCH_ENGLISH,
    LONGBENCH_TASKS,
    InfiniteBenchTask,
    LongBenchTask,
    LongBenchV2Task,
)
from kvsearch.tasks.maths import Gsm8kTask, TracedTask
from kvsearch.tasks.metrics import NEEDS
from kvsearch.tasks.metrics.packages import METRIC_PACKAGES
from kvsearch.tasks.retain import GROUPS, RETAIN, RETAIN_FORMS, RetainTask
from kvsearch.tasks.rows import Dataset, check_rows, load_shared_rows
from kvsearch.tasks.ruler import QA_FORMATS, RULER_SPECS, RULER_TASKS, DrawnRow, DrawnRulerTask, RulerTask
from kvsearch.tasks.ruler.needles import NIAH
from kvsearch.tasks.splits import ALL, SPLITS
from kvsearch.tasks.synthetic.suite import FORMS, SUITES, SYNTHETIC_SPLITS, SyntheticTask
from kvsearch.tasks.user_files import JsonlTask, TextTask

SYNTHETIC = "synthetic"
RULER = "ruler"
LONGBENCH = "longbench"
INFINITEBENCH = "infinitebench"
GSM8K = "gsm8k"
MATH500 = "math500"
AIME = "aime"
NEEDLE = "niah"
JSONL = "jsonl"
TEXT = "ppl"
KINDS: Final = (SYNTHETIC, RULER, LONGBENCH, INFINITEBENCH, GSM8K, MATH500, AIME, RETAIN)
OF_FILES: Final = (JSONL, TEXT)  # kinds that are given with a file of the user's own
# tasks that are a class each; other packages add theirs by the entry point group
TASKS: Final[PluginRegistry[type[Task]]] = PluginRegistry(
    "task", "kvsearch.tasks", {NEEDLE: "kvsearch.tasks.niah:NiahTask"}, "kvsearch.tasks.base:Task"
)
QA_OPTIONS: Final = {"qa_1": "squad", "qa_2": "hotpot"}  # the options that bring the files of RULER's qa tasks
NO_QA: Final = f"{RULER}:no-qa"
MANY = "several tasks are joined by +"
GENERATED = "generated"
STORY_HAYSTACK = "generated in a story, or --haystack"
YOURS = "your file"
FILE_PLACEHOLDER = "FILE"
DRAWN_PREFIX: Final = f"{RULER}:file="  # RULER's tasks as somebody has drawn them

_GENERATED: Final = {"length": "length", "split": "split"}
_ROWS: Final = {"data": "source", "data_revision": "revision", "split": "split"}


@dataclass(frozen=True)
class Entry:
    """A task's entry in the catalogue: its spec, metric, data source and options.

    `source` says where its texts come from, `needs` what file a user must bring (empty: none), with the option
    `required`. `split` is the default one of `splits`. `reads` maps options to the parameters of `make` that they set.
    `hub` is the id of the dataset that its rows are, where it is a public one.
    """

    spec: str
    category: str
    metric: str
    source: str
    make: Callable[..., Task]
    reads: Mapping[str, str]
    needs: str = ""
    required: str | None = None
    split: str = ALL
    splits: tuple[str, ...] = (*SPLITS, ALL)
    hub: str | None = None

    @property
    def kind(self) -> str:
        return self.spec.partition(":")[0]

    @property
    def packages(self) -> tuple[str, ...]:
        """What the metric needs, as pip calls it."""
        return tuple(METRIC_PACKAGES[module] for module in NEEDS.get(self.metric, ()))

    @property
    def options(self) -> tuple[str, ...]:
        """What is read, as on the command line."""
        return tuple(map(format_flag, self.reads))

    def facts(self) -> dict[str, Any]:
        """Return the entry as plain data, for JSON."""
        names = ("spec", "category", "metric", "source", "needs", "packages", "options", "split", "splits")
        return {name: getattr(self, name) for name in names}


def format_flag(option: str) -> str:
    """Return an option's flag on the command line."""
    return "--" + option.replace("_", "-")


def find_user_task(path: str, kind: str = JSONL) -> Entry:
    """Return the task of a user's file."""
    if kind == TEXT:
        needs = f"{FILE_PLACEHOLDER}, plain text or rows with text"
        load = partial(TextTask.load, path)
        return Entry(f"{TEXT}:{path}", TextTask.category, TextTask.metric, YOURS, load, _GENERATED, needs)
    needs = f"{FILE_PLACEHOLDER}, rows with context, question, answers; they may name id, category and metric"
    make = partial(JsonlTask.load, path)
    return Entry(f"{JSONL}:{path}", JsonlTask.category, JsonlTask.metric, YOURS, make, {"split": "split"}, needs)


def find_drawn_ruler_tasks(path: str) -> list[Entry]:
    """Find the RULER tasks for which a file or folder has examples in kvpress's format, in RULER's order.

    Raises:
        UsageError: there is no such file, it is a folder of several lengths, or its rows have other columns or are of
            unknown tasks.
        EnvironmentFault: it cannot be read.
    """
    place = Path(path)
    lengths = sorted(child.parent.name for child in place.glob("*/test*")) if path and place.is_dir() else []
    if not path or (lengths and not any(place.glob("test*"))):
        which = f"{path} has a folder for each of {', '.join(dict.fromkeys(lengths))}" if path else "no file is named"
        raise UsageError(f"{which}: give {DRAWN_PREFIX}FILE, or the folder of one length")
    if not place.exists():
        raise UsageError(f"there is no file or folder {path}: check the path")
    drawn = {row.task for row in check_rows(load_shared_rows(Dataset(), path, None), DrawnRow, path)}
    if unknown := sorted(drawn - {*RULER_TASKS}):
        raise UsageError(f"{path} has rows of the unknown task {unknown[0]!r}{suggest(unknown[0], RULER_TASKS)}")
    entries = []
    for name in RULER_TASKS:
        if name in drawn:
            about = RULER_SPECS[name]
            spec = f"{RULER}:{name} of {path}"
            make = partial(DrawnRulerTask, name, path)
            entries.append(Entry(spec, about.category, about.metric, YOURS, make, {"split": "split"}))
    return entries


def _make_ruler_entry(name: str) -> Entry:
    option = QA_OPTIONS.get(name)
    reads = dict(_GENERATED)
    needs = ""
    source = GENERATED
    if name in NIAH and NIAH[name].haystack == "essay":
        reads["haystack"] = "haystack"
        source = STORY_HAYSTACK
    if option is not None:
        reads[option] = "qa_file"
        source = YOURS
        needs = f"{format_flag(option)} {FILE_PLACEHOLDER}, {QA_FORMATS[name][0]} JSON"
    task = partial(RulerTask, name)
    about = RULER_SPECS[name]
    return Entry(f"{RULER}:{name}", about.category, about.metric, source, task, reads, needs, option, RulerTask.split)


def _make_dataset_entry(spec: str, task: type[DatasetTask[Any]], name: str, *options: str) -> Entry:
    about = task.specs[name]
    reads = _ROWS | {option: option for option in options}
    hub = about.rows.hub
    return Entry(spec, about.category, about.metric, f"{hub}, or --data", partial(task, name), reads, hub=hub)


def find_task_entry(name: str) -> Entry:
    """Return the entry of a task that is registered by itself; errors: `PluginRegistry.find`, and of its metric."""
    kind = TASKS.find(name)
    is_plain = isinstance(kind.category, str) and isinstance(kind.metric, str)
    task = kind if is_plain else kind()
    hub = task.dataset.hub if isinstance(task, DatasetTask) else None
    splits = (*SPLITS, ALL) if "split" in kind.reads else (ALL,)
    texts = kind.texts if hub is None else f"{hub}, or --data"
    split = getattr(task, "split", ALL)
    return Entry(
        name, str(task.category), str(task.metric), texts, kind, kind.reads, split=split, splits=splits, hub=hub
    )


def list_kinds() -> list[str]:
    """Return what a spec may begin with."""
    return [*KINDS, *TASKS.list_names(), *OF_FILES]


def _list_entries() -> Iterator[Entry]:
    for name in FORMS:
        synthetic = SyntheticTask(name)
        yield Entry(
            f"{SYNTHETIC}:{name}", synthetic.category, synthetic.metric, GENERATED, partial(SyntheticTask, name),
            _GENERATED, split=synthetic.split, splits=SYNTHETIC_SPLITS,
        )  # fmt: skip
    yield from map(_make_ruler_entry, RULER_SPECS)
    benchmarks = (LONGBENCH, LongBenchTask), (LONGBENCH, LongBenchV2Task), (INFINITEBENCH, InfiniteBenchTask)
    for benchmark, task in benchmarks:
        for name in task.specs:
            yield _make_dataset_entry(f"{benchmark}:{name}", task, name, "prompts")
    yield _make_dataset_entry(GSM8K, Gsm8kTask, GSM8K, "shots", "metric")
    for name in TracedTask.specs:
        yield _make_dataset_entry(name.replace("aime", "aime:"), TracedTask, name, "prompts", "max_new_tokens")
    yield from map(find_task_entry, TASKS.built_in)
    reads = {**_GENERATED, "haystack": "haystack"}
    for name, (_, metric) in RETAIN_FORMS.items():
        make = partial(RetainTask, name)
        yield Entry(f"{RETAIN}:{name}", RETAIN, metric, STORY_HAYSTACK, make, reads, split=RetainTask.split)


def _join_specs(kind: str, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{kind}:{name}" for name in names)


ENTRIES: Final = {entry.spec: entry for entry in _list_entries()}
SETS: Final[dict[str, tuple[str, ...]]] = {
    SYNTHETIC: _join_specs(SYNTHETIC, SUITES["core"]),
    **{f"{SYNTHETIC}:{suite}": _join_specs(SYNTHETIC, names) for suite, names in SUITES.items()},
    RULER: _join_specs(RULER, RULER_TASKS),
    NO_QA: _join_specs(RULER, (name for name in RULER_TASKS if name not in QA_OPTIONS)),
    LONGBENCH: _join_specs(LONGBENCH, LONGBENCH_TASKS),
    f"{LONGBENCH}:english": _join_specs(LONGBENCH, LONGBENCH_ENGLISH),
    f"{LONGBENCH}:e": _join_specs(LONGBENCH, LONGBENCH_E),
    f"{LONGBENCH}:v2": _join_specs(LONGBENCH, LongBenchV2Task.specs),
    AIME: (f"{AIME}:24", f"{AIME}:25"),
    INFINITEBENCH: _join_specs(INFINITEBENCH, INFINITEBENCH_TASKS),
    f"{INFINITEBENCH}:lava": _join_specs(INFINITEBENCH, INFINITEBENCH_LAVA),
    RETAIN: _join_specs(RETAIN, RETAIN_FORMS),
    **{f"{RETAIN}:{group}": _join_specs(RETAIN, names) for group, names in GROUPS.items()},
}  # specs that stand for several tasks


def list_specs() -> list[str]:
    """Return all names of tasks and sets, as they are typed."""
    return list(dict.fromkeys([*SETS, *ENTRIES, *TASKS.list_names(), *(f"{kind}:" for kind in OF_FILES)]))


def load_catalog() -> tuple[list[Entry], list[dict[str, str]]]:
    """Return the entries of all tasks, and name, package and error of those that cannot be used."""
    entries = list(ENTRIES.values())
    faults = []
    for name in TASKS.list_names()[len(TASKS.built_in) :]:
        try:
            entries.append(find_task_entry(name))
        except Exception as error:  # noqa: BLE001 - one broken package must not hide the other tasks
            faults.append({"name": name, "package": TASKS.find_package(name), "error": format_error(error)})
    return [*entries, *(find_user_task(FILE_PLACEHOLDER, kind) for kind in OF_FILES)], faults


def describe_tasks(spec: str) -> list[Entry]:
    """Return the catalogue entries of a spec, each once.

    Raises:
        UsageError: an unknown kind or name.
        EnvironmentFault: the package of a task is broken.
    """
    entries = [entry for part in _split(spec) for entry in _find_kind(part)]
    return list({entry.spec: entry for entry in entries}.values())


def find_tasks(spec: str, options: Mapping[str, Any] | None = None) -> list[Task]:
    """Return the tasks of a spec, each once, made with options by name: those that `Entry.reads` has; None is no value.

    Raises:
        UsageError: an unknown kind or name, an option that none of the tasks reads, or one that a task cannot take or
            cannot do without.
        EnvironmentFault: a package that a metric needs is missing.
    """
    entries = describe_tasks(spec)
    chosen = {name: value for name, value in (options or {}).items() if value is not None}
    _refuse_unread(chosen, entries)
    tasks = []
    for entry in entries:
        if entry.required is not None and entry.required not in chosen:
            raise UsageError(f"{entry.spec} needs questions: give {entry.needs}, or choose {NO_QA}")
        given = {parameter: chosen[option] for option, parameter in entry.reads.items() if option in chosen}
        if "length" in given:
            if len(given["length"]) != 1:
                lengths = ", ".join(map(str, given["length"])) or "none"
                raise UsageError(
                    f"{entry.kind} tasks take one length, got {lengths}: evaluate one length after the other"
                )
            (given["length"],) = given["length"]
        tasks.append(entry.make(**given))
    return tasks


def _split(spec: str) -> list[str]:
    """Return the specs that are joined by +. A file's name may have one, too, if no kind of task follows it."""
    specs: list[str] = []
    for piece in spec.split("+"):
        names_file = bool(specs) and (specs[-1].partition(":")[0] in OF_FILES or specs[-1].startswith(DRAWN_PREFIX))
        if names_file and piece.partition(":")[0] not in list_kinds():
            specs[-1] += f"+{piece}"
        else:
            specs.append(piece)
    return specs


def list_public_datasets(spec: str) -> tuple[str, ...]:
    """Return the ids on the hub of the datasets that a spec names, each once; UsageError as `describe_tasks`."""
    named = (
        part for part in _split(spec) if part.partition(":")[0] not in OF_FILES and not part.startswith(DRAWN_PREFIX)
    )
    return tuple(dict.fromkeys(entry.hub for part in named for entry in _find_kind(part) if entry.hub is not None))


def _find_kind(spec: str) -> list[Entry]:
    kind, _, rest = spec.partition(":")
    if spec.startswith(DRAWN_PREFIX):
        return find_drawn_ruler_tasks(spec.removeprefix(DRAWN_PREFIX))
    if kind in OF_FILES:
        if not rest:
            raise UsageError(f"task {spec!r} names no file: a file is given as {kind}:FILE")
        other = next((name for name in list_kinds() if f",{name}:" in rest), None)
        if other is not None and not Path(rest).exists():
            raise UsageError(f"there is no file {rest}: {MANY}, as in {kind}:FILE+{other}")
        return [find_user_task(rest, kind)]
    if kind not in list_kinds():
        near = [known for known in (*ENTRIES, *SETS) if known.endswith(f":{kind}")]
        if near:
            raise UsageError(f"unknown task {spec!r}; did you mean {' or '.join(map(repr, near))}?")
        if spec.endswith(f".{JSONL}"):
            raise UsageError(f"a file is given as {JSONL}:FILE: write {JSONL}:{spec}")
        raise UsageError(f"unknown task {spec!r}{suggest(kind, list_kinds())}; a file is given as jsonl:FILE")
    names = [f"{kind}:{name.strip()}" for name in rest.split(",")] if rest else [kind]
    return [entry for name in names for entry in _find_named(name)]


def _find_named(spec: str) -> list[Entry]:
    if spec in SETS:
        return [ENTRIES[member] for member in SETS[spec]]
    if spec in ENTRIES:
        return [ENTRIES[spec]]
    if spec in TASKS.list_names():
        return [find_task_entry(spec)]
    kind, _, name = spec.partition(":")
    if name.partition(":")[0] in list_kinds():
        raise UsageError(f"unknown {kind} task {name!r}: {MANY}, as in {kind}+{name}")
    if kind in ENTRIES or kind in TASKS.list_names():
        raise UsageError(f"unknown task {spec!r}: {kind} is a single task, name it alone")
    known = [task.removeprefix(f"{kind}:") for task in (*ENTRIES, *SETS) if task.startswith(f"{kind}:")]
    raise UsageError(f"unknown {kind} task {name!r}{suggest(name, known)}")


def _refuse_unread(options: Iterable[str], entries: Sequence[Entry]) -> None:
    """Refuse options that change nothing: the user expects them to."""
    read = {option for entry in entries for option in entry.reads}
    unread = [option for option in options if option not in read]
    if unread:
        readers = []
        for option in unread:
            others = {entry.kind for entry in ENTRIES.values() if option not in entry.reads}
            reading = (entry for entry in ENTRIES.values() if option in entry.reads)
            # the kind where all of its tasks read it
            specs = dict.fromkeys(entry.spec if entry.kind in others else entry.kind for entry in reading)
            readers.append(f"{format_flag(option)} is for {', '.join(specs)}")
        raise UsageError(f"none of the chosen tasks reads {', '.join(map(format_flag, unread))}: {'; '.join(readers)}")

"""Tasks by name.

A spec is a kind of task, or a kind with names: `ruler`, `ruler:vt,cwe`, `longbench:english`, `gsm8k`, `jsonl:FILE`.
Several specs are joined by `+`, as in `ruler:vt+gsm8k`. `SETS` has the names that stand for several tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvsearch.errors import UsageError
from kvsearch.naming import suggest
from kvsearch.tasks.base import Task
from kvsearch.tasks.entries import ENTRIES, JSONL, KINDS, NO_QA, SETS, Entry, own_file
from kvsearch.tasks.ruler.task import QA_FORMATS

MANY = "several tasks are joined by +"


@dataclass(frozen=True)
class TaskOptions:
    """What a user may say about the chosen tasks; None leaves it to each of them."""

    lengths: tuple[int, ...] | None = None  # tokens of a context, of RULER's whole prompts; several for niah only
    split: str | None = None
    data: str | Path | None = None  # rows of datasets: a file, a folder or a dataset id of the hub
    data_revision: str | None = None  # branch, tag or commit of a dataset of the hub
    prompts: Path | None = None  # JSON file with prompts for LongBench or InfiniteBench
    haystack: Path | None = None  # text file to hide needles in
    squad: Path | None = None  # what RULER's qa_1 asks about
    hotpot: Path | None = None  # what RULER's qa_2 asks about
    depths: tuple[int, ...] | None = None  # where niah's needles are, in percent of a context
    shots: int | None = None  # worked examples before a problem of GSM8K
    shots_from: str | Path | None = None  # training rows of GSM8K to take them from, as `data`
    metric: str | None = None  # of gsm8k or niah

    @property
    def given(self) -> tuple[str, ...]:
        """The names of the options that are set."""
        return tuple(name for name, value in vars(self).items() if value is not None)


def find_tasks(spec: str, options: TaskOptions | int | None = None) -> list[Task]:
    """Return the tasks of a spec, each once. A plain number is a length, for those of them that have one.

    Raises:
        UsageError: an unknown kind or name, an option that none of the tasks reads, or one that a task cannot take or
            cannot do without.
        EnvironmentFault: a package that a metric needs is missing.
    """
    entries = find_entries(spec)
    if isinstance(options, int):
        return [_made(entry, TaskOptions(lengths=(options,))) for entry in entries]
    chosen = TaskOptions() if options is None else options
    _refuse_unread(chosen, entries)
    return [_made(entry, chosen) for entry in entries]


def find_entries(spec: str) -> list[Entry]:
    """Return the entries of a spec, each once; UsageError for an unknown kind or name."""
    found = [entry for one in _split(spec) for entry in _of_kind(one)]
    return list({entry.spec: entry for entry in found}.values())


def flag(option: str) -> str:
    """Return what an option is called on the command line."""
    return "--length" if option == "lengths" else "--" + option.replace("_", "-")


def _split(spec: str) -> list[str]:
    """Return the specs that are joined by +. A file's name may have one, too, if no kind of task follows it."""
    specs: list[str] = []
    for piece in spec.split("+"):
        if specs and specs[-1].startswith(f"{JSONL}:") and piece.partition(":")[0] not in KINDS:
            specs[-1] += f"+{piece}"
        else:
            specs.append(piece)
    return specs


def _of_kind(spec: str) -> list[Entry]:
    kind, _, rest = spec.partition(":")
    if kind == JSONL:
        if not rest:
            raise UsageError(f"task {spec!r} names no file: a file is given as jsonl:FILE")
        return [own_file(rest)]
    if kind not in KINDS:
        near = [known for known in (*ENTRIES, *SETS) if known.endswith(f":{kind}")]
        if near:
            raise UsageError(f"unknown task {spec!r}; did you mean {' or '.join(map(repr, near))}?")
        raise UsageError(f"unknown task {spec!r}{suggest(kind, KINDS)}; a file is given as jsonl:FILE")
    names = [f"{kind}:{name.strip()}" for name in rest.split(",")] if rest else [kind]
    return [entry for name in names for entry in _named(name)]


def _named(spec: str) -> list[Entry]:
    if spec in SETS:
        return [ENTRIES[member] for member in SETS[spec]]
    if spec in ENTRIES:
        return [ENTRIES[spec]]
    kind, _, name = spec.partition(":")
    if name.partition(":")[0] in KINDS:
        raise UsageError(f"unknown {kind} task {name!r}: {MANY}, as in {kind}+{name}")
    if kind in ENTRIES:
        raise UsageError(f"unknown task {spec!r}: {kind} is a single task, name it alone")
    known = [one.removeprefix(f"{kind}:") for one in (*ENTRIES, *SETS) if one.startswith(f"{kind}:")]
    raise UsageError(f"unknown {kind} task {name!r}{suggest(name, known)}")


def _refuse_unread(options: TaskOptions, entries: Sequence[Entry]) -> None:
    """Refuse options that change nothing: the user expects them to."""
    read = {option for entry in entries for option in entry.reads}
    unread = [option for option in options.given if option not in read]
    if unread:
        told = "; ".join(f"{flag(option)} is for {', '.join(_readers(option))}" for option in unread)
        raise UsageError(f"none of the chosen tasks reads {', '.join(map(flag, unread))}: {told}")


def _readers(option: str) -> list[str]:
    """Return the specs of the tasks that read an option: the kind where all of its tasks do."""
    reading = [entry for entry in ENTRIES.values() if option in entry.reads]
    whole = {kind for kind in KINDS if all(option in e.reads for e in ENTRIES.values() if e.kind == kind)}
    return list(dict.fromkeys(entry.kind if entry.kind in whole else entry.spec for entry in reading))


def _made(entry: Entry, options: TaskOptions) -> Task:
    if entry.needs is not None and entry.needs not in options.given:
        whose, what, _ = QA_FORMATS[entry.name]
        raise UsageError(
            f"{entry.spec} needs questions: give a JSON file in {whose} format ({what}) with {flag(entry.needs)}, or "
            f"choose {NO_QA}"
        )
    given = {set_by: getattr(options, option) for option, set_by in entry.reads.items() if option in options.given}
    if "length" in given:
        if len(given["length"]) != 1:
            told = ", ".join(map(str, given["length"])) or "none"
            raise UsageError(f"{entry.kind} tasks take one length, got {told}: evaluate one length after the other")
        (given["length"],) = given["length"]
    return entry.make(**given)

"""Finished replies on disk, so that a run which is interrupted goes on where it stopped.

A line of the ledger has the replies that were finished together:

    {"reused": false, "samples": [{"id": "...", "task": "qasper", "method": "lava@128", ...}]}

Beside it the directory of an evaluation has, in the end:

losses.json    output losses, where they were asked for
report.json    the results, as `--json` prints them
samples.csv    a row per reply, with the seconds it took
tables.md      the tables
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvsearch.errors import KvsearchWarning, UsageError
from kvsearch.evaluation.samples import Place, Sample
from kvsearch.plan.limits import MOST_NUMBER
from kvsearch.runs.chain import Unfit
from kvsearch.runs.directory import LEDGER, begin, check_directory, run_in
from kvsearch.runs.identity import METRICS, Job, RunConfig, read_config
from kvsearch.runs.ledger import Ledger, damaged, read_lines
from kvsearch.runs.lock import locked
from kvsearch.runs.sums import require_unchanged

if TYPE_CHECKING:
    from kvsearch.evaluation.identity import ReplyKeys
    from kvsearch.tasks.encode import TaskPrompts
    from kvsearch.tasks.readings import Reading

REPORT, SAMPLES, TABLES, LOSSES = "report.json", "samples.csv", "tables.md", "losses.json"
WRITTEN = (LEDGER, REPORT, SAMPLES, TABLES, LOSSES)
_KEEP_REPLIES: tuple[Job, ...] = ("evaluate", "validate", "select")
_KEY = "id"
# of a sample, but for what its author calls the question: that is looked up again
_KEPT = [field for field in fields(Sample) if field.name != "id"]
_FIELDS: dict[str, str] = {_KEY: "str", **{field.name: str(field.type) for field in _KEPT}}


class Finished(NamedTuple):
    """Samples that were finished together, with their keys; `reused`: by another run."""

    samples: Sequence[tuple[str, Sample]]
    reused: bool


class ReplyStore(Ledger[Finished]):
    """The finished replies of one run, by their places; `lent` are replies of another run by their keys."""

    def __init__(self, path: Path, identity: str = "", lent: Mapping[str, Sample] | None = None) -> None:
        self.lent = lent or {}
        self.samples: dict[Place, Sample] = {}
        self.reused: set[Place] = set()
        self._written: dict[Place, tuple[str, int]] = {}  # the key and the number of the line
        super().__init__(path, identity)

    @property
    def go_on(self) -> str:
        """See `Ledger.go_on`."""
        return f"give the same command again: {len(self.samples)} replies are kept"

    @staticmethod
    def parse(content: dict[str, Any]) -> Finished:
        """See `Ledger.parse`."""
        if set(content) != {"reused", "samples"}:
            raise Unfit("it has other fields than reused and samples")
        if not isinstance(content["reused"], bool) or not isinstance(content["samples"], list):
            raise Unfit("reused is true or false, samples is a list")
        for item in content["samples"]:
            if not isinstance(item, dict) or set(item) != set(_FIELDS):
                raise Unfit("a sample lacks a field or has one too many")
            for name, kind in _FIELDS.items():
                if not _fits(item[name], kind):
                    raise Unfit(f"{name} is not a {kind}")
                if kind in ("int", "float") and not -MOST_NUMBER * (name == "score") <= item[name] <= MOST_NUMBER:
                    raise Unfit(f"{name} is out of range, which ends at 2^63 - 1")
        return Finished([(item.pop(_KEY), Sample(**item)) for item in content["samples"]], content["reused"])

    def add(self, samples: Sequence[tuple[str, Sample]], *, reused: bool = False) -> None:
        """Write samples with their keys as one line; they are on the disk when this returns.

        Raises:
            EnvironmentFault: the disk is full or fails; the replies before are kept.
        """
        content = {"reused": reused, "samples": [{**asdict(sample), _KEY: key} for key, sample in samples]}
        self._append(Finished(samples, reused), json.dumps(content, allow_nan=False))

    def require(self, keys: Mapping[Place, str]) -> None:
        """Raise UsageError, with the line, if the reply in one of these places was written under another key."""
        for place, key in keys.items():
            written, line = self._written[place]
            if written != key:
                raise damaged(self.path, line, f"the key of {place.method} on {place.task} is not that of this run")

    def _note(self, line: Finished) -> None:
        for key, sample in line.samples:
            self.samples[sample.place], self._written[sample.place] = sample, (key, self.count)
            if line.reused:
                self.reused.add(sample.place)


def read_replies(path: Path) -> dict[str, Sample]:
    """Return the samples of a ledger by their keys; errors as for `ReplyStore`, and UsageError if there is none."""
    return {key: sample for line in read_lines(path, ReplyStore.parse) for key, sample in line.samples}


@dataclass(frozen=True)
class Known:
    """What is known of a batch: the samples of the `finished` methods, with scores that were computed earlier.

    Of these, `left_out` were never done here, so what is left does not share its arithmetic with them.
    """

    samples: list[Sample] = field(default_factory=list)
    finished: set[str] = field(default_factory=set)
    left_out: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class KeptReplies:
    """The replies of an evaluation in a store: those that are there, or in another run where keys say so, are known."""

    store: ReplyStore
    keys: ReplyKeys

    def recall(self, task: TaskPrompts, batch: Sequence[Reading], methods: Iterable[str]) -> Known:
        """Return what is known of a batch: methods all of whose replies are known. Lent ones are written down.

        Raises:
            UsageError: a reply was written under another key than it has, see `ReplyStore.require`.
        """
        known, lent = Known(), list[tuple[str, Sample]]()
        for method, keyed in self._keyed(task, batch, methods).items():
            if keyed.keys() <= self.store.samples.keys():
                self.store.require(keyed)
                known.samples.extend(self.store.samples[place] for place in keyed)
                left_out = keyed.keys() <= self.store.reused
            elif all(key in self.store.lent for key in keyed.values()):
                for place, key in keyed.items():
                    moved = replace(self.store.lent[key], category=task.task.category, **place._asdict())
                    lent.append((key, moved))
                left_out = True
            else:
                continue
            known.finished.add(method)
            if left_out:
                known.left_out.add(method)
        if lent:
            self.store.add(lent, reused=True)
            known.samples.extend(sample for _, sample in lent)
        return known

    def keep(self, task: TaskPrompts, batch: Sequence[Reading], samples: Sequence[Sample]) -> None:
        """Write samples that were finished together; errors as for `ReplyStore.add`."""
        keyed = self._keyed(task, batch, {sample.method for sample in samples})
        self.store.add([(keyed[sample.method][sample.place], sample) for sample in samples])

    def _keyed(
        self, task: TaskPrompts, batch: Sequence[Reading], methods: Iterable[str]
    ) -> dict[str, dict[Place, str]]:
        """Return, by method, the key of each of its places."""
        from kvsearch.tasks.readings import questions_of

        keyed: dict[str, dict[Place, str]] = {method: {} for method in methods}
        for reading, question in questions_of(batch):
            keys = self.keys.of(task, reading.prompt, question)
            for method, places in keyed.items():
                places[Place(task.task.name, reading.prompt.key, question.number, method)] = keys[method]
        return keyed


def check_run(output: Path | None, reuse: Path | None) -> None:
    """Find out, before a model is loaded, whether a run can be kept in `output` and take replies from `reuse`.

    Raises:
        UsageError: it cannot, see also `kvsearch.runs.directory.check_directory`.
    """
    if reuse is not None:
        if output is None:
            raise UsageError("--reuse needs --output: what is taken over is kept with the new run")
        if output.resolve() == reuse.resolve():
            raise UsageError("--reuse and --output are the same directory: a run goes on by itself, leave --reuse out")
        there = read_config(reuse)
        if there is None or there.job not in _KEEP_REPLIES:
            raise UsageError(f"{reuse} is no directory of an evaluation: --reuse takes an --output of another run")
    if output is not None:
        check_directory(output, "evaluate")


@contextmanager
def open_run(
    directory: Path, config: RunConfig, force: bool = False, reuse: Path | None = None
) -> Iterator[ReplyStore]:
    """Begin an evaluation, or go on with one: what is finished of it.

    Other metrics make no other run: a `KvsearchWarning` says that the replies that are there are scored anew.

    `force` starts anew whatever is there. `reuse` is the directory of another run to take equal replies from.

    Raises:
        UsageError: another run is there, a damaged ledger, or another process writes to it; see `check_run`.
        EnvironmentFault: the disk is full, permissions are missing.
    """
    with locked(directory):
        check_run(directory, reuse)
        lent = None if reuse is None or not (reuse / LEDGER).exists() else read_replies(reuse / LEDGER)
        there = run_in(directory, config.job)
        if there is not None and not force:
            if found := config.difference(there):
                raise UsageError(
                    f"{directory} holds another run: {found}; repeat its command to go on with it, choose another "
                    f"--output (with --reuse {directory} for what is the same), or --force to start anew"
                )
            require_unchanged(directory, LOSSES, "delete it, and give --losses to measure them again")
            _warn_of_metrics(directory, there, config)
        begin(directory, config, WRITTEN if force else ())
        with ReplyStore(directory / LEDGER, config.identity, lent) as store:
            yield store


@contextmanager
def open_stage(directory: Path, config: RunConfig, force: bool = False) -> Iterator[ReplyStore]:
    """Begin a stage of another command, or go on with it: the replies that are finished of it.

    `force` throws away only what cannot be gone on with: a command that is interrupted goes on when it is given again,
    with `force` or without.

    Raises:
        UsageError: replies to other questions are there, or something else, which has to be deleted; a damaged ledger,
            or another process writes to it.
        EnvironmentFault: the disk is full, permissions are missing.
    """
    check_place(directory)
    with locked(directory):
        try:
            there = run_in(directory, config.job)
        except UsageError as error:
            raise UsageError(
                f"{directory} is where replies are kept, but has something else in it: delete it"
            ) from error
        found = None if there is None else config.difference(there)
        if found is not None and not force:
            raise UsageError(
                f"{directory} has replies to other questions: {found}; repeat its command to go on with it, or give "
                "--force to start anew"
            )
        if there is not None and found is None:
            _warn_of_metrics(directory, there, config)
        begin(directory, config, WRITTEN if force and (found is not None or _is_damaged(directory / LEDGER)) else ())
        with ReplyStore(directory / LEDGER, config.identity) as store:
            yield store


def check_place(directory: Path) -> None:
    """Raise UsageError if `directory` cannot be one, because it or something on the way to it is a file."""
    for path in (directory, *directory.parents):
        if path.exists():
            if not path.is_dir():
                raise UsageError(f"cannot keep replies in {directory}: {path} is a file, name a directory")
            return


def _is_damaged(ledger: Path) -> bool:
    try:
        if ledger.exists():
            read_replies(ledger)
    except UsageError:
        return True
    return False


def _warn_of_metrics(directory: Path, there: RunConfig, now: RunConfig) -> None:
    old, new = there.execution.get(METRICS, {}), now.execution.get(METRICS, {})
    for task, metric in new.items():
        if old.get(task, metric) != metric:
            told = f"{directory} has task {task} by {old[task]}: all its replies are now scored by {metric}"
            warnings.warn(told, KvsearchWarning, stacklevel=5)


def _fits(value: object, kind: str) -> bool:
    if kind == "float":
        return isinstance(value, int | float) and type(value) is not bool and abs(value) < float("inf")
    return type(value).__name__ == kind

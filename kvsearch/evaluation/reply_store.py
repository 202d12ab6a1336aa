"""Finished replies on disk, so that a run which is interrupted goes on where it stopped.

A line of the ledger has the replies that were finished together:

    {"samples": [{"id": "...", "task": "qasper", "method": "lava@128", ...}]}

Beside it the directory of an evaluation has, in the end:

losses.json    output losses, where they were asked for
report.json    the results, as `--json` prints them
samples.csv    a row per reply, with the seconds it took
tables.md      the tables
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from kvsearch.core.errors import KvsearchWarning, UsageError
from kvsearch.core.limits import MOST_NUMBER
from kvsearch.evaluation.samples import ReplyPlace, Sample
from kvsearch.runs.identity import LOSSES, METRICS, REPORT, SAMPLES, TABLES, RunConfig
from kvsearch.runs.ledger import Ledger, LedgerFormatError, read_lines
from kvsearch.runs.lock import lock_directory
from kvsearch.runs.run import Run, require_unchanged

REPLY_FILES = (REPORT, SAMPLES, TABLES, LOSSES)
_KEY = "id"  # in place of what the author calls the question, which is looked up again
_LOSS = "loss"  # there where it was measured
_FIELDS = {field.name: str(field.type).removesuffix(" | None") for field in fields(Sample)}
_TYPES: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}

Keyed = Sequence[tuple[str, Sample]]  # samples that were finished together, with the keys of their replies


class ReplyStore(Ledger[Keyed]):
    """The finished replies of one run, by place and key."""

    def __init__(self, path: Path) -> None:
        self.samples: dict[tuple[ReplyPlace, str], Sample] = {}
        super().__init__(path)

    @property
    def go_on(self) -> str:
        return f"give the same command again: {len(self.samples)} replies are kept"

    @staticmethod
    def parse(content: dict[str, Any]) -> Keyed:
        items = content.get("samples")
        if set(content) != {"samples"} or not isinstance(items, list):
            raise LedgerFormatError("it is no list of samples")
        for item in items:
            if not isinstance(item, dict) or item.keys() | {_LOSS} != _FIELDS.keys():
                raise LedgerFormatError("a sample lacks a field or has one too many")
            for name in item:
                kind, value = _FIELDS[name], item[name]
                if not isinstance(value, _TYPES[kind]) or isinstance(value, bool) != (kind == "bool"):
                    raise LedgerFormatError(f"{name} is of another type than it was written with")
                if kind in ("int", "float") and abs(item[name]) > MOST_NUMBER:
                    raise LedgerFormatError(f"{name} is out of range, which ends at 2^63 - 1")
        return [(item.pop(_KEY), Sample(**item)) for item in items]

    def add(self, samples: Keyed) -> None:
        """Write samples with their keys as one line; they are on the disk when this returns.

        Raises:
            EnvironmentFault: the disk is full or fails; the replies before are kept.
        """
        items = ({**asdict(sample), _KEY: key} for key, sample in samples)
        measured = [{name: value for name, value in item.items() if value is not None} for item in items]
        self._append(samples, json.dumps({"samples": measured}, allow_nan=False))

    def _note(self, line: Keyed) -> None:
        self.samples.update(((sample.place, key), sample) for key, sample in line)


def read_replies(path: Path) -> dict[str, Sample]:
    """Return the samples of a ledger by their keys; errors as for `ReplyStore`, and UsageError if there is none."""
    return dict(pair for line in read_lines(path, ReplyStore.parse) for pair in line)


@contextmanager
def open_run(directory: Path, config: RunConfig, force: bool = False) -> Iterator[tuple[Run, ReplyStore]]:
    """Begin a run that keeps replies, or resume it with the replies that are finished.

    Other metrics make no other run: a `KvsearchWarning` says that the replies that are there are scored anew.

    `force` starts anew whatever is there.

    Raises:
        UsageError: another run is there, a damaged ledger, or another process writes to it; see `read_run`.
        EnvironmentFault: the disk is full, permissions are missing.
    """
    if not force:
        require_unchanged(directory, LOSSES, "delete it, and give --losses to measure them again")
    with Run.open(directory, config, force=force, files=REPLY_FILES) as run:
        _warn_of_metrics(run)
        with run.open_ledger(ReplyStore) as store:
            yield run, store


@contextmanager
def open_stage(directory: Path, config: RunConfig, force: bool = False) -> Iterator[ReplyStore]:
    """Begin a stage of another command, or resume it with the replies that are finished.

    `force` throws away only what cannot be gone on with: a command that is interrupted goes on when it is given again,
    with `force` or without.

    Raises:
        UsageError: replies to other questions are there, or something else, which has to be deleted; a damaged ledger,
            or another process writes to it.
        EnvironmentFault: the disk is full, permissions are missing.
    """
    with ExitStack() as stack:
        stack.enter_context(lock_directory(directory))
        try:
            _, store = stack.enter_context(open_run(directory, config))
        except UsageError:
            if not force:
                raise
            _, store = stack.enter_context(open_run(directory, config, force=True))
        yield store


def _warn_of_metrics(run: Run) -> None:
    if run.earlier is None:
        return
    old = run.earlier.execution.get(METRICS, {})
    for task, metric in run.config.execution.get(METRICS, {}).items():
        if old.get(task, metric) != metric:
            warning = f"{run.directory} has task {task} by {old[task]}: all its replies are now scored by {metric}"
            warnings.warn(warning, KvsearchWarning, stacklevel=5)

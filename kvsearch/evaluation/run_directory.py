"""The directory of a run: its configuration first, then finished replies one by one, at the end the results.

config.json    what is run, by content (`identity.run_config`)
ledger.jsonl   finished replies
losses.json    output losses, where they were asked for
report.json    the results, as `--json` prints them
samples.csv    a row per reply, with the seconds it took
tables.md      the tables
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvsearch.errors import KvsearchWarning, UsageError
from kvsearch.evaluation.reply_store import Ledger, read_replies
from kvsearch.evaluation.samples import Sample
from kvsearch.plan.canonical import canonical_json
from kvsearch.plan.files import atomic_write, read_bytes
from kvsearch.plan.parsing import parse_json

CONFIG, LEDGER, LOSSES = "config.json", "ledger.jsonl", "losses.json"
REPORT, SAMPLES, TABLES = "report.json", "samples.csv", "tables.md"
SCHEMA, TASKS, METRIC = "schema", "tasks", "metric"
SHOWN = 40  # letters of a value in a message
TEMPORARY = ".kvsearch-"  # what a killed process leaves of a file that it was writing


def check_directories(output: Path | None, reuse: Path | None, schema: str) -> None:
    """Find out, before a model is loaded, whether a run can be kept in `output` and take replies from `reuse`.

    Raises:
        UsageError: `output` is a file or holds something else than a run, or `reuse` holds no run.
    """
    if reuse is not None:
        if output is None:
            raise UsageError("--reuse needs --output: what is taken over is kept with the new run")
        if output.resolve() == reuse.resolve():
            raise UsageError("--reuse and --output are the same directory: a run goes on by itself, leave --reuse out")
        if not _is_run(reuse, schema):
            raise UsageError(f"{reuse} is no directory of an evaluation: --reuse takes an --output of another run")
    if output is not None and output.exists():
        if not output.is_dir():
            raise UsageError(f"{output} is a file: give a directory to write to")
        strangers = [item for item in output.iterdir() if not item.name.startswith(TEMPORARY)]
        if strangers and not _is_run(output, schema):
            raise UsageError(f"{output} holds something else than an evaluation: choose another directory")


def open_run(directory: Path, config: Mapping[str, Any], force: bool = False, reuse: Path | None = None) -> Ledger:
    """Begin a run, or go on with one: the ledger of what is finished, to be closed by the caller.

    Other metrics make no other run: a `KvsearchWarning` says that the replies that are there are scored anew.

    `force` starts anew whatever is there. `reuse` is the directory of another run to take equal replies from.

    Raises:
        UsageError: another run is there, a damaged ledger, or another process writes to it; see `check_directories`.
        EnvironmentFault: the disk is full, permissions are missing.
    """
    check_directories(directory, reuse, config[SCHEMA])
    lent: dict[str, Sample] = {}
    if reuse is not None and (reuse / LEDGER).exists():
        lent = read_replies(reuse / LEDGER)
    if not force and (directory / CONFIG).exists():
        _require_same(directory, config)
    directory.mkdir(parents=True, exist_ok=True)
    if not force:
        atomic_write(directory / CONFIG, canonical_json(config))
        return Ledger(directory / LEDGER, lent)
    ledger = Ledger(directory / LEDGER, lent, anew=True)  # first: an old ledger must not get a new configuration
    for name in (REPORT, SAMPLES, TABLES, LOSSES):
        (directory / name).unlink(missing_ok=True)
    atomic_write(directory / CONFIG, canonical_json(config))
    return ledger


def difference(there: object, now: object, place: str = "") -> str | None:
    """Say where two JSON values first differ, by sorted keys; None if they are equal.

    Short lists are shown whole, of others the first item that differs.
    """
    if isinstance(there, dict) and isinstance(now, dict):
        for key in sorted({*there, *now}):
            inner = f"{place}.{key}" if place else key
            if key not in there or key not in now:
                return f"{inner} is only {'there' if key in there else 'here'}"
            found = difference(there[key], now[key], inner)
            if found is not None:
                return found
        return None
    if there == now:
        return None
    if isinstance(there, list) and isinstance(now, list) and max(len(repr(there)), len(repr(now))) > SHOWN:
        for index, (old, new) in enumerate(zip(there, now, strict=False)):
            if found := difference(old, new, f"{place}.{index}"):
                return found
        return f"{place} has {len(there)} items there, {len(now)} here"
    first = _first_difference(repr(there), repr(now))
    return f"{place} is {_short(there, first)} there, {_short(now, first)} here"


def _require_same(directory: Path, config: Mapping[str, Any]) -> None:
    there, old = _without_metrics(parse_json(read_bytes(directory / CONFIG), str(directory / CONFIG)))
    now, new = _without_metrics(parse_json(canonical_json(config), "the configuration"))
    found = difference(there, now)
    if found is not None:
        raise UsageError(
            f"{directory} holds another run: {found}; repeat its command to go on with it, choose another --output "
            f"(with --reuse {directory} for what is the same), or --force to start anew"
        )

    for task, metric in new.items():
        if task in old and old[task] != metric:
            told = f"{directory} has task {task} by {old[task]}: all its replies are now scored by {metric}"
            warnings.warn(told, KvsearchWarning, stacklevel=3)


def _without_metrics(config: object) -> tuple[object, dict[str, object]]:
    """A configuration without its metrics, and these by task."""
    tasks = config.get(TASKS) if isinstance(config, dict) else None
    if not isinstance(config, dict) or not isinstance(tasks, dict):
        return config, {}
    metrics = {name: task[METRIC] for name, task in tasks.items() if isinstance(task, dict) and METRIC in task}
    bare = {
        name: {key: value for key, value in task.items() if key != METRIC} if isinstance(task, dict) else task
        for name, task in tasks.items()
    }
    return {**config, TASKS: bare}, metrics


def _is_run(directory: Path, schema: str) -> bool:
    try:
        config = parse_json(read_bytes(directory / CONFIG), CONFIG)
    except UsageError:
        return False
    return isinstance(config, dict) and config.get(SCHEMA) == schema


def _first_difference(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (mine, yours) in pairs if mine != yours), min(len(one), len(other)))


def _short(value: object, first: int) -> str:
    """A value, cut; what it has at `first` is shown."""
    text = repr(value)
    begin = 0 if first < SHOWN else first - SHOWN // 2
    part = text[begin : begin + SHOWN]
    return f"{'...' if begin else ''}{part}{'...' if begin + SHOWN < len(text) else ''}"

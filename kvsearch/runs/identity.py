"""What a run is, by content: its configuration, and in what two of them differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field

from kvsearch.core.canonical import canonical_json
from kvsearch.core.fields import Record
from kvsearch.core.parsing import parse_json, read_json, validate_content
from kvsearch.core.printed import truncate
from kvsearch.runs.lock import find_own_command

CONFIG: Final = "config.json"  # what is run, see `RunConfig`
LEDGER: Final = "ledger.jsonl"  # what is done so far, see `kvsearch.runs.ledger`
SUMS: Final = "SHA256SUMS"  # of what is finished, see `kvsearch.runs.run`
CONTEXTS: Final = "contexts.json"  # what was asked, see `kvsearch.runs.run`
REPORT: Final = "report.json"  # the results, as `--json` prints them
PLAN: Final = "plan.json"  # the plan that was found
BEST: Final = "best.json"  # the best plan so far
SELECTION: Final = "selection.json"  # what was chosen at one size, and why
SAMPLES: Final = "samples.csv"  # a row per reply, with the seconds it took
TABLES: Final = "tables.md"  # the tables of the results
LOSSES: Final = "losses.json"  # output losses of an evaluation, where they were asked for

METRICS = "metrics"  # of what a run executes with: what scores each task, which makes no other run
SCHEMA = "kvsearch.run/1"
Job = Literal["calibrate", "headroom", "evaluate", "validate", "select", "evolve", "run"]
_SHOWN = 40  # letters of a value in a message


# as they are read again from the file, such as tuples as lists
Values = Annotated[
    dict[str, Any], AfterValidator(lambda values: parse_json(canonical_json(values), "the configuration"))
]


class RunConfig(Record):
    """What a run does, as the file `CONFIG` in its directory has it.

    `command` is the command line and `options` is what it comes to, so that the file is a recipe. `content` is all that
    decides the result, by content: two runs of equal content are the same run. `execution` may differ from session to
    session: limits, workers, and what replies depend on by rounding alone.
    """

    job: Job
    command: list[str] = Field(default_factory=find_own_command)
    options: Values = Field(default_factory=dict)
    content: Values
    execution: Values = Field(default_factory=dict)

    def changed(self, **fields: Any) -> RunConfig:
        """Return the configuration with other values of some fields."""
        return RunConfig(**{**dict(self), **fields})

    def to_bytes(self) -> bytes:
        """Return the content of the file: equal configurations have equal bytes."""
        return canonical_json({"schema": SCHEMA, **self.model_dump()})

    def difference(self, there: RunConfig, unknown: Sequence[str] = ()) -> str | None:
        """Say where the content of the run that is `there` first differs but for `unknown` keys; None if nowhere."""
        old = {key: value for key, value in there.content.items() if key not in unknown}
        new = {key: value for key, value in self.content.items() if key not in unknown}
        return find_difference(old, new)


def read_config(directory: Path) -> RunConfig | None:
    """Return the configuration of the run in `directory`; None if there is none, or that of something else.

    Raises:
        UsageError: the file is damaged.
    """
    path = directory / CONFIG
    if not path.exists():
        return None
    content = read_json(path)
    if not isinstance(content, dict) or content.pop("schema", None) != SCHEMA:
        return None
    return validate_content(RunConfig.model_validate, content, str(path))


def find_difference(there: object, now: object, place: str = "") -> str | None:
    """Describe the first difference of two JSON values, by sorted keys; None if they are written alike."""
    if isinstance(there, dict) and isinstance(now, dict):
        for key in sorted({*there, *now}):
            inner = f"{place}.{key}" if place else key
            if key not in there or key not in now:
                return f"{inner} is only {'there' if key in there else 'here'}"
            if text := find_difference(there[key], now[key], inner):
                return text
        return None
    if canonical_json(there) == canonical_json(now):  # 1 and 1.0 are two identities
        return None
    if isinstance(there, list) and isinstance(now, list) and len(there) == len(now):
        pairs = enumerate(zip(there, now, strict=True))
        return next(text for at, pair in pairs if (text := find_difference(*pair, f"{place}.{at}")))
    return f"{place} is {truncate(repr(there), _SHOWN)} there, {truncate(repr(now), _SHOWN)} here"

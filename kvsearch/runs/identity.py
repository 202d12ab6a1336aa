"""What a run is, by content: its configuration, and in what two of them differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError

from kvsearch.errors import UsageError
from kvsearch.plan.canonical import canonical_json, sha256_of
from kvsearch.plan.fields import Record
from kvsearch.plan.parsing import describe_validation_error, parse_json, read_json
from kvsearch.runs.holder import this_command

METRICS = "metrics"  # of what a run executes with: what scores each task, which makes no other run
SCHEMA, CONFIG = "kvsearch.run/1", "config.json"
Job = Literal["calibrate", "evaluate", "validate", "select", "evolve", "run"]
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
    command: list[str] = Field(default_factory=this_command)
    options: Values = Field(default_factory=dict)
    content: Values
    execution: Values = Field(default_factory=dict)

    def with_options(self, options: Mapping[str, Any]) -> RunConfig:
        """Return the configuration with the `options` that it was made of."""
        return RunConfig(**{**dict(self), "options": dict(options)})

    def to_bytes(self) -> bytes:
        """Return the content of the file: equal configurations have equal bytes."""
        return canonical_json({"schema": SCHEMA, **self.model_dump()})

    @property
    def identity(self) -> str:
        """The SHA-256 of the job and the content: equal for sessions of one run, and its ledger begins with it."""
        return sha256_of({"job": self.job, "content": self.content})

    def difference(self, there: RunConfig) -> str | None:
        """Say where the content of the run that is `there` first differs; None if it is the same run."""
        return difference(there.content, self.content)


def read_config(directory: Path) -> RunConfig | None:
    """Return the configuration of the run in `directory`; None if there is none, or that of something else.

    Raises:
        UsageError: the file is damaged.
    """
    path = directory / CONFIG
    if not path.exists():
        return None
    found = read_json(path)
    if not isinstance(found, dict) or found.pop("schema", None) != SCHEMA:
        return None
    try:
        return RunConfig.model_validate(found)
    except ValidationError as error:
        raise UsageError(describe_validation_error(error, str(path))) from error


def read_identity(directory: Path) -> str:
    """Return the identity of the run in `directory`, empty if there is none; errors as for `read_config`."""
    found = read_config(directory)
    return "" if found is None else found.identity


def difference(there: object, now: object, place: str = "") -> str | None:
    """Say where two JSON values first differ, by sorted keys; None if they are written in the same way.

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
    if canonical_json(there) == canonical_json(now):  # 1 and 1.0 are two identities
        return None
    if isinstance(there, list) and isinstance(now, list) and max(len(repr(there)), len(repr(now))) > _SHOWN:
        for index, (old, new) in enumerate(zip(there, now, strict=False)):
            if found := difference(old, new, f"{place}.{index}"):
                return found
        return f"{place} has {len(there)} items there, {len(now)} here"
    old, new = repr(there), repr(now)
    pairs = enumerate(zip(old, new, strict=False))
    first = next((at for at, (mine, yours) in pairs if mine != yours), min(len(old), len(new)))
    return f"{place} is {_short(old, first)} there, {_short(new, first)} here"


def _short(text: str, first: int) -> str:
    """Return a text, cut; what it has at `first` is shown."""
    begin = 0 if first < _SHOWN else first - _SHOWN // 2
    part = text[begin : begin + _SHOWN]
    return f"{'...' if begin else ''}{part}{'...' if begin + _SHOWN < len(text) else ''}"

"""What the records of results have in common, and what is said of a file that is damaged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from kvsearch.core.errors import UsageError
from kvsearch.core.parsing import format_value, list_validation_problems

Content = TypeVar("Content", bound="Result")


class Stored(BaseModel):
    """A frozen part of a result; keys that it does not know are left out, as later versions add some."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=(), populate_by_name=True)


class Result(Stored):
    """What a job found: it is returned, written as JSON and read again."""

    SCHEMA: ClassVar[str]

    def as_json(self) -> dict[str, Any]:
        """Return what is written, for programs."""
        return {"schema": self.SCHEMA, **self.model_dump(mode="json", by_alias=True)}


def damaged_file_error(path: Path, problem: str) -> UsageError:
    """Return what to say of a file that holds something else than its command wrote."""
    return UsageError(f"{path} is damaged ({problem}): restore it, or run its command again")


@contextmanager
def report_damage(path: Path) -> Iterator[None]:
    """Refuse the file at `path` where what is done with its content fails: parts of a record do not fit together."""
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        first = str(error).partition("\n")[0]
        raise damaged_file_error(path, f"{first} is missing" if isinstance(error, KeyError) else first) from error


def read_content(record: type[Content], data: Any, path: Path) -> Content:
    """Return the content of a file as a record.

    Raises:
        UsageError: the file at `path` is damaged, and the message says where, or of another version.
    """
    if isinstance(data, dict):
        schema = data.get("schema", record.SCHEMA)
        if schema != record.SCHEMA:
            versions = f"{format_value(schema)}, this one reads {record.SCHEMA}"
            raise UsageError(
                f"{path} is of another version of kvsearch ({versions}): read it with that one, or delete it and run "
                "its command again"
            )
        data = {name: value for name, value in data.items() if name != "schema"}
    try:
        return record.model_validate(data)
    except (ValidationError, UsageError) as error:  # a dataclass that checks its own numbers raises the second one
        raise damaged_file_error(
            path, list_validation_problems(error)[0] if isinstance(error, ValidationError) else str(error)
        ) from error

"""What commands have written, as it is read again: records of files, and what to say of one that is damaged."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from kvsearch.errors import UsageError
from kvsearch.plan.parsing import problems_of

Found = TypeVar("Found")


class Stored(BaseModel):
    """A frozen record of a file; keys that it does not know are left out, as later versions add some."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())


def damaged(path: Path, problem: str) -> UsageError:
    """Return what to say of a file that holds something else than its command wrote."""
    return UsageError(f"{path} is damaged ({problem}): restore it, or run its command again")


def require_fit(problems: Iterable[str]) -> None:
    """Raise ValueError for the first of what does not fit together in a record; validators call this."""
    for problem in problems:
        raise ValueError(problem)


def stored(kind: type[Found], data: Any, path: Path) -> Found:
    """Return the content of a file as a record or a dataclass.

    Raises:
        UsageError: the file at `path` is damaged; the message says where.
    """
    try:
        return TypeAdapter(kind).validate_python(data)
    except (ValidationError, UsageError) as error:  # a dataclass that checks its own numbers raises the second one
        raise damaged(path, problems_of(error)[0] if isinstance(error, ValidationError) else str(error)) from error

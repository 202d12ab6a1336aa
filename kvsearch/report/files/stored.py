"""What commands have written, as it is read again: records of files, and what to say of one that is damaged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from kvsearch.errors import UsageError
from kvsearch.plan.parsing import problems_of, shown

Found = TypeVar("Found")


class Stored(BaseModel):
    """A frozen record of a file; keys that it does not know are left out, as later versions add some."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Take for damage what does not fit together in a file: names that nothing has, lists of different lengths.

    Raises:
        UsageError: the file at `path` is damaged.
    """
    try:
        yield
    except (LookupError, ValueError, TypeError, ArithmeticError) as error:
        what = f"{type(error).__name__}: {shown(' '.join(str(error).split()))}"
        raise UsageError(
            f"{path} is damaged, its parts do not fit together ({what}): restore it, or run its command again"
        ) from error


def stored(kind: type[Found], data: Any, path: Path) -> Found:
    """Return the content of a file as a record or a dataclass.

    Raises:
        UsageError: the file at `path` is damaged; the message says where.
    """
    try:
        return TypeAdapter(kind).validate_python(data)
    except (ValidationError, UsageError) as error:  # a dataclass that checks its own numbers raises the second one
        problem = problems_of(error)[0] if isinstance(error, ValidationError) else str(error)
        raise UsageError(f"{path} is damaged ({problem}): restore it, or run its command again") from error

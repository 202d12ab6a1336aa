"""What commands have written, as it is read again: records of files, and what to say of one that is damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from kvsearch.errors import UsageError
from kvsearch.plan.parsing import problems_of

Found = TypeVar("Found")


class Stored(BaseModel):
    """A frozen record of a file; keys that it does not know are left out, as later versions add some."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())


def stored(kind: type[Found], data: Any, path: Path) -> Found:
    """Return the content of a file as a record or a dataclass.

    Raises:
        UsageError: the file at `path` is damaged; the message says where.
    """
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        raise UsageError(
            f"{path} is damaged ({problems_of(error)[0]}): restore it, or run its command again"
        ) from error

"""Field types of the files kvsearch reads and writes: strict, finite and frozen, equal bytes for equal content."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

# A pydantic error type of our own: its message is complete, so nothing is added when it is shown.
COMPLETE = "kvsearch"
# Cached positions are stored as int32.
MOST_ENTRIES = 2**31 - 1


class Record(BaseModel):
    """A frozen pydantic model that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def refuse(problems: Iterable[tuple[tuple[str | int, ...], str]]) -> None:
    """Raise one pydantic error that holds all `problems`, each a place below the current field and a message.

    Raises:
        ValidationError: there is at least one problem; inside a validator pydantic merges it with its own errors.
    """
    details = [
        InitErrorDetails(type=PydanticCustomError(COMPLETE, "{what}", {"what": what}), loc=place, input=None)
        for place, what in problems
    ]
    if details:
        raise ValidationError.from_exception_data("record", details)


def _scalar(value: object) -> Scalar:
    if isinstance(value, bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value):
        return value  # half of a surrogate pair is no UTF-8
    what = repr(value) if isinstance(value, float | str) else type(value).__name__
    message = "must be a finite number, true, false or a text, not {what}"
    raise PydanticCustomError(COMPLETE, message, {"what": what})


def _setting(value: object) -> Setting:
    if isinstance(value, list | tuple):
        return tuple(item if item is None else _scalar(item) for item in value)
    return value if value is None else _scalar(value)


def _unchanged(value: Any) -> Any:
    """Serialize a setting as it is; pydantic's own union serializer warns about tuples."""
    return value


Text = Annotated[str, Field(strict=True, min_length=1)]
Sha256 = Annotated[str, Field(strict=True, pattern="^[0-9a-f]{64}$")]
Count = Annotated[int, Field(strict=True, ge=1)]
Index = Annotated[int, Field(strict=True, ge=0)]
Entries = Annotated[int, Field(strict=True, ge=1, le=MOST_ENTRIES)]
Floor = Annotated[int, Field(strict=True, ge=0, le=MOST_ENTRIES)]

Scalar = bool | int | float | str
Setting = Scalar | None | tuple[Scalar | None, ...]
ScalarField = Annotated[Scalar, PlainValidator(_scalar)]
SettingField = Annotated[Setting, PlainValidator(_setting), PlainSerializer(_unchanged)]

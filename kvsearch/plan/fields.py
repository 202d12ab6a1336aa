"""Field types of the files kvsearch reads and writes: strict, finite and frozen, equal bytes for equal content."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, PlainValidator, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from kvsearch.plan.limits import (
    MOST_ENTRIES,
    MOST_HEADS,
    MOST_LAYERS,
    MOST_NUMBER,
    MOST_SAMPLES,
    MOST_TOTAL,
    MOST_WIDTH,
)

# A pydantic error type of our own: its message is complete, so nothing is added when it is shown.
COMPLETE = "kvsearch"


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
    if isinstance(value, bool | int) and -MOST_NUMBER <= value <= MOST_NUMBER:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value):
        return value  # half of a surrogate pair is no UTF-8
    what = "one above 64 bits" if isinstance(value, int) else type(value).__name__
    what = repr(value) if isinstance(value, float | str) else what
    message = "must be a finite number, true, false or a text, not {what}"
    raise PydanticCustomError(COMPLETE, message, {"what": what})


def _setting(value: object) -> Setting:
    if isinstance(value, list | tuple):
        return tuple(item if item is None else _scalar(item) for item in value)
    return value if value is None else _scalar(value)


def _unchanged(value: Any) -> Any:
    """Serialize a setting as it is; pydantic's own union serializer warns about tuples."""
    return value


def few(most: int) -> BeforeValidator:
    """Refuse mappings and lists with more than so many items before any is looked at: pydantic would judge them all."""

    def checked(value: Any) -> Any:
        if isinstance(value, Mapping | list | tuple) and len(value) > most:
            what = "keys" if isinstance(value, Mapping) else "items"
            raise PydanticCustomError(
                COMPLETE, "has {count} {what}, {most} are the most", {"count": len(value), "what": what, "most": most}
            )
        return value

    return BeforeValidator(checked)


Text = Annotated[str, Field(strict=True, min_length=1)]
Sha256 = Annotated[str, Field(strict=True, pattern="^[0-9a-f]{64}$")]
Count = Annotated[int, Field(strict=True, ge=1, le=MOST_NUMBER)]
Index = Annotated[int, Field(strict=True, ge=0, le=MOST_NUMBER)]
Entries = Annotated[int, Field(strict=True, ge=1, le=MOST_ENTRIES)]
Samples = Annotated[int, Field(ge=1, le=MOST_SAMPLES)]
Total = Annotated[int, Field(strict=True, ge=1, le=MOST_TOTAL)]
Layers = Annotated[int, Field(strict=True, ge=1, le=MOST_LAYERS)]
Heads = Annotated[int, Field(strict=True, ge=1, le=MOST_HEADS)]
Width = Annotated[int, Field(strict=True, ge=1, le=MOST_WIDTH)]
Floor = Annotated[int, Field(strict=True, ge=0, le=MOST_ENTRIES)]

Scalar = bool | int | float | str
Setting = Scalar | None | tuple[Scalar | None, ...]
ScalarField = Annotated[Scalar, PlainValidator(_scalar)]
SettingField = Annotated[Setting, PlainValidator(_setting), PlainSerializer(_unchanged)]

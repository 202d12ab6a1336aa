"""Field types of the files kvsearch reads and writes: strict, finite and frozen, equal bytes for equal content."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from kvsearch.core.limits import (
    MOST_ENTRIES,
    MOST_HEADS,
    MOST_LAYERS,
    MOST_NUMBER,
)

# A pydantic error type of our own: its message is complete, so nothing is added when it is shown.
COMPLETE = "kvsearch"


class Record(BaseModel):
    """A frozen pydantic model that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def is_none(value: object) -> bool:
    """Tell whether a field is left out of what is written, so that a file without it keeps its bytes."""
    return value is None


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


def require_ascending(items: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return items that are ascending, each once; for AfterValidator."""
    if sorted(set(items)) != list(items):
        refuse([((), "must be ascending, each once")])
    return items


def _check_scalar(value: Any) -> Any:
    is_whole = isinstance(value, int) and -MOST_NUMBER <= value <= MOST_NUMBER
    if is_whole or isinstance(value, str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    message = "must be a finite number, true, false or a text, not a {what}"
    raise PydanticCustomError(COMPLETE, message, {"what": type(value).__name__})


def _check_setting(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(item if item is None else _check_scalar(item) for item in value)
    return value if value is None else _check_scalar(value)


_TIME = re.compile(r"(?:(\d{1,4})h)?(?:(\d{1,5})m)?(?:(\d{1,6})s)?")


def parse_seconds(time: str) -> int:
    """Parse a time such as 90s, 30m, 2h or 1h30m to seconds; 0 if it is not a time."""
    match = _TIME.fullmatch(time)
    hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0)
    return 3600 * hours + 60 * minutes + seconds


def _check_time(value: str) -> str:
    if not parse_seconds(value):
        raise PydanticCustomError(
            COMPLETE, "must be a time such as 90s, 30m, 2h or 1h30m, not {what}", {"what": repr(value)}
        )
    return value


Time = Annotated[str, AfterValidator(_check_time)]
Text = Annotated[str, Field(strict=True, min_length=1)]
Sha256 = Annotated[str, Field(strict=True, pattern="^[0-9a-f]{64}$")]
Count = Annotated[int, Field(strict=True, ge=1, le=MOST_NUMBER)]
Index = Annotated[int, Field(strict=True, ge=0, le=MOST_NUMBER)]
Entries = Annotated[int, Field(strict=True, ge=1, le=MOST_ENTRIES)]
Samples = Annotated[int, Field(ge=1, le=MOST_ENTRIES)]
LayerCount = Annotated[int, Field(strict=True, ge=1, le=MOST_LAYERS)]
HeadCount = Annotated[int, Field(strict=True, ge=1, le=MOST_HEADS)]
Floor = Annotated[int, Field(strict=True, ge=0, le=MOST_ENTRIES)]
# the end of an interval; in a file null is one that is not there, here NaN: no comparison with it holds
_NULL = BeforeValidator(lambda end: math.nan if end is None else end)
End = Annotated[float, Field(strict=True), _NULL, PlainSerializer(lambda end: None if math.isnan(end) else end)]

Scalar = bool | int | float | str
Setting = Scalar | None | tuple[Scalar | None, ...]
ScalarField = Annotated[Scalar, PlainValidator(_check_scalar)]
# pydantic's own serializer of unions warns about tuples
SettingField = Annotated[Setting, PlainValidator(_check_setting), PlainSerializer(lambda value: value)]

"""Help with names that were typed wrong, and names that stand for others."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from kvsearch.core.errors import UsageError
from kvsearch.core.printed import truncate

MAX_NAME_LENGTH = 100  # letters of a name that somebody may have meant: to compare takes the product of the lengths
_SHOWN = 60  # letters of a known name
_LISTED = 100  # known names


def describe_unknown(what: str, name: object, known: Sequence[str]) -> str:
    """Return the message for an unknown name of a `what`: the nearest known name, and all known names."""
    return f"unknown {what} {truncate(repr(name), MAX_NAME_LENGTH)}{suggest(name, known)}"


def require_known(what: str, name: object, known: Collection[str]) -> None:
    """Raise the UsageError of `describe_unknown` if `name` is not among the `known` names."""
    if name not in known:
        raise UsageError(describe_unknown(what, name, list(known)))


def join_choices(names: Iterable[str]) -> str:
    """Join names to "a, b or c"."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def check_unique(what: str, names: Iterable[object]) -> None:
    """Raise UsageError if one of the `names` is there twice; `what` comes before it in the message."""
    seen = set()
    for name in names:
        if name in seen:
            raise UsageError(f"{what} {name} is given twice: give it once")
        seen.add(name)


def suggest(name: object, known: Sequence[str]) -> str:
    """Return the tail of an error message about an unknown name: the nearest known one, and all of them."""
    listed = [truncate(name_shown, _SHOWN) for name_shown in known[:_LISTED]]
    more = f" and {len(known) - _LISTED} more" if len(known) > _LISTED else ""
    return f"{suggest_nearest(name, known)} (known: {', '.join(listed)}{more})"


def suggest_nearest(name: object, known: Sequence[str], cutoff: float = 0.5) -> str:
    """Return "; did you mean 'NAME'?" with the nearest known name, or "" if no name is near."""
    if not isinstance(name, str) or len(name) > MAX_NAME_LENGTH:
        return ""
    near = difflib.get_close_matches(
        name, [candidate for candidate in known if len(candidate) <= MAX_NAME_LENGTH], n=1, cutoff=cutoff
    )
    return f"; did you mean {near[0]!r}?" if near else ""


def delegate(place: str) -> Any:
    """Make a property that delegates to an attribute path such as "inner.score": a value, or a method."""
    inner, name = place.split(".")
    return property(lambda owner: getattr(getattr(owner, inner), name))  # torch.compile cannot follow attrgetter

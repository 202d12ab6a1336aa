"""Help with names that were typed wrong, and names that stand for others."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from kvsearch.core.errors import UsageError
from kvsearch.core.printed import cut

LONGEST = 100  # letters of a name that somebody may have meant: to compare takes the product of the lengths
_SHOWN = 60  # letters of a known name
_LISTED = 100  # known names


def unknown(what: str, name: object, known: Sequence[str]) -> str:
    """Return what to say of a name of `what` that nothing has: in short, the nearest known one, and all of them."""
    return f"unknown {what} {cut(repr(name), LONGEST)}{suggest(name, known)}"


def require_known(what: str, name: object, known: Collection[str]) -> None:
    """Raise the UsageError of `unknown` if `name` is not among the `known` names."""
    if name not in known:
        raise UsageError(unknown(what, name, list(known)))


def check_unique(what: str, names: Iterable[object]) -> None:
    """Raise UsageError if one of the `names` is there twice; `what` comes before it in the message."""
    seen = set()
    for name in names:
        if name in seen:
            raise UsageError(f"{what} {name} is given twice: give it once")
        seen.add(name)


def suggest(name: object, known: Sequence[str]) -> str:
    """Return the tail of an error message about an unknown name: the nearest known one, and all of them."""
    listed = [cut(one, _SHOWN) for one in known[:_LISTED]]
    more = f" and {len(known) - _LISTED} more" if len(known) > _LISTED else ""
    return f"{did_you_mean(name, known)} (known: {', '.join(listed)}{more})"


def did_you_mean(name: object, known: Sequence[str], cutoff: float = 0.5) -> str:
    """Return a question after the nearest known name, "; did you mean 'NAME'?", nothing if none is near."""
    if not isinstance(name, str) or len(name) > LONGEST:
        return ""
    near = difflib.get_close_matches(name, [one for one in known if len(one) <= LONGEST], n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


def forwarded(place: str) -> Any:
    """Return a property that is what stands at a place of the object, as in "inner.score": a value, or a method."""
    inner, name = place.split(".")
    return property(lambda owner: getattr(getattr(owner, inner), name))  # torch.compile cannot follow attrgetter

"""Markup that is safe by construction: text is escaped, and what nobody can see is shown as its escape."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import quote

from markupsafe import Markup, escape

from kvsearch.printed import visible

LINK_SAFE = ",;:/?@=+$!*()[]{}|^"  # in a data link, beside letters and digits


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """Return an element. Texts and values are made visible and escaped; None leaves an attribute out.

    An underscore in an attribute is a hyphen, but for a last one, which keeps Python's own words free: `class_`.
    """
    stated = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), plain(value))
        for key, value in attributes.items()
        if value is not None
    )
    inner = Markup("").join(child if isinstance(child, Markup) else escape(plain(child)) for child in children)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), stated, inner)


def plain(value: object) -> str:
    """Return a value as it is written: numbers as short as they are to a tenth, texts with all that can be seen."""
    if isinstance(value, float):
        return number(value)
    return value if isinstance(value, Markup) else visible(str(value))


def number(value: float) -> str:
    """Return a coordinate to a tenth, without zeros that say nothing."""
    return f"{value:.1f}".removesuffix(".0").replace("-0.", "-.") if abs(value) >= 0.05 else "0"


def dots(points: Iterable[tuple[float, float]]) -> str:
    """Return a path of one dot per point (with round caps); the page's script finds the nearest of them."""
    return "".join(f"M{number(x)} {number(y)}h0" for x, y in points)


def data_link(text: str, kind: str = "text/csv") -> str:
    """Return a link that holds a file itself."""
    return f"data:{kind};charset=utf-8,{quote(text.encode(errors='backslashreplace'), safe=LINK_SAFE)}"

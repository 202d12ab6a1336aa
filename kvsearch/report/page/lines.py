"""Lines, points, steps and levels over an axis, with 95% intervals; one row each where all are at one place."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from markupsafe import Markup

from kvsearch.report.figures.data import Lines, Series
from kvsearch.report.figures.style import COLOURS
from kvsearch.report.page.markup import dots, number, tag
from kvsearch.report.page.scale import Scale, fitted, label, ticks, ticks_at

WIDTH, HEIGHT = 360.0, 240.0
TOP, RIGHT, BOTTOM = 24.0, 10.0, 36.0
DIGIT = 6.2  # width of a letter of a tick's label
MARKED = 40  # points of a line that get a marker each
APART = 3.2  # between the error bars of two methods at one place
ROW = 20.0
DASHES = 4


@dataclass(frozen=True)
class Key:
    """A line of the legend: its name, and the classes and the marker it is drawn with."""

    number: int
    name: str
    classes: str
    marker: str


def lines(body: Lines) -> tuple[Markup, list[Key]]:
    """Return a drawing with its legend."""
    places = {x for one in body.series if one.style != "level" for x in one.x}
    if len(places) == 1 and not any(one.style == "steps" for one in body.series):
        return _rows(body), []
    return _plot(body), [key for _, key in _styled(body)]


def _styled(body: Lines) -> Iterator[tuple[Series, Key]]:
    """Yield every series with how it is drawn: colours in order, levels and what is muted in grey."""
    drawn = muted = 0
    for at, one in enumerate(body.series):
        if one.style == "level":
            yield one, Key(at, one.name, f"ref d{1 + at % 3}", "")
        elif one.muted:
            shape = MARKER[muted % len(MARKER)] if one.style != "steps" else ""
            yield one, Key(at, one.name, f"muted d{_dash(one, muted)}", shape)
            muted += 1
        else:
            shape = MARKER[drawn % len(MARKER)] if one.style != "steps" else ""
            yield one, Key(at, one.name, f"c{drawn % len(COLOURS)} d{_dash(one, drawn // len(COLOURS))}", shape)
            drawn += 1


def _dash(one: Series, number: int) -> str:
    """Return which dashes a line has; points have no line."""
    return "p" if one.style == "points" else str(number % DASHES)


def _plot(body: Lines) -> Markup:
    values = [y for one in body.series for y in (*one.y, *(one.low or ()), *(one.high or ()))]
    upright = fitted(values, HEIGHT - BOTTOM, TOP, log=body.y.log)
    left = 10 + DIGIT * max(len(label(value)) for value in ticks(upright))
    xs = [x for one in body.series for x in one.x if one.style != "level"]
    across = fitted(xs, left, WIDTH - RIGHT, log=body.x.log, margin=0.03 if len(set(xs)) > 12 else 0.07)
    behind_first = sorted(_styled(body), key=lambda found: not found[0].muted)
    drawn = [_series(body, one, key, across, upright) for one, key in behind_first]
    return _frame(body, across, upright, HEIGHT, xs, *drawn)


def _frame(
    body: Lines, across: Scale, upright: Scale | None, height: float, marked: list[float], *inside: Markup
) -> Markup:
    """Return the axes with what is drawn inside of them; no upright axis: rows are named."""
    bottom, parts = height - BOTTOM, list[Markup]()
    for value in () if upright is None else ticks(upright):
        y = upright(value) if upright else 0.0
        parts.append(tag("path", class_="grid", d=f"M{number(across.start)} {number(y)}H{number(WIDTH - RIGHT)}"))
        parts.append(tag("text", label(value), x=across.start - 6, y=y + 3.5, class_="end"))
    parts.append(tag("path", class_="axis", d=f"M{number(across.start)} {number(bottom)}H{number(WIDTH - RIGHT)}"))
    for value in ticks_at(marked, across, 5 * DIGIT):
        x = across(value)
        parts.append(tag("path", class_="axis", d=f"M{number(x)} {number(bottom)}v4"))
        parts.append(tag("text", label(value), x=x, y=bottom + 15, class_="mid"))
    named = body.x.label if upright else body.y.label
    parts.append(tag("text", named, x=(across.start + WIDTH - RIGHT) / 2, y=height - 4, class_="mid name"))
    if upright is not None:
        parts.append(tag("text", body.y.label, x=2, y=11, class_="name"))
    return tag("svg", *parts, *inside, viewBox=f"0 0 {number(WIDTH)} {number(height)}", role="img")


def _series(body: Lines, one: Series, key: Key, across: Scale, upright: Scale) -> Markup:
    """Return one series: its interval, its line, its markers, and dots that the script finds."""
    first = sum(len(other.y) for other in body.series[: key.number])
    if one.style == "level":
        y = number(upright(one.y[0]))
        parts = [tag("path", class_="line", d=f"M{number(across.start)} {y}H{number(WIDTH - RIGHT)}")]
        hits = dots([(across.start + share * (WIDTH - RIGHT - across.start) / 12, float(y)) for share in range(13)])
        hit = tag("path", class_="hit", data_r=first, data_same=1, d=hits)
        return tag("g", *parts, hit, class_=f"s{key.number} {key.classes}")
    shift = _shift(body, key.number)
    points = [(across(x) + shift, upright(y)) if math.isfinite(y) else None for x, y in zip(one.x, one.y, strict=True)]
    parts = [] if one.style == "points" else [tag("path", class_="line", d=_path(points, one.style == "steps"))]
    if one.low is not None and one.high is not None:
        ends = zip(one.x, one.low, one.high, strict=True)
        bars = "".join(_bar(across(x) + shift, upright(low), upright(high)) for x, low, high in ends)
        parts.append(tag("path", class_="bar", d=bars))
    known = [point for point in points if point is not None]
    if one.style == "points" and len(known) > MARKED:
        parts.append(tag("path", class_="cloud", d=dots(known)))
    elif one.style != "steps" and len(known) <= MARKED:
        parts.append(tag("path", class_="mark", d="".join(f"M{number(x)} {number(y)}{key.marker}" for x, y in known)))
    parts.append(tag("path", class_="hit", data_r=first, d=dots(point or (-99.0, -99.0) for point in points)))
    return tag("g", *parts, class_=f"s{key.number} {key.classes}")


def _rows(body: Lines) -> Markup:
    """Return a row per series, its value with the interval across, levels as upright lines."""
    named = [(one, key) for one, key in _styled(body) if one.style != "level"]
    levels = [(one, key) for one, key in _styled(body) if one.style == "level"]
    left = min(12 + DIGIT * max(len(one.name) for one, _ in named), 0.42 * WIDTH)
    height = 8 + ROW * len(named) + BOTTOM + 12 * bool(levels)
    top = 8 + 12.0 * bool(levels)
    values = [y for one in body.series for y in (*one.y, *(one.low or ()), *(one.high or ()))]
    across = fitted(values, left, WIDTH - RIGHT, log=body.y.log)
    parts = []
    for one, key in levels:
        x = across(one.y[0])
        line = tag("path", class_="line", d=f"M{number(x)} {number(top - 4)}V{number(height - BOTTOM)}")
        text = tag("text", one.name, x=x, y=10, class_="mid small")
        parts.append(tag("g", line, text, class_=f"s{key.number} {key.classes}"))
    for row, (one, key) in enumerate(named):
        y, x = top + ROW * (row + 0.5), across(one.y[0])
        known = one.low is not None and one.high is not None
        bar = bar_across(across(one.low[0]), across(one.high[0]), y) if known and one.low and one.high else ""
        first = sum(len(other.y) for other in body.series[: key.number])
        parts.append(tag(
            "g",
            tag("path", class_="grid", d=f"M{number(left)} {number(y)}H{number(WIDTH - RIGHT)}"),
            tag("text", shortened(one.name, left - 12), x=left - 8, y=y + 3.5, class_="end"),
            tag("path", class_="bar strong", d=bar),
            tag("path", class_="mark", d=f"M{number(x)} {number(y)}{key.marker}"),
            tag("path", class_="hit", data_r=first, d=dots([(x, y)])),
            class_=f"s{key.number} {key.classes}",
        ))  # fmt: skip
    return _frame(body, across, None, height, [], *parts)


def shortened(text: str, room: float) -> str:
    """Return a name cut to the room it has; the tooltip has all of it."""
    most = max(int(room / DIGIT), 3)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _shift(body: Lines, at: int) -> float:
    """Return how far a series is moved aside, so that intervals at one place can be told apart."""
    beside = [number for number, one in enumerate(body.series) if one.low is not None and one.style == "line"]
    return APART * (beside.index(at) - (len(beside) - 1) / 2) if at in beside and len(beside) <= 8 else 0.0


def _path(points: list[tuple[float, float] | None], steps: bool) -> str:
    """Return a line through all points, broken where one is unknown; steps go across first."""
    parts, broken = [], True
    for point in points:
        if point is not None:
            x, y = map(number, point)
            parts.append(f"M{x} {y}" if broken else f"H{x}V{y}" if steps else f"L{x} {y}")
        broken = point is None
    return "".join(parts)


def _bar(x: float, low: float, high: float) -> str:
    at, ends = number(x), (number(low), number(high))
    return f"M{at} {ends[0]}V{ends[1]}" if math.isfinite(low) and math.isfinite(high) else ""


def bar_across(low: float, high: float, y: float) -> str:
    return f"M{number(low)} {number(y)}H{number(high)}"


# circle, square, triangle, diamond, triangle on its top, plus: told apart without colours
MARKER = (
    "m-3.2 0a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0-6.4 0z", "m-2.9-2.9h5.8v5.8h-5.8z", "m0-3.8l3.6 6.4h-7.2z",
    "m0-4l4 4l-4 4l-4-4z", "m0 3.8l3.6-6.4h-7.2z", "m-1.2-3.8h2.4v2.6h2.6v2.4h-2.6v2.6h-2.4v-2.6h-2.6v-2.4h2.6z",
)  # fmt: skip

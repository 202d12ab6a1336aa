"""Means with their intervals, one under the other, in groups."""

from __future__ import annotations

from markupsafe import Markup

from kvsearch.report.figures.data import Intervals
from kvsearch.report.page.lines import BOTTOM, DIGIT, MARKER, RIGHT, ROW, WIDTH, bar_across, shortened
from kvsearch.report.page.markup import dots, number, tag
from kvsearch.report.page.scale import fitted, label, ticks

TOP, HEADING = 8.0, 18.0


def intervals(body: Intervals) -> Markup:
    """Return a row per mean under the names of their groups; a line where nothing is won or lost."""
    known = [one for _, group in body.groups for one in group]
    left = min(12 + DIGIT * max((len(one.name) for one in known), default=0), 0.44 * WIDTH)
    ends = [end for one in known for end in (one.low, one.mean, one.high)]
    across = fitted([*ends, *([] if body.reference is None else [body.reference])], left, WIDTH - RIGHT, log=body.x.log)
    rows, y, first = list[Markup](), TOP, 0
    for name, group in body.groups:
        if name:
            rows.append(tag("text", shortened(name, WIDTH), x=0, y=y + 12, class_="panel"))
            y += HEADING
        for one in group:
            middle, x = y + ROW / 2, across(one.mean)
            rows += [
                tag("path", class_="grid", d=f"M{number(left)} {number(middle)}H{number(WIDTH - RIGHT)}"),
                tag("text", shortened(one.name, left - 12), x=left - 8, y=middle + 3.5, class_="end"),
                tag("path", class_="bar strong", d=bar_across(across(one.low), across(one.high), middle)),
                tag("path", class_="mark", d=f"M{number(x)} {number(middle)}{MARKER[0]}"),
                tag("path", class_="hit", data_r=first, d=dots([(x, middle)])),
            ]
            y, first = y + ROW, first + 1
    axis = [tag("path", class_="axis", d=f"M{number(left)} {number(y)}H{number(WIDTH - RIGHT)}")]
    for value in ticks(across):
        axis.append(tag("path", class_="axis", d=f"M{number(across(value))} {number(y)}v4"))
        axis.append(tag("text", label(value), x=across(value), y=y + 15, class_="mid"))
    axis.append(tag("text", body.x.label, x=(left + WIDTH - RIGHT) / 2, y=y + BOTTOM - 4, class_="mid name"))
    if body.reference is not None:
        place = f"M{number(across(body.reference))} {number(TOP)}V{number(y)}"
        axis.append(tag("g", tag("path", class_="line", d=place), class_="ref d1"))
    drawn = tag("g", *rows, class_="s0 c0")
    return tag("svg", *axis, drawn, viewBox=f"0 0 {number(WIDTH)} {number(y + BOTTOM)}", role="img")

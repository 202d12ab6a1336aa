"""Figures of what caches cost: time of a token and bytes held, over the length of prompts or over the batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvsearch.evaluation.cache_costs import CacheCosts
from kvsearch.report.figures.data import Axis, Figure, Lines, Series
from kvsearch.report.speed import SpeedView


@dataclass(frozen=True)
class _Over:
    """What figures are drawn over: one size varies, of the other the largest is taken."""

    name: str
    axis: Axis
    varies: str
    fixed: str
    at: str  # the fixed size, in words


OVER = (
    _Over("length", Axis("tokens of a prompt", log=True), "length", "batch", "batch {:,}"),
    _Over("batch", Axis("sequences at a time", log=True), "batch", "length", "{:,} tokens"),
)


def speed_figures(view: SpeedView) -> Iterator[Figure]:
    """Yield time per token and bytes held over each size that was measured at several values; over length if none."""
    several = [over for over in OVER if len({getattr(one, over.varies) for one in view.costs}) > 1]
    for over in several or OVER[:1]:
        fixed = max(getattr(one, over.fixed) for one in view.costs)
        some = [one for one in view.costs if getattr(one, over.fixed) == fixed]
        where = over.at.format(fixed)
        times = {one: 1e3 * one.token_seconds for one in some}
        yield _figure(f"token-over-{over.name}", f"Time per token, {where}", "ms per token", over, times, view)
        held = {one: one.held_bytes / 1e6 for one in some}
        yield _figure(f"held-over-{over.name}", f"Bytes that a cache holds, {where}", "MB", over, held, view)


def _figure(name: str, title: str, unit: str, over: _Over, values: dict[CacheCosts, float], view: SpeedView) -> Figure:
    """Return a line per cache, through its values by what they are drawn over."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for one, value in values.items():
        lines.setdefault(one.cache, []).append((getattr(one, over.varies), value))
    series = tuple(_series(cache, sorted(points)) for cache, points in lines.items())
    return Figure(name, title, view.measured(), Lines(over.axis, Axis(unit), series))


def _series(cache: str, points: list[tuple[float, float]]) -> Series:
    x, y = tuple(at for at, _ in points), tuple(value for _, value in points)
    return Series(cache, x, y, style="line" if len(points) > 1 else "points")

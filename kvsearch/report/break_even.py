"""What `bench --curve` says: where a plan starts to pay, what fits into memory, and how far off predictions are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from statistics import median
from typing import Any, ClassVar

from kvsearch.benchmark.break_even import PAYS, BreakEven, CostCheck, CostModel, CurvePoint, StepCosts
from kvsearch.core.fields import Index
from kvsearch.core.items import group_by_key
from kvsearch.evaluation.names import FULL
from kvsearch.models.work import SURE
from kvsearch.report.costs import format_machine
from kvsearch.report.figures import Figure, LineChart, Role, Series
from kvsearch.report.table import Cell, Table
from kvsearch.results import Result

BREAK_EVEN_NOTES = (
    "full cache -> plan; the full cache is the faster of transformers' DynamicCache and kvsearch's own storage. "
    "prompt s: to read one prompt. requests: how many fit into memory at once",
    "*: longer than what was measured; the tokens per second of all requests that fit are beyond the measured batches",
)


class BreakEvenView(Result):
    """Measured steps, the costs fitted to them, checks of these, and what they say over length and batch.

    `memory` are the bytes that all requests may take together.
    """

    SCHEMA: ClassVar[str] = "kvsearch.break-even/1"

    machine: dict[str, Any]
    memory: Index
    measured: tuple[StepCosts, ...]
    checks: tuple[CostCheck, ...]
    costs: dict[str, CostModel]
    points: tuple[CurvePoint, ...]
    break_evens: tuple[BreakEven, ...]

    @property
    def plans(self) -> dict[str, list[CurvePoint]]:
        """The points of every plan, by its name."""
        return group_by_key((point for point in self.points if point.cache != FULL), attrgetter("cache"))

    def headline(self) -> str:
        """Return in a sentence from where on every plan pays."""
        return "; ".join(self._describe_start(plan) for plan in self.plans)

    def parts(self) -> Iterator[str | Table]:
        """Yield on what it was measured, where plans pay and where not, a table for every plan, and the checks."""
        yield self.measured_on()
        spread = median(cost.token_spread for cost in self.measured)
        if spread > SURE:
            yield f"This machine is busy: a step took {spread:.1f} times as long in most rounds as in the fastest."
        for plan, points in self.plans.items():
            first = points[0]
            last = max((point for point in points if point.is_measured), key=attrgetter("length"))
            full = self.full[last.length, last.batch]
            place = f"{first.length:,} tokens and batch {first.batch}"
            yield f"{self._describe_start(plan)}."
            yield (
                f"At {place} it does{' not' if first.speedup < PAYS else ''}: {first.speedup:.2f} times the full "
                f"cache's tokens per second. {self.memory / 1e9:.1f} GB hold {full.requests:,} requests of "
                f"{last.length:,} tokens with the full cache, and {last.requests:,} with the plan."
            )
        for plan, points in self.plans.items():
            batches = list(dict.fromkeys(point.batch for point in points))
            header = ["tokens", *(f"batch {batch}" for batch in batches), "prompt s", "requests", "their tokens/s"]
            rows = [self._make_row(row) for row in group_by_key(points, attrgetter("length")).values()]
            yield Table.plain(f"tokens per second: {plan}", header, rows, notes=BREAK_EVEN_NOTES)
        if self.checks:
            header = ["cache", "tokens", "batch", "ms per step", "foretold", "error"]
            checks = [
                [
                    check.cache, f"{check.length:,}", check.batch, Cell.number(1e3 * check.token_seconds, ".2f"),
                    Cell.number(1e3 * check.foretold_token_seconds, ".2f"), Cell.number(check.error, "+.1%"),
                ]
                for check in self.checks
            ]  # fmt: skip
            yield Table.plain(f"points that were not measured for the fit: {self.describe_errors()}", header, checks)

    def measured_on(self) -> str:
        """Return on what it was measured, and how."""
        rounds = f"the fastest of {self.machine['rounds']} rounds of {self.machine['new_tokens']} new tokens"
        return f"{format_machine(self.machine)}; {rounds}, prompts read one at a time"

    def describe_errors(self) -> str:
        """Return how far off the foretold times of steps are at the points that were left out."""
        errors = sorted(abs(check.error) for check in self.checks)
        return f"errors of {median(errors):.0%} (median) and up to {errors[-1]:.0%}"

    def _describe_start(self, plan: str) -> str:
        """Return from which length on a plan pays at each batch."""
        ends = (self.points[0].length, max(point.length for point in self.points))
        places = []
        for at in self.break_evens:
            if at.cache == plan and at.length is None:
                places.append(f"at no length up to {ends[1]:,} tokens at batch {at.batch}")
            elif at.cache == plan:
                length = at.length if at.length in ends else float(f"{at.length:.2g}")
                places.append(f"from {length:,.0f} tokens at batch {at.batch}")
        return f"{plan} decodes at least {PAYS - 1:.0%} faster than the full cache {', '.join(places)}"

    @property
    def full(self) -> dict[tuple[int, int], CurvePoint]:
        """The points of the full cache, by length and batch."""
        return {(point.length, point.batch): point for point in self.points if point.cache == FULL}

    def _make_row(self, points: Sequence[CurvePoint]) -> list[Cell]:
        """Return the cells of a length: a plan and the full cache at every batch, and what holds for all of them."""
        pairs = [(self.full[point.length, point.batch], point) for point in points]
        full, first = pairs[0]
        rates = [
            Cell(
                f"{full.tokens_per_second:,.1f} -> {point.tokens_per_second:,.1f} ({point.speedup:.2f}x)",
                point.speedup >= PAYS, point.speedup,
            )
            for full, point in pairs
        ]  # fmt: skip
        return [
            Cell(f"{first.length:,}{'' if first.is_measured else '*'}", value=first.length),
            *rates,
            Cell(f"{full.prefill_seconds:.3g} -> {first.prefill_seconds:.3g}"),
            Cell(f"{full.requests:,} -> {first.requests:,}"),
            Cell(f"{full.requests_per_second:,.0f} -> {first.requests_per_second:,.0f}"),
        ]


def make_break_even_figures(view: BreakEvenView) -> Iterator[Figure]:
    """Yield tokens per second, how many times the full cache's these are, and requests that fit, over length."""
    lines = group_by_key(view.points, lambda point: (point.cache, point.batch))
    first = view.points[0].batch
    caches = {cache: points for (cache, batch), points in lines.items() if batch == first}
    rates = [_make_line(points, "tokens_per_second", batch) for (_, batch), points in lines.items()]
    speedups = [_make_line(points, "speedup", batch) for (cache, batch), points in lines.items() if cache != FULL]
    requests = [_make_line(points, "requests") for points in caches.values()]
    level = Series(FULL, (), (1.0,), style="level", role="muted")
    longest = max(cost.length for cost in view.measured)
    x = "tokens of a prompt"
    if longest < max(point.length for point in view.points):
        x += f"; extrapolated beyond {longest:,}"
    caption = view.measured_on()
    if view.checks:
        caption += f"; {view.describe_errors()} at points that were not measured for the fit"
    for name, title, y, series in (
        ("tokens", "Tokens per second", "tokens per second", rates),
        ("speed", "Where a plan starts to pay", "times the full cache's", [level, *speedups]),
        ("requests", "Requests that fit at once", f"requests in {view.memory / 1e9:.1f} GB", requests),
    ):
        yield Figure(
            name, title, caption, LineChart(x, y, tuple(series), log_x=True, log_y=name != "speed"), leads=True
        )


def _make_line(points: Sequence[CurvePoint], value: str, batch: int | None = None) -> Series:
    """Return a value over length as a line of its cache and, where it depends on it, batch."""
    name = points[0].cache if points[0].cache != FULL else "full cache"
    x, y = zip(*((point.length, getattr(point, value)) for point in points), strict=True)
    role: Role = "muted" if points[0].cache == FULL else ""
    return Series(name if batch is None else f"{name}, batch {batch}", x, y, role=role)

"""What differs between two plans: settings, and budgets layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvsearch.plan import PHASES, Phase, Plan, PlanDiff, diff
from kvsearch.plan.yaml import layer_ranges
from kvsearch.report.screen import facts, screen_table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

NOTHING = "-"


@dataclass(frozen=True)
class DifferenceView:
    """Two plans, their names, and what differs between them."""

    plans: tuple[Plan, Plan]
    names: tuple[str, str]
    found: PlanDiff

    @classmethod
    def of(cls, plans: tuple[Plan, Plan], names: tuple[str, str]) -> DifferenceView:
        """Compare two plans; errors are those of `kvsearch.plan.diff`."""
        return cls(plans, names, diff(*plans))

    def as_json(self) -> dict[str, Any]:
        """See `View.as_json`."""
        totals = {phase: self._totals(phase) for phase in PHASES["both"]}
        return {
            "equal": not self.found,
            "settings": [change._asdict() for change in self.found.settings],
            "budgets": [change._asdict() for change in self.found.budgets],
            "totals": {phase: values for phase, values in totals.items() if values != [None, None]},
        }

    def parts(self) -> Iterator[RenderableType]:
        """See `View.parts`."""
        if not self.found:
            yield "the plans are equal"
            return
        yield from facts(dict(zip("AB", self.names, strict=True)))
        settings = [change for change in self.found.settings if change.name != "total"]  # those are with the budgets
        if settings:
            columns = ["phase", "layers", "setting", "A", "B"]
            table = screen_table("settings", columns, left=columns)
            for change in settings:
                values = (NOTHING if value is None else str(value) for value in (change.before, change.after))
                _add(table, change.phase or "", ", ".join(layer_ranges(change.layers)), change.name, *values)
            yield table
        for phase in PHASES["both"]:
            layers = sorted({change.layer for change in self.found.budgets if change.phase == phase})
            if layers:
                yield self._budgets(phase, layers)

    def _budgets(self, phase: Phase, layers: Sequence[int]) -> Table:
        """Return sums of the layers that differ, their heads' budgets where these differ in a layer, and totals."""
        parts = [getattr(plan, phase) for plan in self.plans]
        rows = [[None if part is None else part.budgets[layer] for part in parts] for layer in layers]
        by_head = any(len(set(budget)) > 1 for row in rows for budget in row if budget)
        columns = ["layer", "A", "B", "B - A", *(("A by head", "B by head") if by_head else ())]
        table = screen_table(f"{phase} entries", columns)
        for layer, row in zip(layers, rows, strict=True):
            heads = (" ".join(map(str, budget)) if budget else NOTHING for budget in row)
            sums = _numbers([sum(budget) if budget else None for budget in row])
            _add(table, str(layer), *sums, *(heads if by_head else ()))
        _add(table, "total", *_numbers(self._totals(phase)), style="bold")
        return table

    def _totals(self, phase: Phase) -> list[int | None]:
        parts = [getattr(plan, phase) for plan in self.plans]
        return [None if part is None else part.total for part in parts]


def _numbers(values: list[int | None]) -> list[str]:
    """Write two numbers and by how much the second is larger."""
    before, after = values
    change = NOTHING if before is None or after is None else f"{after - before:+d}"
    return [NOTHING if value is None else str(value) for value in values] + [change]


def _add(table: Table, *cells: str, style: str | None = None) -> None:
    table.add_row(*cells, style=style)

"""kvsearch plan diff: what differs between two plans."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsearch.cli.common import Common, command
from kvsearch.cli.show import plain_table, show_facts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.table import Table

    from kvsearch.plan import Phase, Plan, PlanDiff, SettingChange

NOTHING = "-"


@command
def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help="A plan.", show_default=False)],
    after: Annotated[Path, typer.Argument(metavar="B", help="Another plan.", show_default=False)],
    common: Common,
) -> None:
    """Show what differs between two plans: settings, policies and their parameters, and budgets layer by layer.

    Where the plans come from is not compared. A setting that one of them does not state is shown as -.

    With --json, an object with equal (true or false), settings and budgets (lists of objects with before and after)
    and totals (by phase: those of A and B).

    Example: kvsearch plan diff plan.json smaller.json
    """
    from kvsearch.plan import diff as compared
    from kvsearch.plan import load_plan

    plans = load_plan(before), load_plan(after)
    found = compared(*plans)
    if common.as_json:
        common.print_json(_as_data(found, plans))
    elif not found:
        common.out.print("the plans are equal")
    else:
        _show(found, plans, (str(before), str(after)), common)


def _as_data(found: PlanDiff, plans: tuple[Plan, Plan]) -> dict[str, Any]:
    from kvsearch.plan import PHASES

    totals = {phase: [_total(plan, phase) for plan in plans] for phase in PHASES["both"]}
    return {
        "equal": not found,
        "settings": [change._asdict() for change in found.settings],
        "budgets": [change._asdict() for change in found.budgets],
        "totals": {phase: values for phase, values in totals.items() if values != [None, None]},
    }


def _show(found: PlanDiff, plans: tuple[Plan, Plan], names: tuple[str, str], common: Common) -> None:
    from kvsearch.plan import PHASES

    show_facts(dict(zip("AB", names, strict=True)), common)
    settings = [change for change in found.settings if change.name != "total"]  # those are with the budgets
    if settings:
        common.out.print(_settings_table(settings))
    for phase in PHASES["both"]:
        layers = sorted({change.layer for change in found.budgets if change.phase == phase})
        if layers:
            common.out.print(_budget_table(phase, layers, plans))


def _settings_table(changes: Iterable[SettingChange]) -> Table:
    table = plain_table("settings", ["phase", "layers", "setting", "A", "B"], justify="left")
    for change in changes:
        values = (NOTHING if value is None else str(value) for value in (change.before, change.after))
        _add(table, change.phase or "", ranges(change.layers), change.name, *values)
    return table


def _budget_table(phase: Phase, layers: Sequence[int], plans: tuple[Plan, Plan]) -> Table:
    """Sums of the layers that differ, their heads' budgets where these are not the same in a layer, and totals."""
    rows = [[_budget(plan, phase, layer) for plan in plans] for layer in layers]
    by_head = any(len(set(budget)) > 1 for row in rows for budget in row if budget)
    table = plain_table(
        f"{phase} entries", ["layer", "A", "B", "B - A", *(("A by head", "B by head") if by_head else ())]
    )
    for layer, row in zip(layers, rows, strict=True):
        heads = (" ".join(map(str, budget)) if budget else NOTHING for budget in row)
        sums = _numbers([sum(budget) if budget else None for budget in row])
        _add(table, str(layer), *sums, *(heads if by_head else ()))
    _add(table, "total", *_numbers([_total(plan, phase) for plan in plans]), style="bold")
    return table


def _numbers(values: list[int | None]) -> list[str]:
    before, after = values
    change = NOTHING if before is None or after is None else f"{after - before:+d}"
    return [NOTHING if value is None else str(value) for value in values] + [change]


def _add(table: Table, *cells: str, style: str | None = None) -> None:
    from rich.text import Text

    table.add_row(*(Text(cell, overflow="fold") for cell in cells), style=style)


def _budget(plan: Plan, phase: Phase, layer: int) -> tuple[int, ...] | None:
    part = getattr(plan, phase)
    return None if part is None else part.budgets[layer]


def _total(plan: Plan, phase: Phase) -> int | None:
    part = getattr(plan, phase)
    return None if part is None else part.total


def ranges(numbers: Sequence[int]) -> str:
    """Write ascending whole numbers with runs drawn together: 0-3, 7, 9-10."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)

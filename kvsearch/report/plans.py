"""What `show` says of a plan and of what holds one: settings, budgets of each phase, differences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsearch.core.printed import pluralize
from kvsearch.plan import PHASES, Phase, Plan
from kvsearch.plan.arithmetic import compare_plans
from kvsearch.plan.origin import Guarantee
from kvsearch.plan.schema import NO_CARRY, STATIC
from kvsearch.plan.yaml import format_layer_ranges
from kvsearch.report.figures import Figure, ReportPart, make_layer_map
from kvsearch.report.table import Cell, Table

if TYPE_CHECKING:
    from kvsearch.runtime.store.cache_file import CacheHeader


def list_plan_parts(plan: Plan) -> Iterator[Mapping[str, Any] | Figure]:
    """Yield the settings of each phase and a map of its budgets, rows with their policy where there are several."""
    allocation = plan.allocation
    settings: dict[str, Any] = {
        "model": plan.model.short(), "method": plan.provenance.method, "scaling": plan.scaling, "length": plan.length,
        "floor": plan.floor,
    }  # fmt: skip
    if allocation.name != STATIC:
        meaning = "budgets say what the entries of a prompt are shared out from, not what a head keeps"
        settings["allocation"] = f"{allocation.name} {allocation.params}: {meaning}"
    if guarantee := describe_guarantee(plan):
        settings["guarantee"] = guarantee
    for phase, part in plan.phases.items():
        specs = [spec for spec in part.policies if spec is not None]
        names = [spec.name for spec in specs]
        described = [f"{spec.name} {spec.params}" for spec in specs]
        policies = sorted(set(described))
        phase_settings = {"phase": phase, "total": f"{part.total} entries", "policy": "; ".join(policies)}
        if carrying := [index for index, carry in enumerate(part.carries) if carry != NO_CARRY]:
            kinds = sorted(set(part.carries) - {NO_CARRY})
            phase_settings["carry"] = f"{', '.join(kinds)} in layers {', '.join(format_layer_ranges(carrying))}"
        alone = [index for index, layer in enumerate(part.layers) if layer is None]
        yield {**settings, **phase_settings, **({"layers left alone": alone} if alone else {})}
        if len(set(names)) < len(policies):
            names = described  # of one pattern there are several settings
        rows = [str(layer) for layer in part.planned_layers]
        if len(policies) > 1:
            rows = [f"{layer} {name}" for layer, name in zip(rows, names, strict=True)]
        budgets = np.array([part.budgets[layer] for layer in part.planned_layers])
        body = make_layer_map({"": budgets}, rows, "entries", total="sum")
        caption = f"{plan.model.name}: {plan.provenance.method}, {part.total:,} entries in all"
        if allocation.name != STATIC:
            caption += f"; {allocation.name} shares them out anew for every prompt"
        yield Figure(f"budgets-{phase}", f"{phase} entries by layer and head", caption, body, leads=True)


def describe_guarantee(plan: Plan) -> str:
    """Say what a plan was shown to lose at most, on which contexts and how surely; "" if it was not shown."""
    shown = plan.guarantee
    if shown is None:
        if plan.provenance.guarantee is None:
            return ""
        return "what the file says the plan loses at most is of another plan: this one was changed since"
    return f"it {describe_shown(shown)}"


def describe_shown(shown: Guarantee) -> str:
    """Say what something was shown to lose at most, without its name."""
    return (
        f"loses at most {100 * shown.loss:g} points to the full cache on the mean, with {100 * shown.confidence:g}% "
        f"confidence, as shown on {pluralize(shown.contexts, 'context')} of {', '.join(shown.tasks)} "
        f"({shown.protocol}), where it lost {100 * shown.mean_loss:.2f}"
    )


def plan_headline(plan: Plan) -> str:
    """Say how much a plan keeps."""
    length = f" of a prompt of {plan.length:,} tokens" if plan.length else ""
    return f"{plan.total:,} entries{length}"


def list_cache_parts(header: CacheHeader) -> Iterator[ReportPart]:
    """Yield what a compressed cache holds, in which numbers, and the plan that it was read under."""
    yield {
        "cache of": f"{pluralize(header.sequences, 'sequence')} of {pluralize(header.length, 'token')}",
        "numbers": header.dtype,
        "written by": f"kvsearch {header.kvsearch}, torch {header.torch}, transformers {header.transformers}",
    }
    yield from list_plan_parts(header.plan)


class DifferenceView:
    """The difference between two plans: settings, and budgets layer by layer; errors as `compare_plans`."""

    def __init__(self, plans: tuple[Plan, Plan], names: tuple[str, str]) -> None:
        self.plans = plans
        self.names = names
        self.settings, self.budgets = compare_plans(*plans)

    def as_json(self) -> dict[str, Any]:
        """Return everything, for programs."""
        totals = {phase: self._totals(phase) for phase in PHASES["both"]}
        return {
            "equal": not (self.settings or self.budgets),
            "settings": [change._asdict() for change in self.settings],
            "budgets": [change._asdict() for change in self.budgets],
            "totals": {phase: values for phase, values in totals.items() if values != [None, None]},
        }

    def parts(self) -> Iterator[ReportPart]:
        """Yield the names of the plans, a table of settings, and one of budgets for each phase."""
        if not (self.settings or self.budgets):
            yield "the plans are equal"
            return
        yield dict(zip("AB", self.names, strict=True))
        # totals are with the budgets
        settings = [change for change in self.settings if change.name != "total"]
        if settings:
            columns = ("phase", "layers", "setting", "A", "B")
            rows = []
            for change in settings:
                values = ("-" if value is None else str(value) for value in (change.before, change.after))
                rows.append([change.phase or "", ", ".join(format_layer_ranges(change.layers)), change.name, *values])
            yield Table.plain("settings", columns, rows, words=columns)
        for phase in PHASES["both"]:
            layers = sorted({change.layer for change in self.budgets if change.phase == phase})
            if layers:
                yield self._budgets(phase, layers)

    def _budgets(self, phase: Phase, layers: Sequence[int]) -> Table:
        """Return sums of the layers that differ, their heads' budgets where these differ in a layer, and totals."""
        parts = [plan.phases.get(phase) for plan in self.plans]
        budgets = {layer: [None if part is None else part.budgets[layer] for part in parts] for layer in layers}
        by_head = any(len(set(heads)) > 1 for pair in budgets.values() for heads in pair if heads)
        rows = []
        for layer, pair in budgets.items():
            heads = [" ".join(map(str, budget)) if budget else "-" for budget in pair]
            sums = _format_change([sum(budget) if budget else None for budget in pair])
            rows.append([Cell(str(layer)), *sums, *(map(Cell, heads) if by_head else ())])
        rows.append([Cell("total", best=True), *_format_change(self._totals(phase))])
        columns = ["layer", "A", "B", "B - A", *(("A by head", "B by head") if by_head else ())]
        return Table.plain(f"{phase} entries", columns, rows)

    def _totals(self, phase: Phase) -> list[int | None]:
        parts = [plan.phases.get(phase) for plan in self.plans]
        return [None if part is None else part.total for part in parts]


def _format_change(pair: list[int | None]) -> list[Cell]:
    """Return two numbers and by how much the second is larger."""
    before, after = pair
    change = None if before is None or after is None else after - before
    return [Cell.number(before, "d"), Cell.number(after, "d"), Cell.number(change, "+d")]

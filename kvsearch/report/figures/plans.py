"""Figures of a plan: budgets by layer and head, and which policy a layer has in each phase."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvsearch.plan import PHASES, Plan
from kvsearch.report.figures.data import CategoryMap, Figure, HeatMap, Panel


def plan_figures(plan: Plan) -> Iterator[Figure]:
    """Yield a map of the budgets of each phase and, where there are several policies, one of these."""
    phases = {phase: part for phase in PHASES["both"] if (part := getattr(plan, phase)) is not None}
    where = f"{plan.provenance.method}, {plan.length} tokens" if plan.length else plan.provenance.method
    for phase, part in phases.items():
        title = f"Budgets of the {phase} phase: entries per layer and kv head"
        values = np.array([part.budgets[layer] for layer in part.planned_layers])
        body = layer_map({"": values}, part.planned_layers, "entries")
        yield Figure(f"budgets-{phase}", title, f"{plan.model.name}: {where}, {part.total} entries in all", body)
    layers = range(plan.model.layers)
    names = [tuple(_policy(part.layers[layer]) for part in phases.values()) for layer in layers]
    if len({name for row in names for name in row if name}) > 1:
        body_of_names = CategoryMap(tuple(map(str, layers)), tuple(phases), "layer", "phase", tuple(names))
        yield Figure("policies", "Policy of each layer and phase", f"{plan.model.name}: {where}", body_of_names)


def layer_map(panels: dict[str, Any], layers: Sequence[int], value: str, form: str = "{:.0f}") -> HeatMap:
    """Return maps of layers and kv heads, of `panels` [L, Hkv] by their names."""
    (first, *_) = panels.values()
    heads = tuple(str(head) for head in range(first.shape[1]))
    made = tuple(Panel(name, cells(values)) for name, values in panels.items())
    return HeatMap(tuple(map(str, layers)), heads, "layer", "kv head", value, made, form)


def cells(values: Any) -> tuple[tuple[float | None, ...], ...]:
    """Return an array [R, C] as the cells of a panel, None for what is not a number."""
    rows = np.asarray(values, np.float64).tolist()
    return tuple(tuple(value if value == value else None for value in row) for row in rows)


def _policy(layer: Any) -> str:
    return "" if layer is None else str(layer.policy.name)

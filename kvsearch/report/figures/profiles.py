"""Figures of a profile beside its maps: what allocations lose, how near a ranking is to the oracle's, and signals."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvsearch.plan import Profile
from kvsearch.plan.profile_arrays import EVICTED_RATIO
from kvsearch.report.figures.data import Figure, HeatMap, LineChart, Series, cells, layer_map
from kvsearch.report.profile import RATIO, caption, eviction_losses
from kvsearch.report.signals import TITLES, shown_measures
from kvsearch.signals.table import SignalTable


def profile_figures(profile: Profile) -> Iterator[Figure]:
    """Yield every figure that the arrays of a profile allow."""
    metadata = profile.metadata
    arrays = profile.arrays
    if "mass" in arrays and EVICTED_RATIO in arrays:
        lost = {name: 100 * loss for name, loss in eviction_losses(profile, RATIO).items()}
        named = {f"{name}: {values.sum():.3g} in all": values for name, values in lost.items()}
        title = f"Importance evicted at ratio {RATIO:g}, % of the model's"
        body = layer_map(named, metadata.layers, "importance lost, %", "{:.2g}")
        yield Figure("eviction-loss", title, caption(profile), body)
    if "oracle_recall" in arrays:
        curves = {"oracle": arrays["oracle_recall"].mean((0, 1)), metadata.policy.name: arrays["recall"].mean((0, 1))}
        series = tuple(
            Series(name, _numbers(np.linspace(0, 100, len(row))), _numbers(100 * row)) for name, row in curves.items()
        )
        title = "Importance kept by the ranking and by the oracle's, mean over heads"
        yield Figure(
            "recall", title, caption(profile), LineChart("share of the context kept, %", "importance kept, %", series)
        )
    if metadata.signals is not None:
        yield from _signals(SignalTable(profile))


def _signals(table: SignalTable) -> Iterator[Figure]:
    """Yield maps of layers and patterns, a panel for each phase and budget, and entropies by layer."""
    axes = table.axes
    layers = table.profile.metadata.layers
    for measure in shown_measures(table):
        panels = {
            f"{phase}, {budget} entries": cells(table.measured(measure, phase, budget))
            for phase in axes.phases
            for budget in axes.budgets
        }
        body = HeatMap(tuple(map(str, layers)), table.patterns, "layer", "pattern", measure, panels, "{:.2g}")
        title = f"Signal {measure}: {TITLES[measure]}"
        yield Figure(f"signal-{measure}", title, caption(table.profile), body)


def _numbers(values: object) -> tuple[float, ...]:
    return tuple(np.asarray(values, np.float64).tolist())

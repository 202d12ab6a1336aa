"""Figures of a profile beside its maps: what allocations lose, how near a ranking is to the oracle's, and signals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kvsearch.core.arrays import Floats
from kvsearch.plan import Profile
from kvsearch.plan.profile_arrays import EVICTED_RATIO, KEPT
from kvsearch.report.figures.data import Axis, Figure, HeatMap, LineChart, Panel, Series, cells, layer_map
from kvsearch.report.profile import RATIO, caption, eviction_losses
from kvsearch.report.signals import TITLES, entropies, shown_measures
from kvsearch.signals.table import SignalTable

KEPT_AXIS = Axis("share of the context kept, %")


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
        yield from _recalls(profile)
    if metadata.signals is not None:
        yield from _signals(SignalTable(profile))
    if "recall" in arrays and "rankings" in metadata.provenance.settings:
        yield from _rankings(profile)


def _recalls(profile: Profile) -> Iterator[Figure]:
    """Yield recall by what is kept (LU-KV, Figure 1), and all policies side by side.

    Recall is a mean over heads; policies are compared by the importance of the whole model, which weighs heads.
    """
    arrays = profile.arrays
    metadata = profile.metadata
    curves = {"oracle": arrays["oracle_recall"].mean((0, 1)), metadata.policy.name: arrays["recall"].mean((0, 1))}
    yield _curves("recall", "Importance kept by the ranking and by the oracle's, mean over heads", profile, curves)
    if KEPT in arrays:
        totals = arrays[KEPT].astype(np.float64).sum((1, 2))  # [P, K + 1]
        kept = dict[str, Floats]()
        for spec, row in zip(metadata.measured_policies, totals, strict=True):
            name = f"{spec.name} {len(kept) + 1}" if spec.name in kept else spec.name
            kept[name] = row / max(float(row[-1]), np.finfo(np.float64).tiny)
        yield _curves("kept", "Importance of the whole model kept by each policy, even budgets", profile, kept)


def _curves(name: str, title: str, profile: Profile, curves: Mapping[str, Floats]) -> Figure:
    """Return shares of the importance over shares of the context, each in equal steps from 0 to 1."""
    series = tuple(
        Series(label, _numbers(np.linspace(0, 100, len(row))), _numbers(100 * row), muted=label == "oracle")
        for label, row in curves.items()
    )
    return Figure(name, title, caption(profile), LineChart(KEPT_AXIS, Axis("importance kept, %"), series))


def _signals(table: SignalTable) -> Iterator[Figure]:
    """Yield maps of layers and patterns, a panel for each phase and budget, and entropies by layer."""
    axes = table.axes
    layers = table.profile.metadata.layers
    for measure in shown_measures(table):
        panels = tuple(
            Panel(f"{phase}, {budget} entries", cells(table.measured(measure, phase, budget)))
            for phase in axes.phases
            for budget in axes.budgets
        )
        body = HeatMap(tuple(map(str, layers)), table.patterns, "layer", "pattern", measure, panels, "{:.2g}")
        title = f"Signal {measure}: {TITLES[measure]}"
        yield Figure(f"signal-{measure}", title, caption(table.profile), body)
    for name in entropies(table, axes.phases[0]):
        series = tuple(
            Series(phase, _numbers(layers), _numbers(entropies(table, phase)[name])) for phase in axes.phases
        )
        chart = LineChart(Axis("layer"), Axis("entropy of attention"), series)
        yield Figure(f"signal-{name}", f"Signal {name}: entropy of attention by layer", caption(table.profile), chart)


def _rankings(profile: Profile) -> Iterator[Figure]:
    """Yield what fitted and built-in rankings keep on contexts that the fit never saw, and where in the model."""
    settings: Mapping[str, Any] = profile.metadata.provenance.settings
    names = settings["rankings"]
    shares = _numbers(100 * np.array(settings["at"]))
    recall = profile.arrays["recall"].astype(np.float64)  # [P, B, L, H]
    tables = {"recall": (recall.mean((2, 3)), "importance kept, of what the oracle keeps")}
    if "text_loss" in profile.arrays:
        moved = profile.arrays["text_loss"].astype(np.float64).mean(0)
        tables["moved"] = (moved, "how far replies move (total variation)")
    for stem, (values, label) in tables.items():
        series = tuple(Series(name, shares, _numbers(row)) for name, row in zip(names, values, strict=True))
        where = f"{caption(profile)}; held-out contexts"
        yield Figure(f"rankings-{stem}", f"Rankings: {label}", where, LineChart(KEPT_AXIS, Axis(label), series))
    layers = tuple(map(str, profile.metadata.layers))
    panels = tuple(
        Panel(f"{share:.0%} kept", cells(recall[:, at].mean(-1).T)) for at, share in enumerate(settings["at"])
    )
    body = HeatMap(layers, tuple(names), "layer", "ranking", "recall", panels, "{:.2f}")
    title = "Importance kept, of what the oracle keeps, by layer"
    yield Figure("rankings-by-layer", title, caption(profile), body)


def _numbers(values: object) -> tuple[float, ...]:
    return tuple(np.asarray(values, np.float64).tolist())

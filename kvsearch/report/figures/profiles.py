"""Figures of a profile: local ratios, how near a ranking is to the oracle's, what allocations lose, and signals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvsearch.arrays import Floats
from kvsearch.calibration.analysis import lost_mass, ranking_gap
from kvsearch.plan import Profile
from kvsearch.plan.profile import EVICTED_RATIO, KEPT
from kvsearch.report.figures.data import Axis, Figure, HeatMap, Lines, Panel, Series
from kvsearch.report.figures.plans import cells, layer_map
from kvsearch.report.signals import PREFERRED, TITLES
from kvsearch.signals.table import ENTROPIES, SignalTable

RATIOS = (0.5, 0.8, 0.9)  # at which local ratios are drawn
KEPT_AXIS = "share of the context kept, %"


def profile_figures(profile: Profile, ratio: float = 0.8) -> Iterator[Figure]:
    """Yield every figure that the arrays of a profile allow; losses are at the global eviction `ratio`."""
    metadata, arrays = profile.metadata, profile.arrays
    told = f"{metadata.model.name}: {metadata.method}, {metadata.questions} questions of {metadata.length} tokens"
    layers = metadata.layers
    if EVICTED_RATIO in arrays:
        tables = {f"global ratio {at:g}": profile.local_ratios(at) for at in RATIOS}
        yield Figure(
            "local-ratios", "Local eviction ratios", told, layer_map(tables, layers, "eviction ratio", "{:.2f}")
        )
    if "mass" in arrays and EVICTED_RATIO in arrays:
        table = profile.local_ratios(ratio)
        kept = {"even budgets": np.full(table.shape, 1 - ratio), metadata.method: 1 - table}
        lost = {name: 100 * lost_mass(profile, share) for name, share in kept.items()}
        named = {f"{name}: {values.sum():.3g} in all": values for name, values in lost.items()}
        title = f"Importance evicted at ratio {ratio:g}, % of the model's"
        yield Figure("eviction-loss", title, told, layer_map(named, layers, "importance lost, %", "{:.2g}"))
    if "oracle_recall" in arrays:
        yield from _recalls(profile, told)
    if metadata.signals is not None:
        yield from _signals(SignalTable(profile), told)
    if "recall" in arrays and "rankings" in metadata.provenance.settings:
        yield from _rankings(profile, told)


def _recalls(profile: Profile, told: str) -> Iterator[Figure]:
    """Yield recall by what is kept (LU-KV, Figure 1), its gap to the oracle's by head, and all policies side by side.

    Recall is a mean over heads; policies are compared by the importance of the whole model, which weighs heads.
    """
    arrays, metadata = profile.arrays, profile.metadata
    curves = {"oracle": arrays["oracle_recall"].mean((0, 1)), metadata.policy.name: arrays["recall"].mean((0, 1))}
    yield _curves("recall", "Importance kept by the ranking and by the oracle's, mean over heads", told, curves)
    if KEPT in arrays:
        kept, found = arrays[KEPT].astype(np.float64).sum((1, 2)), dict[str, Floats]()  # [P, K + 1]
        for spec, row in zip(metadata.measured_policies, kept, strict=True):
            found[_apart(spec.name, found)] = row / max(float(row[-1]), np.finfo(np.float64).tiny)
        yield _curves("kept", "Importance of the whole model kept by each policy, even budgets", told, found)
    gap = layer_map({"": 100 * ranking_gap(profile)}, metadata.layers, "recall lost, points", "{:.1f}")
    yield Figure("ranking-gap", "Recall that the ranking loses to the oracle's, mean over budgets", told, gap)


def _curves(name: str, title: str, told: str, curves: Mapping[str, Floats]) -> Figure:
    """Return shares of the importance over shares of the context, each in equal steps from 0 to 1."""
    series = [
        Series(one, tuple(np.linspace(0, 100, len(row)).tolist()), tuple((100 * row).tolist()), muted=one == "oracle")
        for one, row in curves.items()
    ]
    return Figure(name, title, told, Lines(Axis(KEPT_AXIS), Axis("importance kept, %"), tuple(series)))


def _signals(table: SignalTable, told: str) -> Iterator[Figure]:
    """Yield maps of layers and patterns, a panel for each phase and budget, and entropies by layer."""
    axes, layers = table.axes, tuple(map(str, table.profile.metadata.layers))
    for measure in [name for name in PREFERRED if name in table.routes] or table.routes:
        panels = tuple(
            Panel(f"{phase}, {budget} entries", cells(table.measured(measure, phase, budget)))
            for phase in axes.phases
            for budget in axes.budgets
        )
        body = HeatMap(layers, tuple(table.patterns), "layer", "pattern", measure, panels, "{:.2g}")
        yield Figure(f"signal-{measure}", f"Signal {measure}: {TITLES[measure]}", told, body)
    for name in [one for one in table.sensitivities if one in ENTROPIES]:
        rows = [(phase, table.sensitivity(name, phase, axes.budgets[0], ())) for phase in axes.phases]
        series = tuple(Series(phase, _numbers(layers), tuple(found.tolist())) for phase, found in rows)
        body_of_lines = Lines(Axis("layer"), Axis("entropy of attention"), series)
        yield Figure(f"signal-{name}", f"Signal {name}: entropy of attention by layer", told, body_of_lines)


def _rankings(profile: Profile, told: str) -> Iterator[Figure]:
    """Yield what fitted and built-in rankings keep on contexts that the fit never saw, and where in the model."""
    settings: dict[str, Any] = profile.metadata.provenance.settings
    recall = profile.arrays["recall"].astype(np.float64)  # [P, B, L, H]
    at, names = tuple(100 * share for share in settings["at"]), settings["rankings"]
    axis, found = Axis(KEPT_AXIS), {"recall": (recall.mean((2, 3)), "importance kept, of what the oracle keeps")}
    if "loss" in profile.arrays:
        found["moved"] = (profile.arrays["loss"].astype(np.float64), "how far replies move (total variation)")
    for stem, (values, label) in found.items():
        series = tuple(Series(name, at, tuple(row.tolist())) for name, row in zip(names, values, strict=True))
        title = f"Rankings: {label}"
        yield Figure(f"rankings-{stem}", title, f"{told}; held-out contexts", Lines(axis, Axis(label), series))
    layers = tuple(map(str, profile.metadata.layers))
    panels = tuple(Panel(f"{share:.0%} kept", cells(recall[:, n].mean(-1).T)) for n, share in enumerate(settings["at"]))
    body = HeatMap(layers, tuple(names), "layer", "ranking", "recall", panels, "{:.2f}")
    yield Figure("rankings-by-layer", "Importance kept, of what the oracle keeps, by layer", told, body)


def _apart(name: str, taken: Mapping[str, object]) -> str:
    """Return a name that is not taken, with a number where it is."""
    count = 2
    while name in taken:
        name, count = f"{name.partition(' ')[0]} {count}", count + 1
    return name


def _numbers(names: Sequence[str]) -> tuple[float, ...]:
    return tuple(map(float, names))

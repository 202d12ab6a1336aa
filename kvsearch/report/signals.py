"""What `show` says of a PolyKV profile: the signals of every layer and pattern, in each phase and at each budget."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np

from kvsearch.calibration.analysis import signal_stability
from kvsearch.core.arrays import Floats
from kvsearch.plan import Phase
from kvsearch.report.table import Cell, Table
from kvsearch.signals.table import ENTROPY, Explosion, SignalTable, is_constant

TITLES = {
    "cosine": "cosine of attention outputs with those of the full cache",
    "ppl": "what perplexity gains",
    "error": "relative distance of attention outputs from those of the full cache",
    "nll": "nats per token that are lost",
}
PREFERRED = ("cosine", "ppl")  # the paper's; the others are shown where none of them was measured
MOST_DECIMALS = 5
NOISE = 9  # decimals from which on differences are rounding
BEST = "*"
FULL = "full"


def signal_parts(table: SignalTable) -> Iterator[Mapping[str, Any] | str | Table]:
    """Yield the means of all signals over the samples; a star is at the best pattern of a layer."""
    axes = table.axes
    measures = shown_measures(table)
    has_entropy = ENTROPY in table.sensitivities
    facts = {"signals": ", ".join([*table.routes, ENTROPY] if has_entropy else table.routes)}
    if "ppl" in table.routes:
        facts["perplexity"] = f"{table.perplexity:.6g} under the full cache"
    if stability := signal_stability(table.profile):
        correlations = ", ".join(f"{name} {value:.2f}" for name, value in stability.items())
        facts["texts"] = f"rank correlation of each with the others: {correlations}"
    yield facts
    layers = [str(layer) for layer in table.profile.metadata.layers]
    for phase in axes.phases:
        for budget in axes.budgets:
            for measure in measures:
                cells = _cells(table, measure, phase, budget)
                rows = [[layer, *row] for layer, row in zip(layers, cells, strict=True)]
                title = f"{phase} at {budget} entries per kv head: {TITLES[measure]}"
                yield Table.plain(title, ["layer", *table.patterns], rows, tight=True)
        if has_entropy:
            values = zip(layers, entropy_of(table, phase)[:, None], strict=True)
            yield Table.numbers(f"{phase}: entropy of attention", ["layer", ENTROPY], values, ".4f")
    if measures:
        yield f"{BEST} the best pattern of a layer"
    worst: dict[tuple[str, str], Explosion] = {}  # of a pattern in a phase, the budget at which it is worst
    found = (table.explosions(phase, budget) for phase in axes.phases for budget in axes.budgets)
    for explosion in chain.from_iterable(found):
        place = (explosion.pattern, explosion.phase)
        worst[place] = max(worst.get(place, explosion), explosion, key=lambda known: known.gain)
    yield from (explosion.words for explosion in worst.values())


def shown_measures(table: SignalTable) -> list[str]:
    """Return the paper's signals of patterns, or all others where none of them was measured."""
    return [name for name in PREFERRED if name in table.routes] or list(table.routes)


def entropy_of(table: SignalTable, phase: Phase) -> Floats:
    """Return attention entropy, [L]; it does not depend on the budget."""
    return table.sensitivity(ENTROPY, phase, table.axes.budgets[0], ())


def _cells(table: SignalTable, measure: str, phase: Phase, budget: int) -> list[list[Cell]]:
    """Return the cells of every layer, pattern by pattern, the best one marked, the full cache aside."""
    values = table.measured(measure, phase, budget)
    rivals = [index for index, name in enumerate(table.patterns) if name != FULL]
    preferences = table.preference(measure, phase, budget)[:, rivals]
    form = "+.3g"
    if measure not in ("ppl", "nll"):  # the largest harm has four digits, as far as the page has room for them
        largest = float((1 - values if measure == "cosine" else values).max())
        decimals = 3 - math.floor(math.log10(largest)) if largest > 0 else MOST_DECIMALS
        form = f".{min(max(decimals, 0), MOST_DECIMALS)}f"
    rows = []
    for row, wanted in zip(np.round(values, NOISE), preferences, strict=True):
        best = None if is_constant(wanted) else rivals[int(wanted.argmax())]
        cells = (Cell.number(float(value), form) for value in row)
        rows.append([Cell(f"{BEST}{cell.text}", best=True, value=cell.value) if at == best else cell
                     for at, cell in enumerate(cells)])  # fmt: skip
    return rows

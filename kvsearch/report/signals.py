"""What `show` says of a PolyKV profile: the signals of every layer and pattern, in each phase and at each budget."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsearch.calibration.analysis import signal_stability
from kvsearch.plan import Phase
from kvsearch.report.screen import facts, screen_table
from kvsearch.signals.table import ENTROPIES, Explosion, SignalTable, is_constant

if TYPE_CHECKING:
    from rich.console import RenderableType

TITLES = {
    "cosine": "cosine of attention outputs with those of the full cache",
    "ppl": "what perplexity gains",
    "error": "relative distance of attention outputs from those of the full cache",
    "nll": "nats per token that are lost",
}
PREFERRED = ("cosine", "ppl")  # the paper's; the others are shown where none of them was measured
MOST_DECIMALS = 5
NOISE = 9  # decimals from which on differences are rounding
BEST, FULL = "*", "full"


@dataclass(frozen=True, eq=False)
class SignalsView:
    """The means of all signals over the samples; a star is at the best pattern of a layer."""

    table: SignalTable

    def as_json(self) -> dict[str, Any]:
        """See `View.as_json`."""
        table, names, axes = self.table, self.table.patterns, self.table.axes
        means: list[dict[str, Any]] = []
        for phase in axes.phases:
            for budget in axes.budgets:
                best = {name: self._best(name, phase, budget) for name in table.routes}
                means.append(
                    {
                        "phase": phase, "budget": budget,
                        "signals": {name: table.measured(name, phase, budget).tolist() for name in table.routes},
                        "best": {name: [None if at is None else names[at] for at in best[name]] for name in best},
                    }
                )  # fmt: skip
        entropies = {phase: self._entropy(phase) for phase in axes.phases}
        return {
            "metadata": table.profile.metadata.model_dump(mode="json"), "perplexity": self._perplexity,
            "patterns": names, "means": means, "stability": signal_stability(table.profile),
            "explosions": [one._asdict() for one in self._explosions()],
            "entropies": {phase: {name: at.tolist() for name, at in one.items()} for phase, one in entropies.items()},
        }  # fmt: skip

    def parts(self) -> Iterator[RenderableType]:
        """See `View.parts`."""
        table, metadata, axes = self.table, self.table.profile.metadata, self.table.axes
        stated = {
            "model": metadata.model.short(), "method": metadata.method, "questions": metadata.questions,
            "policy": f"{metadata.policy.name} {metadata.policy.params}, where no signal chooses",
            "length": f"{metadata.length} tokens", "data": metadata.provenance.settings.get("data"),
            "protocol": axes.protocol, "signals": ", ".join([*table.routes, *self._entropy(axes.phases[0])]),
        }  # fmt: skip
        if self._perplexity is not None:
            stated["perplexity"] = f"{self._perplexity:.6g} under the full cache"
        if stability := signal_stability(table.profile):
            told = ", ".join(f"{name} {value:.2f}" for name, value in stability.items())
            stated["texts"] = f"rank correlation of each with the others: {told}"
        yield from facts(stated)
        measures = [name for name in PREFERRED if name in table.routes] or list(table.routes)
        layers = [str(layer) for layer in metadata.layers]
        for phase in axes.phases:
            entropies = {name: [f"{value:.4f}" for value in found] for name, found in self._entropy(phase).items()}
            for budget in axes.budgets if measures else ():
                for measure in measures:
                    yield f"{phase} at {budget} entries per kv head: {TITLES[measure]}"
                    columns = self._by_pattern(measure, phase, budget)
                    by_pattern = screen_table("", ["layer", *columns], padding=(0, 0, 0, 1))  # nine fit on 120 columns
                    for cells in zip(layers, *columns.values(), strict=True):
                        by_pattern.add_row(*cells)
                    yield by_pattern
            if entropies:
                yield f"{phase}: entropy of attention"
                by_layer = screen_table("", ["layer", *entropies])
                for cells in zip(layers, *entropies.values(), strict=True):
                    by_layer.add_row(*cells)
                yield by_layer
        if measures:
            yield f"{BEST} the best pattern of a layer"
        worst: dict[tuple[str, str], Explosion] = {}  # of a pattern in a phase, the budget at which it is worst
        for one in self._explosions():
            place = one.pattern, one.phase
            worst[place] = max(worst.get(place, one), one, key=lambda found: found.gain)
        yield from (one.words for one in worst.values())

    @property
    def _perplexity(self) -> float | None:
        """Perplexity under the full cache, where losses were measured."""
        return self.table.perplexity if "ppl" in self.table.routes else None

    def _entropy(self, phase: Phase) -> dict[str, np.ndarray]:
        """Return every reading of attention entropy that was measured, [L]; it does not depend on the budget."""
        names = [name for name in self.table.sensitivities if name in ENTROPIES]
        return {name: self.table.sensitivity(name, phase, self.table.axes.budgets[0], ()) for name in names}

    def _explosions(self) -> list[Explosion]:
        """Return the patterns that explode, in every phase and at every budget."""
        axes = self.table.axes
        return [one for phase in axes.phases for at in axes.budgets for one in self.table.explosions(phase, at)]

    def _best(self, measure: str, phase: Phase, budget: int) -> list[int | None]:
        """Return the pattern that each layer prefers, the full cache aside; None where it does not matter."""
        rivals = [index for index, name in enumerate(self.table.patterns) if name != FULL]
        wanted = self.table.preference(measure, phase, budget)[:, rivals]
        return [None if is_constant(row) else rivals[int(row.argmax())] for row in wanted]

    def _by_pattern(self, measure: str, phase: Phase, budget: int) -> dict[str, list[RenderableType]]:
        """Return the cells of every pattern, layer by layer, the best ones marked."""
        from kvsearch.report.fitting import words

        values, best = self.table.measured(measure, phase, budget), self._best(measure, phase, budget)
        form = "{:+.3g}"
        if measure not in ("ppl", "nll"):  # the largest harm has four digits, as far as the page has room for them
            largest = float((1 - values if measure == "cosine" else values).max())
            decimals = 3 - math.floor(math.log10(largest)) if largest > 0 else MOST_DECIMALS
            form = f"{{:.{min(max(decimals, 0), MOST_DECIMALS)}f}}"
        columns: dict[str, list[RenderableType]] = {}
        for at, name in enumerate(self.table.patterns):
            cells = [form.format(value) for value in np.round(values[:, at], NOISE)]
            marked: list[RenderableType] = [
                words(f"{BEST}{one}", "bold") if at == best[row] else one for row, one in enumerate(cells)
            ]
            columns[name.replace("_", "_\n")] = marked
        return columns

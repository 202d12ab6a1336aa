"""Signals of a PolyKV calibration by name: preferences of layers for patterns, and sensitivities.

A route says which pattern a layer prefers, a sensitivity how much of the budget it should get. Both are read at the
measured budget that is nearest to the one asked for, as ratios go.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsearch.core.arrays import Floats
from kvsearch.core.errors import UsageError
from kvsearch.core.naming import require_known
from kvsearch.plan import Phase, PolicySpec, Profile
from kvsearch.plan.profile_arrays import FULL_NLL, MEAN_ENTROPY, TOKENS, SignalAxes

# the array that each measure is computed from
MEASURES = {"cosine": "cosine", "error": "relative_error", "ppl": "nll", "nll": "nll"}
ROUTES = tuple(MEASURES)
ENTROPY = "entropy"
AGGREGATIONS = {"": "the worst pattern", "-chosen": "the pattern that is used", "-mean": "the mean over the patterns"}
SENSITIVITIES = (ENTROPY, *(measure + over for measure in MEASURES for over in AGGREGATIONS))
CONSTANT_SPREAD = 1e-9  # relative spread below which a signal says nothing
EXPLOSION_FACTOR, MIN_EXPLOSION_SHARE = (
    10,
    0.05,
)  # a pattern explodes that is so often as bad, and moves so much of the budget


class Explosion(NamedTuple):
    """A pattern whose loss in one layer alone decides the budgets by the worst pattern (PolyKV, Eq. 5)."""

    pattern: str
    phase: Phase
    budget: int
    layer: int  # of the model, the worst one
    gain: float  # of perplexity under the pattern
    others: float  # the median of what the others change, up or down
    share: float  # of what is shared out, that Eq. 5 gives the layer for the pattern
    without: float  # the same without it and others that explode there

    @property
    def words(self) -> str:
        """Description of the explosion."""
        return (
            f"{self.pattern} explodes in {self.phase} layer {self.layer} at {self.budget} entries per kv head: "
            f"perplexity gains {self.gain:.3g}, under the other patterns {self.others:.3g} (median), so that by ppl "
            f"the layer gets {self.share:.0%} of the budget, {self.without:.0%} without it: share out by ppl-chosen"
        )


@dataclass(frozen=True, eq=False)
class SignalTable:
    """Signals by name, means over the samples of a profile of method "polykv".

    Raises:
        UsageError: the profile is of another method.
    """

    profile: Profile

    def __post_init__(self) -> None:
        if self.profile.metadata.signals is None:
            raise UsageError(
                f"a profile of {self.profile.metadata.method} has no signals: give the directory of one by "
                "`kvsearch calibrate MODEL --method polykv`"
            )

    @property
    def axes(self) -> SignalAxes:
        """Patterns, phases and measured budgets."""
        axes = self.profile.metadata.signals
        assert axes is not None
        return axes

    @property
    def patterns(self) -> tuple[str, ...]:
        """Names of the patterns, in the order of the last dimension."""
        return tuple(pattern.name for pattern in self.axes.patterns)

    @property
    def evicting(self) -> tuple[PolicySpec, ...]:
        """Patterns that a layer may take: all but the full cache."""
        return tuple(pattern for pattern in self.axes.patterns if pattern.name != "full")

    @property
    def routes(self) -> tuple[str, ...]:
        """The routes that were measured."""
        return tuple(name for name in ROUTES if MEASURES[name] in self.profile.arrays)

    @property
    def sensitivities(self) -> tuple[str, ...]:
        """The sensitivities that were measured."""
        signals = [ENTROPY] if MEAN_ENTROPY in self.profile.arrays else []
        return (*signals, *(measure + over for measure in self.routes for over in AGGREGATIONS))

    @property
    def perplexity(self) -> float:
        """Perplexity under the full cache: exp of the mean loss over all tokens of all samples."""
        return math.exp(float(self._weights @ self._array(FULL_NLL, "ppl")))

    def find_nearest(self, budget: float) -> int:
        """Return the measured budget nearest to `budget` entries per kv head, by ratio; the smaller one of two."""
        return min(self.axes.budgets, key=lambda measured: abs(math.log(measured / budget)))

    def measured(self, measure: str, phase: Phase, budget: float) -> Floats:
        """Return a measure of every layer and pattern, [L, R]: cosine, error, ppl or nll (both increases).

        cosine: of the attention output with that of the full cache (PolyKV, arXiv 2606.15157, Eq. 2); error: relative
        L2 distance of the two; nll: nats per token that the model loses; ppl: what perplexity gains (Eq. 3).

        Raises:
            UsageError: there is no such measure, or it or the phase was not measured.
        """
        require_known("signal", measure, ROUTES)
        values = self._array(MEASURES[measure], measure)
        chosen = values[:, self.axes.budgets.index(self.find_nearest(budget)), self.phase_index(phase)]
        if MEASURES[measure] != "nll":
            return _floats(chosen.mean(axis=0))
        # Perplexity is of all tokens together, so samples weigh as many as they have.
        mean = np.tensordot(self._weights, chosen, 1)
        full = self._weights @ self._array(FULL_NLL, measure)
        return _floats(np.exp(mean) - np.exp(full) if measure == "ppl" else mean - full)

    def read_preference(self, route: str, phase: Phase, budget: float) -> Floats:
        """Return the preference of layers for patterns, [L, R], higher is better; UsageError as `measured`."""
        measured = self.measured(route, phase, budget)
        return measured if route == "cosine" else -measured

    def read_sensitivity(self, name: str, phase: Phase, budget: float, chosen: Sequence[int]) -> Floats:
        """Return the sensitivity of each layer, [L], in the unit of its measure: more sensitive layers get more budget.

        "entropy": entropy of the mean attention row in nats (Eq. 4). Others are a measure (1 - cosine for "cosine") of
        the worst pattern ("ppl" is Eq. 5), with "-chosen" of the patterns `chosen` [L] (indices), with "-mean" of all
        patterns.

        Raises:
            UsageError: there is no such signal, or it or the phase was not measured.
        """
        require_known("budget signal", name, SENSITIVITIES)
        if name == ENTROPY:
            return _floats(self._array(MEAN_ENTROPY, name)[self.phase_index(phase)])
        measure, _, over = name.partition("-")
        harm = self.measured(measure, phase, budget)
        harm = 1 - harm if measure == "cosine" else harm
        if over == "chosen":
            return _floats(harm[np.arange(len(harm)), np.asarray(chosen, dtype=int)])
        return _floats(harm.mean(axis=1) if over == "mean" else harm.max(axis=1))

    def find_explosions(self, phase: Phase, budget: float) -> list[Explosion]:
        """Find patterns that distort Eq. 5, each in its worst layer; none if losses were not measured.

        A pattern explodes in a layer if perplexity gains more than `EXPLOSION_FACTOR` as much as the others change it,
        up or down (their median), and if for it the layer gets `MIN_EXPLOSION_SHARE` of the budget or more above what
        the worst pattern brings that does not explode there. So two that explode in one layer do not hide each other.
        """
        if "ppl" not in self.routes or len(self.patterns) < 2:
            return []
        gains = self.measured("ppl", phase, budget)
        harm = np.maximum(gains, 0.0)
        columns = range(len(self.patterns))
        # For every pattern the median of all others: two that explode do not hide each other.
        usual = np.stack([np.median(np.delete(np.abs(gains), at, axis=1), axis=1) for at in columns], axis=1)
        odd = harm > EXPLOSION_FACTOR * usual
        worst = harm.max(1, keepdims=True)
        elsewhere = worst.sum() - worst
        tame = np.where(odd, 0.0, harm).max(1, keepdims=True)
        smallest = np.finfo(np.float64).tiny
        shares, without = (gain / np.maximum(elsewhere + gain, smallest) for gain in (harm, tame))
        moved = np.where(odd, shares - without, 0.0)
        explosions = []
        for at, name in enumerate(self.patterns):
            row = int(moved[:, at].argmax())
            if moved[row, at] >= MIN_EXPLOSION_SHARE:
                layer = self.profile.metadata.layers[row]
                numbers = harm[row, at], usual[row, at], shares[row, at], without[row, 0]
                explosions.append(Explosion(name, phase, self.find_nearest(budget), layer, *map(float, numbers)))
        return explosions

    def _array(self, name: str, signal: str) -> Floats:
        array = self.profile.arrays.get(name)
        if array is None:
            raise UsageError(
                f"this profile has no {signal!r} signal (it has {', '.join(self.sensitivities)}): calibrate with it"
            )
        return _floats(array)

    def phase_index(self, phase: Phase) -> int:
        """Return the index of a measured phase; UsageError if it was not measured."""
        if phase not in self.axes.phases:
            known = ", ".join(self.axes.phases)
            raise UsageError(f"signals of the {phase} phase were not measured (only {known}): calibrate with it")
        return self.axes.phases.index(phase)

    @cached_property
    def _weights(self) -> Floats:
        """Weight of each sample by its tokens with a loss, [M]."""
        tokens: NDArray[Any] = self.profile.arrays[TOKENS].astype(np.float64)
        return _floats(tokens / tokens.sum())


def _floats(values: NDArray[Any]) -> Floats:
    return np.asarray(values, dtype=np.float64)


def is_constant(signal: Floats) -> bool:
    """Tell whether a signal is the same for all layers, up to rounding."""
    return bool(np.ptp(signal) <= CONSTANT_SPREAD * max(1.0, float(np.abs(signal).max())))

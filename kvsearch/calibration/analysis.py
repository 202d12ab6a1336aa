"""Analysis of a profile: stability of its table, quality of the ranking, and loss of an allocation."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsearch.calibration.options import STABILITY_RATIOS
from kvsearch.core.arrays import Floats
from kvsearch.core.errors import UsageError
from kvsearch.core.parsing import format_value
from kvsearch.plan import Profile
from kvsearch.tasks.splits import group_by_text

STABLE_CORRELATION = 0.8
DOUBTFUL_CORRELATION = 0.5


@dataclass(frozen=True)
class Stability:
    """Spearman rank correlation of the local ratios (Figure 2b), all heads of all layers together.

    `questions`: mean over pairs of questions of one context; `texts`: mean over pairs of contexts, each averaged over
    its questions; `halves`: between the means of the questions about every other text and about the others. NaN where
    there are no pairs.
    """

    ratio: float
    questions: float
    texts: float
    halves: float

    @property
    def verdict(self) -> str:
        """Verdict on a static table, in words."""
        if np.isnan(self.halves):
            return "unknown: one text cannot tell"
        if self.halves >= STABLE_CORRELATION:
            return "stable: a static table is justified"
        return (
            "doubtful: use more texts"
            if self.halves >= DOUBTFUL_CORRELATION
            else "unstable: do not trust a static table"
        )


def measure_stability(profile: Profile, ratio: float) -> Stability:
    """Measure stability at the stored ratio nearest to `ratio` (0.1 to 0.9)."""
    nearest = int(np.argmin([abs(stored - ratio) for stored in STABILITY_RATIOS]))
    rows = _array(profile, "question_ratio")[:, nearest].reshape(profile.metadata.questions, -1).astype(np.float64)
    context = _array(profile, "question_context")
    texts = group_by_text(context.tolist())
    means = [rows[text].mean(0) for text in texts]
    pairs = [(a, b) for a, b in combinations(range(len(rows)), 2) if context[a] == context[b]]
    even_half, odd_half = (sorted(chain.from_iterable(half)) for half in (texts[::2], texts[1::2]))
    return Stability(
        STABILITY_RATIOS[nearest],
        _mean([correlate_ranks(rows[a], rows[b]) for a, b in pairs]),
        _mean([correlate_ranks(a, b) for a, b in combinations(means, 2)]),
        correlate_ranks(rows[even_half].mean(0), rows[odd_half].mean(0)) if odd_half else float("nan"),
    )


def correlate_ranks(a: Floats, b: Floats) -> float:
    """Compute Spearman's rank correlation, with ties at their mean rank; 1 for two constant rows, 0 for one."""
    from scipy.stats import rankdata

    x = rankdata(a) - (len(a) + 1) / 2
    y = rankdata(b) - (len(b) + 1) / 2
    spread = float(np.sqrt((x**2).sum() * (y**2).sum()))
    if spread == 0:
        return float(not x.any() and not y.any())
    return float((x * y).sum() / spread)


def compute_lost_mass(profile: Profile, kept_share: Floats) -> Floats:
    """Compute the importance each head loses (Figures 3, 4, 6) when it keeps `kept_share` [L, Hkv], [L, Hkv].

    In the profile's comparable units, as a share of the importance of the whole model.
    """
    mass = _array(profile, "mass").astype(np.float64)
    position = np.clip(kept_share, 0, 1) * (mass.shape[-1] - 1)
    below = np.floor(position).astype(int)
    above = np.minimum(below + 1, mass.shape[-1] - 1)
    low = np.take_along_axis(mass, below[..., None], -1)[..., 0]
    high = np.take_along_axis(mass, above[..., None], -1)[..., 0]
    kept = low + (position - below) * (high - low)
    lost: Floats = mass[..., -1] - kept
    return lost / max(float(mass[..., -1].sum()), np.finfo(np.float64).tiny)


def compute_ranking_gap(profile: Profile) -> Floats:
    """Compute the recall gap of the policy's ranking to the oracle, mean over all budgets (Figure 1), [L, Hkv]."""
    gap: Floats = (_array(profile, "oracle_recall").astype(np.float64) - _array(profile, "recall")).mean(-1)
    return gap


def _array(profile: Profile, name: str) -> NDArray[Any]:
    if name not in profile.arrays:
        raise UsageError(f"this {format_value(profile.metadata.method)} profile has no {name!r}: it was not measured")
    return profile.arrays[name]


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else float("nan")

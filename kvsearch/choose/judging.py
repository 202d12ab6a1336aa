"""The rule by which a signal is useful, useless or harmful: what its strategy gains on its inverse and on controls."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import stdev
from typing import Final, NamedTuple

from kvsearch.choose.verdicts import Gains, Judged, Kind, SignalUse, Verdict, side
from kvsearch.evaluation.plan_comparison import PlanComparison

LEAST_CONTEXTS: Final = 6  # of fewer, all agree by chance more often than one time in twenty (2 * 0.5**6 = 0.031)
_UNIFORM: Final[dict[Kind, str]] = {"route": "one pattern in all layers", "budgets": "equal budgets"}
_CHANCE: Final = "more than strategies differ by chance"
_RANDOM: Final[dict[Kind, str]] = {"route": "random patterns", "budgets": "random permutations"}


class Compared(NamedTuple):
    """The names, in a comparison, of the strategies that a signal is judged by."""

    forward: str
    inverse: str
    uniform: str
    random: tuple[str, ...]


def judge(kind: Kind, gains: Gains, contexts: int, constant: bool = False) -> tuple[Verdict, str]:
    """Return the verdict on a signal, and the reason for it, from what its forward strategy gains on its controls.

    "Above" and "below" mean that the 95% interval of the difference is; "by more than chance" that it is also more than
    strategies differ by chance (`Gains.reach`). The first that applies:

    1. useless: the signal is `constant`, so that forward and inverse are the same strategy;
    2. useless: there are fewer than `LEAST_CONTEXTS` different contexts, which cannot tell;
    3. harmful: forward is below the uniform control, so not using the signal is better on this model, be it by the
       signal's fault or by bad luck; or it is below the random controls by more than chance;
    4. useful: forward is above its inverse, and above the uniform or the random controls by more than chance;
    5. useless: all else.

    Of signals that say nothing about one in twenty is called useful. Harmful are those whose strategy is a bad one.
    """
    (uniform, random), inverse = gains.beyond, side(gains.inverse)
    uniform = min(uniform, side(gains.uniform))
    names = {_UNIFORM[kind]: uniform, _RANDOM[kind]: random}
    if constant:
        return "useless", "constant: forward and inverse are the same strategy"
    if contexts < LEAST_CONTEXTS:
        return "useless", f"too few contexts to tell: {contexts} different ones, at least {LEAST_CONTEXTS} are needed"
    if min(uniform, random) < 0:
        return "harmful", f"forward is below {' and '.join(name for name, side in names.items() if side < 0)}"
    if inverse > 0 and max(uniform, random) > 0:
        above = " and ".join(name for name, side in names.items() if side > 0)
        level = [f"; {name} could be as good by chance" for name, side in names.items() if side == 0]
        return "useful", f"forward is above its inverse, and above {above} by {_CHANCE}{''.join(level)}"
    return "useless", _useless(kind, gains)


def prediction_reach(controls: Sequence[float]) -> float:
    """Return how far from the mean of some random draws one more may be (95%): t s sqrt(1 + 1/n); n is 2 or more."""
    from scipy.stats import t

    count = len(controls)
    return float(t.ppf(0.975, count - 1) * stdev(controls) * (1 + 1 / count) ** 0.5)


def judged(result: PlanComparison, use: SignalUse, names: Compared) -> Judged:
    """Judge a signal by the scores of a comparison."""
    gains = Gains(
        inverse=result.gain(names.forward, [names.inverse]),
        uniform=result.gain(names.forward, [names.uniform]),
        random=result.gain(names.forward, names.random),
        reach=prediction_reach([result.score(name).mean for name in names.random]),
    )
    constant = result.labels[names.forward] == result.labels[names.inverse]
    verdict, reason = judge(use.kind, gains, sum(result.comparison.distinct.values()), constant)
    return Judged(
        **use._asdict(),
        forward=result.score(names.forward),
        inverse=result.score(names.inverse),
        uniform=result.score(names.uniform),
        random=tuple(map(result.score, names.random)),
        gains=gains,
        verdict=verdict,
        reason=reason,
    )


def _useless(kind: Kind, gains: Gains) -> str:
    """Say why a signal that does no harm does no good."""
    inverse, better = side(gains.inverse), max(gains.beyond)
    controls = f"{_UNIFORM[kind]} and {_RANDOM[kind]}"
    if all(gain.wins == gain.losses == 0 for gain in (gains.inverse, gains.uniform, gains.random)):
        return "forward and all controls score the same on every question"
    sides = {_UNIFORM[kind]: side(gains.uniform), _RANDOM[kind]: side(gains.random)}
    above = " and ".join(name for name, side in sides.items() if side > 0)
    if inverse > 0 and above:
        return f"forward is above {above}, but not by {_CHANCE}: it may be luck"
    if inverse > 0:
        return f"forward is not above {controls}: the gap to the inverse comes from a bad inverse"
    if better > 0:
        return "forward is above a control, but no better than its inverse: the signal's direction does not matter"
    if inverse < 0:
        return f"forward is below its inverse, and not above {controls} by {_CHANCE}: it points the wrong way"
    return f"forward is not above its inverse, nor above {controls} by {_CHANCE}"

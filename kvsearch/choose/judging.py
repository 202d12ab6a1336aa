"""The rule by which a signal is useful, unproven, useless or harmful: what its strategy gains on its controls."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import stdev
from typing import Final, NamedTuple

from kvsearch.calibration.tables import LEAST_CONTEXTS
from kvsearch.choose.verdicts import Gains, Judged, Kind, SignalUse, Verdict, side
from kvsearch.evaluation.plan_comparison import PlanComparison
from kvsearch.runs.estimates import Difference, Estimate

ALPHA: Final = 0.05  # of a signal that says nothing to be called useful
ENOUGH: Final = 19  # random strategies of which the best of all is so by chance one time in twenty
_UNIFORM: Final[dict[Kind, str]] = {"route": "one pattern in all layers", "budgets": "equal budgets"}
_CHANCE: Final = "more than strategies differ by chance"
_RANDOM: Final[dict[Kind, str]] = {"route": "random patterns", "budgets": "random permutations"}


class Compared(NamedTuple):
    """The names, in a comparison, of the strategies that a signal is judged by.

    `exact`: the random ones are all other orders of the forward budgets, each once, and not some that were drawn.
    """

    forward: str
    inverse: str
    uniform: str
    random: tuple[str, ...]
    exact: bool = False


class Draws(NamedTuple):
    """How many random controls there are, and how many of them score as high as the forward strategy, or as low.

    `exact`: see `Compared`.
    """

    tried: int
    as_high: int
    as_low: int
    exact: bool = False

    @classmethod
    def of(cls, forward: Estimate, random: Sequence[Estimate], exact: bool = False) -> Draws:
        """Count them; scores that differ by rounding are equal."""
        above = [round(one.mean - forward.mean, 9) for one in random]
        return cls(len(above), sum(one >= 0 for one in above), sum(one <= 0 for one in above), exact)

    @property
    def ranked(self) -> bool:
        """Whether the rank among them decides: there are enough of them to show it, or there are no more."""
        return self.exact or self.tried >= ENOUGH

    def beyond(self, gain: Difference, reach: float) -> int:
        """Return 1 if a gain on a control is above zero, -1 if below; 0 if its interval or chance may make it.

        Chance is judged by the rank of forward among the random controls, itself among them (a permutation test: one
        in twenty is as high); by fewer than `ENOUGH` of them, by their `reach`.
        """
        found = side(gain)
        rank = (1 + (self.as_high if found > 0 else self.as_low)) / (1 + self.tried)
        return found if (rank <= ALPHA if self.ranked else abs(gain.mean) > reach) else 0


def judge(kind: Kind, gains: Gains, contexts: int, draws: Draws, constant: bool = False) -> tuple[Verdict, str]:
    """Return the verdict on a signal, and the reason for it, from what its forward strategy gains on its controls.

    "Above" and "below" mean that the 95% interval of the difference is; "by more than chance" that random strategies
    do not as well, see `Draws.beyond`. The first that applies:

    1. useless: the signal is `constant`, so that forward and inverse are the same strategy;
    2. unproven: there are fewer than `LEAST_CONTEXTS` different contexts, which cannot tell;
    3. harmful: forward is below the uniform control, so not using the signal is better on this model, be it by the
       signal's fault or by bad luck; or it is below the random controls by more than chance;
    4. useful: forward is above its inverse, and above the uniform or the random controls by more than chance;
    5. unproven: forward is above its inverse and the uniform control, but not by more than chance: the gain is there,
       and random strategies may have it, too;
    6. useless: all else.

    Of signals that say nothing about one in twenty is called useful. Harmful are those whose strategy is a bad one.
    """
    uniform, random = (draws.beyond(gain, gains.reach) for gain in (gains.uniform, gains.random))
    better, inverse = max(uniform, random), side(gains.inverse)
    names = {_UNIFORM[kind]: min(uniform, side(gains.uniform)), _RANDOM[kind]: random}
    if constant:
        return "useless", "constant: forward and inverse are the same strategy"
    if contexts < LEAST_CONTEXTS:
        return "unproven", f"too few contexts to tell: {contexts} different ones, at least {LEAST_CONTEXTS} are needed"
    if min(names.values()) < 0:
        return "harmful", f"forward is below {' and '.join(name for name, side in names.items() if side < 0)}"
    if inverse > 0 and better > 0:
        above = " and ".join(name for name, side in names.items() if side > 0)
        level = [f"; {name} could be as good by chance" for name, side in names.items() if side == 0]
        return "useful", f"forward is above its inverse, and above {above} by {_CHANCE}{''.join(level)}"
    if inverse > 0 and side(gains.uniform) > 0:
        return "unproven", f"{_as_well(draws)}; forward is above its inverse and {_UNIFORM[kind]}"
    return "useless", _useless(kind, gains, better)


def prediction_reach(controls: Sequence[float]) -> float:
    """Return how far from the mean of some random draws one more may be (95%): t s sqrt(1 + 1/n); n is 2 or more."""
    from scipy.stats import t

    count = len(controls)
    return float(t.ppf(0.975, count - 1) * stdev(controls) * (1 + 1 / count) ** 0.5)


def judged(result: PlanComparison, use: SignalUse, names: Compared) -> Judged:
    """Judge a signal by the scores of a comparison."""
    forward, random = result.score(names.forward), tuple(map(result.score, names.random))
    gains = Gains(
        inverse=result.gain(names.forward, [names.inverse]),
        uniform=result.gain(names.forward, [names.uniform]),
        random=result.gain(names.forward, names.random),
        reach=0.0 if names.exact else prediction_reach([one.mean for one in random]),
    )
    constant = result.labels[names.forward] == result.labels[names.inverse]
    contexts, draws = sum(result.comparison.distinct.values()), Draws.of(forward, random, names.exact)
    verdict, reason = judge(use.kind, gains, contexts, draws, constant)
    return Judged(
        **use._asdict(),
        forward=forward,
        inverse=result.score(names.inverse),
        uniform=result.score(names.uniform),
        random=random,
        exact=names.exact,
        gains=gains,
        verdict=verdict,
        reason=reason,
    )


def _as_well(draws: Draws) -> str:
    """Say how many random strategies do as well, or why more of them may, and how to tell."""
    advice = "" if draws.ranked else f" (try --permutations {ENOUGH + 1})"
    others = f"{draws.tried} {'other orders of these budgets' if draws.exact else 'random plans'}"
    if draws.as_high:
        return f"{draws.as_high} of {others} {'does' if draws.as_high == 1 else 'do'} as well{advice}"
    if draws.exact:
        return f"it is the best of all {draws.tried + 1} orders of these budgets, which are too few to prove anything"
    return f"none of {others} does as well, but they differ so much that one more may{advice}"


def _useless(kind: Kind, gains: Gains, better: int) -> str:
    """Say why a signal that does no harm does no good; `better` as in `judge`."""
    inverse, controls = side(gains.inverse), f"{_UNIFORM[kind]} and {_RANDOM[kind]}"
    if all(gain.wins == gain.losses == 0 for gain in (gains.inverse, gains.uniform, gains.random)):
        return "forward and all controls score the same on every question"
    if inverse > 0 and side(gains.random) > 0:
        return f"forward is above {_RANDOM[kind]}, but not by {_CHANCE}, and not above {_UNIFORM[kind]}"
    if inverse > 0:
        return f"forward is not above {controls}: the gap to the inverse comes from a bad inverse"
    if better > 0:
        return "forward is above a control, but no better than its inverse: the signal's direction does not matter"
    if inverse < 0:
        return f"forward is below its inverse, and not above {controls} by {_CHANCE}: it points the wrong way"
    return f"forward is not above its inverse, nor above {controls} by {_CHANCE}"

"""Verdicts on signals: useful, unproven, useless or harmful, by the gain of a strategy over its controls."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import stdev
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, get_args

from pydantic import Field

from kvsearch.calibration.tables import MIN_CONTEXTS_TO_JUDGE
from kvsearch.core.fields import Record, Text
from kvsearch.evaluation.statistics import find_student_quantile
from kvsearch.plan import PhaseNames
from kvsearch.runs.estimates import Difference, Estimate

if TYPE_CHECKING:
    from kvsearch.evaluation.compare import Evaluation

SignalKind = Literal["route", "budgets"]
SignalVerdict = Literal["useful", "unproven", "useless", "harmful"]
SIGNAL_KINDS: Final[tuple[SignalKind, ...]] = get_args(SignalKind)
PHASE_SETTINGS: Final[tuple[PhaseNames, ...]] = get_args(PhaseNames)
ALPHA: Final = 0.05  # of a signal that says nothing to be called useful
MIN_RANDOM_CONTROLS: Final = 19  # random strategies of which the best of all is so by chance one time in twenty
_UNIFORM: Final[dict[SignalKind, str]] = {"route": "one pattern in all layers", "budgets": "equal budgets"}
_CHANCE: Final = "more than strategies differ by chance"
_RANDOM: Final[dict[SignalKind, str]] = {"route": "random patterns", "budgets": "random permutations"}


class SignalUse(NamedTuple):
    """A signal, its use (route or budgets) and its phases, which are judged together."""

    signal: str
    kind: SignalKind
    phases: PhaseNames


class Gains(Record):
    """Gains of the forward strategy over its controls, paired by question; "random" is over their mean.

    The 95% intervals are over contexts, and take the controls as they were drawn. `reach` is how far from the mean of
    the random controls one more random strategy may be, by their spread (95%); 0 where they are all that there are. The
    uniform control is one strategy, too, so whatever gains less on either may be as random as they are.
    """

    inverse: Difference
    uniform: Difference
    random: Difference
    reach: float = Field(ge=0, allow_inf_nan=False)


class JudgedSignal(Record):
    """A judged signal, as a route or for budgets: scores of its strategy and controls, gains and verdict.

    `exact`: the random controls are all other orders of the forward budgets, each once.
    """

    signal: Text
    kind: SignalKind
    phases: PhaseNames
    forward: Estimate
    inverse: Estimate
    uniform: Estimate
    random: tuple[Estimate, ...] = Field(min_length=1)
    exact: bool = False
    gains: Gains
    verdict: SignalVerdict
    reason: Text

    @property
    def place(self) -> tuple[int, str, int]:
        """Sort key: routes first, then budgets, by signal and phases."""
        return SIGNAL_KINDS.index(self.kind), self.signal, PHASE_SETTINGS.index(self.phases)

    @property
    def lower(self) -> int:
        """Number of random controls that score lower than the forward strategy."""
        return sum(control.mean < self.forward.mean for control in self.random)

    @property
    def words(self) -> str:
        """Description of the use, such as `cosine as a route in prefill`."""
        use = "as a route" if self.kind == "route" else "for budgets"
        return f"{self.signal} {use} in {'both phases' if self.phases == 'both' else self.phases}"


class BudgetVerdicts(Record):
    """Verdicts at one size: `budget` entries per kv head, on average, or of a prompt as long as calibrated.

    `ratio` is the share to evict, if the size was given as a ratio.
    """

    budget: float = Field(gt=0, allow_inf_nan=False)
    ratio: float | None = Field(default=None, gt=0, lt=1)
    full: Estimate
    signals: tuple[JudgedSignal, ...]

    @property
    def size(self) -> str:
        """Description of the size, as it was given."""
        return f"{self.budget:g} entries per kv head" if self.ratio is None else f"{100 * self.ratio:g}% evicted"


def find_sign(gain: Difference) -> int:
    """Return 1 if a difference is above zero, -1 if below, 0 if its interval cannot tell."""
    return int(gain.low > 0) - int(gain.high < 0)


class StrategyNames(NamedTuple):
    """Names of the strategy and controls of a signal in an evaluation.

    `exact`: the random ones are all other orders of the forward budgets, each once, and not some that were drawn.
    """

    forward: str
    inverse: str
    uniform: str
    random: tuple[str, ...]
    exact: bool = False


class RandomControls(NamedTuple):
    """Number of random controls, and how many of them score as high as the forward strategy, or as low.

    `exact`: see `StrategyNames`.
    """

    tried: int
    as_high: int
    as_low: int
    exact: bool = False

    @classmethod
    def of(cls, forward: Estimate, random: Sequence[Estimate], exact: bool = False) -> RandomControls:
        """Count controls by their scores, which are equal up to rounding."""
        leads = [round(control.mean - forward.mean, 9) for control in random]
        return cls(len(leads), sum(control >= 0 for control in leads), sum(control <= 0 for control in leads), exact)

    @property
    def rank_decides(self) -> bool:
        """Whether the rank among the controls decides: there are enough of them, or no others exist."""
        return self.exact or self.tried >= MIN_RANDOM_CONTROLS

    def judge_gain(self, gain: Difference, reach: float) -> int:
        """Return 1 if a gain over a control is above zero, -1 if below, 0 if the interval or chance explains it.

        Chance is judged by the rank of forward among the random controls, itself among them (a permutation test: one
        in twenty is as high); by fewer than `MIN_RANDOM_CONTROLS` of them, by their `reach`.
        """
        sign = find_sign(gain)
        rank = (1 + (self.as_high if sign > 0 else self.as_low)) / (1 + self.tried)
        return sign if (rank <= ALPHA if self.rank_decides else abs(gain.mean) > reach) else 0


def judge_gains(
    kind: SignalKind, gains: Gains, contexts: int, draws: RandomControls, constant: bool = False
) -> tuple[SignalVerdict, str]:
    """Judge a signal by the gains of its forward strategy over its controls; return the verdict and the reason.

    "Above" and "below" mean that the 95% interval of the difference is; "by more than chance" that random strategies
    do not as well, see `RandomControls.judge_gain`. The first that applies:

    1. useless: the signal is `constant`, so that forward and inverse are the same strategy;
    2. unproven: there are fewer than `MIN_CONTEXTS_TO_JUDGE` different contexts, which cannot tell;
    3. harmful: forward is below the uniform control, so not using the signal is better on this model, be it by the
       signal's fault or by bad luck; or it is below the random controls by more than chance;
    4. useful: forward is above its inverse, and above the uniform or the random controls by more than chance;
    5. unproven: forward is above its inverse and the uniform control, but not by more than chance: the gain is there,
       and random strategies may have it, too;
    6. useless: all else.

    Of signals that say nothing about one in twenty is called useful. Harmful are those whose strategy is a bad one.
    """
    uniform, random = (draws.judge_gain(gain, gains.reach) for gain in (gains.uniform, gains.random))
    better, inverse = max(uniform, random), find_sign(gains.inverse)
    names = {_UNIFORM[kind]: min(uniform, find_sign(gains.uniform)), _RANDOM[kind]: random}
    if constant:
        return "useless", "constant: forward and inverse are the same strategy"
    if contexts < MIN_CONTEXTS_TO_JUDGE:
        reason = f"too few contexts to tell: {contexts} different ones, at least {MIN_CONTEXTS_TO_JUDGE} are needed"
        return "unproven", reason
    if min(names.values()) < 0:
        return "harmful", f"forward is below {' and '.join(name for name, side in names.items() if side < 0)}"
    if inverse > 0 and better > 0:
        above = " and ".join(name for name, sign in names.items() if sign > 0)
        level = [f"; {name} could be as good by chance" for name, sign in names.items() if sign == 0]
        return "useful", f"forward is above its inverse, and above {above} by {_CHANCE}{''.join(level)}"
    if inverse > 0 and find_sign(gains.uniform) > 0:
        return "unproven", f"{_explain_chance(draws)}; forward is above its inverse and {_UNIFORM[kind]}"
    return "useless", _explain_useless(kind, gains, better)


def compute_prediction_reach(controls: Sequence[float]) -> float:
    """Compute the 95% prediction interval of one more draw, from the mean of n >= 2: t s sqrt(1 + 1/n)."""
    return float(find_student_quantile(len(controls) - 1) * stdev(controls) * (1 + 1 / len(controls)) ** 0.5)


def judge_signal(result: Evaluation, use: SignalUse, names: StrategyNames) -> JudgedSignal:
    """Judge a signal by the scores of an evaluation."""
    forward, random = result.score(names.forward), tuple(map(result.score, names.random))
    gains = Gains(
        inverse=result.gain(names.forward, [names.inverse]),
        uniform=result.gain(names.forward, [names.uniform]),
        random=result.gain(names.forward, names.random),
        reach=0.0 if names.exact else compute_prediction_reach([control.mean for control in random]),
    )
    constant = result.names[names.forward] == result.names[names.inverse]
    contexts, draws = sum(result.distinct.values()), RandomControls.of(forward, random, names.exact)
    verdict, reason = judge_gains(use.kind, gains, contexts, draws, constant)
    return JudgedSignal(
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


def _explain_chance(draws: RandomControls) -> str:
    """Explain how many random strategies do as well, or why others may, and how to tell."""
    advice = "" if draws.rank_decides else f" (try --permutations {MIN_RANDOM_CONTROLS + 1})"
    others = f"{draws.tried} {'other orders of these budgets' if draws.exact else 'random plans'}"
    if draws.as_high:
        return f"{draws.as_high} of {others} {'does' if draws.as_high == 1 else 'do'} as well{advice}"
    if draws.exact:
        return f"it is the best of all {draws.tried + 1} orders of these budgets, which are too few to prove anything"
    return f"none of {others} does as well, but they differ so much that one more may{advice}"


def _explain_useless(kind: SignalKind, gains: Gains, better: int) -> str:
    """Explain why a signal that does no harm is useless; `better` as in `judge_gains`."""
    inverse, controls = find_sign(gains.inverse), f"{_UNIFORM[kind]} and {_RANDOM[kind]}"
    if all(gain.wins == gain.losses == 0 for gain in (gains.inverse, gains.uniform, gains.random)):
        return "forward and all controls score the same on every question"
    if inverse > 0 and find_sign(gains.random) > 0:
        return f"forward is above {_RANDOM[kind]}, but not by {_CHANCE}, and not above {_UNIFORM[kind]}"
    if inverse > 0:
        return f"forward is not above {controls}: the gap to the inverse comes from a bad inverse"
    if better > 0:
        return "forward is above a control, but no better than its inverse: the signal's direction does not matter"
    if inverse < 0:
        return f"forward is below its inverse, and not above {controls} by {_CHANCE}: it points the wrong way"
    return f"forward is not above its inverse, nor above {controls} by {_CHANCE}"

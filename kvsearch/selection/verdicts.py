"""The verdict on a signal, useful, unproven, useless or harmful: what its strategy gains on its controls."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import stdev
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, get_args

from pydantic import Field

from kvsearch.calibration.tables import LEAST_CONTEXTS
from kvsearch.core.fields import Count, Index, Record, Sha256, Text
from kvsearch.evaluation.statistics import find_student_quantile
from kvsearch.plan import ModelFingerprint, PhaseNames
from kvsearch.plan.schema import Protocol
from kvsearch.runs.estimates import Difference, Estimate

if TYPE_CHECKING:
    from kvsearch.evaluation.compare import Evaluation

Kind = Literal["route", "budgets"]
Verdict = Literal["useful", "unproven", "useless", "harmful"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
SETTINGS: Final[tuple[PhaseNames, ...]] = get_args(PhaseNames)
ALPHA: Final = 0.05  # of a signal that says nothing to be called useful
ENOUGH: Final = 19  # random strategies of which the best of all is so by chance one time in twenty
_UNIFORM: Final[dict[Kind, str]] = {"route": "one pattern in all layers", "budgets": "equal budgets"}
_CHANCE: Final = "more than strategies differ by chance"
_RANDOM: Final[dict[Kind, str]] = {"route": "random patterns", "budgets": "random permutations"}


class SignalUse(NamedTuple):
    """A signal, what for, and in which phases: what is judged."""

    signal: str
    kind: Kind
    phases: PhaseNames


class Gains(Record):
    """What the forward strategy scores above its controls, paired by question; "random" is above their mean.

    The 95% intervals are over contexts, and take the controls as they were drawn. `reach` is how far from the mean of
    the random controls one more random strategy may be, by their spread (95%); 0 where they are all that there are. The
    uniform control is one strategy, too, so whatever gains less on either may be as random as they are.
    """

    inverse: Difference
    uniform: Difference
    random: Difference
    reach: float = Field(ge=0, allow_inf_nan=False)


class JudgedSignal(Record):
    """A signal as a route or for budgets: the scores of its strategy and controls, and what follows from them.

    `exact`: the random controls are all other orders of the forward budgets, each once.
    """

    signal: Text
    kind: Kind
    phases: PhaseNames
    forward: Estimate
    inverse: Estimate
    uniform: Estimate
    random: tuple[Estimate, ...] = Field(min_length=1)
    exact: bool = False
    gains: Gains
    verdict: Verdict
    reason: Text

    @property
    def place(self) -> tuple[int, str, int]:
        """What was judged, as a key to sort by: routes first, then budgets, by signal and phases."""
        return KINDS.index(self.kind), self.signal, SETTINGS.index(self.phases)

    @property
    def lower(self) -> int:
        """How many of the random controls score lower than the forward strategy."""
        return sum(one.mean < self.forward.mean for one in self.random)

    @property
    def words(self) -> str:
        """What was judged, for people: `cosine as a route in prefill`."""
        use = "as a route" if self.kind == "route" else "for budgets"
        return f"{self.signal} {use} in {'both phases' if self.phases == 'both' else self.phases}"


class AtBudget(Record):
    """All that was judged at one size: `budget` entries per kv head, on average, or of a prompt as long as calibrated.

    `ratio` is the share to evict, where that was asked for.
    """

    budget: float = Field(gt=0, allow_inf_nan=False)
    ratio: float | None = Field(default=None, gt=0, lt=1)
    full: Estimate
    signals: tuple[JudgedSignal, ...]

    @property
    def size(self) -> str:
        """The size as it was asked for, for people."""
        return f"{self.budget:g} entries per kv head" if self.ratio is None else f"{100 * self.ratio:g}% evicted"


class TaskContent(Record):
    """What was asked of one task, by content."""

    contexts: Count
    questions: Count
    metric: Text
    rows_sha256: Sha256


class Conditions(Record):
    """What was asked of which profile. `split` is the part of the examples, None of tasks that have no parts."""

    model: ModelFingerprint
    profile_sha256: Sha256
    tasks: dict[Text, TaskContent] = Field(min_length=1)
    split: Text | None
    protocol: Protocol
    seed: Index


def side(gain: Difference) -> int:
    """Return 1 if a difference is above zero, -1 if below, 0 if its interval cannot tell."""
    return int(gain.low > 0) - int(gain.high < 0)


class StrategyNames(NamedTuple):
    """The names, in a comparison, of the strategies that a signal is judged by.

    `exact`: the random ones are all other orders of the forward budgets, each once, and not some that were drawn.
    """

    forward: str
    inverse: str
    uniform: str
    random: tuple[str, ...]
    exact: bool = False


class RandomControls(NamedTuple):
    """How many random controls there are, and how many of them score as high as the forward strategy, or as low.

    `exact`: see `StrategyNames`.
    """

    tried: int
    as_high: int
    as_low: int
    exact: bool = False

    @classmethod
    def of(cls, forward: Estimate, random: Sequence[Estimate], exact: bool = False) -> RandomControls:
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


def judge(
    kind: Kind, gains: Gains, contexts: int, draws: RandomControls, constant: bool = False
) -> tuple[Verdict, str]:
    """Return the verdict on a signal, and the reason for it, from what its forward strategy gains on its controls.

    "Above" and "below" mean that the 95% interval of the difference is; "by more than chance" that random strategies
    do not as well, see `RandomControls.beyond`. The first that applies:

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
    return float(find_student_quantile(len(controls) - 1) * stdev(controls) * (1 + 1 / len(controls)) ** 0.5)


def judge_signal(result: Evaluation, use: SignalUse, names: StrategyNames) -> JudgedSignal:
    """Judge a signal by the scores of a comparison."""
    forward, random = result.score(names.forward), tuple(map(result.score, names.random))
    gains = Gains(
        inverse=result.gain(names.forward, [names.inverse]),
        uniform=result.gain(names.forward, [names.uniform]),
        random=result.gain(names.forward, names.random),
        reach=0.0 if names.exact else prediction_reach([one.mean for one in random]),
    )
    constant = result.names[names.forward] == result.names[names.inverse]
    contexts, draws = sum(result.distinct.values()), RandomControls.of(forward, random, names.exact)
    verdict, reason = judge(use.kind, gains, contexts, draws, constant)
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


def _as_well(draws: RandomControls) -> str:
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

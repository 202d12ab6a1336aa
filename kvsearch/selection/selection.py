"""What a selection finds: the records of its races, of its report, and of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from kvsearch.evaluation.samples import Footprint
from kvsearch.plan import Plan, Size
from kvsearch.plan.schema import Protocol
from kvsearch.runs.estimates import Difference, Estimate
from kvsearch.selection.rule import LEAST_CONTEXTS, Rule, Verdict
from kvsearch.selection.scores import GapClosed

if TYPE_CHECKING:
    from kvsearch.evaluation.compare import Comparison

Kind = Literal["candidate", "baseline"]
FOREMOST: Final = 5  # candidates, and as many baselines, that a report asks


@dataclass(frozen=True)
class QuestionCount:
    """How many questions were asked, about how many different contexts, and how long the shortest and longest are."""

    contexts: int
    questions: int
    shortest: int  # tokens
    longest: int

    @classmethod
    def of(cls, comparison: Comparison) -> QuestionCount:
        """Count what was asked in a comparison."""
        lengths = [sample.context_tokens for sample in comparison.samples]
        questions = sum(one.questions for one in comparison.coverage)
        return cls(sum(comparison.distinct.values()), questions, min(lengths), max(lengths))

    @classmethod
    def total(cls, counts: Sequence[QuestionCount]) -> QuestionCount:
        """Add up what was asked in several rounds."""
        return cls(
            sum(count.contexts for count in counts),
            sum(count.questions for count in counts),
            min(count.shortest for count in counts),
            max(count.longest for count in counts),
        )


@dataclass(frozen=True)
class MethodResult:
    """What a candidate or baseline scored on the contexts that it was asked about before it left.

    Of a candidate `lead` is what it scored there above the best baseline, and `chance` a bound of the probability that
    any candidate leads so much by luck, whenever one looks.
    """

    name: str
    kind: Kind
    score: Estimate
    contexts: int
    lead: Difference | None = None
    chance: float | None = None


@dataclass(frozen=True)
class PhaseResult:
    """How the race of one phase setting ended; methods that were asked longest come first, then the higher score.

    `best` is the best baseline; `winner` the candidate that is written, None if it is the baseline. `verdict` says what
    is known of it, see `kvsearch.selection.race`; `level` is what chances are compared with. `bound` is what the
    leading candidate is above the best baseline at least, with the probability `sure`; None without one. `asked` counts
    what was asked until it was decided, of `available` contexts.
    """

    phases: str
    methods: tuple[MethodResult, ...]
    full: Estimate
    best: str
    winner: str | None
    verdict: Verdict
    level: float
    sure: float
    bound: float | None
    asked: QuestionCount
    available: int
    notes: tuple[str, ...] = ()

    def at_level(self, level: float) -> PhaseResult:
        """Return the result at another level: what is likely better may beat the baselines at a higher one."""
        chance = self.method(self.written).chance
        if self.verdict != "likely" or chance is None:
            return self
        beats = chance <= level and self.asked.contexts >= LEAST_CONTEXTS
        return replace(self, level=level, verdict="beats" if beats else "likely")

    @property
    def written(self) -> str:
        """What this setting ends with: its winner, or else its best baseline."""
        return self.winner or self.best

    def method(self, name: str) -> MethodResult:
        """Return what is known of a candidate or baseline."""
        return {method.name: method for method in self.methods}[name]

    @property
    def score(self) -> float:
        """The score of what this setting ends with."""
        return self.method(self.written).score.mean

    def count(self, kind: Kind) -> int:
        """Count candidates or baselines."""
        return sum(method.kind == kind for method in self.methods)

    def foremost(self, kind: Kind) -> list[MethodResult]:
        """Return the candidates or baselines that are reported: those that were asked longest and score highest."""
        return [method for method in self.methods if method.kind == kind][:FOREMOST]

    @property
    def leader(self) -> MethodResult | None:
        """The winner, or else the foremost candidate; None without candidates."""
        return self.method(self.winner) if self.winner else next(iter(self.foremost("candidate")), None)


@dataclass(frozen=True)
class Reported:
    """The report split, which nothing was chosen by: scores by name, the full cache among them.

    `ahead` are those that score higher than what was written, the full cache aside, with what they score above it.
    `gain` is of the winner over the best baseline, `share` what it recovers of the gap to the full cache; None without
    a winner, `share` also where the full cache is not above the best baseline. `lead` is of the foremost candidate over
    the best baseline; None without one.
    """

    asked: QuestionCount
    scores: dict[str, Estimate]
    held: dict[str, Footprint]
    gain: Difference | None
    share: GapClosed | None
    ahead: dict[str, Difference]
    lead: Difference | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Selection:
    """A finished selection at one size, with the plan of what was chosen.

    `chosen` is the phase setting whose race ended with the highest score, `even` the strategy with equal budgets that
    every report has, `loss` how far the full cache is above the plan on the report split.
    """

    model: str
    size: Size
    protocol: Protocol
    seed: int
    rule: Rule
    results: tuple[PhaseResult, ...]
    chosen: PhaseResult
    even: str
    report: Reported
    loss: Difference
    plan: Plan


@dataclass(frozen=True)
class TriedBudget:
    """What the best plan of a budget loses against the full cache, in [0, 1].

    `confirmed`: on other contexts than the budget was looked for on.
    """

    budget: int
    name: str
    loss: float
    confirmed: bool

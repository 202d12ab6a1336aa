"""What a selection finds: the records of its stages, of its report, and of the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from kvsearch.evaluation.values import Footprint
from kvsearch.plan import Plan, Size
from kvsearch.plan.schema import Protocol
from kvsearch.runs.estimates import Difference, Estimate
from kvsearch.selection.acceptance import GapClosed, Rule

if TYPE_CHECKING:
    from kvsearch.evaluation.compare import Comparison
    from kvsearch.evaluation.plan_comparison import PlanComparison

Kind = Literal["candidate", "baseline"]
POLICIES_ALONE: Final = "its policies, equal budgets"
BUDGETS_ALONE: Final = "its budgets, one policy"


@dataclass(frozen=True)
class QuestionCount:
    """How many questions were asked, about how many different contexts, and how long the shortest and longest are."""

    contexts: int
    questions: int
    shortest: int | None = None  # tokens
    longest: int | None = None

    @classmethod
    def of(cls, comparison: Comparison) -> QuestionCount:
        """Count what was asked in a comparison."""
        lengths = [sample.context_tokens for sample in comparison.samples]
        questions = sum(one.questions for one in comparison.coverage)
        return cls(sum(comparison.distinct.values()), questions, min(lengths), max(lengths))


@dataclass(frozen=True)
class MethodResult:
    """What a candidate or baseline scored in the first stage, and in the second if it got there.

    `lead` is what a candidate scored above the best baseline in the second stage, with the 95% interval of this pair
    alone; `chance` is the probability that the largest of all leads there is as large by luck.
    """

    name: str
    kind: Kind
    first: Estimate
    second: Estimate | None = None
    lead: Difference | None = None
    chance: float | None = None
    accepted: bool = False


@dataclass(frozen=True)
class PhaseResult:
    """What was found in one phase setting; methods are by score, those of the second stage first.

    `level` is what chances are compared with, unless there is a `margin`. `best` is the best baseline, `winner` the
    accepted candidate that scores highest.
    """

    phases: str
    methods: tuple[MethodResult, ...]
    full: Estimate
    best: str
    winner: str | None
    level: float
    margin: float | None
    first: QuestionCount
    second: QuestionCount
    notes: tuple[str, ...] = ()

    @property
    def written(self) -> str:
        """What this setting ends with: its winner, or else its best baseline."""
        return self.winner or self.best

    def method(self, name: str) -> MethodResult:
        """Return what is known of a candidate or baseline."""
        return {one.name: one for one in self.methods}[name]

    @property
    def score(self) -> float:
        """The second stage's score of what this setting ends with."""
        found = self.method(self.written).second
        return 0.0 if found is None else found.mean

    def count(self, kind: Kind) -> int:
        """Count candidates or baselines."""
        return sum(one.kind == kind for one in self.methods)

    @property
    def finalists(self) -> list[MethodResult]:
        """The candidates of the second stage, the highest score first."""
        return [one for one in self.methods if one.lead is not None]

    @property
    def leader(self) -> MethodResult | None:
        """The winner, or else the candidate that scores highest in the second stage; None without candidates."""
        return self.method(self.winner) if self.winner else next(iter(self.finalists), None)


@dataclass(frozen=True)
class Gained:
    """What a part of a strategy gains: without the other part, and with it."""

    alone: Difference
    beside: Difference


@dataclass(frozen=True)
class Decomposition:
    """The gains of a strategy over a control of one policy with equal budgets, paired by question."""

    strategy: str
    control: str
    policies: Gained
    budgets: Gained
    both: Difference

    @classmethod
    def of(cls, result: PlanComparison, strategy: str, control: str) -> Decomposition:
        """Read it from a comparison that has `make_part_plans` of the two beside them."""
        policies, budgets = (
            Gained(result.gain(part, [control]), result.gain(strategy, [other]))
            for part, other in ((POLICIES_ALONE, BUDGETS_ALONE), (BUDGETS_ALONE, POLICIES_ALONE))
        )
        return cls(strategy, control, policies, budgets, result.gain(strategy, [control]))


@dataclass(frozen=True)
class ByBudgets:
    """The best candidates with equal budgets and with budgets of their own, and what the latter gains on the former.

    One is None if there is no such candidate.
    """

    equal: str | None
    own: str | None
    gain: Difference | None


@dataclass(frozen=True)
class Reported:
    """The report split, which nothing was chosen by: scores by name, the full cache among them.

    `gain` is of the winner over the best baseline, `share` what it recovers of the gap to the full cache; None without
    a winner, `share` also where the full cache is not above the best baseline. Of candidates, None where there are
    none: `lead` is of the leader over the best baseline, `by_budgets` are the best ones with equal budgets and with
    budgets of their own, and `parts` are what the leader's policies and budgets gain over the best single pattern.
    """

    asked: QuestionCount
    scores: dict[str, Estimate]
    held: dict[str, Footprint]
    gain: Difference | None
    share: GapClosed | None
    lead: Difference | None = None
    by_budgets: ByBudgets | None = None
    parts: Decomposition | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Selection:
    """A finished selection at one size, with the plan of what was chosen.

    `chosen` is the phase setting that scores highest in its second stage, `even` the strategy with equal budgets that
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
    """What the best plan of a budget loses against the full cache, in [0, 1]; `confirmed`: on the second stage."""

    budget: int
    name: str
    loss: float
    confirmed: bool

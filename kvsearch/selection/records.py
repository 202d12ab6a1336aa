"""The decision rule of a selection, and the records of its result; imports nothing that computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import Field

from kvsearch.core.errors import UsageError
from kvsearch.core.fields import is_none
from kvsearch.evaluation.samples import Footprint
from kvsearch.plan import Plan
from kvsearch.runs.estimates import Difference, Estimate, TextLoss

if TYPE_CHECKING:
    from kvsearch.evaluation.compare import Evaluation
    from kvsearch.selection.selection_job import SelectionJob

MethodKind = Literal["candidate", "baseline"]
REPORTED_STRATEGIES: Final = 5  # of a profile's signals, that a report asks
MIN_CONTEXTS_FOR_PROOF: Final = 8  # with fewer nothing beats
HOPELESS_LEVEL: Final = 0.95  # of the one-sided bound by which a loss of right replies is so much above the least

RaceVerdict = Literal["beats", "likely", "cheaper", "baseline"]
PlanPart = Literal[
    "rankings", "budgets", "carry"
]  # of a plan, in the order in which a report adds them to even budgets


@dataclass(frozen=True)
class Rule:
    """The confidence that a candidate needs to be written.

    Args:
        sure: level of the one-sided bound by which a candidate has to lead the best baseline to be written. From .95 on
            only candidates that beat the baselines are written.
        level: chance that a candidate is said to beat the baselines although it does not; at most 1 - `sure`.

    Raises:
        UsageError: one of them is out of range.
    """

    sure: float = 0.9
    level: float = 0.05

    def __post_init__(self) -> None:
        if not 0.5 <= self.sure < 1:
            raise UsageError(f"--confidence {self.sure:g} is outside [0.5, 1): 0.9 is 'likely better', 0.95 'beats'")
        if not 0 < self.level < 1:
            raise UsageError(f"a level of {self.level:g} is no probability of a wrong choice")
        object.__setattr__(self, "level", min(self.level, round(1 - self.sure, 12)))

    @property
    def writes_likely(self) -> bool:
        """Whether a candidate is written that is likely, but not proven to be better."""
        return self.sure < 1 - Rule.level


@dataclass(frozen=True)
class QuestionCount:
    """Number of questions and of distinct contexts, and the shortest and longest context in tokens."""

    contexts: int
    questions: int
    shortest: int  # tokens
    longest: int

    @classmethod
    def of(cls, rounds: Sequence[Evaluation]) -> QuestionCount:
        """Count the questions and contexts of all rounds."""
        lengths = [sample.context_tokens for comparison in rounds for sample in comparison.samples]
        contexts = sum(sum(comparison.distinct.values()) for comparison in rounds)
        questions = sum(task.questions for comparison in rounds for task in comparison.coverage)
        return cls(contexts, questions, min(lengths), max(lengths))


@dataclass(frozen=True)
class MethodResult:
    """The score of a candidate or baseline on the contexts it answered before it left the race.

    Of a candidate `lead` is what it scored there above the best baseline, and `chance` a bound of the probability that
    any candidate leads so much by luck, whenever one looks. `nats` are its losses there, with the difference to
    the best baseline's, where all tasks are teacher-forced. Else, where methods were screened, `spared` are the nats
    per token of the right replies that a candidate loses less than the best baseline.
    """

    name: str
    kind: MethodKind
    score: Estimate
    contexts: int
    lead: Difference | None = None
    chance: float | None = None
    nats: Annotated[TextLoss | None, Field(exclude_if=is_none)] = None
    spared: Annotated[Difference | None, Field(exclude_if=is_none)] = None


@dataclass(frozen=True)
class DroppedMethod:
    """A candidate or baseline that was dropped before it replied, by its loss in nats per token of right replies."""

    name: str
    kind: MethodKind
    loss: float  # above that of the best method


@dataclass(frozen=True)
class Screening:
    """Methods dropped before they replied, by the loss of right replies, see `PlanRace`; `best` loses least."""

    best: str
    asked: QuestionCount
    dropped: tuple[DroppedMethod, ...]

    def count(self, kind: MethodKind) -> int:
        """Count candidates or baselines that were dropped."""
        return sum(method.kind == kind for method in self.dropped)


@dataclass(frozen=True)
class PhaseResult:
    """The result of the race of one phase setting; methods that stayed longest come first, then higher scores.

    `best` is the best baseline; `winner` the candidate that is written, None if it is the baseline. `verdict` says what
    is known of it, see `kvsearch.selection.race`; `level` is what chances are compared with. `bound` is what the
    leading candidate is above the best baseline at least, with the probability `sure`; None without one. `asked` counts
    the contexts and questions until the decision, of `available` contexts. `lower` are the kinds of questions on which
    the winner scores less than the best baseline. `screening` is what was dropped before it replied; None where nothing
    could be.
    """

    phases: str
    methods: tuple[MethodResult, ...]
    full: Estimate
    best: str
    winner: str | None
    verdict: RaceVerdict
    level: float
    sure: float
    bound: float | None
    asked: QuestionCount
    available: int
    notes: tuple[str, ...] = ()
    lower: tuple[str, ...] = ()
    screening: Annotated[Screening | None, Field(exclude_if=is_none)] = None

    def with_level(self, level: float) -> PhaseResult:
        """Judge the result at another level: a likely better candidate may beat the baselines at a higher one."""
        chance = self.method(self.written).chance
        if self.verdict != "likely" or chance is None:
            return self
        beats = chance <= level and self.asked.contexts >= MIN_CONTEXTS_FOR_PROOF
        return replace(self, level=level, verdict="beats" if beats else "likely")

    @property
    def written(self) -> str:
        """Name of the plan to write: the winner, else the best baseline."""
        return self.winner or self.best

    def method(self, name: str) -> MethodResult:
        """Return the result of a candidate or baseline by name."""
        return {method.name: method for method in self.methods}[name]

    @property
    def score(self) -> float:
        """Mean score of the plan to write."""
        return self.method(self.written).score.mean

    def count(self, kind: MethodKind) -> int:
        """Count candidates or baselines, with those that were dropped before they replied."""
        replied = sum(method.kind == kind for method in self.methods)
        return replied if self.screening is None else replied + self.screening.count(kind)

    def list_foremost(self, kind: MethodKind, count: int = 1) -> list[MethodResult]:
        """List up to `count` candidates or baselines: they stayed longest and score highest."""
        return [method for method in self.methods if method.kind == kind][:count]

    @property
    def leader(self) -> MethodResult | None:
        """The winner, or else the foremost candidate; None without candidates."""
        return self.method(self.winner) if self.winner else next(iter(self.list_foremost("candidate")), None)


def compute_shared_level(level: float, races: int, ended: Iterable[PhaseResult]) -> float:
    """Compute the level of the next of several `races` that share one by Holm's rule; some have `ended`.

    A race in which a candidate beats the baselines passes its part of the level on. After the last race the result is
    the level of all races without such a candidate.
    """
    return level / max(races - sum(result.verdict == "beats" for result in ended), 1)


@dataclass(frozen=True)
class ReportScores:
    """Scores by name on the report split, which nothing was chosen by; the full cache is among them.

    `ahead` are those that score higher than what was written, the full cache aside, with what they score above it.
    `gain` is of the winner over the best baseline, `share` what it recovers of the gap to the full cache; None without
    a winner, `share` also where the full cache is not above the best baseline. `lead` is of the foremost candidate over
    the best baseline; None without one. `nats` are losses by name with differences to what was written, where all tasks
    are teacher-forced. `parts` are what each part of the written plan adds to those before it, from the even baseline
    on: in scores, or nats per token less where there are `nats`. `retained` are shares of what the full cache does of
    the tasks retain:*, by name, and `retained_gap` how much less that is than what the written plan keeps of the other
    tasks' scores; empty and None where these are not asked.
    """

    asked: QuestionCount
    scores: dict[str, Estimate]
    held: dict[str, Footprint]
    gain: Difference | None
    share: Estimate | None
    ahead: dict[str, Difference]
    lead: Difference | None = None
    notes: tuple[str, ...] = ()
    nats: Annotated[dict[str, TextLoss], Field(exclude_if=lambda nats: not nats)] = field(default_factory=dict)
    parts: Annotated[dict[PlanPart, Estimate], Field(exclude_if=lambda parts: not parts)] = field(default_factory=dict)
    retained: Annotated[dict[str, Estimate], Field(exclude_if=lambda shares: not shares)] = field(default_factory=dict)
    retained_gap: Annotated[Estimate | None, Field(exclude_if=is_none)] = None


@dataclass(frozen=True, eq=False)
class Selection:
    """A finished selection at one size, with the chosen plan.

    `chosen` is the result of the race, `loss` the lead of the full cache over the plan on the report split.
    """

    job: SelectionJob
    chosen: PhaseResult
    report: ReportScores
    loss: Difference
    plan: Plan


@dataclass(frozen=True)
class TriedBudget:
    """The mean loss of the chosen plan of a budget to the full cache on the report split, in [0, 1].

    `confirmed`: it was shown to lose no more than was wished, as were all larger ones.
    """

    budget: int
    name: str
    loss: float
    confirmed: bool

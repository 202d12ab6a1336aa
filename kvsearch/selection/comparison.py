"""The one place that decides between candidates and baselines, for `run`, `select` and `evolve`.

A `PlanRace` asks the questions of a split in rounds; who stays for the next round, and which verdict ends it, is said
in `kvsearch.selection.race`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from kvsearch.evaluation.compare import Settings, work_of
from kvsearch.evaluation.plan_comparison import PlanComparison, PlanEvaluation, StageStore, prepare_plans
from kvsearch.evaluation.samples import Contexts, Sample
from kvsearch.evaluation.statistics import contrast, estimate
from kvsearch.evaluation.totals import check_eviction
from kvsearch.models.loading import LoadedModel
from kvsearch.models.speed import Work
from kvsearch.plan import Size
from kvsearch.runs.estimates import Difference, Estimate
from kvsearch.selection.candidates import CandidateSet
from kvsearch.selection.race import LEAST_CONTEXTS, LEAVES, Race, Rule, SharedLevel, Verdict, lead_bound, plan_rounds
from kvsearch.selection.scores import TIE, Scores
from kvsearch.selection.selection import QuestionCount
from kvsearch.selection.splits import divide_contexts, texts_of
from kvsearch.tasks.base import Task
from kvsearch.tasks.encode import TaskPrompts


@dataclass(frozen=True, eq=False)
class Decision:
    """How a race ended: the plan that is written, and the verdict on it; see `kvsearch.selection.race`.

    `best` is the baseline with the highest score of those that were asked to the end. `evidence` are the logarithms of
    what bets on the candidates made of 1, all candidates taken into account. `behind` are candidates that left because
    a baseline is ahead of them on a kind of question, with the reason. `bound` is as for a `Race`.
    """

    rounds: tuple[PlanComparison, ...]
    best: str
    written: str
    verdict: Verdict
    evidence: Mapping[str, float]
    behind: Mapping[str, str]
    level: float
    bound: float

    def at_level(self, level: float) -> Decision:
        """Return the decision at another level: what is likely better may beat the baselines at a higher one."""
        if self.verdict != "likely":
            return self
        beats = self.evidence[self.written] >= -math.log(level) and self.asked.contexts >= LEAST_CONTEXTS
        return replace(self, level=level, verdict="beats" if beats else "likely")

    @property
    def winner(self) -> str | None:
        """The candidate that is written, None if it is a baseline."""
        return None if self.verdict == "baseline" else self.written

    def rounds_of(self, name: str) -> int:
        """Return how many rounds asked a candidate or baseline."""
        return sum(name in comparison.labels for comparison in self.rounds)

    def score(self, name: str) -> Estimate:
        """Return the mean over all tasks, of the rounds that asked `name`."""
        label = self.rounds[0].labels[name]
        samples = [sample for sample in self._samples(self.rounds_of(name)) if sample.method == label]
        return estimate(samples, self._contexts)

    def lead(self, name: str) -> Difference:
        """Return what a candidate scores above the best baseline, paired by question, in the rounds that asked it."""
        labels = self.rounds[0].labels
        weights = {labels[name]: 1.0, labels[self.best]: -1.0}
        return contrast(self._samples(self.rounds_of(name)), weights, self._contexts)

    def chance(self, name: str) -> float:
        """Return a bound of the probability that any candidate leads as much as this one by luck."""
        return min(1.0, math.exp(-self.evidence[name])) if name in self.evidence else 1.0

    def contexts_of(self, name: str) -> int:
        """Return how many contexts a candidate or baseline was asked about."""
        return sum(sum(asked.comparison.distinct.values()) for asked in self.rounds[: self.rounds_of(name)])

    @property
    def asked(self) -> QuestionCount:
        """What was asked until it was decided."""
        counts = [QuestionCount.of(asked.comparison) for asked in self.rounds]
        return QuestionCount(
            sum(count.contexts for count in counts),
            sum(count.questions for count in counts),
            min(count.shortest for count in counts),
            max(count.longest for count in counts),
        )

    def lower_kinds(self) -> list[str]:
        """Return the kinds of questions on which what is written scores less than the best baseline."""
        names = {self.written, self.best}
        samples = [sample for sample in self._samples(len(self.rounds)) if sample.method in names]
        lower = []
        for kind, of_kind in by_kind(samples).items():
            scores = Scores.of(of_kind, self._contexts)
            if scores.mean(self.written) < scores.mean(self.best) - TIE:
                lower.append(kind)
        return lower

    def _samples(self, rounds: int) -> list[Sample]:
        return [sample for asked in self.rounds[:rounds] for sample in asked.comparison.samples]

    @cached_property
    def _contexts(self) -> Contexts | None:
        return join_contexts(self.rounds)


@dataclass(frozen=True, eq=False)
class PlanRace:
    """Candidates and baselines, ready to be asked the questions of a split in rounds.

    The replies of a round are kept by the name of the race and its number.
    """

    loaded: LoadedModel
    candidate_set: CandidateSet
    tasks: Sequence[Task]
    settings: Settings
    rule: Rule
    name: str
    only: Sequence[TaskPrompts] | None = None  # a part of the questions of the tasks; None: all

    @cached_property
    def prepared(self) -> PlanEvaluation:
        """All candidates and baselines on all questions."""
        return prepare_plans(self.loaded, self.candidate_set.plans, self.tasks, self.settings)

    @property
    def encoded(self) -> list[TaskPrompts]:
        """The questions of all rounds."""
        return self.prepared.evaluation.encoded if self.only is None else list(self.only)

    @cached_property
    def rounds(self) -> list[list[TaskPrompts]]:
        """The questions of each round."""
        counts = [len(texts_of(task)) for task in self.encoded]
        return divide_contexts(self.encoded, plan_rounds(counts), self.settings.seed)

    @property
    def methods(self) -> int:
        """The most methods that a round asks, the full cache among them."""
        return len(self.prepared.evaluation.methods)

    @property
    def work(self) -> Work:
        """The most that the model has to do."""
        return work_of(self.encoded, self.settings.protocol, self.methods)

    def ask(
        self,
        questions: list[TaskPrompts],
        names: Sequence[str],
        stage: str,
        store: StageStore | None = None,
        *,
        answered: bool = False,
    ) -> PlanComparison:
        """Ask some candidates and baselines; their replies are kept as those of `stage`, `answered` as for `decide`."""
        plans = {name: self.candidate_set.plans[name] for name in names}
        prepared = prepare_plans(self.loaded, plans, self.tasks, self.settings)
        part = replace(prepared, evaluation=replace(prepared.evaluation, encoded=questions))
        return part.run_stage("/".join(filter(None, (self.name, stage))), store, answered=answered)

    def decide(
        self, store: StageStore | None = None, shared: SharedLevel | None = None, *, answered: bool = False
    ) -> Decision:
        """Ask in rounds until it is decided what is written.

        Of names that score the same the first is the best. `shared` is the level that this race shares with others,
        `answered`: only if the full cache can answer, see `Evaluation.require_answers`.

        Raises:
            IncompatibleError, UsageError: see `Evaluation.run`.
        """
        shared = shared or SharedLevel(self.rule.level, races=1)
        level = shared.part
        rule = replace(self.rule, level=level)
        race = Race(list(self.candidate_set.candidates), list(self.candidate_set.baselines), rule)
        rounds: list[PlanComparison] = []
        behind: dict[str, str] = {}
        for number, questions in enumerate(self.rounds, 1):
            names = [*race.candidates, *race.baselines]
            comparison = self.ask(questions, names, f"round-{number}", store, answered=answered and number == 1)
            rounds.append(comparison)
            behind |= behind_on_kinds(rounds, race.candidates, race.baselines)
            race.candidates = [name for name in race.candidates if name not in behind]
            asked = Scores.of(comparison.comparison.samples, comparison.comparison.contexts)
            race.judge_round(asked, is_last=number == len(self.rounds))
            if race.winner is not None:
                break
        assert race.winner is not None
        assert race.verdict is not None
        shared.beaten += race.verdict == "beats"
        evidence = {name: race.evidence(name) for name in race.wealths}
        return Decision(tuple(rounds), race.best, race.winner, race.verdict, evidence, behind, level, race.bound)


def behind_on_kinds(
    rounds: Sequence[PlanComparison], candidates: Sequence[str], baselines: Sequence[str]
) -> dict[str, str]:
    """Return the candidates that the best baseline leads on a kind of question beyond chance, with a reason each.

    Kinds are tasks, or the categories of a task that has several. A mean over all may hide that one is lost. With one
    kind there is none to hide.
    """
    samples = [sample for comparison in rounds for sample in comparison.comparison.samples]
    contexts = join_contexts(rounds)
    asked = [sample for sample in samples if sample.method in {*candidates, *baselines}]
    best = Scores.of(asked, contexts).ranked(baselines)[0]
    kinds = by_kind(asked)
    behind = {}
    for kind, of_kind in kinds.items() if len(kinds) > 1 else ():
        scores = Scores.of(of_kind, contexts)
        level = 1 - (1 - LEAVES) / len(kinds)
        for name in candidates:
            if lead_bound(scores, best, name, level) > 0:
                behind[name] = f"{name} is out: {best} is ahead of it on {kind}"
    return behind


def join_contexts(rounds: Sequence[PlanComparison]) -> Contexts | None:
    """Return what names the contexts of all rounds; None where every key is a context."""
    contexts: dict[tuple[str, str], str] = {}
    for asked in rounds:
        if asked.comparison.contexts is None:
            return None
        contexts.update(asked.comparison.contexts)
    return contexts


def by_kind(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Return samples by the kind of their question: the task, or its category where the task has several."""
    categories: dict[str, set[str]] = {}
    for sample in samples:
        categories.setdefault(sample.task, set()).add(sample.category)
    kinds: dict[str, list[Sample]] = {}
    for sample in samples:
        kind = f"{sample.task}, {sample.category}" if len(categories[sample.task]) > 1 else sample.task
        kinds.setdefault(kind, []).append(sample)
    return kinds


def prepare_race(
    loaded: LoadedModel,
    plans: CandidateSet,
    tasks: Sequence[Task],
    settings: Settings,
    rule: Rule,
    size: Size,
    name: str | None = None,
) -> PlanRace:
    """Return a race of plans of a size that evict something.

    Replies are kept by its `name`; None: it is named after the phases of the plans.

    Raises:
        UsageError: nothing is evicted from any prompt; see `prepare_plans`.
        IncompatibleError: see `prepare_plans`.
    """
    race = PlanRace(loaded, plans, tasks, settings, rule, plans.phases if name is None else name)
    note = check_eviction(race.prepared.evaluation, size)
    if note is None:
        return race
    return replace(race, candidate_set=replace(plans, notes=(*plans.notes, note)))

"""Candidates and baselines of one size, and the two stages of questions that decide between them.

What counts is said in `kvsearch.choose.acceptance`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvsearch.choose.acceptance import Rule, Scores, accepted
from kvsearch.choose.candidates import CandidateSet
from kvsearch.choose.selection import Kind, MethodResult, PhaseResult, QuestionCount
from kvsearch.choose.splits import halves, shared_contexts, shared_questions
from kvsearch.errors import UsageError
from kvsearch.evaluation.check_evicts import check_eviction
from kvsearch.evaluation.compare import Settings
from kvsearch.evaluation.plan_comparison import Keep, PlanComparison, PlanEvaluation, prepare_plans
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Size
from kvsearch.strategies.names import FULL
from kvsearch.tasks.base import Task
from kvsearch.tasks.encode import TaskPrompts


@dataclass(frozen=True, eq=False)
class Contest:
    """Candidates and baselines, with all of them ready to run on all questions of the selection split."""

    loaded: LoadedModel
    found: CandidateSet
    prepared: PlanEvaluation
    tasks: Sequence[Task]
    settings: Settings
    rule: Rule

    @property
    def encoded(self) -> list[TaskPrompts]:
        """What both stages ask."""
        return self.prepared.evaluation.encoded

    @property
    def replies(self) -> dict[str, int]:
        """The most replies of each stage, those of the full cache among them."""
        first, second = self.stages(self.prepared)
        asked = sum(task.coverage.questions for task in second.evaluation.encoded)
        return {"first": first.evaluation.replies, "second": self.most_finalists * asked}

    @property
    def most_finalists(self) -> int:
        """The most methods that the second stage asks, the full cache among them."""
        return min(self.rule.top + self.rule.kept + 1, len(self.prepared.evaluation.methods))

    def stages(self, prepared: PlanEvaluation) -> tuple[PlanEvaluation, PlanEvaluation]:
        """Divide the questions of an evaluation among the two stages; UsageError if a task has one context."""
        evaluation = prepared.evaluation
        first, second = halves(evaluation.encoded, self.rule.share, self.settings.seed)
        return (
            replace(prepared, evaluation=replace(evaluation, encoded=first)),
            replace(prepared, evaluation=replace(evaluation, encoded=second)),
        )

    def first(self, names: Sequence[str], keep: Keep | None = None, *, answered: bool = False) -> PlanComparison:
        """Ask the questions of the first stage of some candidates and baselines; `answered` as for `decide`."""
        return self.stages(self._only(names))[0].run_stage(f"{self.found.phases}/first", keep, answered=answered)

    def _only(self, names: Sequence[str]) -> PlanEvaluation:
        """Return some candidates and baselines, ready to run on all questions of the selection split."""
        plans = {name: self.found.plans[name] for name in names}
        return prepare_plans(self.loaded, plans, self.tasks, self.settings)

    def decide(self, keep: Keep | None = None, *, answered: bool = False, shares: int = 1) -> PhaseResult:
        """Run both stages and apply the rule, whose level `shares` contests have together.

        `answered`: only if the full cache can answer, see `Evaluation.require_answers`.

        Raises:
            IncompatibleError, UsageError: see `Evaluation.run`.
        """
        plans, seed = self.found, self.settings.seed
        rule = replace(self.rule, level=self.rule.level / shares)
        first = self.first(list(plans.plans), keep, answered=answered)
        before = Scores.of(first.comparison.samples, first.comparison.contexts)
        finalists = before.ranked(list(plans.candidates))[: rule.top]
        baselines = before.ranked(list(plans.baselines))[: rule.kept]
        second = self.stages(self._only((*finalists, *baselines)))[1].run_stage(f"{plans.phases}/second", keep)
        after = Scores.of(second.comparison.samples, second.comparison.contexts)
        best = before.beside(after).ranked(baselines)[0]
        leads = {name: second.gain(name, [best]) for name in finalists}
        verdicts = accepted(after, leads, best, baselines, rule, seed)
        winners = after.ranked([name for name, (_, good) in verdicts.items() if good])

        def result(name: str) -> MethodResult:
            score = second.score(name) if name in second.labels else None
            kind: Kind = "candidate" if name in plans.candidates else "baseline"
            return MethodResult(
                name, kind, first.score(name), score, leads.get(name), *verdicts.get(name, (None, False))
            )

        def rank(found: MethodResult) -> tuple[bool, float]:
            return found.second is None, -(found.second or found.first).mean

        return PhaseResult(
            plans.phases, tuple(sorted(map(result, plans.plans), key=rank)), second.score(FULL), best,
            winners[0] if winners else None, rule.level, rule.margin, QuestionCount.of(first.comparison),
            QuestionCount.of(second.comparison), (*plans.notes, *second.comparison.notes),
        )  # fmt: skip


def prepare_contest(
    loaded: LoadedModel, found: CandidateSet, tasks: Sequence[Task], settings: Settings, rule: Rule, size: Size
) -> Contest:
    """Check that plans, model and the questions of the selection split fit together.

    Raises:
        UsageError: nothing is evicted from any prompt; see `prepare_plans`.
        IncompatibleError: see `prepare_plans`.
    """
    prepared = prepare_plans(loaded, found.plans, tasks, settings)
    note = check_eviction(prepared.evaluation, size)
    noted = found if note is None else replace(found, notes=(*found.notes, note))
    return Contest(loaded, noted, prepared, tasks, settings, rule)


def refuse_shared(splits: Mapping[str, Iterable[TaskPrompts]]) -> None:
    """Raise UsageError if the selection and the report split have questions or contexts in common."""
    parts = {name: list(encoded) for name, encoded in splits.items()}
    for what, common in (("questions", shared_questions(parts)), ("contexts", shared_contexts(parts))):
        if common:
            raise UsageError(
                f"{len(common)} {what} are in the {' and in the '.join(parts)} split: what a strategy is chosen by "
                "says nothing about it, give tasks with splits"
            )

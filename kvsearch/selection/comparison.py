"""The one place that decides between candidates and baselines, for `run`, `select` and `evolve`.

A `StagedComparison` says which contexts are asked in which stage, which candidates and baselines stay for the next one,
and which verdict a candidate gets in the end. What counts, and why, is said in `kvsearch.selection.acceptance`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from kvsearch.evaluation.compare import Settings, work_of
from kvsearch.evaluation.plan_comparison import PlanComparison, PlanEvaluation, StageStore, prepare_plans
from kvsearch.evaluation.totals import check_eviction
from kvsearch.models.loading import LoadedModel
from kvsearch.models.speed import Work
from kvsearch.plan import Size
from kvsearch.runs.estimates import Difference
from kvsearch.selection.acceptance import Rule, Scores, judge_leads
from kvsearch.selection.candidates import CandidateSet
from kvsearch.selection.splits import split_contexts
from kvsearch.tasks.base import Task
from kvsearch.tasks.encode import TaskPrompts


@dataclass(frozen=True, eq=False)
class Decision:
    """What every stage scored, and what that decides: the leads over the best baseline, and who is accepted.

    No candidate was found by the last stage. `verdicts` are the chance of every lead there, and whether the candidate
    is accepted; `winner` is the accepted candidate that scores highest, None if there is none.
    """

    stages: tuple[PlanComparison, ...]
    best: str
    leads: Mapping[str, Difference]
    verdicts: Mapping[str, tuple[float, bool]]
    winner: str | None


@dataclass(frozen=True, eq=False)
class StagedComparison:
    """Candidates and baselines, ready to be asked the questions of a split in one or two stages.

    `stages` are the names that replies are kept by. Of two the first has `Rule.share` of the contexts.
    """

    loaded: LoadedModel
    candidate_set: CandidateSet
    tasks: Sequence[Task]
    settings: Settings
    rule: Rule
    stages: tuple[str, ...]

    @cached_property
    def prepared(self) -> PlanEvaluation:
        """All candidates and baselines on all questions."""
        return prepare_plans(self.loaded, self.candidate_set.plans, self.tasks, self.settings)

    @property
    def encoded(self) -> list[TaskPrompts]:
        """The questions of all stages."""
        return self.prepared.evaluation.encoded

    @cached_property
    def parts(self) -> Sequence[list[TaskPrompts]]:
        """The questions of each stage; UsageError if a task has one context for two stages."""
        if len(self.stages) == 1:
            return [self.encoded]
        return split_contexts(self.encoded, self.rule.share, self.settings.seed)

    @property
    def method_counts(self) -> list[int]:
        """The most methods that each stage asks, the full cache among them."""
        everything = len(self.prepared.evaluation.methods)
        finalists = min(self.rule.top + self.rule.kept + 1, everything)
        return [everything, finalists][: len(self.stages)]

    @property
    def work(self) -> Work:
        """The most that the model has to do."""
        protocol = self.settings.protocol
        asked = zip(self.parts, self.method_counts, strict=True)
        return sum((work_of(part, protocol, methods) for part, methods in asked), Work(0, 0))

    def ask(
        self, stage: int, names: Sequence[str], store: StageStore | None = None, *, answered: bool = False
    ) -> PlanComparison:
        """Ask some candidates and baselines the questions of a stage; `answered` as for `decide`."""
        plans = {name: self.candidate_set.plans[name] for name in names}
        prepared = prepare_plans(self.loaded, plans, self.tasks, self.settings)
        if len(self.stages) > 1:
            prepared = replace(prepared, evaluation=replace(prepared.evaluation, encoded=self.parts[stage]))
        return prepared.run_stage(self.stages[stage], store, answered=answered)

    def decide(self, store: StageStore | None = None, *, answered: bool = False) -> Decision:
        """Ask all stages, and apply the rule to the last one.

        The best baseline scores highest in all stages together. Of names that score the same the first is the best, or
        the winner. `answered`: only if the full cache can answer, see `Evaluation.require_answers`.

        Raises:
            IncompatibleError, UsageError: see `Evaluation.run`.
        """
        candidates = list(self.candidate_set.candidates)
        baselines = list(self.candidate_set.baselines)
        earlier: tuple[PlanComparison, ...] = ()
        if len(self.stages) > 1:
            first = self.ask(0, [*candidates, *baselines], store, answered=answered)
            scores = Scores.of(first.comparison.samples, first.comparison.contexts)
            candidates = scores.ranked(candidates)[: self.rule.top]
            baselines = scores.ranked(baselines)[: self.rule.kept]
            earlier = (first,)
        last = self.ask(-1, [*candidates, *baselines], store)
        fresh = Scores.of(last.comparison.samples, last.comparison.contexts)
        best = (scores.beside(fresh) if earlier else fresh).ranked(baselines)[0]
        leads = {name: last.gain(name, [best]) for name in candidates}
        verdicts = judge_leads(fresh, leads, best, baselines, self.rule, self.settings.seed)
        accepted = fresh.ranked([name for name, (_, is_accepted) in verdicts.items() if is_accepted])
        return Decision((*earlier, last), best, leads, verdicts, accepted[0] if accepted else None)


def prepare_comparison(
    loaded: LoadedModel,
    plans: CandidateSet,
    tasks: Sequence[Task],
    settings: Settings,
    rule: Rule,
    size: Size,
    stages: tuple[str, str] | None = None,
) -> StagedComparison:
    """Return a comparison in two stages, of plans of a size that evict something.

    `stages` are the names that replies are kept by; None: they are named after the phases of the plans.

    Raises:
        UsageError: nothing is evicted from any prompt; see `prepare_plans`.
        IncompatibleError: see `prepare_plans`.
    """
    if stages is None:
        stages = (f"{plans.phases}/first", f"{plans.phases}/second")
    comparison = StagedComparison(loaded, plans, tasks, settings, rule, stages)
    note = check_eviction(comparison.prepared.evaluation, size)
    if note is None:
        return comparison
    return replace(comparison, candidate_set=replace(plans, notes=(*plans.notes, note)))

"""Plans: strategies of one size side by side on one set of questions, and what some gain on others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from kvsearch.core.arrays import TIE
from kvsearch.core.canonical import sha256_of
from kvsearch.core.errors import UsageError
from kvsearch.core.progress import Progress
from kvsearch.evaluation.compare import Comparison, Evaluation, Split, prepare
from kvsearch.evaluation.reply_store import ReplyStore
from kvsearch.evaluation.statistics import contrast
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Plan
from kvsearch.runs.estimates import Difference, Estimate
from kvsearch.runtime import Program
from kvsearch.runtime.program import warn_unfit
from kvsearch.strategies.compared import ReadyMethod, full_method
from kvsearch.strategies.names import FULL
from kvsearch.tasks.encode import TaskPrompts

OpenStage = AbstractContextManager[tuple[ReplyStore | None, Progress | None]]
StageStore = Callable[[str, Evaluation], OpenStage]  # opens what keeps the replies of a stage, by its name


@dataclass(frozen=True, eq=False)
class PlanComparison:
    """Scores of everything that was tried, by name; names of equal plans share their replies.

    `labels` maps every name to the method that replied for it; the full cache is always there.
    """

    comparison: Comparison
    labels: Mapping[str, str]

    def score(self, name: str) -> Estimate:
        """Return the mean over all tasks with its 95% interval."""
        return self.comparison.blocks[0].overall.scores[self.labels[name]]

    def gain(self, name: str, others: Sequence[str]) -> Difference:
        """Return what `name` scores above the mean of `others`, paired by question, with its 95% interval."""
        weights: dict[str, float] = {self.labels[name]: 1.0}
        for other in others:
            label = self.labels[other]
            weights[label] = weights.get(label, 0.0) - 1 / len(others)
        return contrast(self.comparison.samples, weights, self.comparison.contexts)

    def ahead(self, name: str) -> dict[str, Difference]:
        """Return what others score above `name`, the most first; the full cache aside."""
        mean = self.score(name).mean
        higher = [other for other in self.labels if other not in (FULL, name) and self.score(other).mean > mean + TIE]
        leads = {other: self.gain(other, [name]) for other in higher}
        return dict(sorted(leads.items(), key=lambda item: -item[1].mean))


@dataclass(frozen=True, eq=False)
class PlanEvaluation:
    """Plans that are ready to run."""

    evaluation: Evaluation
    labels: Mapping[str, str]

    def run(self, progress: Progress | None = None, store: ReplyStore | None = None) -> PlanComparison:
        """Ask everything that is not in the store; see `Evaluation.run` for the errors."""
        return PlanComparison(self.evaluation.run(progress, store), self.labels)

    def of(self, names: Sequence[str], questions: list[TaskPrompts]) -> PlanEvaluation:
        """Return the evaluation of some plans and the full cache, on a part of the questions."""
        labels = {name: self.labels[name] for name in (FULL, *names)}
        methods = tuple(method for method in self.evaluation.methods if method.label in labels.values())
        return PlanEvaluation(replace(self.evaluation, methods=methods, encoded=questions), labels)

    def run_stage(self, name: str, store: StageStore | None, *, answered: bool = False) -> PlanComparison:
        """Run as the stage `name`, whose replies are kept in `store` (None: nowhere); see `run`.

        `answered`: only if the full cache can answer, see `Evaluation.require_answers`.
        """
        stage: OpenStage = nullcontext((None, None)) if store is None else store(name, self.evaluation)
        with stage as (replies, progress):
            if answered:
                self.evaluation.require_answers(progress, replies)
            return self.run(progress, replies)


def prepare_plans(
    loaded: LoadedModel,
    plans: Mapping[str, Plan],
    split: Split,
) -> PlanEvaluation:
    """Check that plans and tasks fit together; plans that differ in nothing but their origin run once.

    Raises:
        UsageError: a plan has the name of the full cache.
        UsageError, IncompatibleError: see `kvsearch.evaluation.compare.prepare` and `Program.from_plan`.
    """
    if FULL in plans:
        raise UsageError(f"two of what is tried are called {FULL!r}: name them differently")
    methods = {FULL: full_method(loaded)}
    labels, known = {FULL: FULL}, dict[str, str]()
    for name, plan in plans.items():
        content = sha256_of(plan.model_dump(mode="json", exclude={"provenance"}))
        labels[name] = known.setdefault(content, name)
        if labels[name] == name:
            methods[name] = ReadyMethod(name, Program.from_plan(loaded.model, plan), {"plan_content": content})
    warn_unfit(loaded.model, {policy for one in methods.values() for policy in one.program.policies})
    return PlanEvaluation(prepare(loaded, list(methods.values()), FULL, split), labels)

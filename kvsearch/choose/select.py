"""Choose a strategy on one split and report it on another: all candidates, then the best of them on fresh questions.

What counts is said in `kvsearch.choose.acceptance`. Every phase setting is judged against baselines of its own
phases; what the one with the highest score in the second stage ends with is chosen.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import NamedTuple

from kvsearch.choose.acceptance import Rule, Scores, accepted, recovered
from kvsearch.choose.candidates import Entrant, Explored, Field, find_field
from kvsearch.errors import UsageError
from kvsearch.evaluation.check_evicts import check_eviction
from kvsearch.evaluation.compare import Comparison, Evaluation, Settings
from kvsearch.evaluation.plan_comparison import PlanComparison, PlanEvaluation, prepare_plans
from kvsearch.evaluation.reply_store import ReplyStore
from kvsearch.evaluation.runner import Progress
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import PHASES, Plan, Profile, Size
from kvsearch.plan.guard import round_half_up
from kvsearch.plan.origin import provenance
from kvsearch.plan.profile import SIGNALLED
from kvsearch.report.selection import Asked, Held, Kind, Outcome, Reported, Selection, Standing
from kvsearch.runs.estimates import Difference
from kvsearch.runs.identity import RunConfig
from kvsearch.strategies.methods import FULL
from kvsearch.tasks.base import Task
from kvsearch.tasks.encode import TaskPrompts, encode_tasks, token_hash

Kept = AbstractContextManager[tuple[ReplyStore | None, Progress | None]]
Keep = Callable[[str, Evaluation], Kept]  # what a stage, by its name, keeps replies in and tells how far it is


class Questions(NamedTuple):
    """Tasks that a choice is made by, and those that its result is reported on."""

    selection: Sequence[Task]
    report: Sequence[Task]


def halves(encoded: Sequence[TaskPrompts], share: float, seed: int) -> tuple[list[TaskPrompts], list[TaskPrompts]]:
    """Divide the contexts of every task at random: `share` of them, at least one, and the rest, at least one.

    Equal contexts, such as one document with several sets of questions, stay together.

    Raises:
        UsageError: a task has one context.
    """
    parted = [_parted(task, share, seed) for task in encoded]
    return [first for first, _ in parted], [second for _, second in parted]


def select(
    loaded: LoadedModel,
    profile: Profile,
    size: Size,
    questions: Questions,
    settings: Settings,
    phases: Sequence[str] = ("prefill",),
    explored: Explored | None = None,
    rule: Rule | None = None,
    keep: Keep | None = None,
) -> Selection:
    """Choose a strategy of a profile at one size; see `prepare_selection` and its `run`."""
    return prepare_selection(loaded, profile, size, questions, settings, phases, explored, rule).run(keep)


def prepare_selection(
    loaded: LoadedModel,
    profile: Profile,
    size: Size,
    questions: Questions,
    settings: Settings,
    phases: Sequence[str] = ("prefill",),
    explored: Explored | None = None,
    rule: Rule | None = None,
) -> PreparedSelection:
    """Make all candidates and baselines, and check that they, the model and the questions fit together.

    Every phase setting is judged against baselines of its own. `settings.samples` is how many contexts of every task
    are asked in each of the two splits.

    Raises:
        UsageError: no phases, a task with one context, a question in both splits, or nothing is evicted from any
            prompt; see `find_field`.
        IncompatibleError: model and profile, or model and questions, do not fit together.
    """
    profile.metadata.model.require(loaded.fingerprint, "this profile")
    if not phases:
        raise UsageError(f"no phases to evict in: give at least one of {', '.join(PHASES)}")
    fields = [find_field(loaded, profile, size, when, explored) for when in phases]
    contests = []
    for field in fields:
        plans = {name: entrant.plan for name, entrant in field.entrants.items()}
        result = prepare_plans(loaded, plans, questions.selection, settings)
        note = check_eviction(result.evaluation, size)
        told = field if note is None else replace(field, notes=(*field.notes, note))
        contests.append(_Contest(told, result))
    prepared = PreparedSelection(loaded, profile, size, questions, settings, rule or Rule(), tuple(contests))
    prepared.check()
    return prepared


class _Contest(NamedTuple):
    """One phase setting, with all of its entrants ready to run on all questions of the selection split."""

    field: Field
    prepared: PlanEvaluation


@dataclass(frozen=True, eq=False)
class PreparedSelection:
    """A selection that is ready to run."""

    loaded: LoadedModel
    profile: Profile
    size: Size
    questions: Questions
    settings: Settings
    rule: Rule
    contests: tuple[_Contest, ...]

    def check(self) -> None:
        """UsageError if the stages or the report split have questions in common, or too few."""
        self._stages(self.contests[0].prepared)
        chosen_by = set(_asked_of(self.contests[0].prepared.evaluation.encoded))
        common = chosen_by.intersection(_asked_of(self._report_prompts))
        if common:
            raise UsageError(
                f"{len(common)} questions are in the selection and in the report split: what a strategy is chosen by "
                "says nothing about it, give tasks with splits"
            )

    @property
    def replies(self) -> dict[str, int]:
        """The most replies of each stage and of the report, those of the full cache among them."""
        finalists, counts = self.rule.top + self.rule.kept + 1, {"first": 0, "second": 0}
        for contest in self.contests:
            first, second = self._stages(contest.prepared)
            counts["first"] += first.evaluation.replies
            asked = sum(task.coverage.questions for task in second.evaluation.encoded)
            counts["second"] += min(finalists, len(contest.prepared.evaluation.contenders)) * asked
        return counts | {"report": 4 * sum(task.coverage.questions for task in self._report_prompts)}

    def config(self, evaluation: Evaluation) -> RunConfig:
        """Return the configuration of a stage; with profile and size, a name says what it stands for.

        So other candidates or finalists go on with the same replies.
        """
        digest = sha256(self.profile.to_bytes()).hexdigest()
        return evaluation.stage_config("select", profile_sha256=digest, **self.size.as_json())

    def run(self, keep: Keep | None = None) -> Selection:
        """Run both stages of every phase setting, decide, and report; `keep` is asked for a ledger before each stage.

        Raises:
            IncompatibleError, UsageError: see `Evaluation.run`.
        """
        keeping = keep or (lambda _, __: nullcontext((None, None)))
        outcomes = [self._judged(contest, keeping) for contest in self.contests]
        best = max(range(len(outcomes)), key=lambda n: outcomes[n].score)
        chosen, field = outcomes[best], self.contests[best].field
        plan = self._plan(field.entrants[chosen.written], chosen, outcomes)
        return Selection(
            self.loaded.name, self.size, self.settings.protocol, self.settings.seed, self.rule, tuple(outcomes),
            chosen, field.even, plan, self._reported(chosen, field, keeping),
        )  # fmt: skip

    def _judged(self, contest: _Contest, keep: Keep) -> Outcome:
        field, seed = contest.field, self.settings.seed
        rule = replace(self.rule, level=self.rule.level / len(self.contests))
        opened = _run(self._stages(contest.prepared)[0], f"{field.phases}/first", keep)
        before = Scores.of(opened.comparison.samples, opened.comparison.contexts)
        finalists = before.ranked(list(field.candidates))[: rule.top]
        baselines = before.ranked(list(field.baselines))[: rule.kept]
        again = self._prepared(field, (*finalists, *baselines), self.questions.selection)
        closed = _run(self._stages(again)[1], f"{field.phases}/second", keep)
        after = Scores.of(closed.comparison.samples, closed.comparison.contexts)
        best = before.beside(after).ranked(baselines)[0]
        leads = {name: closed.gain(name, [best]) for name in finalists}
        verdicts = accepted(after, leads, best, baselines, rule, seed)
        winners = after.ranked([name for name, (_, good) in verdicts.items() if good])
        standings = [_standing(name, field, opened, closed, leads, verdicts) for name in field.entrants]
        return Outcome(
            field.phases, tuple(sorted(standings, key=_rank)), closed.score(FULL), best,
            winners[0] if winners else None, rule.level, rule.margin, _asked(opened.comparison),
            _asked(closed.comparison), (*field.notes, *closed.comparison.notes),
        )  # fmt: skip

    def _reported(self, chosen: Outcome, field: Field, keep: Keep) -> Reported:
        names = dict.fromkeys([field.even, chosen.best, *([chosen.winner] if chosen.winner else [])])
        result = _run(self._prepared(field, list(names), self.questions.report), f"{chosen.phases}/report", keep)
        held = {name: Held(found.entries, found.most) for name, found in result.comparison.held.items()}
        gain = share = None
        if chosen.winner:
            gain = result.gain(chosen.winner, [chosen.best])
            scores = Scores.of(result.comparison.samples, result.comparison.contexts)
            share = recovered(scores, chosen.winner, chosen.best, seed=self.settings.seed)
        told = {name: result.score(name) for name in (FULL, *names)}
        return Reported(_asked(result.comparison), told, held, gain, share, tuple(result.comparison.notes))

    def _plan(self, entrant: Entrant, chosen: Outcome, outcomes: Sequence[Outcome]) -> Plan:
        """The plan to write; its provenance says how it was chosen."""
        origin, one = self.profile.metadata.provenance, chosen.standing(entrant.name)
        told = {
            **origin.settings, **self.size.as_json(), **entrant.origin, "phases": chosen.phases,
            "phases_tried": tuple(outcome.phases for outcome in outcomes), "fallback": chosen.winner is None,
            "candidates": chosen.count("candidate"), "baselines": chosen.count("baseline"),
            "best_baseline": chosen.best, "selection_protocol": self.settings.protocol,
            "selection_questions": (chosen.first.questions, chosen.second.questions),
            "selection_score": chosen.score, "selection_seed": self.settings.seed,
            "lead": None if one.lead is None else one.lead.mean, "chance": one.chance, "margin": self.rule.margin,
        }  # fmt: skip
        made = provenance(SIGNALLED, origin.seed, origin.data_sha256, told)
        return entrant.plan.model_copy(update={"provenance": made})

    def _prepared(self, field: Field, names: Sequence[str], tasks: Sequence[Task]) -> PlanEvaluation:
        plans = {name: field.entrants[name].plan for name in names}
        return prepare_plans(self.loaded, plans, tasks, self.settings)

    def _stages(self, prepared: PlanEvaluation) -> tuple[PlanEvaluation, PlanEvaluation]:
        first, second = halves(prepared.evaluation.encoded, self.rule.share, self.settings.seed)
        return _asking(prepared, first), _asking(prepared, second)

    @cached_property
    def _report_prompts(self) -> list[TaskPrompts]:
        how = self.settings
        return encode_tasks(self.loaded, self.questions.report, how.samples, how.seed, how.max_length)


def _asking(prepared: PlanEvaluation, encoded: list[TaskPrompts]) -> PlanEvaluation:
    return replace(prepared, evaluation=replace(prepared.evaluation, encoded=encoded))


def _run(prepared: PlanEvaluation, name: str, keep: Keep) -> PlanComparison:
    with keep(name, prepared.evaluation) as (store, progress):
        return prepared.run(progress, store)


def _standing(
    name: str,
    field: Field,
    first: PlanComparison,
    second: PlanComparison,
    leads: Mapping[str, Difference],
    verdicts: Mapping[str, tuple[float, bool]],
) -> Standing:
    found = second.score(name) if name in second.labels else None
    chance, good = verdicts.get(name, (None, False))
    kind: Kind = "candidate" if name in field.candidates else "baseline"
    return Standing(name, kind, first.score(name), found, leads.get(name), chance, good)


def _rank(one: Standing) -> tuple[bool, float]:
    return one.second is None, -(one.first if one.second is None else one.second).mean


def _asked(comparison: Comparison) -> Asked:
    return Asked(sum(comparison.distinct.values()), sum(one.questions for one in comparison.coverage))


def _asked_of(encoded: Sequence[TaskPrompts]) -> Iterator[str]:
    """Hashes of all questions with what they follow."""
    for task in encoded:
        for prompt in task.prompts:
            yield from (token_hash(prompt.with_question(question)) for question in prompt.questions)


def _parted(task: TaskPrompts, share: float, seed: int) -> tuple[TaskPrompts, TaskPrompts]:
    names = list(dict.fromkeys(task.contexts[prompt.key] for prompt in task.prompts))
    if len(names) < 2:
        raise UsageError(
            f"task {task.task.name} has one context to select by: two stages need two or more, ask more --samples"
        )
    random.Random(f"{seed}/{task.task.name}").shuffle(names)
    count = min(max(round_half_up(share * len(names)), 1), len(names) - 1)
    early = set(names[:count])
    return _part(task, early), _part(task, set(names) - early)


def _part(task: TaskPrompts, chosen: set[str]) -> TaskPrompts:
    prompts = tuple(prompt for prompt in task.prompts if task.contexts[prompt.key] in chosen)
    coverage = replace(
        task.coverage,
        contexts=len(prompts),
        truncated=sum(prompt.truncated for prompt in prompts),
        questions=sum(len(prompt.questions) for prompt in prompts),
    )
    return replace(task, prompts=prompts, coverage=coverage)

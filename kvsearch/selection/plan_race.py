"""The contest of named plans on the questions of a split, for `run`, `select`, `evolve` and `validate`.

A `PlanRace` decides between candidates and baselines in rounds; who stays for the next round, and which verdict ends
it, is said in `kvsearch.selection.race`. Of candidates that are made of signals it also says whether each signal is
worth following, by questions that all plans answer, see `kvsearch.selection.verdicts`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import chain
from typing import Any

from kvsearch.core.arrays import TIE
from kvsearch.core.errors import assert_present
from kvsearch.core.items import group_by_key
from kvsearch.evaluation.compare import Evaluation, Split, StageStore, estimate_replies, prepare_plans
from kvsearch.evaluation.names import FULL
from kvsearch.evaluation.samples import Contexts, Sample
from kvsearch.evaluation.statistics import (
    MIN_CONTEXTS_FOR_INTERVAL,
    contrast_scores,
    count_contexts,
    estimate,
    share_level,
    summarize,
)
from kvsearch.evaluation.totals import check_eviction
from kvsearch.models.loading import LoadedModel
from kvsearch.models.work import StageCost
from kvsearch.plan import Size
from kvsearch.runs.identity import Job, RunConfig
from kvsearch.runtime import Program
from kvsearch.runtime.program import make_full_program
from kvsearch.selection.candidates import CandidateSet, content_hash
from kvsearch.selection.race import (
    ELIMINATION_LEVEL,
    FINALISTS,
    Race,
    bound_lead,
    find_hopeless,
    plan_rounds,
    plan_screenings,
)
from kvsearch.selection.records import (
    DroppedMethod,
    MethodKind,
    MethodResult,
    PhaseResult,
    QuestionCount,
    Rule,
    Screening,
)
from kvsearch.selection.scores import Scores
from kvsearch.selection.splits import divide_contexts, list_texts
from kvsearch.selection.verdicts import BudgetVerdicts, judge_signal
from kvsearch.tasks.encode import TaskPrompts, force_replies
from kvsearch.tasks.metrics import is_forced
from kvsearch.tasks.metrics.likelihood import read_loss

EXPECTED_HOPEFUL = 16  # methods that are about left after the first screening, for forecasts
SCREENED_TOKENS = 32  # of a right reply that are forced to screen methods: the logits of all rows are held at once


@dataclass(frozen=True, eq=False)
class PlanRace:
    """A race of candidates and baselines, evaluated in rounds on the questions of a split.

    Replies of a round are stored under the name of the race and the number of the round. If it `screens`, hopeless
    methods are dropped by their losses before they reply.
    """

    prepared: Evaluation  # all candidates and baselines on the questions of all rounds
    candidate_set: CandidateSet
    rule: Rule
    size: Size
    name: str
    screens: bool = True

    @property
    def encoded(self) -> list[TaskPrompts]:
        """The questions of all rounds."""
        return self.prepared.encoded

    @property
    def available(self) -> int:
        """Number of contexts of all rounds."""
        return count_contexts(self.encoded)

    @property
    def mean_budget(self) -> float:
        """Mean budget of plans of a profile; for a ratio, that of a prompt as long as calibrated."""
        profile = assert_present(self.candidate_set.profile, "only plans of a profile have a length")
        return self.size.pool(profile.metadata).mean

    @cached_property
    def rounds(self) -> list[list[TaskPrompts]]:
        """The questions of each round; after screenings about other contexts first, whose losses are measured, too."""
        ends = plan_rounds([len(list_texts(task)) for task in self.encoded])
        if self.screened is None:
            return divide_contexts(self.encoded, ends, self.prepared.split.seed)
        parts = divide_contexts(self.encoded, ends, self.prepared.split.seed, backwards=True)
        return [force_beside_replies(part) for part in parts]

    @cached_property
    def screened(self) -> list[list[TaskPrompts]] | None:
        """Questions of each screening, with right replies to teacher-force; None without screening.

        Nothing is screened where it is not wanted or possible, could not drop half of the methods, or is no cheaper.
        """
        plans = self.candidate_set
        # Screening forces every question once more: it pays if at least half of the methods may go.
        spare = sum(max(len(kind) - FINALISTS, 0) for kind in (plans.candidates, plans.baselines))
        if not self.screens or 2 * spare < len(plans.plans):
            return None
        return choose_screening_questions(self.encoded, self.prepared.split.seed)

    @property
    def programs(self) -> list[Program]:
        """The programs of all plans, baselines first; equal plans have one."""
        by_name = {method.name: method.program for method in self.prepared.methods}
        names = (*self.candidate_set.baselines, *self.candidate_set.candidates)
        return [by_name[name] for name in names if name in by_name]

    def cost(self, name: str) -> StageCost:
        """Estimate the cost of the race, as the stage `name`, at most."""
        model = self.prepared.loaded.model
        return estimate_choice(model, name, self.encoded, self.prepared.split, self.programs, self.screened)

    def config(self, evaluation: Evaluation) -> RunConfig:
        """Return the configuration of a stage, which identifies the plans behind the names.

        With a profile and a size a name says it, so other candidates, signals or finalists go on with the same replies.
        """
        profile = self.candidate_set.profile
        if profile is not None:
            job: Job = "validate" if self.candidate_set.signals else "select"
            return evaluation.stage_config(job, profile_sha256=profile.sha256, **self.size.as_json())
        plans = {name: content_hash(plan) for name, plan in self.candidate_set.plans.items()}
        return evaluation.stage_config("run", plans=plans, **self.size.as_json())

    def ask(
        self,
        questions: list[TaskPrompts],
        names: Sequence[str],
        stage: str,
        store: StageStore | None = None,
        *,
        answered: bool = False,
    ) -> Evaluation:
        """Evaluate some methods on `questions`; replies are stored under `stage`, `answered` as for `decide`."""
        part = self.prepared.of(names, questions)
        return part.run_stage("/".join(filter(None, (self.name, stage))), store, answered=answered)

    def decide(
        self, store: StageStore | None = None, level: float | None = None, *, answered: bool = False
    ) -> PhaseResult:
        """Run rounds until the plan to write is decided.

        Of equal scores the first name is the best. `level` is that of this race, where several share that of
        the rule, see `compute_shared_level`. `answered`: only if the full cache can answer, see
        `Evaluation.require_answers`.

        Raises:
            IncompatibleError, UsageError: see `Evaluation.run`.
        """
        level = self.rule.level if level is None else level
        rule = replace(self.rule, level=level)
        reading_twice = {method.name for method in self.prepared.methods if method.program.reads_twice}
        race = Race(
            list(self.candidate_set.candidates), list(self.candidate_set.baselines), rule, reading_twice=reading_twice
        )
        rounds: list[Evaluation] = []
        losses: list[list[Sample]] = []  # of right replies, as scores, by the stage that measured them
        behind: dict[str, str] = {}
        screening = None
        if self.screened is not None:
            if answered:  # before anything else
                self.ask(self.rounds[0], (), "round-1", store, answered=True)
            losses, screening = self._screen(self.screened, store)
            # Methods that were screened out do not reply at all.
            left_out = {method.name for method in screening.dropped}
            race.candidates = [name for name in race.candidates if name not in left_out]
            race.baselines = [name for name in race.baselines if name not in left_out]
        has_losses = self.screened is not None or all(is_forced(task.task) for task in self.encoded)
        screened = {(sample.task, sample.key) for part in losses for sample in part}
        for number, questions in enumerate(self.rounds, 1):
            names = [*race.candidates, *race.baselines]
            # Only those that are still in the race reply, and the full cache, which `of` adds.
            comparison = self.ask(questions, names, f"round-{number}", store, answered=answered and number == 1)
            rounds.append(comparison)
            if has_losses:  # those of texts are scores within bounds, beyond which methods still differ
                fresh = [sample for sample in comparison.samples if (sample.task, sample.key) not in screened]
                losses.append(negate_losses(fresh))
                race.losses = score_losses(losses, self.prepared.contexts)
            behind |= find_behind_on_kinds(rounds, race.candidates, race.baselines)
            # A candidate that loses a kind of question is no better, whatever its mean.
            race.candidates = [name for name in race.candidates if name not in behind]
            round_scores = Scores.of(comparison.samples, comparison.contexts)
            race.eliminate(round_scores, is_last=number == len(self.rounds), available=self.available)
            if race.winner is not None:
                break
        result = self._make_result(race, rounds, losses, tuple(behind.values()), level)
        return replace(result, screening=screening)

    def judge_signals(self, store: StageStore | None = None, *, answered: bool = False) -> BudgetVerdicts:
        """Evaluate all plans on all questions, and judge every signal by the gain of its strategy over its controls.

        Raises:
            IncompatibleError, UsageError: see `Evaluation.run`.
        """
        result = self.ask(self.encoded, list(self.candidate_set.plans), "", store, answered=answered)
        return BudgetVerdicts(
            budget=self.mean_budget,
            ratio=self.size.ratio,
            full=result.score(FULL),
            signals=tuple(judge_signal(result, use, names) for use, names in self.candidate_set.signals.items()),
        )

    def _screen(
        self, questions: Sequence[list[TaskPrompts]], store: StageStore | None
    ) -> tuple[list[list[Sample]], Screening]:
        """Drop all but the finalists by the losses of right replies, on more and more contexts; return these, too."""
        plans = self.candidate_set
        kinds = [list(plans.candidates), list(plans.baselines)]
        forced: list[Evaluation] = []
        losses: list[list[Sample]] = []
        dropped: list[DroppedMethod] = []
        for number, part in enumerate(questions, 1):
            # Contexts are forced only for those that may still be among the best.
            forced.append(self.ask(part, [*chain(*kinds)], f"screen-{number}", store))
            losses.append(negate_losses(forced[-1].samples))
            scores = score_losses(losses, self.prepared.contexts)
            if number < len(questions):
                leaving = find_hopeless(scores, *kinds)
            else:
                leaving = [name for kind in kinds for name in scores.rank(kind)[FINALISTS:]]
            dropped += self._record_dropped(scores, leaving)
            kinds = [[name for name in kind if name not in leaving] for kind in kinds]
        return losses, Screening(scores.rank([*chain(*kinds)])[0], QuestionCount.of(forced), tuple(dropped))

    def _record_dropped(self, losses: Scores, names: Sequence[str]) -> list[DroppedMethod]:
        """Record dropped methods, with their excess loss over the best method, in nats per token."""
        best = max(losses.mean(name) for name in self.candidate_set.plans if name in losses.sums)
        candidates = self.candidate_set.candidates
        return [
            DroppedMethod(name, "candidate" if name in candidates else "baseline", best - losses.mean(name))
            for name in names
        ]

    def _make_result(
        self,
        race: Race,
        rounds: Sequence[Evaluation],
        losses: Sequence[Sequence[Sample]],
        behind: tuple[str, ...],
        level: float,
    ) -> PhaseResult:
        """Make the result of a race; methods that stayed longest come first, then better ones.

        `decide` says what `losses` are.
        """
        assert race.winner is not None
        assert race.verdict is not None
        plans = self.candidate_set
        contexts = rounds[-1].contexts  # of all rounds
        kinds: dict[str, MethodKind] = dict.fromkeys(plans.candidates, "candidate")
        kinds |= dict.fromkeys(plans.baselines, "baseline")
        replied = {name: kind for name, kind in kinds.items() if name in rounds[0].names}
        methods = [_method_result(name, kind, race, rounds, losses) for name, kind in replied.items()]

        def standing(method: MethodResult) -> float:
            own = _select_parts(losses, method.name)
            return score_losses(own, self.prepared.contexts).mean(method.name) if own else method.score.mean

        methods.sort(key=lambda method: (-method.contexts, -standing(method)))
        samples = [sample for evaluation in rounds for sample in evaluation.samples]
        return PhaseResult(
            phases=plans.phases,
            methods=tuple(methods),
            full=estimate([sample for sample in samples if sample.method == FULL], contexts),
            best=race.best,
            winner=None if race.verdict == "baseline" else race.winner,
            verdict=race.verdict,
            level=level,
            sure=self.rule.sure,
            bound=race.bound if math.isfinite(race.bound) else None,
            asked=QuestionCount.of(rounds),
            available=self.available,
            notes=(*plans.notes, *behind, *rounds[-1].notes),
            lower=tuple(find_lower_kinds(samples, contexts, race.winner, race.best)),
        )


def _method_result(
    name: str, kind: MethodKind, race: Race, rounds: Sequence[Evaluation], losses: Sequence[Sequence[Sample]]
) -> MethodResult:
    """Return the score of a method in the rounds it took part in, and the lead of a candidate there."""
    contexts = rounds[-1].contexts  # of all rounds
    own_rounds = [evaluation for evaluation in rounds if name in evaluation.names]
    samples = [sample for evaluation in own_rounds for sample in evaluation.samples]
    row = summarize([sample for sample in samples if sample.method in {name, race.best}], race.best, contexts)[-1]
    score = row.scores[name]
    nats = row.nats.get(name)
    count = sum(sum(evaluation.distinct.values()) for evaluation in own_rounds)
    if kind == "baseline":
        return MethodResult(name, kind, score, count, nats=nats)
    signs = {name: 1.0, race.best: -1.0}
    lead = contrast_scores(samples, signs, contexts)
    # Nothing was bet on a candidate that was out after the first round.
    chance = min(1.0, math.exp(-race.evidence(name))) if name in race.wealths else 1.0
    paired = [*chain(*_select_parts(losses, name))]
    spared = contrast_scores(paired, signs, contexts) if paired and nats is None else None
    return MethodResult(name, kind, score, count, lead, chance, nats, spared)


def _select_parts(losses: Sequence[Sequence[Sample]], name: str) -> list[Sequence[Sample]]:
    """Select the stages whose losses were measured for a method, too."""
    return [part for part in losses if name in {sample.method for sample in part}]


def negate_losses(samples: Sequence[Sample]) -> list[Sample]:
    """Replace scores by minus the losses of the right replies, in nats per token."""
    losses = (read_loss(sample.reply) if sample.loss is None else sample.loss for sample in samples)
    return [replace(sample, score=-loss) for sample, loss in zip(samples, losses, strict=True)]


def score_losses(losses: Sequence[Sequence[Sample]], contexts: Contexts) -> Scores:
    """Return the scores of what `negate_losses` returned for several stages, for methods that took part in all."""
    return reduce(Scores.concatenate, (Scores.of(samples, contexts) for samples in losses if samples))


def force_beside_replies(encoded: Sequence[TaskPrompts]) -> list[TaskPrompts]:
    """Return tasks whose right replies are teacher-forced beside each reply, as far as screenings force them."""
    return [task if is_forced(task.task) else replace(task, forced_tokens=SCREENED_TOKENS) for task in encoded]


def choose_screening_questions(encoded: Sequence[TaskPrompts], seed: int) -> list[list[TaskPrompts]] | None:
    """Choose the questions of each screening, with right replies to force, for a ranking of methods by loss.

    Each is about others, which the last rounds of a race ask about, too. None where some question has no right reply,
    or all are answered by force anyway.
    """
    if all(is_forced(task.task) for task in encoded):
        return None
    counts = [len(list_texts(task)) for task in encoded]
    parts = divide_contexts(encoded, plan_screenings(counts), seed)
    forced = [force_replies(part, SCREENED_TOKENS) for part in parts]
    return None if any(part is None for part in forced) else [part for part in forced if part is not None]


def estimate_choice(
    model: Any,
    name: str,
    encoded: Sequence[TaskPrompts],
    split: Split,
    programs: Sequence[Program],
    screened: Sequence[list[TaskPrompts]] | None,
) -> StageCost:
    """Estimate the cost of a choice among programs, as the stage `name`, with as many finalists as are likely.

    Baselines come first among the programs, candidates last.
    """
    if screened is None:
        return estimate_replies(model, name, encoded, split, programs)
    # At most: finalists of both kinds, and the full cache.
    finalists = [make_full_program(model), *programs[:FINALISTS], *programs[-FINALISTS:]]
    cost = estimate_replies(model, name, force_beside_replies(encoded), split, finalists)
    hopeful = programs[:: -(-len(programs) // EXPECTED_HOPEFUL)]  # of every kind some
    screenings = [
        estimate_replies(model, name, part, split, hopeful if number else programs)
        for number, part in enumerate(screened)
    ]
    return replace(cost, work=sum((screening.work for screening in screenings), cost.work))


def find_lower_kinds(samples: Sequence[Sample], contexts: Contexts, written: str, best: str) -> list[str]:
    """Find the kinds of questions on which the written plan scores less than the best baseline."""
    compared = [sample for sample in samples if sample.method in {written, best}]
    scores = {kind: Scores.of(of_kind, contexts) for kind, of_kind in group_by_kind(compared).items()}
    return [kind for kind, of_kind in scores.items() if of_kind.mean(written) < of_kind.mean(best) - TIE]


def find_behind_on_kinds(
    rounds: Sequence[Evaluation], candidates: Sequence[str], baselines: Sequence[str]
) -> dict[str, str]:
    """Find candidates that the best baseline leads on a kind of question beyond chance, with a reason for each.

    Kinds are tasks, or the categories of a task that has several. A mean over all may hide that one is lost. With one
    kind there is none to hide. Two leads that happen to be equal leave no doubt to Student's t: kinds are judged from
    as many contexts on as an interval takes.
    """
    samples = [sample for comparison in rounds for sample in comparison.samples]
    contexts = rounds[-1].contexts  # of all rounds
    remaining = [sample for sample in samples if sample.method in {*candidates, *baselines}]
    best = Scores.of(remaining, contexts).rank(baselines)[0]
    kinds = group_by_kind(remaining)
    behind = {}
    for kind, of_kind in kinds.items() if len(kinds) > 1 else ():
        scores = Scores.of(of_kind, contexts)
        if len(scores.tasks) < MIN_CONTEXTS_FOR_INTERVAL:
            continue
        # Bonferroni over kinds: with many of them one would be lost by chance.
        level = share_level(ELIMINATION_LEVEL, len(kinds))
        for name in candidates:
            if bound_lead(scores, best, name, level) > 0:
                behind[name] = f"{name} is out: {best} is ahead of it on {kind}"
    return behind


def group_by_kind(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Group samples by the kind of their question: the task, or its category where the task has several."""
    categories: dict[str, set[str]] = {}
    for sample in samples:
        categories.setdefault(sample.task, set()).add(sample.category)

    def kind(sample: Sample) -> str:
        return f"{sample.task}, {sample.category}" if len(categories[sample.task]) > 1 else sample.task

    return group_by_key(samples, kind)


def prepare_race(loaded: LoadedModel, plans: CandidateSet, split: Split, rule: Rule, size: Size, name: str) -> PlanRace:
    """Prepare a race of plans at a size, whose replies are kept by its `name`; check that they evict something.

    Raises:
        UsageError: nothing is evicted from any prompt; see `prepare_plans`.
        IncompatibleError: see `prepare_plans`.
    """
    prepared = prepare_plans(loaded, plans.plans, split)
    note = check_eviction(prepared, size)
    if note is not None:
        plans = replace(plans, notes=(*plans.notes, note))
    return PlanRace(prepared, plans, rule, size, name)

"""A selection at one size: candidates against baselines, then a report on another split.

The rule of the decision is described in `kvsearch.selection.race`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from kvsearch.core.arrays import TIE
from kvsearch.core.errors import UsageError, assert_present
from kvsearch.core.naming import delegate
from kvsearch.evaluation.compare import Evaluation, Split, StageStore, estimate_replies, prepare_plans
from kvsearch.evaluation.guarantee import (
    compute_hoeffding_bentkus,
    count_shown,
    find_shown_bound,
    make_guarantee,
    measure_context_losses,
    measure_evicted_masses,
)
from kvsearch.evaluation.names import FULL
from kvsearch.evaluation.runner import hash_rows
from kvsearch.evaluation.statistics import count_contexts
from kvsearch.models.loading import LoadedModel
from kvsearch.models.work import StageCost
from kvsearch.plan import Plan, Profile, Size
from kvsearch.plan.arithmetic import add_carry, even_out_budgets
from kvsearch.plan.origin import ContextRecord, Use, join_records, make_provenance
from kvsearch.plan.schema import NO_CARRY
from kvsearch.runs.estimates import Estimate
from kvsearch.runtime import Program
from kvsearch.selection.candidates import CandidateSet, content_hash
from kvsearch.selection.plan_race import PlanRace, prepare_race
from kvsearch.selection.records import (
    REPORTED_STRATEGIES,
    MethodKind,
    PhaseResult,
    PlanPart,
    QuestionCount,
    ReportScores,
    Rule,
    Selection,
    TriedBudget,
)
from kvsearch.selection.scores import Scores, measure_gap_closed
from kvsearch.selection.splits import refuse_shared
from kvsearch.tasks.encode import TaskPrompts, collect_contexts, list_context_hashes

# methods that a report asks beside what is always there: the best of a run, some of which take several readings
REPORTED_OF_RUN: Final[Mapping[MethodKind, int]] = {"candidate": 2, "baseline": 2}
REPORTED_OF_PROFILE: Final[Mapping[MethodKind, int]] = {"candidate": REPORTED_STRATEGIES}
RUN_METHOD: Final = "run"  # of plans that were not chosen among the strategies of a profile
BUDGET_STEP: Final = 1.1  # from one budget that is tried to the next
MORE_BUDGETS: Final = 2  # above the smallest that looks good, which are tested, too
GUARANTEE_STAGE: Final = "guarantee"


@dataclass(frozen=True, eq=False)
class SelectionJob:
    """A selection that is ready to run: `race` decides, the split `reported` is evaluated once.

    With a `profile` candidates are strategies of its signals, else each has its own origin.
    """

    race: PlanRace
    reported: Split
    size = delegate("race.size")
    protocol = delegate("reported.protocol")
    seed = delegate("reported.seed")

    @property
    def profile(self) -> Profile | None:
        """The calibration whose signals all candidates are made of."""
        return self.race.candidate_set.profile

    def check(self) -> None:
        """Raise UsageError if the selection and the report split have questions or contexts in common."""
        refuse_shared({"selection": self.race.encoded, "report": self.report_prompts})

    @cached_property
    def report_prompts(self) -> list[TaskPrompts]:
        """Prompts of the report split."""
        return self.reported.encode(self.race.prepared.loaded)

    @property
    def hashes(self) -> dict[Use, list[str]]:
        """The hashes of the contexts of both splits."""
        return {"chosen": list_context_hashes(self.race.encoded), "reported": list_context_hashes(self.report_prompts)}

    @property
    def costs(self) -> list[StageCost]:
        """Costs of the race and the report, at most."""
        model = self.race.prepared.loaded.model
        choice = self.race.cost(f"choose at {self.size.words}")
        programs = choose_reported(self.race.programs, self.reported_counts)
        name = f"report at {self.size.words}"
        return [choice, estimate_replies(model, name, self.report_prompts, self.reported, programs)]

    @property
    def reported_counts(self) -> Mapping[MethodKind, int]:
        """How many of the best candidates and baselines the report asks."""
        return REPORTED_OF_RUN if self.profile is None else REPORTED_OF_PROFILE

    @property
    def content(self) -> dict[str, Any]:
        """All settings that decide replies, as JSON; selections of other candidates or phases are the same run."""
        content = self.race.config(self.race.prepared).content
        return {**content, "reported": {task.task.name: hash_rows(task) for task in self.report_prompts}}

    def run(self, store: StageStore | None = None, level: float | None = None, *, answered: bool = False) -> Selection:
        """Run the race and the report; `store` keeps the replies, other arguments as for `PlanRace.decide`.

        Raises:
            IncompatibleError, UsageError: see `Evaluation.run`.
        """
        return self.report(self.race.decide(store, level, answered=answered), store)

    def report(self, chosen: PhaseResult, store: StageStore | None = None) -> Selection:
        """Evaluate the chosen plan on the report split; errors as for `Evaluation.run`."""
        candidate_set = self.race.candidate_set
        plans = candidate_set.plans
        leader = chosen.leader
        counts = self.reported_counts.items()
        foremost = [method for kind, count in counts for method in chosen.list_foremost(kind, count)]
        names = [chosen.written, chosen.best, candidate_set.even, *(method.name for method in foremost)]
        partial_plans = {} if self.profile is not None else self._find_partial_plans(chosen.written)
        report_plans = {name: plans[name] for name in dict.fromkeys(names)} | dict(partial_plans.values())
        evaluation = prepare_plans(self.race.prepared.loaded, report_plans, self.reported)
        stage = "report" if self.profile is None else f"{chosen.phases}/report"
        report = evaluation.run_stage(stage, store)
        gain = share = None
        if chosen.winner is not None:
            gain = report.gain(chosen.winner, [chosen.best])
            scores = Scores.of(report.samples, report.contexts)
            share = measure_gap_closed(scores, chosen.winner, chosen.best, seed=self.seed)
        reported = ReportScores(
            asked=QuestionCount.of([report]),
            scores={name: report.score(name) for name in report.names},
            held={name: report.held[label] for name, label in report.names.items()},
            gain=gain,
            share=share,
            ahead=report.find_higher_plans(chosen.written),
            lead=None if leader is None else report.gain(leader.name, [chosen.best]),
            notes=tuple(report.notes),
            nats=report.nats(chosen.written),
            parts=measure_parts(report, candidate_set.even, {part: name for part, (name, _) in partial_plans.items()}),
            retained=report.retained_shares(),
            retained_gap=report.retained_gap(chosen.written),
        )
        return Selection(self, chosen, reported, report.gain(FULL, [chosen.written]), self._make_plan(chosen))

    def _find_partial_plans(self, written: str) -> dict[PlanPart, tuple[str, Plan]]:
        """Find the partial plans of the written one (rankings, budgets, carry), each with the name of an equal method.

        The first has its rankings with uniform budgets, the second its budgets, too, the last is the plan itself. Plans
        that keep the same as the one before are left out.
        """
        plans = self.race.candidate_set.plans
        known = {content_hash(plan): name for name, plan in reversed(plans.items())}
        plan = plans[written]
        partial_plans: dict[PlanPart, Plan] = {
            "rankings": even_out_budgets(plan),
            "budgets": add_carry(plan, NO_CARRY),
            "carry": plan,
        }
        before = content_hash(plans[self.race.candidate_set.even])
        named = {}
        for part, partial_plan in partial_plans.items():
            content = content_hash(partial_plan)
            if content != before:
                named[part] = (known.get(content, f"{written}, {part} alone"), partial_plan)
            before = content
        return named

    def _make_plan(self, chosen: PhaseResult) -> Plan:
        """Make the plan to write; its provenance records how it was chosen, and on which contexts."""
        candidate_set = self.race.candidate_set
        plan = candidate_set.plans[chosen.written]
        selected = chosen.method(chosen.written)
        fitted = plan.provenance if self.profile is None else self.profile.metadata.provenance
        settings = {
            **fitted.settings,
            **self.size.as_json(),
            **candidate_set.origins[chosen.written],
            "fallback": chosen.winner is None,
            "verdict": chosen.verdict,
            "candidates": chosen.count("candidate"),
            "baselines": chosen.count("baseline"),
            "best_baseline": chosen.best,
            "selection_protocol": self.protocol,
            "selection_questions": chosen.asked.questions,
            "selection_score": chosen.score,
            "selection_seed": self.seed,
            "lead": None if selected.lead is None else selected.lead.mean,
            "chance": selected.chance,
        }
        method = RUN_METHOD
        contexts = fitted.contexts
        if self.profile is not None:
            method = self.profile.metadata.method
            settings["phases"] = chosen.phases
            settings["phases_tried"] = (chosen.phases,)
            if chosen.winner is None:
                contexts = ContextRecord()  # a baseline was fitted on nothing
        record = ContextRecord(
            chosen=collect_contexts(self.race.encoded), reported=collect_contexts(self.report_prompts)
        )
        origin = make_provenance(method, fitted.seed, fitted.data_sha256, settings, join_records([contexts, record]))
        return plan.model_copy(update={"provenance": origin})


def measure_parts(report: Evaluation, even: str, names: Mapping[PlanPart, str]) -> dict[PlanPart, Estimate]:
    """Measure the gain of each part of a plan over the parts before it, by the `names` of the partial plans.

    The first is compared with the baseline `even`. Gains are scores, or on text nats per token of reduced loss.
    """
    gains: dict[PlanPart, Estimate] = {}
    for (part, name), before in zip(names.items(), [even, *names.values()], strict=False):
        losses = report.nats(name)
        gain = losses[before].difference if losses else report.gain(name, [before])
        gains[part] = assert_present(gain, f"{name} and {before} are one plan")
    return gains


def prepare_selection(
    loaded: LoadedModel, plans: CandidateSet, size: Size, choice: Split, reported: Split, rule: Rule
) -> SelectionJob:
    """Prepare the choice among plans of a size on one split, `reported` on another.

    Raises:
        UsageError: a question in both splits, or nothing is evicted from any prompt.
        IncompatibleError: model and plans, or model and questions, do not fit together.
    """
    name = "" if plans.profile is None else plans.phases
    selection = SelectionJob(prepare_race(loaded, plans, choice, rule, size, name), reported)
    selection.check()
    return selection


def choose_reported(programs: Sequence[Program], counts: Mapping[MethodKind, int] = REPORTED_OF_RUN) -> list[Program]:
    """Choose about the programs of a report among all, to forecast its cost; baselines come first, candidates last.

    A report asks the best of either kind, the best baseline, even budgets, and the full cache, counted as a candidate.
    """
    candidates = counts.get("candidate", 0) + 1
    return [*programs[: counts.get("baseline", 0) + 2], *programs[-candidates:]]


def list_budgets(least: int, largest: int) -> list[int]:
    """List the budgets to try from `least` to `largest`, each a tenth larger than the one before, rounded up."""
    budgets = []
    budget = float(least)
    while budget <= largest:
        budgets.append(round(budget))
        budget = max(budget * BUDGET_STEP, round(budget) + 1)
    return budgets


def find_guaranteed_budget(
    budgets: Sequence[int],
    bound: float,
    confidence: float,
    selection_at: Callable[[int], tuple[SelectionJob, StageStore | None]],
    store: StageStore | None = None,
) -> tuple[Selection, list[TriedBudget]]:
    """Find the smallest budget whose chosen plan is shown to lose at most `bound`; return its selection and all tries.

    A plan is better the more it may keep, so `budgets`, which ascend, are bisected by what the chosen plan loses on the
    questions that it is chosen by: it looks good if such a mean loss would be shown by as many contexts as the report
    has. The smallest that looks good is flattered by these questions, so the next two are tried, too. Then all plans
    answer the report split, which nothing was chosen by, and are tested from the largest to the smallest, see
    `count_shown`. `selection_at` prepares the selection at a budget, and says where its replies are kept; `store` keeps
    the replies of the test.

    Raises:
        UsageError: no budget looks good, or none is shown; see also `PlanRace.decide`.
    """
    chosen: dict[int, tuple[SelectionJob, StageStore | None, PhaseResult]] = {}

    def choose(budget: int) -> tuple[SelectionJob, StageStore | None, PhaseResult]:
        if budget not in chosen:
            selection, replies = selection_at(budget)
            chosen[budget] = (selection, replies, selection.race.decide(replies, answered=True))
        return chosen[budget]

    def looks_good(budget: int) -> bool:
        selection, _, result = choose(budget)
        contexts = count_contexts(selection.report_prompts)
        loss = max(result.full.mean - result.score, 0.0)
        return compute_hoeffding_bentkus(loss, contexts, bound) <= 1 - confidence + TIE

    first = bisect_left(budgets, True, key=looks_good)
    for budget in budgets[first : first + 1 + MORE_BUDGETS]:
        choose(budget)
    sequence = sorted(chosen, reverse=True)
    selection = chosen[sequence[0]][0]
    plans = {str(budget): chosen[budget][0].race.candidate_set.plans[chosen[budget][2].written] for budget in sequence}
    evaluation = prepare_plans(selection.race.prepared.loaded, plans, selection.reported)
    report = evaluation.run_stage(GUARANTEE_STAGE, store)
    losses = [measure_context_losses(report.samples, report.names[name], report.contexts) for name in plans]
    shown = count_shown(losses, bound, confidence)
    tried = [
        TriedBudget(budget, chosen[budget][2].written, float(lost.mean()), confirmed=number < shown)
        for number, (budget, lost) in enumerate(zip(sequence, losses, strict=True))
    ]
    if not shown:
        raise UsageError(
            f"of {len(sequence)} budgets that were tried, up to {sequence[0]} entries per kv head, none is shown to "
            f"lose at most {100 * bound:g} points: {sequence[0]} loses {100 * losses[0].mean():.2f} on "
            f"{len(losses[0])} contexts, which shows {100 * find_shown_bound(losses[0], confidence):g} at most: allow "
            "more with --lose-at-most, or ask more contexts with --samples"
        )
    job, replies, result = chosen[sequence[shown - 1]]
    selected = job.report(result, replies)
    loaded = selection.race.prepared.loaded
    masses = measure_evicted_masses(loaded, selected.plan, job.report_prompts, selection.reported)
    guarantee = make_guarantee(
        selected.plan, losses[shown - 1], bound, confidence, job.report_prompts, selection.protocol, masses
    )
    origin = selected.plan.provenance.model_copy(update={"guarantee": guarantee})
    return replace(selected, plan=selected.plan.model_copy(update={"provenance": origin})), tried

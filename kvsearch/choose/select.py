"""Choose a strategy on one split and report it on another: all candidates, then the best of them on fresh questions.

What counts is said in `kvsearch.choose.acceptance`. Every phase setting is judged against baselines of its own
phases; what the one with the highest score in the second stage ends with is chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

from kvsearch.choose.acceptance import Rule, Scores, recovered
from kvsearch.choose.candidates import CandidateSet, Explored, find_candidates
from kvsearch.choose.contest import Contest, prepare_contest, refuse_shared
from kvsearch.choose.decomposition import Decomposition, between
from kvsearch.choose.selection import ByBudgets, PhaseResult, QuestionCount, Reported, Selection
from kvsearch.choose.splits import Questions
from kvsearch.errors import UsageError
from kvsearch.evaluation.compare import Evaluation, Settings, work_of
from kvsearch.evaluation.plan_comparison import Keep, prepare_plans
from kvsearch.models.loading import LoadedModel
from kvsearch.models.speed import Work
from kvsearch.plan import PHASES, Plan, Profile, Size
from kvsearch.plan.contexts import ContextRecord, Use, joined
from kvsearch.plan.origin import provenance
from kvsearch.plan.profile import SIGNALLED
from kvsearch.runs.identity import RunConfig
from kvsearch.strategies.names import FULL
from kvsearch.tasks.encode import TaskPrompts, asked_hashes, asked_set, encode_tasks


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
            prompt; see `find_candidates`.
        IncompatibleError: model and profile, or model and questions, do not fit together.
    """
    profile.metadata.model.require(loaded.fingerprint, "this profile")
    if not phases:
        raise UsageError(f"no phases to evict in: give at least one of {', '.join(PHASES)}")
    chosen = rule or Rule()
    contests = tuple(
        prepare_contest(loaded, found, questions.selection, settings, chosen, size)
        for found in [find_candidates(loaded, profile, size, when, explored) for when in phases]
    )
    prepared = PreparedSelection(loaded, profile, size, questions, settings, chosen, contests)
    prepared.check()
    return prepared


@dataclass(frozen=True, eq=False)
class PreparedSelection:
    """A selection that is ready to run."""

    loaded: LoadedModel
    profile: Profile
    size: Size
    questions: Questions
    settings: Settings
    rule: Rule
    contests: tuple[Contest, ...]

    def check(self) -> None:
        """Raise UsageError if the stages or the report split have questions or contexts in common, or too few."""
        contest = self.contests[0]
        contest.stages(contest.prepared)
        refuse_shared({"selection": contest.encoded, "report": self._report_prompts})

    @property
    def replies(self) -> dict[str, int]:
        """The most replies of each stage and of the report, those of the full cache among them."""
        counts: Counter[str] = Counter()
        for one in self.contests:
            counts.update(one.replies)
        return dict(counts) | {
            "report": self._most_reported * sum(one.coverage.questions for one in self._report_prompts)
        }

    @property
    def work(self) -> Work:
        """The most that the model has to do."""
        made, protocol = (
            work_of(self._report_prompts, self.settings.protocol, self._most_reported),
            self.settings.protocol,
        )
        for one in self.contests:
            first, second = (stage.evaluation for stage in one.stages(one.prepared))
            made += first.work + work_of(second.encoded, protocol, one.most_finalists)
        return made

    @property
    def _most_reported(self) -> int:
        """The most plans of a report: full, even, best baseline, single, the other kind of budgets, two parts."""
        return self.rule.top + 7

    def config(self, evaluation: Evaluation) -> RunConfig:
        """Return the configuration of a stage; with profile and size, a name says what it stands for.

        So other candidates or finalists go on with the same replies.
        """
        digest = sha256(self.profile.to_bytes()).hexdigest()
        return evaluation.stage_config("select", profile_sha256=digest, **self.size.as_json())

    def run(self, keep: Keep | None = None, *, answered: bool = False) -> Selection:
        """Run both stages of every phase setting, decide, and report; `keep` is asked for a ledger before each stage.

        `answered`: only if the full cache can answer, see `Evaluation.require_answers`.

        Raises:
            IncompatibleError, UsageError: see `Evaluation.run`.
        """
        results = [one.decide(keep, answered=answered, shares=len(self.contests)) for one in self.contests]
        best = max(range(len(results)), key=lambda n: results[n].score)
        chosen, found = results[best], self.contests[best].found
        return Selection(
            self.loaded.name, self.size, self.settings.protocol, self.settings.seed, self.rule, tuple(results), chosen,
            found.even, self._reported(chosen, found, keep), self._plan(found, chosen, results),
        )  # fmt: skip

    def _reported(self, chosen: PhaseResult, found: CandidateSet, keep: Keep | None) -> Reported:
        """Ask the report split, once: what was chosen, the finalists, and what takes the leader apart."""
        leader, plans, parts, notes = chosen.leader, found.plans, dict[str, Plan](), list[str]()
        best: dict[bool, str | None] = {True: None, False: None}  # candidate, with equal budgets and with its own
        for one in reversed(chosen.methods):
            if one.kind == "candidate":
                best[found.has_equal_budgets(one.name)] = one.name
        equal, own = best[True], best[False]
        single = max(filter(found.has_equal_budgets, found.baselines), key=lambda name: chosen.method(name).first.mean)
        if leader is not None:
            parts, lifted = between(self.profile, self.size, plans[leader.name], plans[single])
            if lifted:
                notes.append(
                    f"{single} always keeps more than {leader.name} gives some layers: its parts differ by that"
                )
        candidates = [*(one.name for one in chosen.finalists), *filter(None, (equal, own))]
        names = list(dict.fromkeys([found.even, chosen.best, *([single, *candidates] if leader else [])]))
        report = prepare_plans(
            self.loaded, {name: plans[name] for name in names} | parts, self.questions.report, self.settings
        )
        result = report.run_stage(f"{chosen.phases}/report", keep)
        gain = share = lead = by_budgets = decomposition = None
        if chosen.winner:
            gain = result.gain(chosen.winner, [chosen.best])
            scores = Scores.of(result.comparison.samples, result.comparison.contexts)
            share = recovered(scores, chosen.winner, chosen.best, seed=self.settings.seed)
        if leader is not None:
            lead = result.gain(leader.name, [chosen.best])
            by_budgets = ByBudgets(equal, own, result.gain(own, [equal]) if equal and own else None)
            decomposition = Decomposition.of(result, leader.name, single)
        return Reported(
            QuestionCount.of(result.comparison), {name: result.score(name) for name in (FULL, *names, *parts)},
            {name: result.comparison.held[label] for name, label in result.labels.items()}, gain, share, lead,
            by_budgets, decomposition, (*notes, *result.comparison.notes),
        )  # fmt: skip

    def _plan(self, found: CandidateSet, chosen: PhaseResult, results: Sequence[PhaseResult]) -> Plan:
        """Return the plan to write; its provenance says how it was chosen."""
        origin, one = self.profile.metadata.provenance, chosen.method(chosen.written)
        how = {
            **origin.settings, **self.size.as_json(), **found.origins[chosen.written], "phases": chosen.phases,
            "phases_tried": tuple(result.phases for result in results), "fallback": chosen.winner is None,
            "candidates": chosen.count("candidate"), "baselines": chosen.count("baseline"),
            "best_baseline": chosen.best, "selection_protocol": self.settings.protocol,
            "selection_questions": (chosen.first.questions, chosen.second.questions),
            "selection_score": chosen.score, "selection_seed": self.settings.seed,
            "lead": None if one.lead is None else one.lead.mean, "chance": one.chance, "margin": self.rule.margin,
        }  # fmt: skip
        made = provenance(SIGNALLED, origin.seed, origin.data_sha256, how, self._contexts(chosen))
        return found.plans[chosen.written].model_copy(update={"provenance": made})

    @property
    def hashes(self) -> dict[Use, list[str]]:
        """What the contexts of the selection and of the report split are known by, see `kvsearch.plan.contexts`."""
        return {"chosen": asked_hashes(self._selection_prompts), "reported": asked_hashes(self._report_prompts)}

    def _contexts(self, chosen: PhaseResult) -> ContextRecord | None:
        """Return what the plan to write was fitted, chosen and reported on; a baseline was fitted on nothing."""
        fitted = self.profile.metadata.provenance.contexts if chosen.winner else ContextRecord()
        asked = ContextRecord(chosen=asked_set(self._selection_prompts), reported=asked_set(self._report_prompts))
        return joined([fitted, asked])

    @property
    def _selection_prompts(self) -> list[TaskPrompts]:
        """What both stages ask, the same in every phase setting."""
        return self.contests[0].encoded

    @cached_property
    def _report_prompts(self) -> list[TaskPrompts]:
        how = self.settings
        return encode_tasks(self.loaded, self.questions.report, how.samples, how.seed, how.max_length, how.used)

"""The best plan of a size, of fitted rankings and single policies: chosen on one split, reported on another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from kvsearch.choose.acceptance import Scores, recovered
from kvsearch.choose.candidates import content_hash
from kvsearch.choose.contest import Contest, refuse_shared
from kvsearch.choose.selection import PhaseResult, QuestionCount, Reported, Selection
from kvsearch.evaluation.compare import Evaluation
from kvsearch.evaluation.plan_comparison import Keep, prepare_plans
from kvsearch.plan import Plan, Size
from kvsearch.plan.contexts import ContextRecord, Use, joined
from kvsearch.plan.origin import provenance
from kvsearch.runs.estimates import Difference
from kvsearch.runs.identity import RunConfig
from kvsearch.strategies.names import FULL
from kvsearch.tasks.base import Task
from kvsearch.tasks.encode import TaskPrompts, asked_hashes, asked_set, encode_tasks

METHOD: Final = "run"


@dataclass(frozen=True, eq=False)
class Overall:
    """What was chosen at a size, and how far the full cache is above it on the report split."""

    selection: Selection
    loss: Difference


@dataclass(frozen=True, eq=False)
class OverallChoice:
    """A choice that is ready to be made."""

    contest: Contest
    size: Size
    report: Sequence[Task]
    shares: int = 1  # sizes that are chosen at together, which share the level

    @property
    def longest(self) -> int:
        """Tokens of the longest context that is chosen by."""
        return max(len(prompt.context) for task in self.contest.encoded for prompt in task.prompts)

    def check(self) -> None:
        """Raise UsageError if a stage has no context, or the splits have questions or contexts in common."""
        self.contest.stages(self.contest.prepared)
        refuse_shared({"selection": self.contest.encoded, "report": self.report_prompts})

    @property
    def replies(self) -> dict[str, int]:
        """The most replies of both stages and of the report."""
        rule, asked = self.contest.rule, sum(task.coverage.questions for task in self.report_prompts)
        return self.contest.replies | {"report": (rule.top + rule.kept + 2) * asked}

    @property
    def hashes(self) -> dict[Use, list[str]]:
        """What the contexts of both splits are known by, see `kvsearch.plan.contexts`."""
        return {"chosen": asked_hashes(self.contest.encoded), "reported": asked_hashes(self.report_prompts)}

    @cached_property
    def report_prompts(self) -> list[TaskPrompts]:
        """What is asked once, of what was chosen and what it is compared with."""
        how = self.contest.settings
        return encode_tasks(self.contest.loaded, self.report, how.samples, how.seed, how.max_length, how.used)

    def config(self, evaluation: Evaluation) -> RunConfig:
        """Return the configuration of a stage: names stand for these plans."""
        plans = {name: content_hash(plan) for name, plan in self.contest.found.plans.items()}
        return evaluation.stage_config("run", plans=plans, **self.size.as_json())

    def run(self, keep: Keep | None = None) -> Overall:
        """Decide in two stages, then report.

        Raises:
            UsageError: see `Evaluation.run`.
            IncompatibleError: the full cache itself scores next to nothing; see also `Evaluation.run`.
        """
        return self.reported(self.contest.decide(keep, answered=True, shares=self.shares), keep)

    def reported(self, result: PhaseResult, keep: Keep | None = None) -> Overall:
        """Ask the report split of what was decided; errors as for `Evaluation.run`."""
        contest = self.contest
        report, loss = self._reported(result, keep)
        selection = Selection(
            contest.loaded.name, self.size, contest.settings.protocol, contest.settings.seed, contest.rule, (result,),
            result, contest.found.even, report, self._plan(result),
        )  # fmt: skip
        return Overall(selection, loss)

    def _reported(self, result: PhaseResult, keep: Keep | None) -> tuple[Reported, Difference]:
        """Ask the report split once, of everything that reached the second stage and of even budgets."""
        plans, seed = self.contest.found.plans, self.contest.settings.seed
        asked = [one.name for one in result.methods if one.second is not None]
        names = list(dict.fromkeys([result.written, result.best, self.contest.found.even, *asked]))
        chosen = {name: plans[name] for name in names}
        found = prepare_plans(self.contest.loaded, chosen, self.report, self.contest.settings).run_stage("report", keep)
        gain = share = lead = None
        if result.winner:
            gain = found.gain(result.winner, [result.best])
            scores = Scores.of(found.comparison.samples, found.comparison.contexts)
            share = recovered(scores, result.winner, result.best, seed=seed)
        if result.leader is not None:
            lead = found.gain(result.leader.name, [result.best])
        held = {name: found.comparison.held[label] for name, label in found.labels.items()}
        scored = {name: found.score(name) for name in (FULL, *names)}
        reported = Reported(
            QuestionCount.of(found.comparison), scored, held, gain, share, lead, notes=tuple(found.comparison.notes)
        )
        return reported, found.gain(FULL, [result.written])

    def _plan(self, result: PhaseResult) -> Plan:
        """Return the plan to write; its provenance says how it was chosen, and what on."""
        plan, one = self.contest.found.plans[result.written], result.method(result.written)
        origin, settings = plan.provenance, self.contest.settings
        how: Mapping[str, Any] = {
            **origin.settings, **self.size.as_json(), "strategy": result.written, "fallback": result.winner is None,
            "candidates": result.count("candidate"), "baselines": result.count("baseline"),
            "best_baseline": result.best, "selection_protocol": settings.protocol,
            "selection_questions": (result.first.questions, result.second.questions), "selection_score": result.score,
            "selection_seed": settings.seed, "lead": None if one.lead is None else one.lead.mean, "chance": one.chance,
        }  # fmt: skip
        asked = ContextRecord(chosen=asked_set(self.contest.encoded), reported=asked_set(self.report_prompts))
        contexts = joined([origin.contexts, asked])
        made = provenance(METHOD, origin.seed, origin.data_sha256, how, contexts)
        return plan.model_copy(update={"provenance": made})

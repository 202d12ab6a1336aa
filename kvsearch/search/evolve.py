"""EvolKV (arXiv 2509.08315): search budgets on a task, then choose and report on held-out questions.

1. Search, on the first split: start plans, then the stages of `loop`, by a cheap loss or by the task's metric.
2. Choice, on the second split, whose contexts nothing at hand was searched, fitted or chosen on: the best candidates
   and all start plans answer by themselves. A candidate is the result if it beats the best start plan or is likely
   better, by the rule of `kvsearch.selection.race`, else that start plan is. So the result never scores below the best
   start plan there. With parity the result is the paper's, whatever scores above it.
3. Report, on the third split, which is asked once: the choice beside the full cache and baselines of the same size.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from kvsearch.budgets.allocator import Uniform
from kvsearch.core.arrays import Ints
from kvsearch.core.canonical import hash_json
from kvsearch.core.errors import UsageError
from kvsearch.core.items import Progress
from kvsearch.evaluation.compare import Evaluation, Split, StageStore, estimate_replies, prepare_plans
from kvsearch.evaluation.methods import make_direct_plan
from kvsearch.evaluation.names import EVOLVED, EXPANDED, FULL, STREAMING, UNIFORM
from kvsearch.models.work import StageCost, Work
from kvsearch.plan import Phase, Plan, Size
from kvsearch.plan.origin import ContextRecord, Use, join_records
from kvsearch.policies import create_policy
from kvsearch.runtime import Program
from kvsearch.runtime.program import make_full_program
from kvsearch.runtime.replay.forced_answers import Asked, ForcedAnswer
from kvsearch.search.bank.samples import BankSample, list_samples
from kvsearch.search.loop import Search, SearchOutcome, Watcher
from kvsearch.search.optimisers import default_population
from kvsearch.search.settings import EvolveSettings
from kvsearch.search.stages import BudgetBounds, make_stages
from kvsearch.search.start_plans import SearchSetup, make_start_tables
from kvsearch.search.trials import START_PLANS, Candidate, Executor, TrialLog, TrialRunner
from kvsearch.selection.candidates import CandidateSet
from kvsearch.selection.plan_race import PlanRace
from kvsearch.selection.records import PhaseResult, Rule, compute_shared_level
from kvsearch.selection.splits import refuse_shared
from kvsearch.tasks.encode import TaskPrompts, collect_contexts, list_context_hashes
from kvsearch.tasks.metrics import is_right

SPLIT_USES: dict[str, Use] = {"search": "fitted", "choice": "chosen", "report": "reported"}


@dataclass(frozen=True, eq=False)
class Choice:
    """The choice on the second split: its name, budgets and plan, and the result of the race of all finalists.

    `finalists` are the start plans by their names, and the best candidates as "#1", "#2", ...; `best` is the one with
    the highest score of those asked to the end, of equal ones the lower loss, then the first. Baselines of the
    `race` are start plans.
    """

    name: str
    table: Ints
    plan: Plan
    finalists: Mapping[str, Candidate]
    best: str
    race: PhaseResult


@dataclass(frozen=True, eq=False)
class PreparedSearch:
    """A search at one budget whose model, questions and start plans are checked; see `prepare_searches`.

    `splits` are named as in `SPLIT_USES`; only the first is needed where nothing is chosen.
    """

    setup: SearchSetup
    budget: int
    settings: EvolveSettings
    starts: Mapping[str, Ints]
    splits: Mapping[str, Split]
    encoded: Mapping[str, list[TaskPrompts]]
    before: ContextRecord  # of the start plans that were given
    rule: Rule = field(default_factory=Rule)
    kept: frozenset[str] | None = None  # SHA-256 of the questions that are searched on; None: all of the split
    answers: Mapping[Asked, ForcedAnswer] | None = None  # what is teacher-forced; None: the right answers as given

    def as_json(self) -> dict[str, Any]:
        """Return the size and the settings, for the configuration of the run and the provenance of its plans."""
        return {"budget": self.budget, **self.settings.as_json()}

    @cached_property
    def samples(self) -> list[BankSample]:
        """Samples of the search split."""
        samples = list_samples(self.encoded["search"], self.settings.protocol, self.answers)
        return [sample for sample in samples if self.kept is None or sample.sha256 in self.kept]

    @property
    def search_split(self) -> Split:
        """The search split: its questions and prompt settings."""
        return self.splits["search"]

    @property
    def needs_replies(self) -> bool:
        """Whether the teacher-forced answers are the model's own replies."""
        return self.settings.answers == "own" and self.settings.objective != "metric"

    @cached_property
    def data_sha256(self) -> str:
        """SHA-256 of the samples and answers of the search split."""
        return hash_json([[sample.sha256, sample.answer.tolist()] for sample in self.samples])

    @cached_property
    def bounds(self) -> BudgetBounds:
        """Floors and caps of heads, and the total."""
        # budgets above what a sequence has in a phase are of no use, but a start plan may have them
        share = self.budget * (self.settings.group_size if self.settings.parity else self.setup.heads[0])
        tables = np.stack([self.setup.floors, *self.starts.values()])
        floors_of_phase = [int(part.max()) for part in np.split(tables, len(self.setup.phases), axis=1)]
        caps_of_phase = [
            max(min(find_longest(self.samples, phase), share), floor)
            for phase, floor in zip(self.setup.phases, floors_of_phase, strict=True)
        ]
        rows = len(self.setup.floors) // len(caps_of_phase)
        caps = np.repeat(np.array(caps_of_phase), rows)[:, None] * np.ones_like(self.setup.floors)
        return BudgetBounds(self.budget, self.setup.floors, caps, self.setup.phases, self.setup.choices)

    @property
    def cap(self) -> int:
        """The largest budget that a candidate may have."""
        return int(self.bounds.caps.max())

    @property
    def maximum_candidates(self) -> int:
        """Upper bound of evaluated candidates: start plans, all generations, and the mean of every stage."""
        settings = self.settings
        uniform = next(iter(self.starts.values()))
        populations = [
            settings.population or default_population(stage.space.dimension)
            for stage in make_stages(settings, self.bounds, self.starts, lambda: uniform)
        ]
        return len(self.starts) + len(populations) + settings.generations * sum(populations)

    def search_costs(self, candidates: int) -> list[StageCost]:
        """Estimate the cost of full-cache replies and of evaluating candidates.

        Prompts are read once for all candidates where plans evict in them.
        """
        model = self.setup.loaded.model
        full = make_full_program(model)
        full_passes = 1 + self.needs_replies + 2 * (self.settings.hard_below is not None)
        once = {sample.prompt_sha256: len(sample.prompt) for sample in self.samples}
        is_metric = self.settings.objective == "metric"
        read = sum(len(sample.question_ids if is_metric else sample.following) for sample in self.samples)
        replied = sum(sample.limit for sample in self.samples) if is_metric else 0
        if not self.setup.evicts_prompts_only:
            read += sum(len(sample.prompt) for sample in self.samples)
        work = Work(tokens=candidates * read) + Work.replying(candidates * replied) + Work.over(once.values())
        return [
            estimate_replies(
                model, "ask the full cache", self.encoded["search"], self.search_split, [full] * full_passes
            ),
            StageCost(f"search, at most {candidates:,} candidates", len(once), len(self.samples), work),
        ]

    def decision_costs(self) -> list[StageCost]:
        """Estimate the cost, at most, of choosing among the finalists and of the report."""
        model = self.setup.loaded.model
        starts = [Program.from_plan(model, self.setup.plan(table, {}, 0)) for table in self.starts.values()]
        chosen = [make_full_program(model), *starts, *starts[:1] * (self.settings.finalists + 1)]
        reported = [make_full_program(model), *starts, *starts[:1] * 3]
        return [
            estimate_replies(
                model, f"{stage} at {self.budget} entries", self.encoded[split], self.search_split, programs
            )
            for stage, split, programs in (("choose", "choice", chosen), ("report", "report", reported))
        ]

    def require_answers(self, progress: Progress | None = None) -> None:
        """Evaluate the full cache on the search split; IncompatibleError if it scores next to nothing."""
        prepare_plans(self.setup.loaded, {}, self.splits["search"]).require_answers(progress)

    def search(
        self, executor: Executor, log: TrialLog, allowed: int | None, watcher: Watcher, name: str = ""
    ) -> SearchOutcome:
        """Run the search; `allowed` as for `TrialRunner`, `name` and errors as for `Search`."""
        trials = TrialRunner(executor, log, self.settings.objective, allowed)
        return Search(self.settings, self.bounds, self.starts, trials, watcher, name).run()

    def plan(self, table: Ints, settings: Mapping[str, Any], contexts: ContextRecord | None = None) -> Plan:
        """Make the plan of budgets [phases * L, Hkv]; `settings` and `contexts` go to its provenance."""
        return self.setup.plan(table, settings, self.settings.seed, self.data_sha256, contexts)

    @property
    def hashes(self) -> dict[Use, list[str]]:
        """Hashes of the contexts of every split, by use; see `kvsearch.plan.origin`."""
        return {SPLIT_USES[name]: list_context_hashes(encoded) for name, encoded in self.encoded.items()}

    def record(self, searched: bool) -> ContextRecord:
        """Return the contexts a result was fitted, chosen and reported on, including the contexts of its start plans.

        A result that was not `searched` is a start plan: the search split had no influence on it.
        """
        contexts = {SPLIT_USES[name]: collect_contexts(encoded) for name, encoded in self.encoded.items()}
        if not searched:
            del contexts["fitted"]
        return self.before.with_more(**contexts)

    def choose(
        self,
        outcome: SearchOutcome,
        store: StageStore | None = None,
        store_name: str = "choice",
        level: float | None = None,
    ) -> Choice:
        """Choose on the second split: a candidate that is better than the best start plan, else the start plan.

        Of several the one with the highest score; with parity the paper's result whatever it scores. See `Choice`.
        """
        finalists = self._find_finalists(outcome)
        settings = {**self.as_json(), "samples": len(self.samples), "ended": outcome.ended}
        plans = {name: self.plan(finalist.table, settings) for name, finalist in finalists.items()}
        ranked = list(finalists)
        if not outcome.flat:  # of equal scores the lower loss is the better one
            ranked.sort(key=lambda name: finalists[name].value)
        candidates = {name: plans[name] for name in ranked if name not in self.starts}
        starts = {name: plans[name] for name in ranked if name in self.starts}
        candidate_set = CandidateSet(self.settings.phases, candidates, starts, even=UNIFORM)
        prepared = prepare_plans(self.setup.loaded, candidate_set.plans, self.splits["choice"])
        race = PlanRace(prepared, candidate_set, self.rule, Size(self.budget), store_name, screens=False)
        result = race.decide(store, level)
        chosen = result.written
        if outcome.result is not None:
            paper = outcome.result.table
            chosen = next(name for name, finalist in finalists.items() if np.array_equal(finalist.table, paper))
        table = finalists[chosen].table
        origin = {
            **settings, "chosen": chosen, "found": finalists[chosen].where, "score": result.method(chosen).score.mean,
        }  # fmt: skip
        plan = self.plan(table, origin, self.record(searched=chosen not in self.starts))
        to_the_end = [name for name in ranked if result.method(name).contexts == result.asked.contexts]
        best = max(to_the_end, key=lambda name: round(result.method(name).score.mean, 9))
        return Choice(chosen, table, plan, finalists, best, result)

    def reported_plans(self, choice: Choice) -> dict[str, Plan]:
        """Return the plans of the report: the choice as "evolved", start plans, and StreamingLLM with uniform budgets.

        Also the best finalist, where something else was chosen.
        """
        tables = dict(self.starts)
        if choice.best != choice.name:
            tables[choice.best] = choice.finalists[choice.best].table
        plans = {EVOLVED: choice.plan, **{name: self.plan(table, {}) for name, table in tables.items()}}
        streaming = create_policy(STREAMING)
        if self.budget > streaming.sink_count:
            plans[STREAMING] = make_direct_plan(
                self.setup.loaded, streaming, Size(budget=self.budget), self.setup.phases, Uniform()
            )
        return plans

    def _find_finalists(self, outcome: SearchOutcome) -> dict[str, Candidate]:
        values = {candidate.table.tobytes(): candidate.value for candidate in outcome.pool}
        finalists: dict[str, Candidate] = {}
        for name, table in self.starts.items():
            finalists[name] = Candidate(table, values.get(table.tobytes(), math.inf), f"start {name}")
        searched = [candidate for candidate in outcome.pool if not candidate.where.startswith(START_PLANS)]
        searched = searched[: self.settings.finalists]
        if outcome.mean is not None:
            searched.append(outcome.mean)
        known = {table.tobytes() for table in self.starts.values()}
        for candidate in searched:
            if candidate.table.tobytes() not in known:
                known.add(candidate.table.tobytes())
                finalists[f"#{len(finalists) - len(self.starts) + 1}"] = candidate
        return finalists


@dataclass(frozen=True, eq=False)
class Evolved:
    """A finished search: its outcome, the choice, and the evaluation on the report split."""

    search: PreparedSearch
    outcome: SearchOutcome
    choice: Choice
    report: Evaluation


def prepare_searches(
    base: SearchSetup,
    starts: Mapping[int, Mapping[str, Plan]],
    settings: EvolveSettings,
    splits: Mapping[str, Split],
    before: ContextRecord | None = None,
    rule: Rule | None = None,
) -> tuple[PreparedSearch, ...]:
    """Encode the questions of all splits, and prepare and check a search at every budget.

    `starts` are start plans by name, by budget: the entries that a kv head keeps on average. `rule` says how sure to
    be. No context is used that one of these plans was fitted or chosen on, as `before` says (None: as the plans of the
    first budget say themselves).

    Raises:
        UsageError: too few questions, no fresh context, a question in two splits, a group size above the layers, a
            budget that leaves nothing to search or evicts nothing, or what `make_start_tables`, `encode_tasks` and
            spaces refuse.
        IncompatibleError: see `make_start_tables` and `encode_tasks`.
    """
    layers = base.heads[0]
    if "group_size" not in settings.model_fields_set:  # the paper's, as far as the model has so many layers
        size = 1 if settings.space == "joint" else min(settings.group_size, layers)
        settings = settings.model_copy(update={"group_size": size})
    if settings.space == "groups" and settings.group_size > layers:
        raise UsageError(f"a group of {settings.group_size} layers: the model has {layers}, give at most that many")
    tables = {budget: make_start_tables(base, budget, plans) for budget, plans in starts.items()}
    plans = next(iter(starts.values()))
    if before is None and plans:
        before = join_records(plan.provenance.contexts for plan in plans.values()) or ContextRecord(complete=False)
    before = before or ContextRecord()
    splits = {name: split.without(before.used) for name, split in splits.items()}
    encoded = {name: split.encode(base.loaded) for name, split in splits.items()}
    searches = tuple(
        PreparedSearch(base, budget, settings, table, splits, encoded, before, rule or Rule())
        for budget, table in tables.items()
    )
    if len(searches[0].samples) < 2:
        raise UsageError("one question to search on: the result would fit that one alone, give more --samples")
    refuse_shared(encoded)
    for search in searches:
        check_budget(search)
    return searches


def run_searches(
    searches: Sequence[PreparedSearch],
    executor: Executor,
    log: TrialLog,
    allowed: int | None,
    watcher: Watcher,
    store: StageStore | None = None,
) -> list[Evolved]:
    """Search and choose at every budget, then report on all; `allowed` bounds the candidates of all budgets together.

    Budgets share one bank and one log, and none knows of the others' results. The report split is asked once, at the
    end, of the result of each budget, and beside it of the plan of the smallest budget scaled to that size: these are
    the optimised and the extrapolated plans of EvolKV (sections 4.2.1 and C.4). Errors as `Search.run`.
    """
    is_front = len(searches) > 1
    finished: list[tuple[PreparedSearch, SearchOutcome, Choice]] = []
    alone = searches[0].rule.level
    for number, search in enumerate(searches, 1):
        outcome = search.search(executor, log, allowed, watcher, f"budget {search.budget}: " if is_front else "")
        if number == len(searches):
            executor.close()  # its memory is for the replies now
        level = compute_shared_level(alone, len(searches), (choice.race for *_, choice in finished))
        choice = search.choose(outcome, store, f"choice-{search.budget}" if is_front else "choice", level)
        finished.append((search, outcome, choice))
    level = compute_shared_level(alone, len(searches), (choice.race for *_, choice in finished))
    finished = [
        (search, outcome, replace(choice, race=choice.race.with_level(level))) for search, outcome, choice in finished
    ]
    smallest = finished[0][2].table
    plans: dict[str, Plan] = {}
    report_names: list[dict[str, str]] = []  # the names in the report, by the name at one budget
    for search, _, choice in finished:
        compared = search.reported_plans(choice)
        if plans:
            compared[EXPANDED] = search.plan(search.bounds.complete(smallest), {})
        report_names.append({name: f"{name}-{search.budget}" if is_front else name for name in compared})
        plans |= {report_names[-1][name]: plan for name, plan in compared.items()}
    first = searches[0]
    report = prepare_plans(first.setup.loaded, plans, first.splits["report"]).run_stage("report", store)
    evolved = []
    for (search, outcome, choice), names in zip(finished, report_names, strict=True):
        labels = {FULL: report.names[FULL], **{name: report.names[name_asked] for name, name_asked in names.items()}}
        evolved.append(Evolved(search, outcome, choice, replace(report, names=labels)))
    return evolved


def find_longest(samples: Sequence[BankSample], phase: Phase = "prefill") -> int:
    """Return the tokens of the longest compressed prompt; in the decode phase, with question and longest reply."""
    if phase == "prefill":
        return max(len(sample.prompt) for sample in samples)
    return max(len(sample.prompt) + len(sample.question_ids) + sample.limit for sample in samples)


def check_budget(prepared: PreparedSearch) -> None:
    """Raise UsageError if the budget leaves nothing to search, evicts nothing, or does not suit the space."""
    budget = prepared.budget
    phases = prepared.setup.phases
    choices = np.reshape(prepared.setup.floors, (prepared.setup.choices, -1, prepared.setup.heads[1]))
    for phase, floors in zip(phases, np.split(choices.min(axis=0), len(phases)), strict=True):
        longest = find_longest(prepared.samples, phase)
        text = "prompt" if phase == "prefill" else "prompt and reply"
        if budget >= longest:
            raise UsageError(
                f"{budget} entries per kv head keep all of the longest {text} ({longest} tokens): this budget does not "
                "matter here, give a smaller --budget or longer prompts"
            )
        if budget * floors.size <= floors.sum():
            raise UsageError(
                f"a budget of {budget} is what the policy always keeps: nothing is left to search, raise it"
            )
    uniform = next(iter(prepared.starts.values()))
    next(make_stages(prepared.settings, prepared.bounds, prepared.starts, lambda: uniform))


def keep_hard_questions(
    searches: Sequence[PreparedSearch], progress: Progress | None = None
) -> tuple[tuple[PreparedSearch, ...], str]:
    """Restrict searches to questions that eviction gets wrong and the full cache right; return them and a message.

    EvolKV optimises needles on at most 35 instances whose scores are below 60 (arXiv 2509.08315, section 4.2.3). What
    the full cache itself gets wrong tells nothing about budgets, and what even budgets get right leaves nothing to
    gain. Several searches have the same questions: those that are hard at the first budget, the smallest.

    Raises:
        UsageError: fewer than two questions are left.
    """
    first = searches[0]
    settings = first.settings
    assert settings.hard_below is not None
    scores = measure_difficulty(first, progress)
    right = [name for name, score in scores.items() if is_right(score[FULL])]
    hard = [name for name in right if 100 * scores[name][UNIFORM] < settings.hard_below]
    kept = hard
    if settings.hard_most is not None and settings.hard_most < len(hard):
        kept = random.Random(f"{settings.seed}/hard").sample(hard, settings.hard_most)
    if len(kept) < 2:
        raise UsageError(
            f"of {len(scores)} questions the full cache answers {len(right)} right, and {len(hard)} of these score "
            f"below {settings.hard_below:g} under even budgets of {first.budget} entries: too few to search on, raise "
            "--samples or --hard-below, or lower the budget"
        )
    message = (
        f"searching on {len(kept)} of {len(scores)} questions: the full cache answers {len(right)} right, {len(hard)} "
        f"of these score below {settings.hard_below:g} under even budgets of {first.budget} entries"
    )
    return tuple(replace(search, kept=frozenset(kept)) for search in searches), message


def measure_difficulty(search: PreparedSearch, progress: Progress | None = None) -> dict[str, dict[str, float]]:
    """Return the scores of all questions, by SHA-256, with the full cache and under even budgets."""
    even = {UNIFORM: search.plan(search.starts[UNIFORM], {})}
    scores: dict[str, dict[str, float]] = {}
    for reply in prepare_plans(search.setup.loaded, even, search.search_split).run(progress).samples:
        scores.setdefault(reply.prompt_sha256, {})[reply.method] = reply.score
    return scores

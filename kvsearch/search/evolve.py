"""EvolKV (arXiv 2509.08315): search budgets on what the model makes of a task, choose and report on fresh questions.

1. Search, on the first split: start plans, then the stages of `loop`, by a cheap loss or by the task's metric.
2. Choice, on the second split: the best candidates and all start plans answer by themselves, the highest score wins. So
   the result is never worse there than what the search started from.
3. Report, on the third split, which is asked once: the choice beside the full cache and baselines of the same size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kvsearch.budgets.uniform import Uniform
from kvsearch.errors import UsageError
from kvsearch.evaluate.encoding import TaskPrompts, encode_tasks
from kvsearch.evaluate.ledger import Ledger as Replies
from kvsearch.evaluate.runner import Progress
from kvsearch.evaluate.study import Evaluation, Settings
from kvsearch.evaluate.trial import Trial, prepare_trial
from kvsearch.export.build import Target
from kvsearch.export.direct import direct_plan
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Plan
from kvsearch.policies import create_policy
from kvsearch.search.bank import CandidateBank
from kvsearch.search.bank_samples import BankSample, bank_samples
from kvsearch.search.completion import complete
from kvsearch.search.contest import STREAMING, UNIFORM, Base, start_tables
from kvsearch.search.executors.base import Executor, Floats, Ints, Job
from kvsearch.search.ledger import Ledger
from kvsearch.search.loop import Found, Outcome, Search, Watcher
from kvsearch.search.scoring import Scoring
from kvsearch.search.settings import EvolveSettings, Limits
from kvsearch.search.stages import Frame
from kvsearch.tasks.base import Task

Kept = AbstractContextManager[tuple[Replies | None, Progress | None]]
Keep = Callable[[str, Evaluation], Kept]  # what "choice" and "report" keep replies in, and how they tell how far it is


@dataclass(frozen=True)
class Splits:
    """Tasks to search on, to choose by and to report on."""

    search: Sequence[Task]
    choice: Sequence[Task]
    report: Sequence[Task]


class BankEvaluator:
    """A bank as what an executor asks."""

    def __init__(self, bank: CandidateBank) -> None:
        self.bank = bank

    @property
    def tokens_spent(self) -> int:
        return self.bank.tokens_spent

    def evaluate(self, job: Job) -> Floats:
        """See `CandidateBank.values`."""
        return self.bank.values(job.objective, job.candidates, job.samples)  # type: ignore[arg-type]

    def close(self) -> None:
        self.bank.close()


@dataclass(frozen=True, eq=False)
class Choice:
    """What was chosen on the second split: its name, budgets and plan, and the trial of all finalists by name.

    `finalists` are the start plans by their names, and the best candidates as "#1", "#2", ...
    """

    name: str
    table: Ints
    plan: Plan
    trial: Trial
    finalists: Mapping[str, Found]


@dataclass(frozen=True, eq=False)
class Evolved:
    """A finished search: how it went, what was chosen, and how that does on the report split."""

    outcome: Outcome
    choice: Choice
    report: Trial


@dataclass(frozen=True, eq=False)
class PreparedSearch:
    """A search whose model, questions and start plans fit together; see `prepare_search`."""

    base: Base
    settings: EvolveSettings
    asked: Settings
    starts: Mapping[str, Ints]
    splits: Splits
    encoded: Mapping[str, list[TaskPrompts]]

    @property
    def loaded(self) -> LoadedModel:
        return self.base.loaded

    @cached_property
    def samples(self) -> list[BankSample]:
        """What is searched on."""
        return bank_samples(self.encoded["search"], self.settings.protocol)

    @cached_property
    def frame(self) -> Frame:
        """Floors, caps and the size that is shared."""
        return Frame(self.settings.budget, self.base.floors, self._caps)

    @property
    def cap(self) -> int:
        """The largest budget that a candidate may have."""
        return int(max(self._caps.max(), *(table.max() for table in self.starts.values())))

    @property
    def _caps(self) -> Ints:
        """Budgets above the longest prompt are of no use."""
        longest = max(len(sample.prompt) for sample in self.samples)
        layers = self.base.heads[0]
        most = self.settings.group_size if self.settings.space == "groups" else layers
        share = self.settings.budget * (most if self.settings.parity else layers)
        return np.full_like(self.base.floors, max(min(longest, share), int(self.base.floors.max())))

    def bank(self, max_memory: int | None = None, progress: Progress | None = None) -> CandidateBank:
        """Read the prompts once for all candidates; see `CandidateBank` for the errors."""
        full = self.settings.objective == "kl"
        return CandidateBank(
            self.loaded, self.base.by_layer, self.samples, self.cap, full=full, max_memory=max_memory, progress=progress
        )

    def search(self, executor: Executor, ledger: Ledger, limits: Limits, watcher: Watcher) -> Outcome:
        """The first part; see `Search.run` for the errors."""
        counts = [len(sample.following) for sample in self.samples]

        def tokens(chosen: Sequence[int] | None) -> int:
            return sum(counts) if chosen is None else sum(counts[number] for number in chosen)

        scoring = Scoring(executor, ledger, self.settings.objective, self.settings.job, limits, tokens)
        return Search(self.settings, self.frame, self.starts, scoring, ledger, len(self.samples), watcher).run()

    def choose(self, outcome: Outcome, keep: Keep | None = None) -> Choice:
        """The second part: the highest score on the second split; of equal ones the lower loss, then the first."""
        finalists = self._finalists(outcome)
        settings = self._origin(outcome)
        plans = {name: self._plan(found.table, settings) for name, found in finalists.items()}
        trial = self._trial(plans, self.splits.choice, "choice", keep)
        best = max(finalists, key=lambda name: (round(trial.score(name).mean, 9), -finalists[name].value))
        if outcome.flat:
            best = UNIFORM
        table = finalists[best].table
        chosen = {**settings, "chosen": best, "found": finalists[best].where, "score": trial.score(best).mean}
        return Choice(best, table, self._plan(table, chosen), trial, finalists)

    def report(self, choice: Choice, keep: Keep | None = None) -> Trial:
        """The third part: the choice as "evolved", beside start plans and StreamingLLM with even budgets."""
        plans = {"evolved": choice.plan, **{name: self._plan(table, {}) for name, table in self.starts.items()}}
        streaming, target = create_policy(STREAMING), Target(budget=self.settings.budget)
        if self.settings.budget > streaming.sink_count:
            plans[STREAMING] = direct_plan(self.loaded, streaming, target, ("prefill",), Uniform())
        return self._trial(plans, self.splits.report, "report", keep)

    def run(
        self, executor: Executor, ledger: Ledger, limits: Limits, watcher: Watcher, keep: Keep | None = None
    ) -> Evolved:
        """All three parts."""
        outcome = self.search(executor, ledger, limits, watcher)
        choice = self.choose(outcome, keep)
        return Evolved(outcome, choice, self.report(choice, keep))

    def _finalists(self, outcome: Outcome) -> dict[str, Found]:
        values = {tuple(one.table.ravel()): one for one in outcome.pool}
        found: dict[str, Found] = {}
        for name, table in self.starts.items():
            known = values.get(tuple(table.ravel()))
            found[name] = Found(table, known.value if known else float("inf"), f"start {name}")
        taken = {tuple(one.table.ravel()) for one in found.values()}
        for one in outcome.pool:
            table = complete(one.table, total=self.frame.total, floors=self.base.floors, caps=self.frame.caps)
            if len(found) >= len(self.starts) + self.settings.finalists:
                break
            if tuple(table.ravel()) not in taken:
                taken.add(tuple(table.ravel()))
                found[f"#{len(found) - len(self.starts) + 1}"] = Found(table, one.value, one.where)
        return found

    def _origin(self, outcome: Outcome) -> dict[str, Any]:
        return {**self.settings.as_json(), "samples": len(self.samples), "ended": outcome.ended}

    def _plan(self, table: Ints, settings: Mapping[str, Any]) -> Plan:
        return self.base.plan(table, settings, self.settings.seed)

    def _trial(self, plans: Mapping[str, Plan], tasks: Sequence[Task], name: str, keep: Keep | None) -> Trial:
        prepared = prepare_trial(self.loaded, plans, tasks, self.asked)
        keeping = keep or (lambda _, __: nullcontext((None, None)))
        with keeping(name, prepared.evaluation) as (ledger, progress):
            return prepared.run(progress, ledger)


def prepare_search(
    base: Base, settings: EvolveSettings, splits: Splits, asked: Settings, plans: Mapping[str, Plan]
) -> PreparedSearch:
    """Draw the questions of all splits, and check that everything fits together.

    `asked.samples` is how many contexts of every task each split has; `plans` are start plans by name.

    Raises:
        UsageError: too few questions, a question in two splits, a group size above the layers, or what `start_tables`
            and `encode_tasks` refuse.
        IncompatibleError: see `start_tables` and `encode_tasks`.
    """
    layers = base.heads[0]
    if settings.space == "groups" and settings.group_size > layers:
        raise UsageError(f"a group of {settings.group_size} layers: the model has {layers}, give at most that many")
    starts = start_tables(base, settings.budget, plans)
    encoded = {
        name: encode_tasks(base.loaded, tasks, asked.samples, asked.seed, asked.max_length)
        for name, tasks in (("search", splits.search), ("choice", splits.choice), ("report", splits.report))
    }
    prepared = PreparedSearch(base, settings, asked, starts, splits, encoded)
    _check_splits(prepared)
    return prepared


def _check_splits(prepared: PreparedSearch) -> None:
    if len(prepared.samples) < 2:
        raise UsageError("one question to search on: the result would fit that one alone, give more --samples")
    seen: dict[str, str] = {}
    for name, encoded in prepared.encoded.items():
        for sample in bank_samples(encoded, prepared.settings.protocol):
            other = seen.setdefault(sample.sha256, name)
            if other != name:
                raise UsageError(
                    f"{sample.place} is in the {other} and in the {name} split: what is searched or chosen on must not "
                    "be reported on, give tasks with splits"
                )

"""Searches of the bundled model on short contexts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvsearch.evaluation.compare import Split, prepare_plans
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Plan
from kvsearch.plan.schema import parse_phases
from kvsearch.policies import create_policy
from kvsearch.search.evaluators import make_executor
from kvsearch.search.evolve import SPLIT_USES, Evolved, PreparedSearch, prepare_searches
from kvsearch.search.loop import SearchOutcome
from kvsearch.search.settings import EvolveSettings
from kvsearch.search.start_plans import SearchSetup
from kvsearch.search.trials import TrialLog
from tests import tiny
from tests.search.searching import NullReporter

CONTEXTS, LENGTH, QUESTIONS, BUDGET = 4, 100, 2, 12
POLICY = create_policy("snapkv", {"window": 4, "kernel": 3})


def splits(contexts: int = CONTEXTS, answer: str | None = None) -> dict[str, Split]:
    """Three tasks with contexts of their own; `answer`: that of all questions."""
    whole = tiny.listed(*[(LENGTH, QUESTIONS)] * (3 * contexts))
    rows = whole.rows
    if answer is not None:
        rows = tuple(replace(row, queries=tuple(replace(q, answers=(answer,)) for q in row.queries)) for row in rows)
    firsts = [part * contexts for part in range(3)]
    parts = [Split([replace(whole, rows=rows[first : first + contexts])], contexts) for first in firsts]
    return dict(zip(SPLIT_USES, parts, strict=True))


def settings_of(**changes: Any) -> EvolveSettings:
    """Two generations in groups of two layers."""
    return EvolveSettings.model_validate({"group_size": 2, "generations": 2, "finalists": 4, **changes})


def prepare(
    loaded: LoadedModel,
    plans: Mapping[str, Plan] | None = None,
    contexts: int = CONTEXTS,
    budget: int = BUDGET,
    **changes: Any,
) -> PreparedSearch:
    """A search that is ready to run."""
    how = settings_of(**changes)
    base = SearchSetup.of(loaded, POLICY, parse_phases(how.phases))
    asked = splits(contexts).items()
    parts = {name: replace(split, protocol=how.protocol, seed=how.seed) for name, split in asked}
    (prepared,) = prepare_searches(base, {budget: plans or {}}, how, parts)
    return prepared


def evolve(prepared: PreparedSearch, path: Path) -> Evolved:
    """All three parts."""
    with make_executor(prepared, prepared.cap) as executor, TrialLog(path) as log:
        outcome = prepared.search(executor, log, None, NullReporter())
    return decide(prepared, outcome)


def decide(prepared: PreparedSearch, outcome: SearchOutcome) -> Evolved:
    """The second and the third part."""
    choice = prepared.choose(outcome)
    report = prepare_plans(prepared.setup.loaded, prepared.reported_plans(choice), prepared.splits["report"]).run()
    return Evolved(prepared, outcome, choice, report)

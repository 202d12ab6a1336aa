"""EvolKV end to end, on the bundled model and short contexts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Plan
from kvsearch.plan.arithmetic import compute_budgets
from kvsearch.policies import create_policy
from kvsearch.report.search import describe_decision, make_search_result
from kvsearch.runtime import Program
from kvsearch.search.evolve import PreparedSearch, prepare_searches
from kvsearch.search.loop import SearchOutcome
from kvsearch.search.settings import EvolveSettings
from kvsearch.search.spaces import decode_choices
from kvsearch.search.start_plans import SearchSetup, make_start_tables
from kvsearch.search.trials import Candidate
from tests import tiny
from tests.search.evolving import (
    BUDGET,
    POLICY,
    QUESTIONS,
    decide,
    evolve,
    prepare,
    settings_of,
    splits,
)

CONTEXTS = 2  # of a split
KEYDIFF = create_policy("keydiff", {"sinks": 1, "window": 3})


def test_the_plan_has_the_total_runs_and_scores_below_no_start_where_it_is_chosen(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    prepared = prepare(loaded, contexts=CONTEXTS, protocol="question-aware")
    evolved = evolve(prepared, tmp_path / "l")
    choice, plan = evolved.choice, evolved.choice.plan
    scores = {name: choice.race.method(name).score.mean for name in choice.finalists}
    assert set(prepared.starts) < set(scores)
    assert scores[choice.name] >= max(scores[name] for name in prepared.starts)
    assert plan.total == prepared.bounds.total == choice.table.sum()
    np.testing.assert_equal(compute_budgets(plan, "prefill", 1000), choice.table)
    assert plan.decode is None
    Program.from_plan(loaded.model, plan)
    assert plan.provenance.data_sha256 == prepared.data_sha256
    assert plan.provenance.settings["chosen"] == choice.name
    data = make_search_result([evolved], 3, 5).as_json()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["questions"] == dict.fromkeys(("search", "choice", "report"), CONTEXTS * QUESTIONS)


@pytest.mark.nightly
def test_parity_writes_the_papers_result_whatever_scores_above_it(loaded: LoadedModel) -> None:
    """Layer 0 gets all that the floors of the others leave: even budgets score above that."""
    prepared = prepare(loaded, contexts=CONTEXTS, parity=True, budget=40)
    table = prepared.setup.floors.copy()
    table[0] += 40 * 6 - int(table[:, 0].sum())
    papers = Candidate(table, 9.0, "layers 0-1, generation 0, completed")
    other = Candidate(np.roll(prepared.starts["pyramid"], 1, axis=0), 1.0, "layers 2-3, generation 0, completed")
    evolved = decide(prepared, SearchOutcome([papers, other], papers))
    choice = evolved.choice
    assert choice.race.method("#1").score.mean < choice.race.method("uniform").score.mean
    assert (choice.name, choice.table.tolist()) == ("#1", table.tolist())
    np.testing.assert_equal(compute_budgets(choice.plan, "prefill", 1000), table)
    assert choice.best != "#1"
    assert choice.best in evolved.report.names
    (found,) = make_search_result([evolved], 3, 5).found.values()
    assert found.best == choice.best
    assert re.match(
        rf"the paper's result: #1 \(layers 0-1, generation 0, completed\), .* split; {choice.best} scores .* there",
        describe_decision(evolved),
    )
    plain = decide(prepared, SearchOutcome([papers, other])).choice
    assert plain.name == plain.race.best != "#1"


def test_a_flat_search_keeps_even_budgets(loaded: LoadedModel, tmp_path: Path) -> None:
    how = settings_of(objective="metric", group_size=6)
    parts = splits(CONTEXTS, answer="nowhere")
    (prepared,) = prepare_searches(SearchSetup.of(loaded, POLICY), {BUDGET: {}}, how, parts)
    evolved = evolve(prepared, tmp_path / "l")
    assert evolved.outcome.flat
    assert "the metric is zero for all" in evolved.outcome.ended
    assert evolved.choice.name == "uniform"
    assert describe_decision(evolved).endswith("search by nll; uniform was written")


def test_a_start_plan_of_another_model(loaded: LoadedModel) -> None:
    other = tiny.plan_for(tiny.loaded(), [[12, 20]] * 4)
    with pytest.raises(IncompatibleError, match="start plan other was made for another model"):
        prepare(loaded, {"other": other})


def joint_start(loaded: LoadedModel) -> Plan:
    """Snapkv and keydiff in turns, budgets that differ."""
    budgets = np.array([[8 + (layer + head) % 3 * 4 for head in range(4)] for layer in range(6)])
    specs = [POLICY.spec if layer % 2 else KEYDIFF.spec for layer in range(6)]
    plan = tiny.plan_for(loaded, budgets.tolist())
    layers = [
        None if row is None else row.model_copy(update={"policy": spec})
        for row, spec in zip(plan.prefill.layers, specs, strict=True)
    ]
    return plan.model_copy(update={"prefill": plan.prefill.model_copy(update={"layers": tuple(layers)})})


def prepared_jointly(loaded: LoadedModel, **changes: Any) -> PreparedSearch:
    how = EvolveSettings.model_validate({"space": "joint", "generations": 3, "finalists": 4, **changes})
    base = SearchSetup.with_choices(loaded, [KEYDIFF, POLICY])
    (prepared,) = prepare_searches(base, {BUDGET: {"mine": joint_start(loaded)}}, how, splits(CONTEXTS))
    return prepared


@pytest.mark.slow
def test_policies_and_budgets_are_searched_together(loaded: LoadedModel, tmp_path: Path) -> None:
    prepared = prepared_jointly(loaded)
    assert prepared.settings.group_size == 1
    assert list(prepared.starts) == ["uniform", "pyramid", "mine"]
    assert all(table.shape == (12, 4) and table.sum() == BUDGET * 24 for table in prepared.starts.values())
    evolved = evolve(prepared, tmp_path / "l")
    kinds = {tuple(decode_choices(one.table, 2)) for one in evolved.outcome.pool}
    assert len(kinds) > 2
    assert all(one.table.sum() == BUDGET * 24 for one in evolved.outcome.pool)
    for one in evolved.outcome.pool[:3]:
        plan = prepared.plan(one.table, {})
        assert plan.total == BUDGET * 24
        names = [layer.policy.name for layer in plan.prefill.layers if layer is not None]
        assert names == [(KEYDIFF, POLICY)[at].name for at in decode_choices(one.table, 2)]


def test_one_policy_leaves_nothing_to_choose(loaded: LoadedModel) -> None:
    with pytest.raises(UsageError, match="there is only snapkv: name others with --policy"):
        SearchSetup.with_choices(loaded, [POLICY, POLICY])
    with pytest.raises(UsageError, match="begins with the policies of a plan"):
        make_start_tables(SearchSetup.with_choices(loaded, [POLICY, KEYDIFF]), BUDGET, {})
    other = create_policy("snapkv", {"window": 3})
    with pytest.raises(UsageError, match="start plan mine has policy keydiff with other parameters"):
        make_start_tables(SearchSetup.with_choices(loaded, [POLICY, other]), BUDGET, {"mine": joint_start(loaded)})

"""Plans of a search: what it starts from, and what its result is written as."""

from __future__ import annotations

import numpy as np
import pytest

from kvsearch.core.errors import UsageError
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Plan
from kvsearch.plan.arithmetic import add_carry, compute_budgets
from kvsearch.policies import create_policy
from kvsearch.runtime import Program
from kvsearch.search.start_plans import SearchSetup, make_start_tables
from tests import tiny
from tests.plan.builders import make_plan

POLICY = create_policy("snapkv", {"window": 4, "kernel": 3, "sinks": 2})
BOTH = ("prefill", "decode")
SHAPED = [[12, 4 + 16], [8, 24], [30, 6 + 4], [9, 15]]


@pytest.fixture(scope="module")
def base(model: LoadedModel) -> SearchSetup:
    return SearchSetup.of(model, POLICY)


def test_uniform_pyramid_and_scaled_plans_have_the_total_and_equal_tables_are_there_once(
    base: SearchSetup, model: LoadedModel
) -> None:
    plan, even = tiny.plan_for(model, list(SHAPED)), tiny.plan_for(model, [[20, 20]] * 4)
    found = make_start_tables(base, 20, {"mine": plan, "even": even})
    assert list(found) == ["uniform", "pyramid", "mine"]
    assert (found["uniform"] == 20).all()
    assert (np.diff(found["pyramid"][:, 0]) < 0).all()
    assert [int(table.sum()) for table in found.values()] == [160] * 3
    assert min(table.min() for table in found.values()) >= 6
    np.testing.assert_equal(make_start_tables(base, 16, {"mine": plan})["mine"], SHAPED)


def test_plans_that_cannot_be_starts(base: SearchSetup, model: LoadedModel) -> None:
    with pytest.raises(UsageError, match="start plan mine leaves layers their full cache"):
        make_start_tables(base, 20, {"mine": tiny.plan_for(model, [None, *SHAPED[1:]])})
    with pytest.raises(UsageError, match="start plan mine has entries that carry what leaves"):
        make_start_tables(base, 20, {"mine": add_carry(tiny.plan_for(model, list(SHAPED)), "match")})
    with pytest.raises(UsageError, match="start plan mine is no static plan of both phases, which is what is searched"):
        make_start_tables(SearchSetup.of(model, POLICY, BOTH), 20, {"mine": tiny.plan_for(model, list(SHAPED))})


def two_phases(model: LoadedModel) -> Plan:
    """The rows of `SHAPED`, turned round while decoding."""
    one, other = (tiny.plan_for(model, rows).model_dump(mode="json") for rows in (SHAPED, SHAPED[::-1]))
    return make_plan(list(SHAPED), model=one["model"], prefill=one["prefill"], decode=other["prefill"])


class TestPhases:
    def test_a_table_of_both_phases(self, model: LoadedModel) -> None:
        base = SearchSetup.of(model, POLICY, BOTH)
        assert base.heads == (4, 2)
        assert base.floors.shape == (8, 2)
        assert not base.evicts_prompts_only
        plan = base.plan(np.concatenate([SHAPED, SHAPED[::-1]]), {}, seed=0)
        np.testing.assert_equal(compute_budgets(plan, "prefill", 1000), SHAPED)
        np.testing.assert_equal(compute_budgets(plan, "decode", 1000), SHAPED[::-1])
        Program.from_plan(model.model, plan)

    def test_starts_have_the_size_in_each_phase(self, model: LoadedModel) -> None:
        base = SearchSetup.of(model, two_phases(model), BOTH)
        assert base.policies == (POLICY,) * 8
        found = make_start_tables(base, 20, {"mine": two_phases(model)})
        assert list(found) == ["uniform", "pyramid", "mine"]
        for table in found.values():
            assert [int(part.sum()) for part in np.split(table, 2)] == [160, 160]
        np.testing.assert_equal(
            make_start_tables(base, 16, {"mine": two_phases(model)})["mine"], [*SHAPED, *SHAPED[::-1]]
        )

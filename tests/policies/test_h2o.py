from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.errors import UsageError
from kvsearch.policies import Observation, create_policy
from kvsearch.policies.decoding import State, Step
from kvsearch.policies.h2o import H2O, MASS
from kvsearch.policies.scoring import column_sums
from kvsearch.policies.streaming import StreamingLLM
from tests.policies.contract import Case, PolicyContract, cases, observe, properties
from tests.policies.course import decode
from tests.policies.examples import attending, check_order_of_slots, kept, leaves, scattered, step_at

ROWS = [
    [1.0, 0.0, 0.0, 0.0, 0.0],
    [0.6, 0.4, 0.0, 0.0, 0.0],
    [0.5, 0.1, 0.4, 0.0, 0.0],
    [0.4, 0.1, 0.3, 0.2, 0.0],
    [0.3, 0.1, 0.1, 0.2, 0.3],
]
SUMS = [2.8, 0.7, 0.8, 0.4, 0.3]


class TestContract(PolicyContract):
    policy = H2O()


class TestContractMostlyRecent(PolicyContract):
    policy = H2O(recent_share=0.7, sinks=2)


class TestContractFixedWindow(PolicyContract):
    policy = H2O(recent=3, sinks=1)


class TestContractNothingRecent(PolicyContract):
    policy = H2O(recent_share=0.0)


def received(sums: list[float]) -> Observation:
    """One head that received the attention given."""
    length = len(sums)
    return dataclasses.replace(attending([[1 / length] * length]), column_sums=torch.tensor([[sums]]))


def test_column_sums_of_the_prompt() -> None:
    seen = attending(ROWS)
    assert seen.queries is not None
    sums = column_sums(seen.queries, seen.keys, seen.valid, seen.scaling)
    torch.testing.assert_close(sums, torch.tensor([[SUMS]]))
    torch.testing.assert_close(H2O().score(dataclasses.replace(seen, column_sums=sums)), sums)


@pytest.mark.parametrize(
    ("policy", "budget", "expected"),
    [
        (H2O(recent=1), 4, {0, 1, 2, 4}),
        (H2O(recent=1), 3, {0, 2, 4}),
        (H2O(), 4, {0, 2, 3, 4}),
        (H2O(), 3, {0, 3, 4}),  # of an odd budget, the odd entry is recent
        (H2O(), 2, {0, 4}),
        (H2O(), 1, {4}),
        (H2O(recent_share=0.0), 3, {0, 2, 4}),  # the newest entry always stays
        (H2O(recent_share=1.0), 3, {2, 3, 4}),
        (H2O(recent_share=0.25), 4, {0, 1, 2, 4}),
        (H2O(sinks=2), 4, {0, 1, 3, 4}),
        (H2O(sinks=2), 3, {0, 1, 4}),
    ],
)
def test_heavy_and_recent(policy: H2O, budget: int, expected: set[int]) -> None:
    assert kept(policy, received(SUMS), budget) == expected


def test_a_decode_step() -> None:
    """Token 5 arrives: 3.0, .8, .9, .5, .4 received; 5 is the newest, so that 4 leaves."""
    step = arriving([0, 1, 2, 4, 5], [2.8, 0.7, 0.8, 0.3, 0.0], [0.2, 0.1, 0.1, 0.2, 0.4])
    assert leaves(H2O(recent=1), step, budget=4) == [4]
    torch.testing.assert_close(step.cached.state.entries[MASS], torch.tensor([[3.0, 0.8, 0.9, 0.5, 0.4]]))


def test_the_recent_half_is_protected_while_decoding() -> None:
    def step() -> Step:
        return arriving([5, 0, 4, 1, 2], [0.0, 2.8, 0.3, 0.7, 0.8], [0.4, 0.2, 0.2, 0.1, 0.1])

    assert leaves(H2O(), step(), budget=4) == [1]
    assert leaves(H2O(sinks=2), step(), budget=4) == [2]
    assert leaves(H2O(recent_share=0.0), step(), budget=4) == [4]
    only_recent = arriving([5, 0, 4, 3, 2], [0.0, 2.8, 0.3, 0.7, 0.8], [0.4, 0.2, 0.2, 0.1, 0.1])
    assert leaves(H2O(recent_share=1.0), only_recent, budget=4) == [0]


def arriving(positions: list[int], mass: list[float], row: list[float]) -> Step:
    step = step_at(positions, row)
    return dataclasses.replace(step, cached=dataclasses.replace(step.cached, state=State({MASS: torch.tensor([mass])})))


@pytest.mark.parametrize(
    ("policy", "recent"),
    [
        (H2O(), [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]),
        (H2O(recent_share=0.9), [1, 2, 3, 4, 5, 6, 7, 8, 9, 9]),  # 10 * (1 - .9) is .999..., and counts as 1
        (H2O(recent_share=0.8), [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]),
        (H2O(recent_share=0.0), [1] * 10),
        (H2O(recent_share=1.0), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (H2O(recent=3), [3] * 10),
    ],
)
def test_the_recent_part_of_a_budget(policy: H2O, recent: list[int]) -> None:
    budgets = range(1, 11)
    assert [policy.recent_at(budget) for budget in budgets] == recent
    share = policy.recent == 0 and policy.recent_share > 0
    assert [policy.quota(budget) for budget in budgets] == [count if share else 0 for count in recent]
    sinks = dataclasses.replace(policy, sinks=2)
    quotas = [0 if policy.recent else count * share + 2 for count in recent]
    assert [sinks.quota(budget) for budget in budgets] == quotas


def test_a_head_without_a_bound_has_no_strange_window() -> None:
    assert H2O().recent_at(2**62) == 2**61


@properties
@given(cases(), st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0]), st.integers(0, 3), st.integers(1, 15))
def test_kept_sets_by_definition(case: Case, share: float, sinks: int, budget: int) -> None:
    """Sinks, the last r(b) entries, and of the others those that received most."""
    policy = H2O(recent_share=share, sinks=sinks)
    observation = observe(policy, case)
    recent = max(1, -int(-budget * share // 1))
    if budget < sinks + recent:
        return
    for head in range(case.heads):
        mass = observation.received()[0, head, case.pads[0] :].tolist()
        count = len(mass)
        chosen = {*range(min(sinks, count)), *range(max(0, count - recent), count)}
        others = sorted(set(range(count)) - chosen, key=lambda index: (-mass[index], index))
        expected = chosen | set(others[: max(0, budget - len(chosen))])
        assert kept(policy, observation, budget, head) == {index + case.pads[0] for index in expected}


@properties
@given(cases(), st.integers(0, 3), st.integers(1, 15))
def test_only_recent_entries_are_those_of_streaming(case: Case, sinks: int, budget: int) -> None:
    policy = H2O(recent_share=1.0, sinks=sinks)
    observation = observe(policy, case)
    assert kept(policy, observation, budget) == kept(StreamingLLM(sinks), observation, budget)


@properties
@given(cases(max_length=9), st.integers(1, 10), st.sampled_from([H2O(), H2O(recent=2, sinks=1)]))
def test_survivors_keep_all_they_received(case: Case, budget: int, policy: H2O) -> None:
    """What an entry received is the sum over all rows, those of the prompt and those since."""
    observation = observe(policy, case)
    prompt = observation.received().flatten(0, 1)
    for moment in decode(policy, observation, budget, steps=6, seed=case.seed):
        mass = moment.step.cached.state.entries[MASS]
        assert torch.equal(moment.priorities, mass)
        assert bool((mass[~moment.before.held] == 0).all())
        for segment, rows in enumerate(moment.rows):
            pads = case.pads[segment // case.heads]
            for position, value in moment.entries(mass, segment).items():
                column = position + pads
                total = float(prompt[segment, column]) if column < case.length else 0.0
                total += sum(row.get(position, 0.0) for row in rows)
                assert value == pytest.approx(total, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_slots_in_any_order(seed: int) -> None:
    step = scattered(seed)
    mass = step.row * 3
    held = dataclasses.replace(step, cached=dataclasses.replace(step.cached, state=State({MASS: mass})))
    check_order_of_slots(H2O(), held, seed)


def test_a_fixed_window_takes_no_first_stage() -> None:
    assert H2O(recent=2).first_stage(received(SUMS)) is None
    assert H2O().first_stage(received(SUMS)) is not None


def test_what_it_reads() -> None:
    assert (H2O().online, H2O().row, H2O().merges) == (True, "group", False)
    assert H2O().needs().describe() == ["attention column sums"]
    assert (H2O().recent_count, H2O(recent=7).recent_count, H2O(sinks=3).sink_count) == (1, 7, 3)
    assert [H2O().drop_at(budget) for budget in (1, 9)] == [1, 1]


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"recent_share": -0.1}, "recent_share must be between 0 and 1, got -0.1"),
        ({"recent_share": 1.5}, "recent_share must be between 0 and 1, got 1.5"),
        ({"recent_share": float("nan")}, "recent_share must be between 0 and 1, got nan"),
        ({"recent": -1}, "recent must be 0 or more, got -1"),
        ({"sinks": -1}, "sinks must be 0 or more, got -1"),
    ],
)
def test_out_of_range(params: dict[str, object], problem: str) -> None:
    with pytest.raises(UsageError, match=f"^policy h2o: {problem}$"):
        create_policy("h2o", params)

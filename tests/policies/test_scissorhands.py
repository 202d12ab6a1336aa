from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvsearch.policies import Observation
from kvsearch.policies.decoding import State, Step
from kvsearch.policies.scissorhands import LOW, MASSES, RING, Scissorhands, places
from kvsearch.testing.policy_contract import Case, cases, observe, properties
from tests.policies.course import Row, decode
from tests.policies.examples import attending, kept, leaves, step_at
from tests.policies.test_h2o import ROWS


def test_persistence_over_the_last_rows() -> None:
    """Thresholds 1/3, 1/4, 1/5; low 0, 3, 1, 1, 0 of 3, 3, 3, 2, 1; an attention of .2 is not below 1/5.

    Raw counts would tie 2 and 3.
    """
    policy, observation = Scissorhands(history=3, window=1), attending(ROWS)
    state = policy.start(observation)
    assert state.entries[LOW].tolist() == [[[0, 3, 1, 1, 0]]]
    torch.testing.assert_close(state.entries[MASSES], torch.tensor([[[1.2, 0.3, 0.8, 0.4, 0.3]]]))
    # persistence 1, 0, 2/3, 1/2, 1; of the two at 1, entry 0 received more
    assert policy.score(observation).tolist() == [[[4.0, 0.0, 2.0, 1.0, 3.0]]]
    assert kept(policy, observation, 3) == {0, 2, 4}
    assert kept(policy, observation, 4) == {0, 2, 3, 4}
    assert kept(policy, observation, 2) == {0, 4}


def dense_rows(observation: Observation, row: int, head: int, history: int) -> list[Row]:
    """The last prompt rows of one head as attention by position, mean over the group, by plain softmax."""
    real = observation.valid[row]
    keys = observation.keys[row, head][real].float()
    group = observation.queries.shape[1] // observation.keys.shape[1]
    queries = observation.queries[row, head * group : (head + 1) * group].float()
    count = min(len(keys), history)
    rows = []
    for token in range(len(keys) - count, len(keys)):
        query = queries[:, queries.shape[1] - len(keys) + token]
        logits = query @ keys[: token + 1].T * observation.scaling
        rows.append(dict(enumerate(logits.softmax(-1).mean(0).tolist())))
    return rows


def recount(rows: list[Row], position: int) -> tuple[int, int, float]:
    """Rows in which an entry was low, rows in which it was seen, attention received."""
    mine = [(row[position], len(row)) for row in rows if position in row]
    low = sum(value < float(1 / torch.tensor(float(visible))) for value, visible in mine)
    return low, len(mine), sum(value for value, _ in mine)


def places_by_definition(entries: list[tuple[int, int, float]]) -> list[int]:
    keys = [(1 - Fraction(low, seen), mass) for low, seen, mass in entries]
    order = sorted(set(keys))
    return [order.index(key) for key in keys]


counts = st.integers(1, 2**15 - 1).flatmap(lambda seen: st.tuples(st.integers(0, seen), st.just(seen)))
masses = st.floats(0, 1e6, width=32) | st.sampled_from([0.0, 1.0, 1.0000001192092896])


@properties
@example([((32765, 32766), 1e6), ((32766, 32767), 0.0)], 0)  # the two closest ratios there are
@given(st.lists(st.tuples(counts, masses), min_size=1, max_size=8), st.integers(0, 3))
def test_places_are_exact(entries: list[tuple[tuple[int, int], float]], absent: int) -> None:
    low, seen, mass = ([1] * absent + list(part) for part in zip(*((*c, m) for c, m in entries), strict=True))
    real = torch.tensor([[False] * absent + [True] * len(entries)])
    found = places(torch.tensor([low]).short(), torch.tensor([seen]), torch.tensor([mass]).float(), real)
    assert found.dtype == torch.float32
    assert found[real].tolist() == places_by_definition([(c[0], c[1], m) for c, m in entries])


def arriving() -> Step:
    """Entries 0, 2, 4 of the prompt above under a history of 3; token 5 arrives, row .5, .1, .1, .3, thresholds 1/4.

    The prompt's rows of tokens 2, 3, 4 are at bits 2, 0, 1; the new one takes the place of token 2's.
    """
    step = step_at([2, 5, -1, 0, 4], [0.1, 0.3, 0.0, 0.5, 0.1])
    state = State(
        {
            LOW: torch.tensor([[1, 0, 0, 0, 0]]).short(),
            MASSES: torch.tensor([[0.8, 0.0, 0.0, 1.2, 0.3]]),
            RING: torch.tensor([[[0b010], [0], [0], [0], [0]]], dtype=torch.uint8),
        }
    )
    return dataclasses.replace(step, cached=dataclasses.replace(step.cached, state=state))


def test_a_decode_step() -> None:
    """Low: 2 in two of three rows, 4 in one of two, 0 and 5 never: 2 leaves."""
    policy, step = Scissorhands(history=3, window=1), arriving()
    assert leaves(policy, step, budget=3) == [2]
    entries = step.cached.state.entries
    assert entries[LOW].tolist() == [[2, 0, 0, 0, 1]]
    assert entries[RING].tolist() == [[[0b110], [0], [0], [0], [0b100]]]
    torch.testing.assert_close(entries[MASSES], torch.tensor([[0.9, 0.3, 0.0, 1.7, 0.4]]))
    assert policy.step(arriving()).tolist() == [[0.0, 2.0, 4.0, 3.0, 1.0]]  # what is empty comes last


@properties
@given(cases(max_length=9), st.sampled_from([1, 3, 8, 10, 400]), st.integers(1, 10), st.sampled_from([0, 1, 3]))
def test_the_ring_counts_what_a_recount_of_the_history_does(case: Case, history: int, budget: int, drop: int) -> None:
    policy = Scissorhands(history=history, window=1, drop=drop)
    observation = observe(policy, case)
    prompts = [dense_rows(observation, row, head, history) for row in range(case.batch) for head in range(case.heads)]
    for moment in decode(policy, observation, budget, steps=8, seed=case.seed):
        state = moment.step.cached.state.entries
        for tensor in state.values():
            assert bool((tensor[~moment.before.held] == 0).all())
        for segment, rows in enumerate(moment.rows):
            every = [*prompts[segment], *rows]
            low, mass = (moment.entries(state[name], segment) for name in (LOW, MASSES))
            naive = {position: recount(every[-history:], position) for position in low}
            assert low == {position: count for position, (count, _, _) in naive.items()}
            for position, value in mass.items():
                assert value == pytest.approx(recount(every, position)[2], rel=1e-4, abs=1e-5)
            expected = places_by_definition([(naive[of][0], naive[of][1], mass[of]) for of in naive])
            found = moment.entries(moment.priorities, segment)
            assert [found[position] for position in naive] == expected


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Scissorhands(window=1, drop=2), [1, 2, 2, 2, 2, 2]),
        (Scissorhands(window=1, drop=0), [1, 1, 1, 2, 5, 50]),
        (Scissorhands(window=7, sinks=1, drop=0), [1, 1, 1, 1, 3, 50]),
    ],
)
def test_how_many_leave_at_once(policy: Scissorhands, expected: list[int]) -> None:
    """As many as asked for, but never protected ones."""
    assert [policy.drop_at(budget) for budget in (1, 2, 3, 4, 10, 100)] == expected

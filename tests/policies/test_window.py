"""Policies that look at a window of the last queries, SnapKV and LAVa; what is protected is another number."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvsearch.core.canonical import canonical_json
from kvsearch.policies import Observation, create_policy
from kvsearch.policies.decoding import mark_best
from kvsearch.policies.lava import LAVa
from kvsearch.policies.scoring import pool_positions
from kvsearch.policies.snapkv import SnapKV
from tests.policies.examples import WINDOW_ROWS, attending, kept


@pytest.mark.parametrize(
    ("pooling", "scores", "expected"),
    [
        ("max", [0.30, 0.30, 0.20, 0.20, 0.20, 0.10], {0, 1, 2, 6, 7}),
        ("avg", [0.1067, 0.1233, 0.09, 0.0933, 0.11, 0.0433], {0, 1, 4, 6, 7}),
        ("none", [0.30, 0.02, 0.05, 0.20, 0.03, 0.10], {0, 3, 5, 6, 7}),
    ],
)
def test_pooling(pooling: str, scores: list[float], expected: set[int]) -> None:
    policy, observation = SnapKV(window=2, kernel=3, pooling=pooling), attending(WINDOW_ROWS)
    torch.testing.assert_close(policy.score(observation)[0, 0, :6], torch.tensor(scores), atol=5e-5, rtol=0)
    assert kept(policy, observation, 5) == expected


def test_the_group_is_aggregated_before_it_is_pooled() -> None:
    a, b = [0.6, 0.0, 0.1, 0.0, 0.3], [0.0, 0.1, 0.5, 0.0, 0.4]
    policy = SnapKV(window=1, kernel=3, pooling="max", group="mean")
    scores = policy.score(attending([a], [b]))[0, 0, :4]
    torch.testing.assert_close(scores, torch.tensor([0.3, 0.3, 0.3, 0.3]))


def test_average_pooling_pads_with_zero_and_max_pooling_with_nothing() -> None:
    scores, inside = torch.tensor([[[3.0, 6.0, 9.0, -1.0]]]), torch.tensor([[True, True, True, False]])
    assert pool_positions(scores, 3, "avg", inside)[0, 0, :3].tolist() == [3.0, 6.0, 5.0]
    assert pool_positions(-scores, 3, "max", inside)[0, 0, :3].tolist() == [-3.0, -3.0, -6.0]


# two heads with four candidates and a window of one; the largest value norms are 1 and 3, in the window 100
ATTENTION = ([[0.40, 0.20, 0.10, 0.05, 0.25]], [[0.10, 0.10, 0.30, 0.20, 0.30]])
LARGEST = torch.tensor([[0.6, -0.4], [-1.0, 2.0]])  # one vector per head, |.|_1 = 1 and 3


def two_heads() -> Observation:
    values = torch.zeros(1, 2, 5, 2)
    values[0, :, 2] = LARGEST
    values[0, :, 0] = LARGEST / 2
    values[0, :, 4] = 50.0
    return dataclasses.replace(attending(*ATTENTION, kv_heads=2), values=values)


def scores(policy: LAVa, observation: Observation) -> Tensor:
    return policy.score(observation)[0]


def test_heads_are_comparable() -> None:
    found = scores(LAVa(window=1, kernel=1), two_heads())[:, :4]
    torch.testing.assert_close(found, torch.tensor([[0.40, 0.20, 0.10, 0.05], [0.30, 0.30, 0.90, 0.60]]))
    pooled = scores(LAVa(window=1, kernel=3), two_heads())[:, :4]
    torch.testing.assert_close(pooled, torch.tensor([[0.40, 0.40, 0.20, 0.10], [0.30, 0.90, 0.90, 0.90]]))


def test_the_largest_of_the_group_after_the_sum_over_rows() -> None:
    """Two heads look at entry 0 at different times: sums .7 and .5 over two rows, so .35."""
    first = [[0.6, 0.2, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4]]
    second = [[0.1, 0.4, 0.5, 0.0], [0.4, 0.2, 0.2, 0.2]]
    values = torch.ones(1, 1, 4, 1)
    observation = dataclasses.replace(attending(first, second), values=values)
    torch.testing.assert_close(scores(LAVa(window=2, kernel=1), observation)[0, :2], torch.tensor([0.35, 0.30]))
    found = scores(LAVa(window=2, kernel=1, group="mean"), observation)[0, :2]
    torch.testing.assert_close(found, torch.tensor([0.30, 0.25]))


def test_scored_anew_it_looks_at_what_is_held() -> None:
    """Three of nine tokens are left before a window of two: each segment has its own index and count."""
    keys = torch.eye(5)[None, None].repeat(2, 1, 1, 1)
    index = torch.tensor([[0, 3, 5, 7, 8], [-1, 1, 4, 7, 8]])
    queries = torch.tensor([[0.1, 0.2, 0.3, 0.2, 0.2]]).log().expand(2, 1, 2, 5)
    values = torch.tensor([2.0, 5.0, 1.0, 9.0, 9.0]).view(1, 1, 5, 1).repeat(2, 1, 1, 1)
    values[1, 0, 0] = 100.0
    observation = Observation(
        keys, values, index >= 0, 1.0, queries, token_index=index, token_count=torch.tensor([9, 9])
    )
    found = LAVa(window=2, kernel=1).score(observation)[:, 0]
    whole, part = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.2, 0.3])
    # the row of token 7 does not see token 8
    torch.testing.assert_close(found[0, :3], 5.0 * (whole / 0.8 + whole) / 2)
    torch.testing.assert_close(found[1, 1:3], 5.0 * (part / 0.7 + part / 0.9) / 2)


OBSERVING: dict[str, dict[str, Any]] = {
    "snapkv": {}, "pyramidkv": {}, "cake": {}, "lava": {}, "criticalkv": {}, "defensivekv": {},
    "vatp": {"base": "snapkv"},
}  # fmt: skip


@pytest.mark.parametrize("name", OBSERVING)
def test_the_window_is_protected_by_default_and_plans_do_not_say_so(name: str) -> None:
    plain = create_policy(name, {"window": 6, **OBSERVING[name]})
    assert (plain.recent_count, plain.needs().query_rows) == (6, 6)
    assert "protect" not in plain.parameters()
    for protect in (6, -1):
        same = create_policy(name, {"window": 6, "protect": protect, **OBSERVING[name]})
        assert same == plain
        assert canonical_json(same.spec) == canonical_json(plain.spec)


@pytest.mark.parametrize(
    ("protect", "scores", "expected"),
    [
        (2, [0.30, 0.02, 0.05, 0.20, 0.03, 0.10], {0, 3, 6, 7}),
        (1, [0.30, 0.02, 0.05, 0.20, 0.03, 0.10, 0.20], {0, 3, 6, 7}),  # equal scores: the lower position
        (0, [0.30, 0.02, 0.05, 0.20, 0.03, 0.10, 0.20, 0.10], {0, 3, 5, 6}),  # the newest entry may leave
    ],
)
def test_both_rows_decide_whatever_is_protected(protect: int, scores: list[float], expected: set[int]) -> None:
    policy, observation = SnapKV(window=2, kernel=1, protect=protect), attending(WINDOW_ROWS)
    torch.testing.assert_close(policy.score(observation)[0, 0, : len(scores)], torch.tensor(scores))
    assert kept(policy, observation, 4) == expected


# equal ones among them, both zeros, and the ends of what floats can say
PRIORITIES = st.sampled_from([float("-inf"), -3.0e38, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, 2.0, 3.0e38, float("inf")])


@st.composite
def segments(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Priorities, protected slots, positions [S, C], and how many stay [S]."""
    count, width = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    rows: list[tuple[list[float], list[bool], list[int], int]] = []
    for _ in range(count):
        positions = draw(st.permutations(range(width)))
        positions = [position if draw(st.booleans()) else -1 for position in positions]
        held = sum(position >= 0 for position in positions)
        protected = [position >= 0 and draw(st.booleans()) for position in positions]
        rows.append(([draw(PRIORITIES) for _ in positions], protected, positions, draw(st.integers(0, held))))
    priorities, protected, positions, counts = zip(*rows, strict=True)
    return torch.tensor(priorities), torch.tensor(protected), torch.tensor(positions), torch.tensor(counts)


@given(segments(), st.integers(0, 3))
def test_protected_entries_stay_then_the_highest_then_the_first(
    given: tuple[Tensor, Tensor, Tensor, Tensor], spare: int
) -> None:
    priorities, protected, positions, counts = given
    found = mark_best(*given, width=int(counts.max()) + spare)
    for row, count in enumerate(counts.tolist()):
        held = [slot for slot, position in enumerate(positions[row].tolist()) if position >= 0]
        held.sort(key=lambda slot: (not protected[row, slot], -float(priorities[row, slot]), int(positions[row, slot])))
        assert sorted(held[:count]) == found[row].nonzero().flatten().tolist()

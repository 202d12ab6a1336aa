"""What is looked at and what is protected are two numbers; protected entries stay while decoding, too."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvsearch.core.canonical import canonical_json
from kvsearch.policies import Policy, create_policy
from kvsearch.policies.cake import CAKE
from kvsearch.policies.decoding import mark_best
from kvsearch.policies.lava import LAVa
from kvsearch.policies.snapkv import SnapKV
from tests.policies.examples import WINDOW_ROWS, attending, kept, leaves, step_at

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
        (3, [0.30, 0.02, 0.05, 0.20, 0.03], {0, 5, 6, 7}),
    ],
)
def test_both_rows_decide_whatever_is_protected(protect: int, scores: list[float], expected: set[int]) -> None:
    policy, observation = SnapKV(window=2, kernel=1, protect=protect), attending(WINDOW_ROWS)
    torch.testing.assert_close(policy.score(observation)[0, 0, : len(scores)], torch.tensor(scores))
    assert kept(policy, observation, 4) == expected


def test_pooling_reaches_up_to_what_is_protected() -> None:
    near = SnapKV(window=2, kernel=3, protect=1).score(attending(WINDOW_ROWS))[0, 0, :7]
    torch.testing.assert_close(near, torch.tensor([0.30, 0.30, 0.20, 0.20, 0.20, 0.20, 0.20]))


def test_lava_looks_at_the_values_of_all_that_may_leave() -> None:
    observation = attending(WINDOW_ROWS)
    values = observation.values.clone()
    values[..., 6, :] *= 5.0  # in the window, not protected
    observation = dataclasses.replace(observation, values=values)
    loud = LAVa(window=2, kernel=1, protect=1).score(observation)[0, 0, :6]
    torch.testing.assert_close(loud, torch.tensor([0.30, 0.02, 0.05, 0.20, 0.03, 0.10]) * 5.0)


def test_a_decode_step_of_cake_lets_go_of_what_is_looked_at() -> None:
    step = step_at([9, 0, 5, 8, 2, 6], [0.2, 0.3, 0.1, 0.01, 0.3, 0.09])
    assert leaves(CAKE(window=3, kernel=1), step, budget=5) == [6]
    assert leaves(CAKE(window=3, kernel=1, protect=1), step, budget=5) == [8]


def test_what_to_lower_is_named() -> None:
    assert SnapKV(sinks=4).protecting == ["sinks", "protect"]
    assert SnapKV(protect=0).protecting == []
    keydiff: Policy = create_policy("keydiff", {"window": 1})
    assert keydiff.protecting == ["window"]


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

"""When a mean over contexts is above zero beyond chance."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvsearch.calibration.probe.chance import EXACT, beyond_chance

some = st.lists(st.floats(0.01, 1), min_size=1, max_size=EXACT + 3)


@given(some)
def test_five_contexts_that_all_lose_are_beyond_chance_and_four_are_not(losses: list[float]) -> None:
    """All of n signs alike have a chance of 1 in 2^n."""
    assert beyond_chance(losses) == (len(losses) >= 5)
    assert not beyond_chance([-loss for loss in losses])


def test_one_context_that_loses_much_says_nothing() -> None:
    assert not beyond_chance([0.03, -0.001])
    assert not beyond_chance([5.0, -0.1, 0.1, -0.1, 0.1, -0.1, 0.1])
    assert not beyond_chance([0.0] * 20)
    assert beyond_chance([0.02] * 19 + [-0.02])

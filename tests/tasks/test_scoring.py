"""Which replies count as right."""

from __future__ import annotations

import pytest

from kvsearch.tasks.scoring import ROUNDING, is_right


@pytest.mark.parametrize(
    ("value", "right"), [(1.0, True), (1 - ROUNDING / 2, True), (1 - 2 * ROUNDING, False), (0.5, False), (0.0, False)]
)
def test_a_right_reply_has_the_full_score(value: float, right: bool) -> None:
    assert is_right(value) is right

"""The chance of leads, by the exact count of all signs."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.sign_flips import MAX_EXACT_CONTEXTS, compute_chances


@pytest.mark.parametrize("contexts", [1, 2, 4, 7])
def test_the_least_chance_is_that_all_coins_agree(contexts: int) -> None:
    assert compute_chances(np.full((1, contexts), 0.1))[0] == pytest.approx(0.5**contexts, abs=0.01)
    assert compute_chances(np.full((1, contexts), -0.1))[0] == 1.0
    assert compute_chances(np.zeros((2, contexts))).tolist() == [1.0, 1.0]


def test_chances_are_those_of_all_signs() -> None:
    leads = np.array(
        [[0.5, 0.2, 0.4, -0.1, 0.3, 0.2], [0.1, 0.1, 0.0, 0.1, 0.1, 0.1], [0.3, -0.3, 0.9, 0.1, 0.2, -0.6]]
    )
    scaled = leads / np.linalg.norm(leads, axis=1, keepdims=True)
    largest = np.array([(scaled @ np.array(signs)).max() for signs in product([-1, 1], repeat=6)])
    exact = (largest[:, None] >= scaled.sum(axis=1) - 1e-9).mean(axis=0)
    np.testing.assert_allclose(compute_chances(leads), exact, atol=0.015)
    alone = np.array([compute_chances(row[None])[0] for row in leads])
    assert (alone <= compute_chances(leads)).all()  # more finalists, more luck
    assert compute_chances(leads)[0] > 1.5 * alone[0]


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=MAX_EXACT_CONTEXTS + 3))
def test_five_contexts_that_all_lead_are_beyond_chance_and_four_are_not(leads: list[float]) -> None:
    """All of n signs alike have a chance of 1 in 2^n."""
    assert (compute_chances(np.array([leads]))[0] <= 0.05) == (len(leads) >= 5)
    assert compute_chances(-np.array([leads]))[0] > 0.05


def test_one_context_that_leads_much_says_nothing() -> None:
    assert compute_chances(np.array([[5.0, -0.1, 0.1, -0.1, 0.1, -0.1, 0.1]]))[0] > 0.05
    assert compute_chances(np.array([[0.02] * 19 + [-0.02]]))[0] <= 0.05

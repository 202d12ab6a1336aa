"""The chance of leads, by the exact count of all signs."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from kvsearch.evaluation.sign_flips import compute_chances


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

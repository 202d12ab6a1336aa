"""Losses and divergences of teacher-forced answers, by hand and against torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kvsearch.signals.divergence import answer_divergences
from kvsearch.signals.perplexity import answer_losses

# two samples, two rows, three tokens; the first sample has one token of an answer, in the last row
LOGITS = torch.tensor([[[9.0, 0.0, 0.0], [0.0, 0.0, 0.0]], [[math.log(2.0), 0.0, 0.0], [0.0, math.log(6.0), 0.0]]])
ANSWERS = torch.tensor([[-1, 2], [0, 1]])


def test_nll_by_hand() -> None:
    """-log 1/3, and -log 2/4 - log 6/8."""
    found = answer_losses(LOGITS, ANSWERS)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, [math.log(3), math.log(2) + math.log(8 / 6)], rtol=1e-6)


def test_kl_by_hand() -> None:
    """Against an even distribution, on the rows that count."""
    even = torch.full((2, 2, 3), -math.log(3))
    first = (math.log(4 / 6) + 2 * math.log(4 / 3)) / 3
    second = (math.log(8 / 18) + 2 * math.log(8 / 3)) / 3
    np.testing.assert_allclose(answer_divergences(even, LOGITS, ANSWERS), [0, first + second], atol=1e-7)


def test_losses_are_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, full = (torch.randn(3, 4, 50, generator=generator) * 3 for _ in range(2))
    full = full.log_softmax(-1)
    answers = torch.randint(0, 50, (3, 4), generator=generator)
    nll = F.cross_entropy(logits.flatten(0, 1), answers.flatten(), reduction="none").view(3, 4).sum(-1)
    kl = F.kl_div(logits.log_softmax(-1), full, log_target=True, reduction="none").sum((-1, -2))
    np.testing.assert_allclose(answer_losses(logits, answers), nll, rtol=1e-5)
    np.testing.assert_allclose(answer_divergences(full, logits, answers), kl, rtol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_none_stay_with_their_sample(bad: float) -> None:
    logits = LOGITS.clone()
    logits[1, 0, 0] = bad
    full = torch.full((2, 2, 3), -math.log(3))
    for found in (answer_losses(logits, ANSWERS), answer_divergences(full, logits, ANSWERS)):
        assert np.isfinite(found).tolist() == [True, False]


def test_rows_without_an_answer_do_not_count_whatever_they_are() -> None:
    logits = LOGITS.clone()
    logits[0, 0] = float("nan")
    np.testing.assert_array_equal(answer_losses(logits, ANSWERS), answer_losses(LOGITS, ANSWERS))

"""Losses of tokens, divergences of next-token distributions, and both over answers: by hand and against torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kvsearch.signals import predictions
from kvsearch.signals.predictions import compute_log_odds, sum_answer_losses, token_losses


def test_a_worked_example() -> None:
    """Probabilities 1/2, 1/4, 1/4: the first token costs ln 2 nats, the second ln 4; perplexity is sqrt 8."""
    logits = torch.tensor([2.0, 1.0, 1.0]).log().expand(2, 3)
    losses = token_losses(logits, torch.tensor([0, 1]))
    assert losses.tolist() == pytest.approx([math.log(2), math.log(4)])
    assert math.exp(losses.double().mean()) == pytest.approx(math.sqrt(8))


@pytest.mark.parametrize(("scratch", "dtype"), [(1, torch.float32), (8 * 50 * 3, torch.bfloat16)])
def test_any_scratch_memory_gives_the_same(scratch: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "PREDICTION_SCRATCH_BYTES", scratch)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 7, 50, generator=generator).to(dtype)
    targets = torch.randint(0, 50, (2, 3, 7), generator=generator)
    expected = F.cross_entropy(logits.double().flatten(0, 2), targets.flatten(), reduction="none").view(2, 3, 7)
    found = token_losses(logits, targets)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_sure_prediction_costs_next_to_nothing() -> None:
    """In logsumexp minus the logit, 1000 would round the loss away."""
    logits = torch.tensor([[1000.0, 990.0, -math.inf]])
    assert token_losses(logits, torch.tensor([0])).item() == pytest.approx(math.exp(-10), rel=0.01)
    assert token_losses(logits, torch.tensor([1])).item() == pytest.approx(10, rel=1e-4)
    assert token_losses(logits, torch.tensor([2])).item() == math.inf


def test_log_odds() -> None:
    """Probabilities 1/2, 1/4, 1/4 have odds of 1 and 1/3; odds of e^10 stay exact where p is 1 in fp32."""
    logits = torch.tensor([2.0, 1.0, 1.0]).log().expand(2, 3)
    assert compute_log_odds(logits, torch.tensor([0, 1])).tolist() == pytest.approx([0.0, -math.log(3)], abs=1e-6)
    assert compute_log_odds(torch.tensor([[1000.0, 980.0, -math.inf]]), torch.tensor([0])).item() == pytest.approx(20)
    generator = torch.Generator().manual_seed(0)
    drawn, targets = torch.randn(7, 50, generator=generator).bfloat16(), torch.randint(0, 50, (7,), generator=generator)
    chances = drawn.double().softmax(-1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(compute_log_odds(drawn, targets).double(), chances.log() - (1 - chances).log())


# two samples, two rows, three tokens; the first sample has one token of an answer, in the last row
LOGITS = torch.tensor([[[9.0, 0.0, 0.0], [0.0, 0.0, 0.0]], [[math.log(2.0), 0.0, 0.0], [0.0, math.log(6.0), 0.0]]])
ANSWERS = torch.tensor([[-1, 2], [0, 1]])


def test_nll_by_hand() -> None:
    """-log 1/3, and -log 2/4 - log 6/8."""
    found = sum_answer_losses(LOGITS, ANSWERS)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, [math.log(3), math.log(2) + math.log(8 / 6)], rtol=1e-6)


def test_numbers_that_are_none_stay_with_their_sample_and_rows_without_an_answer_do_not_count() -> None:
    logits = LOGITS.clone()
    logits[0, 0] = float("nan")
    np.testing.assert_array_equal(sum_answer_losses(logits, ANSWERS), sum_answer_losses(LOGITS, ANSWERS))
    logits[1, 0, 0] = float("inf")
    assert np.isfinite(sum_answer_losses(logits, ANSWERS)).tolist() == [True, False]

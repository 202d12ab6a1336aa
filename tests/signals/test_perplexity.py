"""Losses of tokens: a worked example, the same whatever the memory, and targets shared by many rows."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from kvsearch.signals import perplexity
from kvsearch.signals.perplexity import token_losses


def test_a_worked_example() -> None:
    """Probabilities 1/2, 1/4, 1/4: the first token costs ln 2 nats, the second ln 4; perplexity is sqrt 8."""
    logits = torch.tensor([2.0, 1.0, 1.0]).log().expand(2, 3)
    losses = token_losses(logits, torch.tensor([0, 1]))
    assert losses.tolist() == pytest.approx([math.log(2), math.log(4)])
    assert math.exp(losses.double().mean()) == pytest.approx(math.sqrt(8))


@pytest.mark.parametrize("scratch", [1, 8 * 50 * 3, 2**26])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_scratch_memory_gives_the_same(scratch: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perplexity, "SCRATCH_BYTES", scratch)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 7, 50, generator=generator).to(dtype)
    targets = torch.randint(0, 50, (2, 3, 7), generator=generator)
    expected = F.cross_entropy(logits.double().flatten(0, 2), targets.flatten(), reduction="none").view(2, 3, 7)
    found = token_losses(logits, targets)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_targets_of_all_rows_alike() -> None:
    generator = torch.Generator().manual_seed(1)
    logits, targets = torch.randn(4, 5, 11, generator=generator), torch.randint(0, 11, (5,), generator=generator)
    found = token_losses(logits, targets)
    for index, one in enumerate(logits):
        torch.testing.assert_close(found[index], token_losses(one, targets))


def test_a_sure_prediction_costs_next_to_nothing() -> None:
    """In logsumexp minus the logit, 1000 would round the loss away."""
    logits = torch.tensor([[1000.0, 990.0, -math.inf]])
    assert token_losses(logits, torch.tensor([0])).item() == pytest.approx(math.exp(-10), rel=0.01)
    assert token_losses(logits, torch.tensor([1])).item() == pytest.approx(10, rel=1e-4)
    assert token_losses(logits, torch.tensor([2])).item() == math.inf


def test_no_tokens_no_losses() -> None:
    assert token_losses(torch.zeros(3, 0, 5), torch.zeros(0, dtype=torch.long)).shape == (3, 0)


def test_targets_of_another_length_are_refused() -> None:
    with pytest.raises(RuntimeError, match="expand"):
        token_losses(torch.zeros(3, 5), torch.zeros(2, dtype=torch.long))

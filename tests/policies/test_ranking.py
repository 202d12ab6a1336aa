"""Order of protection, ties and padding."""

from __future__ import annotations

import torch

from kvsearch.policies import keep_mask, rank_entries
from kvsearch.policies.ranking import protection_order


def test_order_of_protection() -> None:
    valid = torch.tensor([[False, True, True, True, True, True, True]])
    order = protection_order(valid, sinks=2, window=3)
    assert order.tolist() == [[-1, 1, 2, -1, 4, 3, 0]]


def test_sinks_inside_the_window_are_counted_once() -> None:
    valid = torch.ones(1, 3, dtype=torch.bool)
    ranks = rank_entries(torch.zeros(1, 1, 3), valid, sinks=2, window=2)
    assert ranks.tolist() == [[[1, 2, 0]]]


def test_minus_infinity_is_still_better_than_padding() -> None:
    valid = torch.tensor([[False, True, True]])
    ranks = rank_entries(torch.tensor([[[9.0, float("-inf"), 1.0]]]), valid)
    assert ranks.tolist() == [[[2, 1, 0]]]


def test_budgets_may_differ_between_sequences() -> None:
    ranks = torch.arange(4).int().expand(2, 1, 4)
    valid = torch.ones(2, 4, dtype=torch.bool)
    assert keep_mask(ranks, torch.tensor([[1], [9]]), valid).sum(-1).tolist() == [[1], [4]]


def test_half_precision_scores_keep_their_order() -> None:
    scores = torch.tensor([[[1.0, 1.001, 1.002]]])
    assert rank_entries(scores, torch.ones(1, 3, dtype=torch.bool)).tolist() == [[[2, 1, 0]]]

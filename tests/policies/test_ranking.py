"""Order of protection, ties and padding."""

from __future__ import annotations

import torch

from kvsearch.policies import rank_entries


def test_minus_infinity_is_still_better_than_padding() -> None:
    valid = torch.tensor([[False, True, True]])
    ranks = rank_entries(torch.tensor([[[9.0, float("-inf"), 1.0]]]), valid)
    assert ranks.tolist() == [[[2, 1, 0]]]


def test_half_precision_scores_keep_their_order() -> None:
    scores = torch.tensor([[[1.0, 1.001, 1.002]]])
    assert rank_entries(scores, torch.ones(1, 3, dtype=torch.bool)).tolist() == [[[2, 1, 0]]]

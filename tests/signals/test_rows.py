"""What single rows of attention say: their entropy, and how they differ."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvsearch.policies import Observation
from kvsearch.signals import attention_rows
from kvsearch.signals.attention_rows import mean_entropy, measure_dispersion

SURE = 200.0  # a logit that leaves nothing for the others


def average_attention(query: Tensor, keys: Tensor, scaling: float) -> Tensor:
    return attention_rows.average_attention(query, keys, scaling, None, padded(len(keys), keys.shape[2], 0))


def one_hot_heads(*targets: int) -> tuple[Tensor, Tensor]:
    """One row of one-hot attention per head, head by head to a key of `targets`; keys are unit vectors."""
    table = torch.eye(4)[None, None]
    return SURE * torch.stack([table[0, 0, target] for target in targets])[None, :, None], table


def padded(batch: int, length: int, pads: int) -> Tensor:
    """All sequences but the first have padding on the left."""
    valid = torch.ones(batch, length, dtype=torch.bool)
    valid[1:, :pads] = False
    return valid


def test_two_heads_that_look_at_one_place_each() -> None:
    """Their mean is half and half: ln 2."""
    query, keys = one_hot_heads(0, 2)
    mean = average_attention(query, keys, 1.0)
    assert mean.tolist() == [[0.5, 0.0, 0.5, 0.0]]
    assert mean_entropy(mean[0]) == pytest.approx(math.log(2))
    assert mean_entropy(average_attention(*one_hot_heads(1, 1), 1.0)[0]) == 0.0


def test_a_worked_example() -> None:
    """Attention [1/2, 1/4, 1/4], and before it a row that is uniform over two keys."""
    keys = torch.tensor([2.0, 1.0, 1.0]).log().view(1, 1, 3, 1)
    both = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1)
    assert average_attention(both, keys, 1.0)[0].tolist() == pytest.approx([0.5, 0.375, 0.125])


def observe_padded(length: int = 9, pads: int = 0) -> Observation:
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 2, length, 8, generator=generator)
    queries = torch.randn(2, 6, 4, 8, generator=generator)
    return Observation(keys, values, padded(2, length, pads), 8**-0.5, queries=queries)


def moments_by_hand(seen: Observation, sequence: int, window: int) -> tuple[float, float]:
    """Entropy and variance of one sequence, query head by query head and row by row."""
    real = seen.valid[sequence]
    length = int(real.sum())
    keys, entropy, variance = seen.keys[sequence][:, real], 0.0, 0.0
    rows = min(window, length)
    for head, query in enumerate(seen.queries[sequence]):
        attention: list[Tensor] = []
        for row in range(rows):
            end = length - rows + row + 1
            logits = query[len(query) - rows + row] @ keys[head // seen.group, :end].T * seen.scaling
            attention.append(torch.cat([logits.softmax(-1), torch.zeros(length - end)])[: length - rows])
        table = torch.stack(attention)
        entropy -= float((table * (table + 1e-10).log()).sum())
        variance += float(table.var(0, unbiased=True).sum()) if rows > 1 and length > rows else 0.0
    return entropy / rows, variance


@pytest.mark.parametrize(("window", "pads"), [(1, 0), (3, 0), (3, 3), (3, 7)])
def test_it_is_the_entropy_and_variance_of_every_row(window: int, pads: int) -> None:
    seen = observe_padded(pads=pads)
    entropy, variance = measure_dispersion(seen, window)
    for sequence in range(2):
        expected = moments_by_hand(seen, sequence, window)
        assert entropy[sequence].item() == pytest.approx(expected[0], rel=1e-5, abs=1e-6)
        assert variance[sequence].item() == pytest.approx(expected[1], rel=1e-4, abs=1e-6)

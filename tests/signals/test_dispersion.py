from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kvsearch.policies import Observation
from kvsearch.policies.cake import CAKE as Pattern
from kvsearch.signals.attention_rows import dispersion


def observe(
    batch: int = 2, heads: int = 2, group: int = 3, length: int = 9, pads: int = 0, seed: int = 0
) -> Observation:
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, batch, heads, length, 8, generator=generator)
    queries = torch.randn(batch, heads * group, 4, 8, generator=generator)
    valid = torch.ones(batch, length, dtype=torch.bool)
    valid[1:, :pads] = False
    return Observation(keys, values, valid, 8**-0.5, queries=queries)


def by_hand(seen: Observation, sequence: int, window: int) -> tuple[float, float]:
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


@pytest.mark.parametrize("pads", [0, 3, 7])
@pytest.mark.parametrize("window", [1, 3])
def test_it_is_the_entropy_and_variance_of_every_row(window: int, pads: int) -> None:
    seen = observe(pads=pads)
    entropy, variance = dispersion(seen, window)
    for sequence in range(2):
        expected = by_hand(seen, sequence, window)
        assert entropy[sequence].item() == pytest.approx(expected[0], rel=1e-5, abs=1e-6)
        assert variance[sequence].item() == pytest.approx(expected[1], rel=1e-4, abs=1e-6)


def test_without_candidates_there_is_nothing() -> None:
    seen = observe(length=3)
    entropy, variance = dispersion(seen, 3)
    assert entropy.tolist() == variance.tolist() == [0, 0]


def test_the_moments_are_computed_once_with_the_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvsearch.policies import cake

    calls: list[int] = []
    inner = cake.window_rows

    def counted(seen: Observation, window: int) -> Iterator[tuple[slice, Tensor]]:
        calls.append(window)
        return inner(seen, window)

    monkeypatch.setattr(cake, "window_rows", counted)
    seen = observe()
    Pattern(window=3).score(seen)
    dispersion(seen, 3)
    assert calls == [3]

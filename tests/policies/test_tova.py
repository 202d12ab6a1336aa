from __future__ import annotations

import pytest
import torch

from kvsearch.policies.tova import TOVA
from tests.policies.examples import attending, kept, leaves, step_at

HEADS = ([[0.5, 0.1, 0.05, 0.05, 0.3]], [[0.1, 0.1, 0.35, 0.05, 0.4]])


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_the_mean_over_all_heads_of_the_layer_ranks_for_every_head(kv_heads: int) -> None:
    """Two query heads, of one kv head or of two."""
    observation = attending(*HEADS, kv_heads=kv_heads)
    expected = torch.tensor([0.3, 0.1, 0.2, 0.05, 0.35]).expand(1, kv_heads, 5)
    torch.testing.assert_close(TOVA().score(observation), expected)
    assert all(kept(TOVA(), observation, 3, head) == {0, 2, 4} for head in range(kv_heads))


def test_only_the_last_row_counts() -> None:
    earlier = [[[0.0, 1.0, 0.0, 0.0, 0.0], *rows] for rows in HEADS]
    assert kept(TOVA(), attending(*earlier), 3) == {0, 2, 4}
    assert TOVA().needs().query_rows == 1


def test_the_newest_and_the_first_token_may_go_unless_they_are_protected() -> None:
    observation = attending([[0.1, 0.5, 0.3, 0.1, 0.0]])
    assert kept(TOVA(), observation, 2) == {1, 2}
    assert kept(TOVA(protect_last=True), observation, 2) == {1, 4}
    assert kept(TOVA(protect_last=True, sinks=1), observation, 2) == {0, 4}


def test_a_decode_step_drops_the_lowest_of_its_own_row() -> None:
    """Tokens 0, 2, 4 and the new 5, with mean attention .1, .4, .3, .2: 0 leaves."""
    step = step_at([4, 0, 5, 2], row=[0.3, 0.1, 0.2, 0.4])
    assert leaves(TOVA(), step, budget=3) == [0]
    assert leaves(TOVA(sinks=1), step, budget=3) == [5]
    assert leaves(TOVA(sinks=1, protect_last=True), step, budget=3) == [4]
    assert (TOVA().row, TOVA().online) == ("layer", True)

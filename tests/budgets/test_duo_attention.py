from __future__ import annotations

import numpy as np
import pytest

from kvsearch.budgets.duo_attention import head_budgets, streaming_heads
from kvsearch.errors import UsageError

GATES = np.array([[0.9, 0.1], [0.4, 0.6]])


class TestStreamingHeads:
    def test_the_example(self) -> None:
        assert streaming_heads(GATES, 0.5, seed=0).tolist() == [[False, True], [True, False]]

    @pytest.mark.parametrize(
        ("share", "count"), [(0.0, 0), (0.12, 0), (0.125, 1), (0.37, 1), (0.5, 2), (0.9, 4), (1.0, 4)]
    )
    def test_the_share_is_rounded_half_up(self, share: float, count: int) -> None:
        chosen = streaming_heads(GATES, share)
        assert chosen.sum() == count
        assert sorted(GATES[chosen]) == sorted(GATES.ravel())[:count]

    @pytest.mark.parametrize("seed", range(20))
    def test_equal_gates_are_told_apart_by_the_seed(self, seed: int) -> None:
        gates = np.zeros((4, 5))
        gates[0] = -1.0
        chosen = streaming_heads(gates, 0.5, seed)
        assert chosen.sum() == 10
        assert chosen[0].all()
        assert np.array_equal(chosen, streaming_heads(gates, 0.5, seed))

    def test_ties_do_not_favour_low_indices(self) -> None:
        chosen = np.stack([streaming_heads(np.ones((2, 3)), 0.5, seed) for seed in range(60)])
        assert (chosen.mean(0) > 0.2).all()
        assert (chosen.mean(0) < 0.8).all()

    @pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
    def test_a_share_out_of_range(self, share: float) -> None:
        with pytest.raises(UsageError, match="share of streaming heads must be between 0 and 1"):
            streaming_heads(GATES, share)

    def test_gates_that_are_no_numbers(self) -> None:
        with pytest.raises(UsageError, match="1 of 4 gates are NaN"):
            streaming_heads(np.where(GATES == 0.4, np.nan, GATES), 0.5)


class TestBudgets:
    @pytest.mark.parametrize(
        ("total", "expected"),
        [
            (12, [[3, 3], [3, 3]]),
            (17, [[6, 3], [3, 5]]),
            (20, [[7, 3], [3, 7]]),
            (21, [[8, 3], [3, 7]]),
            (22, [[8, 3], [3, 8]]),
        ],
    )
    def test_a_total_leaves_equal_parts_to_retrieval_heads(self, total: int, expected: list[list[int]]) -> None:
        assert head_budgets(GATES, 0.5, 1, 2, 8, total).tolist() == expected

    @pytest.mark.parametrize("total", [11, 23])
    def test_a_total_out_of_reach(self, total: int) -> None:
        with pytest.raises(UsageError) as caught:
            head_budgets(GATES, 0.5, 1, 2, 8, total)
        assert str(caught.value) == (
            f"a total of {total} entries cannot be met with 2 streaming heads of 3 entries and 2 retrieval heads of up "
            "to 8: give 12 to 22"
        )

    def test_streaming_heads_only(self) -> None:
        assert head_budgets(GATES, 1.0, 1, 2, 8, 12).tolist() == [[3, 3], [3, 3]]
        with pytest.raises(UsageError, match="give 12 to 12"):
            head_budgets(GATES, 1.0, 1, 2, 8, 13)

    def test_retrieval_heads_only(self) -> None:
        assert head_budgets(GATES, 0.0, 1, 2, 8).tolist() == [[8, 8], [8, 8]]
        assert head_budgets(GATES, 0.0, 1, 2, 8, 18).tolist() == [[5, 5], [4, 4]]

    def test_prompts_shorter_than_what_streaming_heads_keep(self) -> None:
        assert head_budgets(GATES, 0.5, 4, 8, 6).tolist() == [[6, 6], [6, 6]]
        assert head_budgets(GATES, 0.5, 4, 8, 6, 24).tolist() == [[6, 6], [6, 6]]

    @pytest.mark.parametrize("total", range(60, 241, 7))
    def test_the_total_is_exact(self, total: int) -> None:
        gates = np.random.default_rng(1).random((4, 3))
        budgets = head_budgets(gates, 0.4, 2, 3, 20, total) if total <= 7 * 20 + 5 * 5 else None
        if budgets is not None:
            assert budgets.sum() == total
            retrieval = budgets[~streaming_heads(gates, 0.4)]
            assert retrieval.max() - retrieval.min() <= 1

    def test_the_seed_decides_among_equal_gates(self) -> None:
        flat = np.ones((2, 3))
        for seed in range(5):
            assert np.array_equal(head_budgets(flat, 0.5, 1, 2, 9, seed=seed) == 3, streaming_heads(flat, 0.5, seed))

    @pytest.mark.parametrize(("sinks", "recent", "length"), [(-1, 2, 8), (1, 0, 8), (1, 2, 0)])
    def test_counts_out_of_range(self, sinks: int, recent: int, length: int) -> None:
        with pytest.raises(UsageError, match=f"got {sinks}, {recent}, {length}"):
            head_budgets(GATES, 0.5, sinks, recent, length)

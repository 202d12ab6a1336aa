"""What every policy must do; a test class subclasses `PolicyContract` and sets `policy`.

    class TestMyPolicy(PolicyContract):
        policy = MyPolicy(window=4)

Observations are drawn small and ugly: left padding, prompts of one token, windows longer than the prompt, one to seven
query heads per kv head. The invariants hold for every policy.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvsearch.policies import (
    Observation,
    Policy,
    QueryStatistics,
    create_policy,
    keep_mask,
    kept_indices,
    policy_class,
    rank_entries,
)

DIM = 4
# subclasses run the same test function, which hypothesis takes for a mistake
properties = settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
)


@dataclass(frozen=True)
class Case:
    """The shape of an observation; the first `pads[row]` of `length` columns of a row are padding."""

    heads: int
    group: int
    length: int
    pads: tuple[int, ...]
    seed: int

    @property
    def batch(self) -> int:
        return len(self.pads)


@st.composite
def cases(draw: st.DrawFn, max_length: int = 14) -> Case:
    length = draw(st.integers(1, max_length))
    pads = draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=3))
    return Case(
        draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 7])), length, tuple(pads), draw(st.integers(0, 99))
    )


def rope(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine tables [N, DIM] of a small rotary embedding."""
    angle = positions[:, None].float() * torch.tensor([1.0, 0.1])
    return torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()


def no_rope(positions: Tensor) -> tuple[Tensor, Tensor]:
    """A rotary embedding that turns nothing, as wide as DIM."""
    return torch.ones(len(positions), DIM), torch.zeros(len(positions), DIM)


def observe(policy: Policy, case: Case, dtype: torch.dtype = torch.float32) -> Observation:
    """An observation with random content, and with what `policy` says it needs."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    batch, heads, query_heads = case.batch, case.heads, case.heads * case.group
    needs = policy.needs()
    queries = normal(batch, query_heads, case.length, DIM)[:, :, -needs.query_rows :] if needs.query_rows else None
    statistics = None
    if needs.query_statistics_from is not None:
        factor = normal(batch, query_heads, DIM, DIM).float()
        statistics = QueryStatistics(normal(batch, query_heads, DIM).float(), factor @ factor.transpose(-1, -2))
    return Observation(
        keys=normal(batch, heads, case.length, DIM),
        values=normal(batch, heads, case.length, DIM),
        valid=torch.arange(case.length)[None] >= torch.tensor(case.pads)[:, None],
        scaling=DIM**-0.5,
        queries=queries,
        statistics=statistics,
        rotary=rope,
    )


def with_more_pads(observation: Observation, pads: int) -> Observation:
    """The same sequences with `pads` more columns of padding in front; the padding holds large values."""

    def longer(states: Tensor) -> Tensor:
        return torch.cat([states.new_full((*states.shape[:2], pads, DIM), 50.0), states], 2)

    queries = observation.queries
    if queries is not None and queries.shape[2] == observation.keys.shape[2]:
        queries = longer(queries)  # fewer rows than the policy wants: the prompt was shorter than the window
    valid = torch.nn.functional.pad(observation.valid, (pads, 0), value=False)
    return dataclasses.replace(
        observation,
        keys=longer(observation.keys),
        values=longer(observation.values),
        valid=valid,
        queries=queries,
        next_position=observation.lengths,
    )


def permuted(observation: Observation, order: list[int]) -> Observation:
    """The same batch with its sequences in another order."""
    statistics = observation.statistics
    return dataclasses.replace(
        observation,
        keys=observation.keys[order],
        values=observation.values[order],
        valid=observation.valid[order],
        queries=None if observation.queries is None else observation.queries[order],
        statistics=statistics and QueryStatistics(statistics.mean[order], statistics.covariance[order]),
    )


def first_to_protect(policy: Policy, length: int, budget: int) -> set[int]:
    """The protected entries, as indices among the real tokens, that a budget must cover (GE2)."""
    sinks, window = policy.sink_count, policy.window_count
    if budget < sinks + window:
        if window:
            sinks = min(sinks, budget - 1)
            window = max(1, budget - sinks)
        else:
            sinks = budget
    return set(range(min(sinks, length))) | set(range(max(0, length - window), length))


class PolicyContract:
    policy: ClassVar[Policy]

    def ranks(self, observation: Observation) -> Tensor:
        scores = self.policy.score(observation)
        return rank_entries(scores, observation.valid, self.policy.sink_count, self.policy.window_count)

    @properties
    @given(cases())
    def test_scores_are_finite_fp32_of_every_entry(self, case: Case) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            observation = observe(self.policy, case, dtype)
            scores = self.policy.score(observation)
            assert scores.shape == (case.batch, case.heads, case.length)
            assert scores.dtype == torch.float32
            real = observation.valid[:, None].expand_as(scores)
            assert not scores[real].isnan().any()
            for row, count in enumerate(observation.lengths.tolist()):
                start = case.length - count + self.policy.sink_count
                end = case.length - self.policy.window_count
                assert scores[row, :, start : max(start, end)].isfinite().all()

    @properties
    @given(cases())
    def test_scoring_is_deterministic_and_leaves_its_input_alone(self, case: Case) -> None:
        observation, again = observe(self.policy, case), observe(self.policy, case)
        first = self.policy.score(observation)
        assert torch.equal(first, self.policy.score(observation))
        assert torch.equal(first, self.policy.score(again))
        for name in ("keys", "values", "valid", "queries"):
            before, after = getattr(again, name), getattr(observation, name)
            assert before is after is None or torch.equal(before, after)
        if observation.statistics is not None and again.statistics is not None:
            assert torch.equal(observation.statistics.mean, again.statistics.mean)
            assert torch.equal(observation.statistics.covariance, again.statistics.covariance)

    @properties
    @given(cases())
    def test_ranks_are_permutations_with_protected_first_and_pads_last(self, case: Case) -> None:
        observation = observe(self.policy, case)
        ranks = self.ranks(observation)
        assert ranks.dtype == torch.int32
        assert torch.equal(ranks.sort(-1).values, torch.arange(case.length).int().expand_as(ranks))
        for row, count in enumerate(observation.lengths.tolist()):
            pads = case.length - count
            assert (ranks[row, :, :pads] >= count).all()
            protected = self.policy.protected(count)
            assert protected == len(first_to_protect(self.policy, count, case.length + 100))
            for head in range(case.heads):
                order = ranks[row, head, pads:].argsort().tolist()
                assert set(order[:protected]) == first_to_protect(self.policy, count, case.length + 100)

    @properties
    @given(cases())
    def test_kept_sets(self, case: Case) -> None:
        """I1 to I4: real, ascending and unique, as many as there is room for, protected ones first, nested."""
        observation = observe(self.policy, case)
        ranks = self.ranks(observation)
        smaller: dict[tuple[int, int], set[int]] = {}
        for budget in range(1, case.length + 2):
            mask = keep_mask(ranks, torch.full((case.heads,), budget), observation.valid)
            assert not (mask & ~observation.valid[:, None]).any()
            for row, count in enumerate(observation.lengths.tolist()):
                pads = case.length - count
                for head in range(case.heads):
                    kept = torch.nonzero(mask[row, head]).flatten().tolist()
                    assert len(kept) == min(count, budget)
                    if budget <= count:
                        assert kept == kept_indices(ranks, budget, row, head)
                    assert first_to_protect(self.policy, count, budget) <= {index - pads for index in kept}
                    assert smaller.get((row, head), set()) <= set(kept)
                    smaller[row, head] = set(kept)

    @properties
    @given(cases(), st.randoms(use_true_random=False))
    def test_permuting_sequences_permutes_ranks(self, case: Case, random: object) -> None:
        """I6, first half."""
        observation = observe(self.policy, case)
        order = list(range(case.batch))
        random.shuffle(order)  # type: ignore[attr-defined]
        scores = self.policy.score(observation)
        shuffled = permuted(observation, order)
        torch.testing.assert_close(self.policy.score(shuffled), scores[order], rtol=1e-5, atol=1e-6)
        ranks = rank_entries(scores, observation.valid, self.policy.sink_count, self.policy.window_count)
        again = rank_entries(scores[order], shuffled.valid, self.policy.sink_count, self.policy.window_count)
        assert torch.equal(again, ranks[order])

    @properties
    @given(cases(), st.integers(1, 5))
    def test_left_padding_changes_nothing(self, case: Case, pads: int) -> None:
        """I6, second half: scores up to rounding, and ranks exactly where scores are the same."""
        observation = observe(self.policy, case)
        padded = with_more_pads(observation, pads)
        scores, longer = self.policy.score(observation), self.policy.score(padded)[:, :, pads:]
        start = torch.arange(case.length) - torch.tensor(case.pads)[:, None]
        count = observation.lengths[:, None]
        candidate = (start >= self.policy.sink_count) & (start < count - self.policy.window_count)
        candidate = candidate[:, None].expand_as(scores)
        if self.policy.name == "streaming":  # its score is the position itself: only the order counts
            longer = longer - pads
        torch.testing.assert_close(longer[candidate], scores[candidate], rtol=1e-4, atol=1e-5)

        ranks = rank_entries(scores, observation.valid, self.policy.sink_count, self.policy.window_count)
        scores = torch.nn.functional.pad(scores, (pads, 0), value=1e9)
        shifted = rank_entries(scores, padded.valid, self.policy.sink_count, self.policy.window_count)[:, :, pads:]
        real = observation.valid[:, None].expand_as(ranks)
        assert torch.equal(shifted[real], ranks[real])

    @properties
    @given(cases())
    def test_each_sequence_is_scored_on_its_own(self, case: Case) -> None:
        observation = observe(self.policy, case)
        ranks = self.policy.score(observation)
        for row in range(case.batch):
            alone = permuted(observation, [row])
            real = observation.valid[row][None].expand(case.heads, -1)
            torch.testing.assert_close(
                self.policy.score(alone)[0][real], ranks[row][real], rtol=1e-5, atol=1e-6, equal_nan=True
            )

    def test_it_is_rebuilt_from_its_name_and_parameters(self) -> None:
        assert policy_class(self.policy.name) is type(self.policy)
        assert create_policy(self.policy.name, self.policy.parameters()) == self.policy
        assert self.policy.source

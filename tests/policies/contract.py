"""What every policy must do; a test class subclasses `PolicyContract` and sets `policy`.

    class TestMyPolicy(PolicyContract):
        policy = MyPolicy(window=4)

Observations are drawn small and ugly: left padding, prompts of one token, windows longer than the prompt, one to seven
query heads per kv head. The invariants hold for every policy.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvsearch.errors import InternalError
from kvsearch.policies import (
    Observation,
    Policy,
    QueryStatistics,
    create_policy,
    keep_mask,
    kept_indices,
    policy_class,
    rank_under,
)
from kvsearch.policies.base import Norm
from kvsearch.policies.decoding import State
from kvsearch.policies.ranking import keep_under
from kvsearch.policies.scoring import column_sums
from tests.examples import fixed

DIM = 4
MODEL_DIM = 5
MISSING = {"queries": None, "statistics": {}, "column_sums": None, "projection": None}
# subclasses run the same test function, which hypothesis takes for a mistake
properties = settings(fixed, suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow])


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


@dataclass(frozen=True)
class OutputWeights:
    """W_O of every query head, [Hq, DIM, MODEL_DIM], as the projection that policies are given."""

    weight: Tensor

    def __call__(self, values: Tensor, order: Norm) -> Tensor:
        """|v W_O[q]|, [B, Hkv, G, T] fp32."""
        weight = self.weight.view(values.shape[1], -1, *self.weight.shape[1:])
        projected = torch.einsum("bhtd,hgdm->bhgtm", values.float(), weight)
        return projected.norm(p={"l1": 1, "l2": 2}[order], dim=-1)


def observe(policy: Policy, case: Case, dtype: torch.dtype = torch.float32) -> Observation:
    """An observation with random content, and with what `policy` says it needs and nothing else."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    batch, heads, query_heads = case.batch, case.heads, case.heads * case.group
    needs = policy.needs()
    queries = normal(batch, query_heads, case.length, DIM)
    keys, values = normal(batch, heads, case.length, DIM), normal(batch, heads, case.length, DIM)
    valid = torch.arange(case.length)[None] >= torch.tensor(case.pads)[:, None]
    statistics = {}
    if needs.query_statistics_from is not None:
        factor = normal(batch, query_heads, DIM, DIM).float()
        mean = normal(batch, query_heads, DIM).float()
        statistics[needs.query_statistics_from] = QueryStatistics(mean, factor @ factor.transpose(-1, -2))
    return Observation(
        keys=keys,
        values=values,
        valid=valid,
        scaling=DIM**-0.5,
        queries=queries[:, :, -needs.query_rows :] if needs.query_rows else None,
        statistics=statistics,
        rotary=rope,
        column_sums=column_sums(queries, keys, valid, DIM**-0.5) if needs.column_sums else None,
        projection=OutputWeights(normal(query_heads, DIM, MODEL_DIM).float()) if needs.projection else None,
    )


def with_more_pads(observation: Observation, pads: int) -> Observation:
    """The same sequences with `pads` more columns of padding in front; the padding holds large values."""

    def longer(states: Tensor) -> Tensor:
        return torch.cat([states.new_full((*states.shape[:2], pads, DIM), 50.0), states], 2)

    queries, received = observation.queries, observation.column_sums
    if queries is not None and queries.shape[2] == observation.keys.shape[2]:
        queries = longer(queries)  # fewer rows than the policy wants: the prompt was shorter than the window
    return dataclasses.replace(
        observation,
        keys=longer(observation.keys),
        values=longer(observation.values),
        valid=torch.nn.functional.pad(observation.valid, (pads, 0), value=False),
        queries=queries,
        next_position=observation.lengths,
        column_sums=None if received is None else torch.nn.functional.pad(received, (pads, 0)),  # nothing sees padding
    )


def permuted(observation: Observation, order: list[int]) -> Observation:
    """The same batch with its sequences in another order."""
    return dataclasses.replace(
        observation,
        keys=observation.keys[order],
        values=observation.values[order],
        valid=observation.valid[order],
        queries=None if observation.queries is None else observation.queries[order],
        statistics={
            start: QueryStatistics(of.mean[order], of.covariance[order]) for start, of in observation.statistics.items()
        },
        column_sums=None if observation.column_sums is None else observation.column_sums[order],
    )


def without(observation: Observation, name: str) -> Observation:
    """The same without one of the things a policy may declare."""
    return dataclasses.replace(observation, **{name: MISSING[name]})


def is_given(observation: Observation, name: str) -> bool:
    """Whether one of the things a policy may declare is there."""
    found = getattr(observation, name)
    return found is not None and not (isinstance(found, dict) and not found)


def contents(observation: Observation) -> dict[str, Tensor]:
    """Copies of everything in an observation that could be changed."""
    found = {name: getattr(observation, name) for name in ("keys", "values", "valid", "queries", "column_sums")}
    found |= {f"mean {start}": of.mean for start, of in observation.statistics.items()}
    found |= {f"covariance {start}": of.covariance for start, of in observation.statistics.items()}
    return {name: tensor.clone() for name, tensor in found.items() if tensor is not None}


class Shifted:
    """A policy that repeats, for an observation with `pads` more columns of padding, the scores it gave without."""

    def __init__(self, policy: Policy, observation: Observation, pads: int) -> None:
        self.policy, self.observation, self.pads = policy, observation, pads

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def score(self, _: Observation) -> Tensor:
        return torch.nn.functional.pad(self.policy.score(self.observation), (self.pads, 0), value=1e9)

    def first_stage(self, _: Observation) -> Tensor | None:
        first = self.policy.first_stage(self.observation)
        return None if first is None else torch.nn.functional.pad(first, (self.pads, 0), value=1e9)


def start_of(policy: Policy, observation: Observation) -> State:
    """The state in which a policy starts to decode; without any where it has no decode rule of its own."""
    return policy.start(observation) if policy.online else State()


def first_to_protect(policy: Policy, length: int, budget: int) -> set[int]:
    """The protected entries, as indices among the real tokens, that a budget must cover."""
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
    score_is_position: ClassVar[bool] = False  # only the order of such scores counts

    @properties
    @given(cases())
    def test_scores_are_finite_fp32_of_every_entry(self, case: Case) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            observation = observe(self.policy, case, dtype)
            first = self.policy.first_stage(observation)
            for scores in [self.policy.score(observation), *([] if first is None else [first])]:
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
        before = contents(observation)
        score, ranks = self.policy.score(observation), rank_under(self.policy, observation)
        state = start_of(self.policy, observation)
        for tensor in (*state.entries.values(), *state.heads.values()):
            tensor.fill_(1)  # a state is the caller's: it shares no memory with the observation
        assert torch.equal(score, self.policy.score(observation))
        assert torch.equal(score, self.policy.score(again))
        assert torch.equal(ranks, rank_under(self.policy, again))
        after = contents(observation)
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert torch.equal(tensor, after[name]), name

    @properties
    @given(cases())
    def test_the_state_at_the_start_of_decoding(self, case: Case) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            observation = observe(self.policy, case, dtype)
            state, again = start_of(self.policy, observation), start_of(self.policy, observation)
            for name, tensor in state.entries.items():
                assert tensor.shape[:3] == (case.batch, case.heads, case.length), name
                torch.testing.assert_close(tensor, again.entries[name], rtol=0, atol=0, equal_nan=True)
            for name, tensor in state.heads.items():
                assert tensor.shape[:2] == (case.batch, case.heads), name
                torch.testing.assert_close(tensor, again.heads[name], rtol=0, atol=0, equal_nan=True)

    @properties
    @given(cases())
    def test_what_is_declared_is_used(self, case: Case) -> None:
        """`observe` gives what is declared and nothing else; without any one of these things there is no result."""
        observation = observe(self.policy, case)
        needs = self.policy.needs()
        declared = (needs.query_rows, needs.query_statistics_from is not None, needs.column_sums, needs.projection)
        assert [is_given(observation, name) for name in MISSING] == [bool(need) for need in declared]
        for name in MISSING:
            if is_given(observation, name):
                poor = without(observation, name)
                with pytest.raises(InternalError):
                    rank_under(self.policy, poor), start_of(self.policy, poor)

    @properties
    @given(cases())
    def test_ranks_are_permutations_with_protected_first_and_pads_last(self, case: Case) -> None:
        observation = observe(self.policy, case)
        ranks = rank_under(self.policy, observation)
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
        """Real, ascending and unique, as many as there is room for, protected ones first, nested."""
        observation = observe(self.policy, case)
        ranks = rank_under(self.policy, observation)
        smaller = torch.zeros_like(ranks, dtype=torch.bool)
        for budget in range(1, case.length + 2):
            budgets = torch.full((case.batch, case.heads), budget)
            mask = keep_under(self.policy, observation, budgets)
            exempt = self.policy.exempt(budgets, observation.lengths[:, None].expand_as(budgets))
            everything = observation.valid[:, None].expand_as(mask)
            assert torch.equal(mask[exempt], everything[exempt])
            assert torch.equal(mask[~exempt], keep_mask(ranks, budgets, observation.valid)[~exempt])
            assert not (mask & ~observation.valid[:, None]).any()
            assert not (smaller & ~mask).any()
            smaller = mask
            for row, head in torch.nonzero(~exempt).tolist():
                count = int(observation.lengths[row])
                kept = torch.nonzero(mask[row, head]).flatten().tolist()
                assert len(kept) == min(count, budget)
                if budget <= count:
                    assert kept == kept_indices(ranks, budget, row, head)
                pads = case.length - count
                assert first_to_protect(self.policy, count, budget) <= {index - pads for index in kept}

    @properties
    @given(cases())
    def test_budgets_of_heads_and_sequences_do_not_mix(self, case: Case) -> None:
        observation = observe(self.policy, case)
        budgets = 1 + (torch.arange(case.batch * case.heads).view(case.batch, case.heads) * 3 + case.seed) % case.length
        mixed = keep_under(self.policy, observation, budgets)
        for row, head in torch.cartesian_prod(torch.arange(case.batch), torch.arange(case.heads)).tolist():
            alike = keep_under(self.policy, observation, torch.full_like(budgets, int(budgets[row, head])))
            assert torch.equal(mixed[row, head], alike[row, head])

    @properties
    @given(cases(), st.randoms(use_true_random=False))
    def test_permuting_sequences_permutes_ranks(self, case: Case, random: object) -> None:
        """Nothing depends on the order of a batch."""
        observation = observe(self.policy, case)
        order = list(range(case.batch))
        random.shuffle(order)  # type: ignore[attr-defined]
        shuffled = permuted(observation, order)
        torch.testing.assert_close(
            self.policy.score(shuffled), self.policy.score(observation)[order], rtol=1e-5, atol=1e-6
        )
        assert torch.equal(rank_under(self.policy, shuffled), rank_under(self.policy, observation)[order])

    @properties
    @given(cases(), st.integers(1, 5))
    def test_left_padding_changes_nothing(self, case: Case, pads: int) -> None:
        """Scores up to rounding, and ranks exactly where scores are the same."""
        observation = observe(self.policy, case)
        padded = with_more_pads(observation, pads)
        scores, longer = self.policy.score(observation), self.policy.score(padded)[:, :, pads:]
        start = torch.arange(case.length) - torch.tensor(case.pads)[:, None]
        count = observation.lengths[:, None]
        candidate = (start >= self.policy.sink_count) & (start < count - self.policy.window_count)
        candidate = candidate[:, None].expand_as(scores)
        if self.score_is_position:
            longer = longer - pads
        torch.testing.assert_close(longer[candidate], scores[candidate], rtol=1e-4, atol=1e-5)

        ranks = rank_under(self.policy, observation)
        same = Shifted(self.policy, observation, pads)
        shifted = rank_under(same, padded)[:, :, pads:]  # type: ignore[arg-type]
        real = observation.valid[:, None].expand_as(ranks)
        assert torch.equal(shifted[real], ranks[real])

    @properties
    @given(cases())
    def test_each_sequence_is_scored_on_its_own(self, case: Case) -> None:
        observation = observe(self.policy, case)
        scores = self.policy.score(observation)
        for row in range(case.batch):
            alone = permuted(observation, [row])
            real = observation.valid[row][None].expand(case.heads, -1)
            torch.testing.assert_close(
                self.policy.score(alone)[0][real], scores[row][real], rtol=1e-5, atol=1e-6, equal_nan=True
            )

    def test_it_is_rebuilt_from_its_name_and_parameters(self) -> None:
        assert policy_class(self.policy.name) is type(self.policy)
        assert create_policy(self.policy.name, self.policy.parameters()) == self.policy
        assert self.policy.source

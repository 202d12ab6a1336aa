"""What every policy must do; a test class subclasses `PolicyContract` and sets `policy`.

    class TestMyPolicy(PolicyContract):
        policy = MyPolicy(window=4)

Observations are drawn small and with every edge case: left padding, prompts of one token, windows longer than the
prompt, one to seven query heads per kv head. The invariants hold for every policy.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvsearch.core.errors import InternalError
from kvsearch.policies import (
    Observation,
    Policy,
    QueryStatistics,
    create_policy,
    find_policy_class,
    keep_mask,
    rank_under,
)
from kvsearch.policies.base import Norm
from kvsearch.policies.checks import read_lengths
from kvsearch.policies.decoding import State
from kvsearch.policies.ranking import apply_to_each, find_limits, keep_at
from kvsearch.policies.scoring import sum_columns

DIM = 4
MODEL_DIM = 5
EMPTY_INPUTS: dict[str, Any] = {"queries": None, "statistics": {}, "column_sums": None, "projection": None}
# The same examples at every run: floats that tie in one draw of a million are no failure. No deadline: how fast a
# machine is says nothing about the code. Subclasses run the same test function, which hypothesis takes for a mistake.
properties = settings(
    derandomize=True,
    database=None,
    deadline=None,
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


@dataclass(frozen=True)
class OutputWeights:
    """W_O of every query head, [Hq, DIM, MODEL_DIM], as the projection that policies are given."""

    weight: Tensor

    def __call__(self, values: Tensor, order: Norm) -> Tensor:
        """|v W_O[q]|, [B, Hkv, G, T] fp32."""
        weight = self.weight.view(values.shape[1], -1, *self.weight.shape[1:])
        projected = torch.einsum("bhtd,hgdm->bhgtm", values.float(), weight)
        norms: Tensor = projected.norm(p={"l1": 1, "l2": 2}[order], dim=-1)
        return norms


def observe(policy: Policy, case: Case, dtype: torch.dtype = torch.float32) -> Observation:
    """Make an observation with random content, and with what `policy` says it needs and nothing else."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    batch = case.batch
    heads = case.heads
    query_heads = case.heads * case.group
    needs = policy.needs()
    queries = normal(batch, query_heads, case.length, DIM)
    keys = normal(batch, heads, case.length, DIM)
    values = normal(batch, heads, case.length, DIM)
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
        column_sums=sum_columns(queries, keys, valid, DIM**-0.5) if needs.column_sums else None,
        projection=OutputWeights(normal(query_heads, DIM, MODEL_DIM).float()) if needs.projection else None,
        hidden={} if needs.hidden is None else {needs.hidden: normal(batch, heads, case.length, 1)[..., 0].float()},
        rereads={} if needs.reread is None else {needs.reread: normal(batch, heads, case.length).float().abs()},
    )


def with_more_pads(observation: Observation, pads: int) -> Observation:
    """Return the same sequences with `pads` more columns of padding in front; the padding holds large values."""

    def longer(states: Tensor) -> Tensor:
        return torch.cat([states.new_full((*states.shape[:2], pads, DIM), 50.0), states], 2)

    queries = observation.queries
    received = observation.column_sums
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
        hidden={what: torch.nn.functional.pad(got, (pads, 0)) for what, got in observation.hidden.items()},
        rereads={how: torch.nn.functional.pad(got, (pads, 0)) for how, got in observation.rereads.items()},
    )


def permuted(observation: Observation, order: list[int]) -> Observation:
    """Return the same batch with its sequences in another order."""
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
        hidden={what: got[order] for what, got in observation.hidden.items()},
        rereads={how: got[order] for how, got in observation.rereads.items()},
    )


def without(observation: Observation, name: str) -> Observation:
    """Return an observation without one of the inputs that a policy may declare to need, see `EMPTY_INPUTS`."""
    return dataclasses.replace(observation, **{name: EMPTY_INPUTS[name]})


def is_given(observation: Observation, name: str) -> bool:
    """Return whether an observation has one of the inputs that a policy may declare to need."""
    value = getattr(observation, name)
    return value is not None and not (isinstance(value, dict) and not value)


def contents(observation: Observation) -> dict[str, Tensor]:
    """Copy all tensors of an observation by name, to see later whether a policy has changed one in place."""
    tensors = {name: getattr(observation, name) for name in ("keys", "values", "valid", "queries", "column_sums")}
    tensors |= {f"mean {start}": of.mean for start, of in observation.statistics.items()}
    tensors |= {f"covariance {start}": of.covariance for start, of in observation.statistics.items()}
    return {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}


class Shifted:
    """A policy that gives an observation with `pads` more columns of padding the scores that it gave without them.

    Scores of a padded batch differ by rounding, which may swap near ties; with these, ranks have to be exactly equal.
    """

    def __init__(self, policy: Policy, observation: Observation, pads: int) -> None:
        self.policy = policy
        self.observation = observation
        self.pads = pads

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def score(self, _: Observation) -> Tensor:
        return torch.nn.functional.pad(self.policy.score(self.observation), (self.pads, 0), value=1e9)

    def first_stage(self, _: Observation) -> Tensor | None:
        first = self.policy.first_stage(self.observation)
        return None if first is None else torch.nn.functional.pad(first, (self.pads, 0), value=1e9)


def keep_under(policy: Policy, observation: Observation, budgets: Tensor) -> Tensor:
    """Return what a policy keeps at `budgets` [B, Hkv] int64, [B, Hkv, T] bool; exempt heads keep everything."""
    return keep_at(policy, observation, find_limits(policy, budgets, read_lengths(observation)))


def start_of(policy: Policy, observation: Observation) -> State:
    """Return the state in which a policy starts to decode; an empty one if it has no decode rule of its own."""
    return policy.start(observation) if policy.has_decode_rule else State()


def first_to_protect(policy: Policy, length: int, budget: int) -> set[int]:
    """Return the protected entries that a budget must cover first, as indices among the real tokens."""
    sinks = policy.sink_count
    window = policy.recent_count
    if budget < sinks + window:  # sinks come first, but at least one recent entry stays
        if window:
            sinks = min(sinks, budget - 1)
            window = max(1, budget - sinks)
        else:
            sinks = budget
    return set(range(min(sinks, length))) | set(range(max(0, length - window), length))


def candidates(policy: Policy, observation: Observation) -> Tensor:
    """Return which entries a score decides about, neither padding nor protected, [B, Hkv, T] bool."""
    index = observation.valid.cumsum(-1) - 1
    free = (index >= policy.sink_count) & (index < observation.lengths[:, None] - policy.recent_count)
    return (free & observation.valid)[:, None].expand(observation.keys.shape[:3])


class Drawn:
    """One example: an observation for a policy, with scores, ranks and kept sets, which several invariants check."""

    def __init__(self, policy: Policy, case: Case) -> None:
        self.policy = policy
        self.case = case
        self.observation = observe(policy, case)
        self.valid = self.observation.valid
        self.lengths = self.observation.lengths
        self.scores = policy.score(self.observation)
        self.ranks = rank_under(policy, self.observation)
        self.budgets = torch.arange(1, case.length + 2)
        self.uniform = self.budgets[:, None, None].expand(-1, case.batch, case.heads)  # [N, B, Hkv]
        self.masks = torch.stack([self.keep(budgets) for budgets in self.uniform])  # [N, B, Hkv, T]

    def keep(self, budgets: Tensor) -> Tensor:
        """Return which entries are kept at budgets [B, Hkv], [B, Hkv, T] bool."""
        return keep_under(self.policy, self.observation, budgets)

    def to_protect(self, budget: int) -> Tensor:
        """Return the protected entries that a budget must cover, [B, T] bool."""
        protected = torch.zeros_like(self.valid)
        for row, count in enumerate(self.lengths.tolist()):
            columns = first_to_protect(self.policy, count, budget)
            protected[row, [self.case.length - count + index for index in columns]] = True
        return protected


class PolicyContract:
    """Subclasses set `policy`, with small parameters, as prompts have 14 tokens at most."""

    policy: ClassVar[Policy]
    score_is_position: ClassVar[bool] = False  # only the order of such scores counts

    @properties
    @given(cases(), st.integers(1, 5))
    def test_every_invariant(self, case: Case, pads: int) -> None:
        """Check each invariant, a method below, on one example: drawing and scoring it takes longest."""
        drawn = Drawn(self.policy, case)
        before = contents(observe(self.policy, case))
        for dtype in (torch.float32, torch.bfloat16):
            observation = drawn.observation if dtype is torch.float32 else observe(self.policy, case, dtype)
            self.scores_are_finite_fp32_of_every_entry(observation)
            self.the_state_at_the_start_of_decoding(observation)
        self.scoring_is_deterministic(drawn)
        self.what_is_declared_is_used(drawn)
        self.ranks_are_permutations_with_protected_first_and_pads_last(drawn)
        self.kept_sets(drawn)
        self.budgets_of_heads_and_sequences_do_not_mix(drawn)
        self.permuting_sequences_permutes_ranks(drawn)
        self.left_padding_changes_nothing(drawn, pads)
        self.each_sequence_is_scored_on_its_own(drawn)
        after = contents(drawn.observation)
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert torch.equal(tensor, after[name]), f"{name} was changed"

    def scores_are_finite_fp32_of_every_entry(self, observation: Observation) -> None:
        batch, heads, length = observation.keys.shape[:3]
        first = self.policy.first_stage(observation)
        for scores in [self.policy.score(observation), *([] if first is None else [first])]:
            assert scores.shape == (batch, heads, length)
            assert scores.dtype == torch.float32
            real = observation.valid[:, None].expand_as(scores)
            assert not scores[real].isnan().any()
            compared = scores[candidates(self.policy, observation)]
            assert compared.isfinite().all()
            assert self.policy.signed_scores or (compared >= 0).all(), "scores below 0 are to be declared"

    def the_state_at_the_start_of_decoding(self, observation: Observation) -> None:
        """It has the right shapes, is equal when made again, and shares no memory with the observation."""
        batch, heads, length = observation.keys.shape[:3]
        state = start_of(self.policy, observation)
        again = start_of(self.policy, observation)
        for name, tensor in state.entries.items():
            assert tensor.shape[:3] == (batch, heads, length), name
            torch.testing.assert_close(tensor, again.entries[name], rtol=0, atol=0, equal_nan=True)
        for name, tensor in state.heads.items():
            assert tensor.shape[:2] == (batch, heads), name
            torch.testing.assert_close(tensor, again.heads[name], rtol=0, atol=0, equal_nan=True)
        for tensor in (*state.entries.values(), *state.heads.values()):
            tensor.fill_(1)  # the caller compares the observation with a copy afterwards

    def scoring_is_deterministic(self, drawn: Drawn) -> None:
        again = observe(self.policy, drawn.case)
        assert torch.equal(drawn.scores, self.policy.score(drawn.observation))
        assert torch.equal(drawn.scores, self.policy.score(again))
        assert torch.equal(drawn.ranks, rank_under(self.policy, again))

    def what_is_declared_is_used(self, drawn: Drawn) -> None:
        """`observe` gives only the declared inputs; a policy raises InternalError if one of these is missing."""
        needs = self.policy.needs()
        declared = (needs.query_rows, needs.query_statistics_from is not None, needs.column_sums, needs.projection)
        assert [is_given(drawn.observation, name) for name in EMPTY_INPUTS] == [bool(need) for need in declared]
        for name in EMPTY_INPUTS:
            if is_given(drawn.observation, name):
                poor = without(drawn.observation, name)
                with pytest.raises(InternalError):
                    rank_under(self.policy, poor), start_of(self.policy, poor)

    def ranks_are_permutations_with_protected_first_and_pads_last(self, drawn: Drawn) -> None:
        ranks = drawn.ranks
        length = drawn.case.length
        assert ranks.dtype == torch.int32
        assert torch.equal(ranks.sort(-1).values, torch.arange(length).int().expand_as(ranks))
        assert torch.equal(ranks < drawn.lengths[:, None, None], drawn.valid[:, None].expand_as(ranks))
        to_protect = drawn.to_protect(length + 100)
        counts = to_protect.sum(-1)
        assert counts.tolist() == [self.policy.protected(count) for count in drawn.lengths.tolist()]
        assert torch.equal(ranks < counts[:, None, None], to_protect[:, None].expand_as(ranks))

    def kept_sets(self, drawn: Drawn) -> None:
        """Kept sets are nested, without padding, of the budget's size, by rank; exempt heads keep all."""
        masks = drawn.masks
        budgets = drawn.uniform
        real = drawn.valid[:, None]
        lengths = drawn.lengths[:, None].expand_as(budgets)
        exempt = apply_to_each(self.policy.keeps_all, budgets, lengths).bool()
        assert not (masks & ~real).any()
        assert not (masks[:-1] & ~masks[1:]).any()
        assert torch.equal(masks[exempt], real.expand_as(masks)[exempt])
        by_rank = torch.stack([keep_mask(drawn.ranks, each, drawn.valid) for each in budgets])
        assert torch.equal(masks[~exempt], by_rank[~exempt])
        assert torch.equal(masks.sum(-1)[~exempt], torch.minimum(lengths, budgets)[~exempt])
        to_protect = torch.stack([drawn.to_protect(budget)[:, None] for budget in drawn.budgets.tolist()])
        assert not (to_protect & ~masks)[~exempt].any()

    def budgets_of_heads_and_sequences_do_not_mix(self, drawn: Drawn) -> None:
        case = drawn.case
        budgets = 1 + (torch.arange(case.batch * case.heads).view(case.batch, case.heads) * 3 + case.seed) % case.length
        mixed = drawn.keep(budgets)
        for row, head in itertools.product(range(case.batch), range(case.heads)):
            assert torch.equal(mixed[row, head], drawn.masks[budgets[row, head] - 1, row, head])

    def permuting_sequences_permutes_ranks(self, drawn: Drawn) -> None:
        """Scores and ranks do not depend on the order of a batch."""
        order = torch.randperm(drawn.case.batch, generator=torch.Generator().manual_seed(drawn.case.seed)).tolist()
        shuffled = permuted(drawn.observation, order)
        torch.testing.assert_close(self.policy.score(shuffled), drawn.scores[order], rtol=1e-5, atol=1e-6)
        assert torch.equal(rank_under(self.policy, shuffled), drawn.ranks[order])

    def left_padding_changes_nothing(self, drawn: Drawn, pads: int) -> None:
        """Padding changes scores by rounding only, and ranks not at all where scores are the same, see `Shifted`."""
        padded = with_more_pads(drawn.observation, pads)
        longer = self.policy.score(padded)[:, :, pads:]
        if self.score_is_position:
            longer = longer - pads
        compared = candidates(self.policy, drawn.observation)
        torch.testing.assert_close(longer[compared], drawn.scores[compared], rtol=1e-4, atol=1e-5)

        same = Shifted(self.policy, drawn.observation, pads)
        shifted = rank_under(same, padded)[:, :, pads:]  # type: ignore[arg-type]
        real = drawn.valid[:, None].expand_as(drawn.ranks)
        assert torch.equal(shifted[real], drawn.ranks[real])

    def each_sequence_is_scored_on_its_own(self, drawn: Drawn) -> None:
        for row in range(drawn.case.batch):
            alone = self.policy.score(permuted(drawn.observation, [row]))[0]
            real = drawn.valid[row][None].expand_as(alone)
            torch.testing.assert_close(alone[real], drawn.scores[row][real], rtol=1e-5, atol=1e-6, equal_nan=True)

    def test_it_is_rebuilt_from_its_name_and_parameters(self) -> None:
        assert find_policy_class(self.policy.name) is type(self.policy)
        assert create_policy(self.policy.name, self.policy.parameters()) == self.policy
        assert self.policy.source

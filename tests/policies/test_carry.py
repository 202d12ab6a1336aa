"""Log weights and values of kept entries that make up for those that left a prompt."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvsearch.policies import Observation
from kvsearch.policies.base import References
from kvsearch.policies.carry import MIN_WEIGHT, REFERENCES, match_attention, match_segments
from kvsearch.testing.policy_contract import DIM, no_rope, rope
from tests.examples import fixed


def test_two_equal_entries_become_one_of_twice_the_weight() -> None:
    """Of three entries with attention .25, .25, .5 the first leaves: the second, its equal, gets weight 2, or log 2."""
    attention = torch.tensor([[[0.25, 0.25, 0.5], [0.4, 0.4, 0.2], [0.1, 0.1, 0.8]]])
    values = torch.tensor([[[3.0], [1.0], [7.0]]])
    found, log_weights = match_segments(attention, values, torch.tensor([[1, 2]]), torch.float32)
    # ridges pull a little towards weights of 1 and values as they were
    torch.testing.assert_close(log_weights, torch.tensor([[math.log(2), 0.0]]), atol=0.03, rtol=0)
    shares = attention[:, :, 1:] * log_weights.exp()
    shares = shares / shares.sum(-1, keepdim=True)
    gram = shares[0].T @ shares[0]
    ridge = 0.1 * gram.trace() / 2 * torch.eye(2)
    residual = attention[0] @ values[0] - shares[0] @ values[0, 1:]
    expected = values[0, 1:] + torch.linalg.solve(gram + ridge, shares[0].T @ residual)
    torch.testing.assert_close(found[0], expected)
    assert abs(float(found[0, 0]) - 2.0) < 0.3  # the mean of those that it stands for


def test_weights_are_the_bounded_least_squares_of_the_denominators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsearch.policies.carry.GRADIENT_STEPS", 500)
    generator = torch.Generator().manual_seed(0)
    attention = torch.randn(1, 40, 30, generator=generator).mul(2).softmax(-1)
    slots = torch.arange(0, 30, 5)[None]
    _, log_weights = match_segments(attention, torch.zeros(1, 30, 2), slots, torch.float32)
    kept = attention[0][:, ::5].double()
    ridge = 0.01 * kept.square().sum() / 6
    # with a ridge towards 1 as further rows
    rows = torch.cat([kept, ridge.sqrt() * torch.eye(6)]).numpy()
    wanted = np.concatenate([np.ones(40), np.full(6, math.sqrt(ridge))])
    lsq_linear = pytest.importorskip("scipy.optimize").lsq_linear
    expected = lsq_linear(rows, wanted, (MIN_WEIGHT, 30.0)).x
    torch.testing.assert_close(log_weights[0].exp().double(), torch.from_numpy(expected), atol=1e-3, rtol=1e-3)


def seen(seed: int, batch: int, heads: int, group: int, length: int, pads: int = 0, **changes: object) -> Observation:
    """Prompts of which the first `pads` columns are padding, with reference queries."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    valid = torch.arange(length).expand(batch, -1) >= pads
    real = torch.arange(REFERENCES).expand(batch, -1) < length - pads
    references = References(normal(batch, heads * group, REFERENCES, DIM), real)
    states = normal(batch, heads, length, DIM), normal(batch, heads, length, 3)
    made = Observation(*states, valid, 0.7, references=references, rotary=rope)
    return replace(made, **changes)  # type: ignore[arg-type]


def chosen(observation: Observation, seed: int) -> tuple[Tensor, np.ndarray, list[int]]:
    """What is kept at random, how many that are of a head, and how many there are."""
    shape = observation.keys.shape[:3]
    generator = torch.Generator().manual_seed(seed)
    keep = (torch.rand(shape, generator=generator) < torch.rand(*shape[:2], 1, generator=generator)).bool()
    keep &= observation.valid[:, None]
    keep[..., -1] = True
    return keep, keep.sum(-1).numpy(), observation.lengths.tolist()


prompts = st.builds(
    seen, st.integers(0, 99), st.integers(1, 2), st.integers(1, 2), st.integers(1, 3), st.integers(3, 80),
    st.integers(0, 2), softcap=st.sampled_from([None, 3.0]),
)  # fmt: skip


def outputs(observation: Observation, keep: Tensor, values: Tensor, log_weights: Tensor) -> Tensor:
    """What the reference queries, unturned, get of what is kept."""
    queries = present_queries(observation)
    heads = keep.shape[1]
    keys, values, keep, log_weights = (
        states.repeat_interleave(queries.shape[1] // heads, 1)
        for states in (observation.keys, values, keep, log_weights)
    )
    logits = queries @ keys.transpose(-1, -2) * observation.scaling
    if observation.softcap is not None:
        logits = observation.softcap * torch.tanh(logits / observation.softcap)
    logits = (logits + log_weights[:, :, None]).masked_fill(~keep[:, :, None], -math.inf)
    return logits.softmax(-1) @ values


def present_queries(observation: Observation) -> Tensor:
    assert observation.references is not None
    return observation.references.queries


@fixed(15)
@given(prompts, st.integers(0, 99))
def test_what_entries_carry(observation: Observation, seed: int) -> None:
    keep, counts, lengths = chosen(observation, seed)
    before = observation.keys.clone(), observation.values.clone()
    values, log_weights = match_attention(observation, keep, counts, lengths)
    assert torch.equal(observation.keys, before[0])
    assert torch.equal(observation.values, before[1])
    assert bool(log_weights.isfinite().all() and values.isfinite().all())
    assert float(log_weights.min()) >= math.log(MIN_WEIGHT) - 1e-5
    assert float(log_weights.max()) <= math.log(keep.shape[2]) + 1e-5
    whole = torch.from_numpy(counts == observation.lengths[:, None].numpy())[..., None]
    assert not bool((log_weights * (whole | ~keep)).any())  # of heads that lose nothing, and of what leaves
    same = (whole | ~keep)[..., None].expand_as(values)
    assert torch.equal(values[same], observation.values[same])
    order = torch.arange(len(keep)).flip(0)
    flipped = replace(
        observation, keys=observation.keys.flip(0), values=observation.values.flip(0), valid=observation.valid.flip(0),
        references=References(present_queries(observation).flip(0), observation.references.real.flip(0)),
    )  # fmt: skip
    other = match_attention(flipped, keep.flip(0), counts[order.numpy()], lengths[::-1])
    torch.testing.assert_close(other.values.flip(0), values, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(other.log_weights.flip(0), log_weights, atol=1e-4, rtol=1e-4)


@fixed(10)
@given(st.integers(0, 999), st.sampled_from([None, 3.0]))
def test_reference_queries_are_answered_better(seed: int, softcap: float | None) -> None:
    observation = seen(seed, 1, 2, 2, 90, softcap=softcap, rotary=no_rope)
    keep, counts, lengths = chosen(observation, seed)
    carried = match_attention(observation, keep, counts, lengths)
    everything = outputs(observation, torch.ones_like(keep), observation.values, torch.zeros_like(carried.log_weights))
    plain = outputs(observation, keep, observation.values, torch.zeros_like(carried.log_weights))
    matched = outputs(observation, keep, *carried)
    if bool((counts < lengths[0]).any()):
        assert float((matched - everything).square().sum()) < 0.8 * float((plain - everything).square().sum())


def test_learned_sinks_keep_their_share() -> None:
    """With a sink that takes nearly all, entries need not take over what is the sink's."""
    observation = seen(3, 1, 1, 2, 70)
    keep, counts, lengths = chosen(observation, 5)
    plain = match_attention(observation, keep, counts, lengths)
    sunk = match_attention(replace(observation, sinks=torch.full((1, 2), -50.0)), keep, counts, lengths)
    torch.testing.assert_close(sunk.log_weights, plain.log_weights, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(sunk.values, plain.values, atol=1e-4, rtol=1e-4)
    heavy = match_attention(replace(observation, sinks=torch.full((1, 2), 12.0)), keep, counts, lengths)
    assert bool(heavy.log_weights.isfinite().all())
    assert not torch.allclose(heavy.values, plain.values, atol=1e-3)
    half = replace(observation, keys=observation.keys.bfloat16(), values=observation.values.bfloat16())
    carried = match_attention(half, keep, counts, lengths)
    assert carried.values.dtype == carried.log_weights.dtype == torch.bfloat16

"""Small observations and decode steps with given numbers, and what a policy makes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from kvsearch.policies import Observation, Policy
from kvsearch.policies.decoding import Cached, State, Step, find_lowest, mark_protected
from kvsearch.policies.ranking import apply_to_each
from kvsearch.testing.policy_contract import keep_under

NAN = float("nan")
JUNK = 1e4  # in keys and values of empty slots
# mean attention of the window over the six candidates, as two rows that see the window causally
WINDOW_ROWS = [[0.30, 0.02, 0.05, 0.20, 0.03, 0.10, 0.30, 0.00], [0.30, 0.02, 0.05, 0.20, 0.03, 0.10, 0.10, 0.20]]


def kept(policy: Policy, observation: Observation, budget: int, head: int = 0) -> set[int]:
    """Columns that `policy` keeps in one head of the first sequence when every head has `budget`."""
    budgets = torch.full((len(observation.keys), observation.keys.shape[1]), budget)
    return set(torch.nonzero(keep_under(policy, observation, budgets)[0, head]).flatten().tolist())


def plain(length: int) -> Observation:
    """One sequence, one head, nothing to tell its entries apart."""
    states = torch.zeros(1, 1, length, 2)
    return Observation(states, states, torch.ones(1, length, dtype=torch.bool), 1.0)


def attending(*heads: Sequence[Sequence[float]], kv_heads: int = 1) -> Observation:
    """One sequence whose query heads pay exactly the attention given, one row per window query."""
    rows = torch.tensor(heads)  # [Hq, rows, T]
    length = rows.shape[-1]
    logits = rows.log().clamp(min=-1e4)
    keys = torch.eye(length).expand(1, kv_heads, length, length)
    return Observation(keys, keys, torch.ones(1, length, dtype=torch.bool), 1.0, queries=logits[None])


def step_at(positions: Sequence[int], row: Sequence[float] | None = None, keys: Sequence[float] | None = None) -> Step:
    """A step of one head whose slots hold the tokens at `positions`, -1 for none; the last of them is the newest.

    `row` and `keys`, one number per key, are by slot.
    """
    where = torch.tensor([positions])
    states = torch.tensor([keys if keys is not None else [0.0] * len(positions)])[..., None]
    cached = Cached(states, states, where, State(), layer=0, heads=torch.zeros(1, dtype=torch.int64))
    return Step(cached, where.argmax(-1), where.amax(-1) + 1, None if row is None else torch.tensor([row]))


def scattered(seed: int, segments: int = 4, slots: int = 11, dim: int = 3) -> Step:
    """A step of heads that hold different entries in slots in any order; empty slots hold junk."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.full((segments, slots), -1)
    seen = torch.randint(slots, 2 * slots, (segments,), generator=generator)
    for segment in range(segments):
        count = int(torch.randint(1, slots + 1, (), generator=generator))
        chosen = torch.randperm(int(seen[segment]) - 1, generator=generator)[: count - 1]
        where = torch.randperm(slots, generator=generator)[:count]
        positions[segment, where] = torch.cat([chosen, seen[segment, None] - 1])
    empty = positions < 0
    keys, values = torch.randn(2, segments, slots, dim, generator=generator).masked_fill(empty[..., None], JUNK)
    row = torch.rand(segments, slots, generator=generator).masked_fill(empty, 0.0)
    cached = Cached(keys, values, positions, State(), layer=0, heads=torch.arange(segments))
    return Step(cached, positions.argmax(-1), seen, row / row.sum(-1, keepdim=True))


def rearranged(step: Step, seed: int) -> tuple[Step, Tensor]:
    """The same step with its entries in other slots, and the slot [S, C] from which each came."""
    generator = torch.Generator().manual_seed(seed)
    cached = step.cached
    order = torch.rand(cached.positions.shape, generator=generator).argsort(-1)

    def moved(states: Tensor) -> Tensor:
        return torch.stack([of[to] for of, to in zip(states, order, strict=True)])

    changed = dataclasses.replace(
        cached,
        keys=moved(cached.keys),
        values=moved(cached.values),
        positions=moved(cached.positions),
        state=cached.state.changed(moved, torch.clone),
    )
    attention = None if step.attention is None else moved(step.attention)
    newest = (order == step.newest[:, None]).int().argmax(-1)
    return dataclasses.replace(step, cached=changed, newest=newest, attention=attention), order


def check_order_of_slots(policy: Policy, step: Step, seed: int) -> None:
    """Priorities are no NaN and belong to entries: in whatever slots these sit, they keep them."""
    other, order = rearranged(step, seed)
    priorities, again = policy.step(step), policy.step(other)
    held = other.cached.held
    assert priorities.dtype == torch.float32
    assert priorities.shape == step.cached.positions.shape
    assert not priorities.isnan().any()
    assert policy.signed or (priorities[step.cached.held] >= 0).all(), "priorities below 0 are to be declared"
    torch.testing.assert_close(again[held], priorities.gather(-1, order)[held], rtol=1e-5, atol=1e-6)


def leaves(policy: Policy, step: Step, budget: int) -> list[int]:
    """The position that leaves each segment when it is one above `budget`."""
    positions = step.cached.positions
    budgets = torch.full_like(step.newest, budget)
    assert (step.cached.held.sum(-1) == budgets + 1).all()
    sinks, recent = apply_to_each(policy.protected_at, budgets).unbind(-1)
    protected = mark_protected(positions, step.seen, sinks, recent)
    outside = protected | ~step.cached.held
    slot = find_lowest(policy.step(step), positions, outside, policy.signed)
    left: list[int] = positions.gather(-1, slot[:, None]).flatten().tolist()
    return left

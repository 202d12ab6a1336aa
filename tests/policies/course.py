"""Decode rules run token by token on random tokens, with all that is needed to count their state anew, naively."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvsearch.policies import Observation, Policy
from kvsearch.policies.decoding import Cached, State, Step, mark_best, mark_protected
from kvsearch.policies.h2o import MASS_STATE
from kvsearch.policies.ranking import apply_to_each
from tests.policies.examples import JUNK, keep_under

Row = dict[int, float]  # attention by position


@dataclass
class Moment:
    """A decode step, seen after its merge and before what leaves is gone."""

    step: Step
    priorities: Tensor  # [S, C]
    leaving: Tensor  # [S, E]
    before: Cached  # as it was before the merge
    rows: list[list[Row]] = field(default_factory=list)  # per segment: the attention rows of all decode steps so far

    def entries(self, values: Tensor, segment: int) -> dict[int, float]:
        """`values` [S, C] of what a segment holds, by position."""
        pairs = zip(self.step.cached.positions[segment].tolist(), values[segment].tolist(), strict=True)
        return {position: value for position, value in pairs if position >= 0}


def decode(policy: Policy, observation: Observation, budget: int, steps: int, seed: int = 0) -> Iterator[Moment]:
    """The steps after a prompt of which every head keeps `budget` entries; slots are in any order."""
    generator = torch.Generator().manual_seed(seed)
    cached, seen = at_start(policy, observation, budget, steps, generator)
    rows: list[list[Row]] = [[] for _ in seen]
    for _ in range(steps):
        newest = arrive(cached, seen, generator)
        seen = seen + 1
        attention = torch.rand(cached.positions.shape, generator=generator).pow(3).masked_fill(~cached.held, 0.0)
        attention /= attention.sum(-1, keepdim=True)
        for segment, row in enumerate(attention.tolist()):
            pairs = zip(cached.positions[segment].tolist(), row, strict=True)
            rows[segment].append({position: value for position, value in pairs if position >= 0})
        step = Step(cached, newest, seen, attention)
        priorities = policy.step(step)
        leaving = leaving_slots(policy, step, priorities, budget)
        before = cloned(cached)
        if policy.merges and leaving.shape[1]:
            policy.merge(cached, leaving)
        yield Moment(step, priorities.clone(), leaving, before, rows)
        away = torch.zeros(len(seen), cached.positions.shape[1] + 1).scatter_(1, leaving + 1, 1.0)[:, 1:] > 0
        clear(cached, away)


def some_slots(step: Step, share: float, generator: torch.Generator) -> list[list[int]]:
    """About a `share` of the slots of every segment that hold an entry, but the newest, ascending by position."""
    lists = []
    for position, newest in zip(step.cached.positions.tolist(), step.newest.tolist(), strict=True):
        held = [slot for slot, at in enumerate(position) if at >= 0 and slot != newest]
        chosen = [slot for slot in held if float(torch.rand((), generator=generator)) < share]
        lists.append(sorted(chosen, key=position.__getitem__))
    return lists


def merged(policy: Policy, cached: Cached, leaving: list[list[int]]) -> Cached:
    """What a merge leaves; positions and masses do not change."""
    after = cloned(cached)
    policy.merge(after, slots(leaving))
    assert torch.equal(after.positions, cached.positions)
    assert torch.equal(after.state.entries[MASS_STATE], cached.state.entries[MASS_STATE])
    return after


def at_start(
    policy: Policy, observation: Observation, budget: int, steps: int, generator: torch.Generator
) -> tuple[Cached, Tensor]:
    """What is kept of the prompt, in slots in any order, with room for `steps` tokens; and the tokens seen, [S]."""
    batch, heads, length = observation.keys.shape[:3]
    keep = keep_under(policy, observation, torch.full((batch, heads), budget)).flatten(0, 1)
    order = torch.rand(batch * heads, length + steps, generator=generator).argsort(-1)

    def placed(states: Tensor) -> Tensor:
        """States [B, Hkv, T, ...] in slots [S, C, ...]."""
        flat = states.flatten(0, 1)
        room = torch.cat([flat, flat.new_zeros(len(flat), steps, *flat.shape[2:])], 1)
        return torch.stack([of[to] for of, to in zip(room, order, strict=True)])

    index = observation.index[:, None].expand(batch, heads, length).flatten(0, 1).masked_fill(~keep, -1)
    index = torch.nn.functional.pad(index, (0, steps), value=-1).gather(1, order)
    state = policy.start(observation).changed(placed, lambda tensor: tensor.flatten(0, 1).clone())
    head = torch.arange(heads).repeat(batch)
    cached = Cached(placed(observation.keys), placed(observation.values), index, state, observation.layer, head)
    clear(cached, index < 0)
    return cached, observation.seen.repeat_interleave(heads)


def arrive(cached: Cached, seen: Tensor, generator: torch.Generator) -> Tensor:
    """Put a random token into a free slot of every segment; the slots, [S]."""
    free = torch.rand(cached.positions.shape, generator=generator).masked_fill(cached.held, -1.0)
    newest = free.argmax(-1)
    where = (torch.arange(len(newest)), newest)
    for states in (cached.keys, cached.values):
        states[where] = torch.randn(len(newest), states.shape[-1], generator=generator).to(states.dtype)
    cached.positions[where] = seen
    return newest


def leaving_slots(policy: Policy, step: Step, priorities: Tensor, budget: int) -> Tensor:
    """Slots that leave, ascending by position, [S, E] with -1 behind the last."""
    positions, used = step.cached.positions, step.cached.held.sum(-1)
    budgets = torch.full_like(used, budget)
    sinks, recent = apply_to_each(policy.protected_at, budgets).unbind(-1)
    stay = torch.where(used > budgets, budgets + 1 - policy.drop_at(budget), used)
    keep = mark_best(priorities, mark_protected(positions, step.seen, sinks, recent), positions, stay, int(stay.max()))
    lists = []
    for held, kept, position in zip(step.cached.held, keep, positions, strict=True):
        lists.append(sorted(torch.nonzero(held & ~kept).flatten().tolist(), key=position.tolist().__getitem__))
    return slots(lists)


def slots(lists: list[list[int]]) -> Tensor:
    """Lists of slots as [S, E], -1 behind the last."""
    width = max(map(len, lists))
    return torch.tensor([line + [-1] * (width - len(line)) for line in lists], dtype=torch.int64).view(
        len(lists), width
    )


def clear(cached: Cached, away: Tensor) -> None:
    """Empty the slots `away` [S, C] bool: junk for keys and values, zeros for state."""
    cached.positions[away] = -1
    cached.keys[away], cached.values[away] = JUNK, JUNK
    for tensor in cached.state.entries.values():
        tensor[away] = 0


def cloned(cached: Cached) -> Cached:
    """A copy that shares no memory."""
    state = cached.state.changed(torch.clone, torch.clone)
    return dataclasses.replace(
        cached,
        keys=cached.keys.clone(),
        values=cached.values.clone(),
        positions=cached.positions.clone(),
        state=State(state.entries, state.heads),
    )

"""Storage of a layer whose entries are evicted while decoding: a new token takes the slot of the one that left.

Every (sequence, kv head) is a segment with slots; segments that may hold (nearly) as much share one dense block. Slots
are filled from the left, so a block at its budgets has one free slot per segment between two steps and none during
attention: its shape never changes, and no step waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvsearch.arrays import Bools, Ints
from kvsearch.policies import Observation
from kvsearch.policies.decoding import Cached, State, slots_of
from kvsearch.runtime.rule import Limits, StepRule
from kvsearch.runtime.storage import GROWTH, MIN_SPARE, Segmented, bucket


@dataclass
class SlotBlock:
    """Segments with slots of their own; host copies of what each holds spare every step a synchronisation."""

    names: Ints  # [S] sequence * Hkv + kv head, ascending
    rows: Tensor  # [S] sequence of each segment
    cached: Cached  # a slot without an entry has position -1 and zeros for state
    limits: Limits
    used: Ints  # [S] entries held
    seen: Tensor  # [S] tokens of the sequence so far
    slot: Tensor  # [S] where the next token goes
    width: int = 0  # slots that have been in use

    def has_room(self) -> bool:
        """Tell whether every segment can take another token."""
        return int(self.used.max()) < self.cached.positions.shape[1]

    def put(self, keys: Tensor, values: Tensor, real: Bools | None, active: Tensor | None) -> None:
        """Store one token per segment, keys [S, D] and values [S, Dv]; none where not `real` and `active`, [S] bool."""
        self.width = max(self.width, int(self.used.max()) + 1)
        where, cached = (torch.arange(len(keys), device=keys.device), self.slot), self.cached
        cached.keys[where], cached.values[where] = keys, values
        cached.positions[where] = self.seen if active is None else self.seen.masked_fill(~active, -1)
        self.seen = self.seen + 1 if active is None else self.seen + active
        self.used = self.used + (1 if real is None else real)

    @property
    def full(self) -> bool:
        """Whether every slot in use holds an entry."""
        return bool((self.used == self.width).all())

    def in_use(self) -> Cached:
        """Return the slots in use, as views of keys, values, positions and state."""
        cached, width = self.cached, self.width
        return replace(
            cached,
            keys=cached.keys[:, :width],
            values=cached.values[:, :width],
            positions=cached.positions[:, :width],
            state=State({k: v[:, :width] for k, v in cached.state.entries.items()}, cached.state.heads),
        )

    def free(self, leaving: Tensor | None, active: Tensor | None) -> None:
        """Make room for the next token: the slot `leaving` [S] where one left (-1: none), else the next unused one.

        Segments that are not `active` [S] bool took no token and keep the slot they have.
        """
        last = self.cached.positions.shape[1] - 1
        slot = self.cached.held.sum(-1).clamp(max=last)
        if leaving is not None:
            gone = leaving >= 0
            slot = torch.where(gone, leaving, slot)
            where = (torch.arange(len(leaving), device=leaving.device), leaving.clamp(min=0))
            for tensor, empty in ((self.cached.positions, -1), *((t, 0) for t in self.cached.state.entries.values())):
                now = tensor[where]
                tensor[where] = now.masked_fill(gone.view(-1, *[1] * (now.dim() - 1)), empty)
        self.slot = slot if active is None else torch.where(active, slot, self.slot)


class SlotStore(Segmented):
    """The entries one layer holds for a batch while its decode rule is in force."""

    def __init__(self, blocks: list[SlotBlock], batch: int, heads: int) -> None:
        self.blocks, self.batch, self.heads = blocks, batch, heads
        super().__init__([torch.from_numpy(block.names).to(block.slot.device) for block in blocks])

    def used(self) -> Ints:
        """Return the entries held per segment, [B * Hkv]."""
        held = np.zeros(self.batch * self.heads, dtype=np.int64)
        for block in self.blocks:
            held[block.names] = block.used
        return held

    def entries(self) -> Tensor:
        """Return the entries held per sequence and kv head, [B, Hkv] int64."""
        return torch.from_numpy(self.used().reshape(self.batch, self.heads))

    def kept_positions(self, row: int, head: int) -> list[int]:
        """Return the token indices of the entries of one sequence and head, ascending."""
        wanted = row * self.heads + head
        for block in self.blocks:
            for index in np.flatnonzero(block.names == wanted):
                held = block.cached.positions[index]
                return sorted(held[held >= 0].tolist())
        return []

    def select_rows(self, rows: Sequence[int]) -> SlotStore:
        """Return sequences `rows` of this store, in that order and as often as named, as a new store."""
        blocks = []
        for block in self.blocks:
            pairs = [
                (new * self.heads + int(name) % self.heads, index)
                for new, old in enumerate(rows)
                for index, name in enumerate(block.names)
                if name // self.heads == old
            ]
            if pairs:
                chosen = np.array(sorted(pairs))
                blocks.append(_selected(block, chosen[:, 0], chosen[:, 1], self.heads))
        return SlotStore(blocks, len(rows), self.heads)

    def nbytes(self) -> int:
        """Return the bytes of storage allocated: keys, values, positions and running state, free slots included."""
        held = [(block.cached.keys, block.cached.values, block.cached.positions) for block in self.blocks]
        state = sum(block.cached.state.nbytes() for block in self.blocks)
        return state + sum(tensor.untyped_storage().nbytes() for tensors in held for tensor in tensors)


@dataclass(frozen=True)
class SlotSource:
    """Segments to be packed: the slots `order` [S, E] of `cached`, ascending by position, -1 behind the last."""

    names: Ints
    cached: Cached
    order: Tensor
    used: Ints
    seen: Tensor  # [S]


def segments_of(observation: Observation, state: State) -> Cached:
    """Take a prompt apart into segments, by sequence and kv head; state is [B, Hkv, T, ...] and [B, Hkv, ...]."""
    batch, heads = observation.keys.shape[:2]
    return Cached(
        observation.keys.flatten(0, 1),
        observation.values.flatten(0, 1),
        observation.index.repeat_interleave(heads, 0),
        state.changed(lambda t: t.flatten(0, 1), lambda t: t.flatten(0, 1)),
        observation.layer,
        torch.arange(heads, device=observation.keys.device).repeat(batch),
    )


def source_of(observation: Observation, keep: Tensor, state: State) -> SlotSource:
    """Take the entries `keep` [B, Hkv, T] bool of a prompt, with its state as `segments_of` takes it."""
    batch, heads, length = keep.shape
    flat = keep.flatten(0, 1)
    order = slots_of(flat, torch.arange(length, device=keep.device).expand_as(flat))
    used = flat.sum(-1).cpu().numpy()
    seen = observation.seen.repeat_interleave(heads)
    return SlotSource(np.arange(batch * heads), segments_of(observation, state), order, used, seen)


def pack(sources: Sequence[SlotSource], rule: StepRule, batch: int, heads: int) -> SlotStore:
    """Copy the entries of sources into a store with room for more tokens, in as few blocks as is economical."""
    names = np.concatenate([source.names for source in sources])
    used = np.concatenate([source.used for source in sources])
    budgets = rule.budgets[names]
    spare = np.maximum(MIN_SPARE, (used * GROWTH).astype(np.int64))
    capacity = np.maximum(np.minimum(budgets + 1, used + spare), used + 1)
    blocks = []
    for group in bucket(capacity.tolist()):
        members = np.array(sorted(group, key=lambda index: names[index]))
        blocks.append(_block(sources, names[members], int(capacity[members].max()), rule, heads))
    return SlotStore(blocks, batch, heads)


def _block(sources: Sequence[SlotSource], names: Ints, capacity: int, rule: StepRule, heads: int) -> SlotBlock:
    """Gather the block of the segments `names` from the sources that hold them."""
    parts = [(source, np.flatnonzero(np.isin(source.names, names))) for source in sources]
    parts = [(source, rows) for source, rows in parts if len(rows)]
    found = np.concatenate([source.names[rows] for source, rows in parts])
    back = np.argsort(found)
    pieces = [_gathered(source, rows, capacity) for source, rows in parts]
    cached = _joined([piece for piece, _ in pieces], back)
    device = cached.keys.device
    used = np.concatenate([source.used[rows] for source, rows in parts])[back]
    return SlotBlock(
        names=names,
        rows=torch.from_numpy(names // heads).to(device),
        cached=cached,
        limits=rule.limits(names, device),
        used=used,
        seen=torch.cat([seen for _, seen in pieces])[torch.from_numpy(back).to(device)],
        slot=torch.from_numpy(used).to(device),
        width=int(used.max()),
    )


def _gathered(source: SlotSource, rows: Ints, capacity: int) -> tuple[Cached, Tensor]:
    device = source.order.device
    index = torch.from_numpy(rows).to(device)
    order = source.order[index, :capacity]
    order = torch.nn.functional.pad(order, (0, capacity - order.shape[1]), value=-1)
    empty, where = order < 0, (index[:, None], order.clamp(min=0))

    def entry(tensor: Tensor) -> Tensor:
        taken = tensor[where]
        return taken.masked_fill(empty.view(*empty.shape, *[1] * (taken.dim() - 2)), 0)

    cached = source.cached
    return replace(
        cached,
        keys=cached.keys[where],
        values=cached.values[where],
        positions=cached.positions[where].masked_fill(empty, -1),
        state=cached.state.changed(entry, lambda tensor: tensor[index]),
        heads=cached.heads[index],
    ), source.seen[index]


def _joined(parts: list[Cached], back: Ints) -> Cached:
    if len(parts) == 1 and (back == np.arange(len(back))).all():
        return parts[0]
    order = torch.from_numpy(back).to(parts[0].keys.device)

    def both(tensors: list[Tensor]) -> Tensor:
        return torch.cat(tensors)[order]

    states = [part.state for part in parts]
    return replace(
        parts[0],
        keys=both([part.keys for part in parts]),
        values=both([part.values for part in parts]),
        positions=both([part.positions for part in parts]),
        state=State(
            {name: both([state.entries[name] for state in states]) for name in states[0].entries},
            {name: both([state.heads[name] for state in states]) for name in states[0].heads},
        ),
        heads=both([part.heads for part in parts]),
    )


def _selected(block: SlotBlock, names: Ints, rows: Ints, heads: int) -> SlotBlock:
    index = torch.from_numpy(rows).to(block.slot.device)
    return replace(
        block,
        names=names,
        rows=torch.from_numpy(names // heads).to(index.device),
        cached=block.cached.segments(index),
        limits=block.limits.select(rows),
        used=block.used[rows],
        seen=block.seen[index],
        slot=block.slot[index],
    )

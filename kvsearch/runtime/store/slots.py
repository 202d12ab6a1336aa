"""Slot storage for eviction while decoding: a new token takes the slot of an entry that left.

Every (sequence, kv head) is a segment with slots; segments that may hold (nearly) as much share one dense block. What a
step does is known on the host before it runs (`SlotBlock.prepare_step`): how many entries every segment holds does not
depend on which. The step itself changes tensors in place, waits for nothing, and has no branch that depends on their
values, so it can be compiled, or captured and replayed. A block at its budgets has one free slot per segment between
two steps and none during attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvsearch.core.arrays import Bools, Ints
from kvsearch.policies import Observation
from kvsearch.policies.decoding import Cached, State, list_slots, widen_marks
from kvsearch.runtime.decode.rule import Evictions, Limits, StepRule
from kvsearch.runtime.logits import list_head_rows
from kvsearch.runtime.store.blocks import GROWTH_SHARE, MIN_SPARE, group_segments, hide_positions, make_index


class StepPlan(NamedTuple):
    """What a step does to a block, known before it runs."""

    width: int  # slots that are looked at
    full: bool  # all of them hold an entry
    bias: Literal["", "keep", "fill", "make"]  # what becomes of the bias: not used, right as it is, one slot, all of it
    leaving: Evictions
    holes: bool  # whether slots may be free left of one that is not, after the step


@dataclass
class SlotBlock:
    """Segments with slots of their own; `used` on the host spares every step a synchronisation."""

    names: Ints  # [S] sequence * Hkv + kv head, ascending
    rows: Tensor  # [S] sequence of each segment
    cached: Cached  # a slot without an entry has position -1 and zeros for state
    limits: Limits
    used: Ints  # [S] entries held
    seen: Tensor  # [S] tokens of the sequence so far
    slot: Tensor  # [S] where the next token goes
    width: int = 0  # slots that have been in use
    holes: bool = False
    step_plan: StepPlan | None = None  # the step that runs now, or ran last
    bias: Tensor | None = None  # [S, C] what to add to logits, -inf where there is no entry; right if `biased`
    biased: bool = False  # for all slots but the next token's
    links: Tensor | None = None  # of kernels that look at entries in the order of positions; None: not known now

    def __post_init__(self) -> None:
        self.lines = torch.arange(len(self.names), device=self.slot.device)
        # One tensor of two rows, which a step advances at once; `seen` and `edge` are views of it.
        self.clock = torch.stack([self.seen, self.seen - self.limits.young])
        self.seen, self.edge = self.clock  # the newest position that may leave, [S]

    @property
    def capacity(self) -> int:
        return self.cached.positions.shape[1]

    def prepare_step(self, real: Bools | None, fixed: bool, dtype: torch.dtype | None) -> Ints:
        """Decide what the next step does; return the entries [S] that are held in it.

        Segments not `real` [S] bool (None: all are) have padding in it. With `fixed`, all slots are looked at, whether
        they have been in use or not, so that steps are alike. `dtype` is that of the bias; None: nobody adds one.
        """
        used = self.used + (1 if real is None else real)
        self.width = max(self.width, int(self.used.max()) + 1)  # padding, too, is written to a slot
        width = self.capacity if fixed else self.width
        leaving = self.limits.leaving(used, real)
        # Where every segment loses one entry, its slot is the next token's: no hole is left behind, and as the slot is
        # filled before it is looked at, what is added to logits stays right, too.
        in_place = leaving.max_leaving == 0 or leaving.each_one
        full = bool((used == width).all())
        bias: Literal["", "keep", "fill", "make"]
        # Nothing has to be hidden, or kernels see empty slots by their positions.
        if full or dtype is None:
            bias = ""
        elif not self.biased:
            bias = "make"
        else:
            # Where each segment lost one entry, the token goes where that was, and its bias is 0 already.
            bias = "keep" if self.step_plan is not None and self.step_plan.leaving.each_one else "fill"
        holes = self.holes or not in_place
        self.step_plan = StepPlan(width, full, bias, leaving, holes)
        self.biased = bias != "" and real is None and in_place
        self.holes = holes
        self.used = leaving.stay
        if self.step_plan.bias and (self.bias is None or self.bias.dtype != dtype):
            self.bias = torch.empty(self.cached.positions.shape, dtype=dtype, device=self.slot.device)
        return used

    def link(self) -> None:
        """Link slots in the order of positions: which is before and behind each; the next token's is the last.

        From here on steps that are one launch keep it so.
        """
        positions = self.cached.positions
        last = torch.iinfo(positions.dtype).max
        when = positions.masked_fill(positions < 0, last).scatter_(1, self.slot[:, None], last - 1)
        order = when.argsort(dim=-1, stable=True).int()
        self.links = order.new_full((2, *order.shape), -1)
        self.links[0].scatter_(1, order[:, 1:].long(), order[:, :-1])
        self.links[1].scatter_(1, order[:, :-1].long(), order[:, 1:])

    def separate(self) -> None:
        """Continue in copies, so that earlier steps can still be differentiated."""
        self.cached = replace(self.cached, keys=self.cached.keys.clone(), values=self.cached.values.clone())
        self.slot = self.slot.clone()

    def put(self, keys: Tensor, values: Tensor, step_plan: StepPlan, active: Tensor | None) -> None:
        """Store one token per segment, keys [S, D] and values [S, Dv]; none where not `active` [S] bool."""
        cached = self.cached
        where = (self.lines, self.slot)
        cached.keys.index_put_(where, keys)
        cached.values.index_put_(where, values)
        # Padding takes a slot, too, with position -1: what a step writes must not depend on values.
        position = self.seen if active is None else self.seen.masked_fill(~active, -1)
        cached.positions.scatter_(1, self.slot[:, None], position[:, None])
        if cached.log_weights is not None:  # where a kernel freed the slot, that of what left is still there
            cached.log_weights.scatter_(1, self.slot[:, None], 0.0)
        self.clock.add_(1 if active is None else active)
        if self.bias is not None and step_plan.bias == "make":
            self.bias.zero_().masked_fill_(cached.positions < 0, float("-inf"))
        elif self.bias is not None and step_plan.bias == "fill":
            self.bias.scatter_(1, self.slot[:, None], 0.0)

    def positions_of(self, row: int) -> Tensor:
        """Return the positions of one segment, -1 where there is no entry."""
        return self.cached.positions[row]

    def tensors(self) -> list[Tensor]:
        """Return keys, values, positions and running state."""
        cached = self.cached
        state = (*cached.state.entries.values(), *cached.state.heads.values())
        return [cached.keys, cached.values, cached.positions, *state]

    def first(self, width: int) -> Cached:
        """Return the first slots, as views; those in use are the first `self.width`."""
        if width == self.capacity:
            return self.cached
        return self.cached.at_slots(lambda tensor: tensor[:, :width])

    def showing(self, step_plan: StepPlan, visible: Tensor) -> Cached:
        """Return the attended slots, with tokens that are not `visible` [B, T] bool treated as empty."""
        cached = self.first(step_plan.width)
        return replace(cached, positions=hide_positions(cached.positions, self.rows[:, None], visible))

    def free(self, leaving: Tensor | None, step_plan: StepPlan, active: Tensor | None) -> None:
        """Free the slots of entries that left, `leaving` [S, E] (-1: none), and choose the slot of the next token.

        Segments that are not `active` [S] bool took no token and keep the slot they have.
        """
        positions = self.cached.positions
        states = self.cached.state.entries.values()
        # The rule has written the slot that is free to `slot` already.
        if step_plan.leaving.each_one:  # it is in `slot` already
            _clear(positions, self.slot[:, None], -1)
            for tensor in states:
                _clear(tensor, self.slot[:, None], 0)
            return
        if leaving is not None:
            for tensor, empty in ((positions, -1), *((tensor, 0) for tensor in states)):
                _blank_slots(tensor, leaving, empty)
        # Without holes slots fill up from the left; with some, the next token goes to the first one.
        if step_plan.holes:
            torch.argmin(positions, -1, out=self.slot)  # an empty slot has position -1: the first one
        else:
            self.slot.add_(1 if active is None else active).clamp_(max=self.capacity - 1)


def _clear(tensor: Tensor, slots: Tensor, empty: int) -> None:
    """Set the slots [S, 1] of a tensor [S, C, ...] to `empty`, in place."""
    tensor.scatter_(1, _expand_slots(slots, tensor), empty)


def _blank_slots(tensor: Tensor, leaving: Tensor, empty: int) -> None:
    """Set the slots `leaving` [S, E] (-1: none) of a tensor [S, C, ...] to `empty`, in place."""
    if leaving.shape[1] == 1:
        # One slot is read, changed and written back: a mask over all slots would cost more.
        gone = _expand_slots(leaving >= 0, tensor)
        where = _expand_slots(leaving.clamp(min=0), tensor)
        tensor.scatter_(1, where, tensor.gather(1, where).masked_fill(gone, empty))
        return
    gone = leaving.new_zeros(len(leaving), tensor.shape[1] + 1, dtype=torch.bool)
    gone = gone.scatter_(1, leaving + 1, True)[:, 1:]  # -1 goes to the column in front
    tensor.masked_fill_(widen_marks(gone, tensor), empty)


def _expand_slots(slots: Tensor, tensor: Tensor) -> Tensor:
    """Expand [S, E] to the dimensions of a tensor [S, C, ...] behind the second."""
    rest = tensor.shape[2:]
    return slots.view(*slots.shape, *[1] * len(rest)).expand(*slots.shape, *rest)


@dataclass(frozen=True)
class SlotSource:
    """Segments to be packed: the slots `order` [S, E] of `cached`, ascending by position, -1 behind the last."""

    names: Ints
    cached: Cached
    order: Tensor
    used: Ints
    seen: Tensor  # [S]


def split_segments(observation: Observation, state: State) -> Cached:
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


def take_entries(observation: Observation, keep: Tensor, counts: Ints, state: State) -> SlotSource:
    """Take the entries `keep` [B, Hkv, T] bool of a prompt, `counts` [B, Hkv]; its state as for `split_segments`."""
    batch, heads, length = keep.shape
    flat = keep.flatten(0, 1)
    used = counts.flatten()
    order = list_slots(flat, torch.arange(length, device=keep.device).expand_as(flat), int(used.max()))
    seen = observation.seen.repeat_interleave(heads)
    return SlotSource(np.arange(batch * heads), split_segments(observation, state), order, used, seen)


def compute_capacities(used: Ints, budgets: Ints, room: int = 0) -> Ints:
    """Return slots for segments that hold `used` entries and may hold `budgets`, with room for some tokens, [S]."""
    spare = np.maximum(max(MIN_SPARE, room), (used * GROWTH_SHARE).astype(np.int64))
    # A head never holds more than its budget and the token that comes in.
    slots: Ints = np.maximum(np.minimum(budgets + 1, used + spare), used + 1)
    return slots


def pack(sources: Sequence[SlotSource], rule: StepRule, room: int = 0) -> list[SlotBlock]:
    """Copy the entries of sources into blocks with room for more tokens, as few as is economical."""
    names = np.concatenate([source.names for source in sources])
    used = np.concatenate([source.used for source in sources])
    capacity = compute_capacities(used, rule.budgets[names], room)
    blocks = []
    for group in group_segments(capacity.tolist(), sources[0].order.device):
        # Ascending: a block that has all segments is taken to have them in order.
        members = np.array(sorted(group, key=lambda index: names[index]))
        blocks.append(_gather_block(sources, names[members], int(capacity[members].max()), rule))
    return blocks


def _gather_block(sources: Sequence[SlotSource], names: Ints, capacity: int, rule: StepRule) -> SlotBlock:
    """Gather the block of the segments `names` from the sources that hold them."""
    parts = [(source, np.flatnonzero(np.isin(source.names, names))) for source in sources]
    parts = [(source, rows) for source, rows in parts if len(rows)]
    order = np.concatenate([source.names[rows] for source, rows in parts])
    # Sources give their segments one after the other; this brings them into the order of names.
    back = np.argsort(order)
    pieces = [_gather(source, rows, capacity) for source, rows in parts]
    cached = _join([piece for piece, _ in pieces], back)
    device = cached.keys.device
    used = np.concatenate([source.used[rows] for source, rows in parts])[back]
    return SlotBlock(
        names=names,
        rows=make_index(names, device) // rule.heads,
        cached=cached,
        limits=rule.limits(names, device),
        used=used,
        seen=torch.cat([seen for _, seen in pieces])[make_index(back, device)],
        # Entries are packed from the left, so this is the first free slot.
        slot=cached.held.sum(-1),
        width=int(used.max()),
    )


def _gather(source: SlotSource, rows: Ints, capacity: int) -> tuple[Cached, Tensor]:
    device = source.order.device
    index = make_index(rows, device)
    order = source.order[index, :capacity]
    # Slots behind the entries are empty: their state is zeros, their keys are any that are finite.
    order = torch.nn.functional.pad(order, (0, capacity - order.shape[1]), value=-1)
    empty = order < 0
    where = (index[:, None], order.clamp(min=0))

    def entry(tensor: Tensor) -> Tensor:
        taken = tensor[where]
        return taken.masked_fill(widen_marks(empty, taken), 0)

    cached = source.cached
    return replace(
        cached,
        keys=cached.keys[where],
        values=cached.values[where],
        positions=cached.positions[where].masked_fill(empty, -1),
        state=cached.state.changed(entry, lambda tensor: tensor[index]),
        heads=cached.heads[index],
    ), source.seen[index]


def _join(parts: list[Cached], back: Ints) -> Cached:
    if len(parts) == 1 and (back == np.arange(len(back))).all():
        return parts[0]
    whole = replace(
        parts[0],
        keys=torch.cat([part.keys for part in parts]),
        values=torch.cat([part.values for part in parts]),
        positions=torch.cat([part.positions for part in parts]),
        state=State.joined([part.state for part in parts]),
        heads=torch.cat([part.heads for part in parts]),
    )
    return whole.segments(torch.from_numpy(back).to(whole.keys.device))


def select_segments(block: SlotBlock, chosen: Ints, heads: int) -> SlotBlock:
    """Return a block that holds row r of this one as segment s of a store, for all (r, s) of `chosen` [S', 2]."""
    rows, names = chosen.T
    index = torch.from_numpy(rows).to(block.slot.device)
    return replace(
        block,
        names=names,
        rows=torch.from_numpy(names // heads).to(index.device),
        cached=block.cached.segments(index),
        limits=block.limits.select(rows, index, list_head_rows(names % heads, heads, index.device)),
        used=block.used[rows],
        seen=block.seen[index],
        slot=block.slot[index],
        # What a step has made does not fit other rows.
        step_plan=None,
        bias=None,
        biased=False,
        links=None,
    )

"""Views of the cache for policies while decoding: segments of entries in slots, and one attention row per step.

A segment is one kv head of one sequence. Its entries sit in slots in any order; `positions` says which token each is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from kvsearch.core.errors import assert_present
from kvsearch.policies.tensors import Tensor, torch

if TYPE_CHECKING:
    from kvsearch.policies.base import Observation

Change = Callable[[Tensor], Tensor]
LOG_WEIGHTS = "log_weights"  # state of entries that carry what left the prompt: added to their logits


@dataclass
class State:
    """Running state of a policy: tensors per entry [S, C, ...] and per head [S, ...] (at the start [B, Hkv, ...])."""

    entries: dict[str, Tensor] = field(default_factory=dict)
    heads: dict[str, Tensor] = field(default_factory=dict)

    def changed(self, entries: Change, heads: Change) -> State:
        """Return the state with every tensor replaced."""
        return State({k: entries(v) for k, v in self.entries.items()}, {k: heads(v) for k, v in self.heads.items()})

    @classmethod
    def joined(cls, states: Sequence[State]) -> State:
        """Return the states of several parts as one, segment after segment."""
        first = states[0]
        return cls(
            {name: torch.cat([state.entries[name] for state in states]) for name in first.entries},
            {name: torch.cat([state.heads[name] for state in states]) for name in first.heads},
        )

    def restore(self, before: State, rows: Tensor) -> None:
        """Take the segments `rows` [S] bool back to `before`, in place."""
        for tensors, old in ((self.entries, before.entries), (self.heads, before.heads)):
            for name, tensor in tensors.items():
                tensor.copy_(torch.where(widen_marks(rows, tensor), old[name], tensor))


@dataclass
class Cached:
    """The entries of S heads in slots. A slot without an entry has position -1 and, in every state tensor, zeros.

    Its keys and values are any finite numbers.
    """

    keys: Tensor  # [S, C, D]
    values: Tensor  # [S, C, Dv]
    positions: Tensor  # [S, C] int64, index of the token in its sequence
    state: State
    layer: int | Tensor  # [S, 1] int64 where segments are of several layers
    heads: Tensor  # [S] int64, kv head of each segment
    most_staying: int | None = None  # entries of a segment at most when some leave, where the host knows

    @property
    def held(self) -> Tensor:
        """Slots that hold an entry, [S, C] bool."""
        return self.positions >= 0

    @property
    def log_weights(self) -> Tensor | None:
        """What is added to logits of the entries, [S, C] in the dtype of keys; None where they carry nothing."""
        return self.state.entries.get(LOG_WEIGHTS)

    def at_slots(self, change: Change) -> Cached:
        """Return other slots of the same segments: `change` makes tensors [S, C', ...] of those [S, C, ...]."""
        keys, values, positions = (change(tensor) for tensor in (self.keys, self.values, self.positions))
        state = self.state.changed(change, lambda tensor: tensor)
        return replace(self, keys=keys, values=values, positions=positions, state=state)

    def segments(self, rows: slice | Tensor) -> Cached:
        """Return some of the segments: views for a slice, copies for indices."""
        return replace(
            self,
            keys=self.keys[rows],
            values=self.values[rows],
            positions=self.positions[rows],
            state=self.state.changed(lambda tensor: tensor[rows], lambda tensor: tensor[rows]),
            layer=self.layer if isinstance(self.layer, int) else self.layer[rows],
            heads=self.heads[rows],
        )

    def staying(self, leaving: Tensor) -> Tensor:
        """Return the slots whose entries stay when those in `leaving` [S, E] (-1: none) go, [S, C] bool."""
        away = self.held.new_zeros(len(leaving), self.positions.shape[1] + 1)
        return self.held & ~away.scatter_(1, leaving + 1, True)[:, 1:]  # -1 goes to the column in front


@dataclass
class Step:
    """One decode step, after its attention."""

    cached: Cached
    newest: Tensor  # [S] slot of the step's own token
    seen: Tensor  # [S] tokens so far, this one included
    attention: Tensor | None  # [S, C] fp32, the step's attention row as `Policy.row` wants it; 0 in empty slots
    look: Callable[[], Observation] | None = None  # at the tokens that arrived
    full: bool = False  # every slot holds an entry, or is as good as full: `attention` is +inf where there is none
    arrivals: Tensor | None = None  # [S, K] slots of the tokens that arrived, the newest first; None: the newest alone
    waits: bool = False  # the token is scored in a later step, and protected until then
    hidden: Tensor | None = None  # [S] fp32, what `Needs.hidden` makes of the token's hidden states

    @cached_property
    def empty(self) -> Tensor:
        """Slots without an entry, [S, C] bool."""
        return self.cached.positions < 0

    @property
    def row(self) -> Tensor:
        """The attention row, [S, C] fp32."""
        return assert_present(self.attention, "a policy read an attention row that it did not declare")

    @property
    def arrived(self) -> Observation:
        """The step's own token as an observation, keys [S, 1, 1, D]; where scores may wait, the last K of them.

        Where the segments are all heads of their sequences, in order, these are rows of it, keys [B, Hkv, K, D].
        """
        return assert_present(self.look, "a policy looked at the step's token where it cannot be seen")()

    def at_newest(self, values: Tensor) -> Tensor:
        """Return the entry of `values` [S, C, ...] that belongs to the step's own token, [S, ...]."""
        where = widen_marks(self.newest, values)
        return values.gather(1, where.expand(-1, 1, *values.shape[2:])).squeeze(1)


def sort_by_position(positions: Tensor, chosen: Tensor) -> Tensor:
    """Return the slots [S, C]: those `chosen` [S, C] bool by ascending position, behind them the others."""
    # Above all positions, so that what is not chosen comes behind.
    key = positions.masked_fill(~chosen, torch.iinfo(positions.dtype).max)
    return torch.argsort(key, dim=-1, stable=True)


def list_slots(chosen: Tensor, positions: Tensor, width: int) -> Tensor:
    """Return the `chosen` slots [S, C] in ascending order of position, [S, width] int64 with -1 behind."""
    order = sort_by_position(positions, chosen)[:, :width]
    return torch.where(chosen.gather(-1, order), order, -1)


def gather_entries(states: Tensor, slots: Tensor) -> Tensor:
    """Return the states [S, C, ...] at slots [S, K], [S, K, ...]."""
    return states.gather(1, widen_marks(slots, states).expand(*slots.shape, *states.shape[2:]))


def widen_marks(marks: Tensor, states: Tensor) -> Tensor:
    """Add dimensions of size 1 to marks of the first dimensions of states, such as [S, C] for [S, C, ...]."""
    return marks.view(*marks.shape, *[1] * (states.dim() - marks.dim()))


def mark_protected(positions: Tensor, seen: Tensor, sinks: Tensor, recent: Tensor) -> Tensor:
    """Mark slots that must not be evicted, [S, C] bool: the first `sinks` tokens of a segment, the last `recent`."""
    held = positions >= 0
    return held & ((positions < sinks[:, None]) | (positions >= (seen - recent)[:, None]))


def find_lowest(
    priorities: Tensor, positions: Tensor, outside: Tensor | None, signed: bool, out: Tensor | None = None
) -> Tensor:
    """Return the slot of the lowest priority in each segment, [S]; the later position among equals.

    `priorities` are [S, C] fp32, below 0 only if `signed`; what is `outside` [S, C] bool (None: nothing) never leaves.
    The bits of a float that is not negative are in the order of the floats, so that a priority and a position make one
    whole number that has no equals: a single reduction finds it.
    """
    # position - 2^32 * bits: the largest is the entry with the lowest priority, and of equal ones the latest.
    order = torch.add(positions, _order_bits(priorities, signed), alpha=-(2**32))
    if outside is not None:
        order.masked_fill_(outside, torch.iinfo(torch.int64).min)
    return torch.argmax(order, -1) if out is None else torch.argmax(order, -1, out=out)


def mark_best(priorities: Tensor, protected: Tensor, positions: Tensor, counts: Tensor, width: int) -> Tensor:
    """Return the `counts` [S] entries to keep in each segment, [S, C] bool: protected ones, then by priority.

    Ties go to the lower position, which is below 2^30. No count is above `width`.
    """
    held = positions >= 0
    # whole numbers without equals: fewer than 2^61 by priority and position, and protected ones above them
    order = torch.add(-positions, _order_bits(priorities, signed=True), alpha=2**30)
    order = torch.add(order, protected, alpha=2**62).masked_fill_(~held, torch.iinfo(torch.int64).min)
    # As many for all segments, the best first; each marks as many of them as it may keep.
    indices = order.topk(min(width, positions.shape[1])).indices
    counted = torch.arange(indices.shape[1], device=indices.device) < counts[:, None]
    return torch.zeros_like(held).scatter_(1, indices, counted) & held


def _order_bits(priorities: Tensor, signed: bool) -> Tensor:
    """Return whole numbers in the order of fp32 `priorities`, int32; of those that are not `signed`, their bits."""
    bits = priorities.view(torch.int32)
    if signed:  # the other way round below 0, and -0 is 0
        bits = torch.where(bits < 0, torch.iinfo(torch.int32).min - bits, bits)
    return bits

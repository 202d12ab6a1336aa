"""Dense blocks: segments of (nearly) equal length side by side, aligned at the right.

A segment is what one kv head holds of one sequence. A new token is one slice write for all segments of a block, and
attention is one call per block. Right after prefill a block has no spare column; room for new tokens comes with the
first append and then grows by an eighth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvsearch.core.arrays import Ints
from kvsearch.core.errors import InternalError
from kvsearch.core.items import group_by_key
from kvsearch.kernels.attention import Entries

WASTE = 1 / 64  # on a CPU, padding allowed inside blocks, as a share of the entries of the layer
# On other devices every block is some 5 to 20 kernels per step, of about 4 microseconds to launch: time to read 2^17
# entries at 2 TB/s. So blocks are joined while that costs no more of each, and all in all no more memory than this:
PADDING_SHARE = 1 / 4
SMALL = 2**14  # of the entries of the layer, or this many where that is more (4 MiB in bf16, D = 64)
LAUNCHES = 2**17
GROWTH_SHARE = 1 / 8
MIN_SPARE = 32
MAX_ROOM = 512  # tokens that room is made for ahead of time, at most


Where = Tensor | tuple[Tensor, Tensor]  # indexes tensors that are shaped as the positions of a block


@dataclass
class Block:
    """Segments with a common right edge: columns `[0, end)` are in use, those left of a segment's start are padding.

    A `FlatBlock` does the same where kernels serve. Every segment gets the same number of appended tokens, padding
    among them.
    """

    segments: Tensor  # [S] int64 ascending, sequence * Hkv + kv head
    keys: Tensor  # [S, capacity, D]
    values: Tensor  # [S, capacity, Dv]
    positions: Tensor  # [S, capacity] int32, index of the token in its sequence, -1 where no entry
    end: int
    padded: bool  # some column left of `end` is empty in some segment
    # [S, capacity] in the dtype of keys, what entries of the prompt carry, 0 for others; None: nothing
    log_weights: Tensor | None = None
    _bias: Tensor | None = None  # [S, capacity], made when first asked for
    place: Tensor | None = None  # [1] int64, where `put` writes next; None: it does not, before `prepare_step`

    @property
    def columns(self) -> int:
        """How many columns are looked at, in use or not."""
        return self.end if self.place is None else self.keys.shape[1]

    @property
    def gaps(self) -> bool:
        """Whether some of them may hold no entry."""
        return self.padded or self.place is not None

    @property
    def bias(self) -> Tensor | None:
        """What to add to the logits, [S, columns]: -inf where there is no entry, else the log weight, or 0.

        None where every column has an entry and none a log weight. Spare columns count as filled, so that decode steps
        need not touch it, but in a fixed block.
        """
        if self.place is not None:
            return self._bias
        if not self.padded:
            return None if self.log_weights is None else self.log_weights[:, : self.end]
        if self._bias is None:
            empty = self.positions < 0
            empty[:, self.end :] = False
            self._bias = self._hiding(empty)
        return self._bias[:, : self.end]

    def _hiding(self, empty: Tensor) -> Tensor:
        if self.log_weights is not None:
            return self.log_weights.masked_fill(empty, float("-inf"))
        return torch.zeros(empty.shape, dtype=self.keys.dtype, device=empty.device).masked_fill_(empty, float("-inf"))

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, padded: bool) -> None:
        """Add q columns: keys [S, q, D], values [S, q, Dv], positions [S or 1, q] int32, -1 for padding if `padded`."""
        count = keys.shape[1]
        if self.end + count > self.keys.shape[1]:
            self._grow(self.end + count + max(MIN_SPARE, int(self.end * GROWTH_SHARE)))
        # A block at rest counts spare columns as filled, a fixed one as empty: it goes back to rest.
        if self.place is not None:
            self._bias = self.place = None
        columns = slice(self.end, self.end + count)
        self.keys[:, columns] = keys
        self.values[:, columns] = values
        self.positions[:, columns] = positions
        self.end += count
        if padded:
            self.padded = True
            self._bias = None

    def separate(self) -> None:
        """Continue in copies, so that earlier attention can still be differentiated."""
        self._grow(self.keys.shape[1])

    def prepare_step(self, room: int) -> bool:
        """Prepare for a token that `put` adds, with room for `room` of them; return whether tensors were made anew."""
        anew = self.place is None or self.end == self.keys.shape[1]
        if anew:
            if self.end + room > self.keys.shape[1]:
                self._grow(self.end + room)
            # All columns of a fixed block are looked at, so spare ones are marked as empty.
            self.positions[:, self.end :] = -1
            self._bias = self._hiding(self.positions < 0)
            self.place = torch.full((1,), self.end, device=self.positions.device)
        self.end += 1
        return anew

    def release(self) -> None:
        """Return to growing as tokens come, until `prepare_step` makes room again."""
        self._bias = self.place = None

    def put(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Add one column to a fixed block: keys [S, 1, D], values [S, 1, Dv], positions [S or 1, 1] int32, no padding.

        That changes tensors in place and depends on no value; `end` is for the host to count.
        """
        if self.place is None or self._bias is None:
            raise InternalError("a token was put into a block that is not fixed")
        # The column is a number on the device: a captured step writes to the next one whenever it is replayed.
        self.keys.index_copy_(1, self.place, keys)
        self.values.index_copy_(1, self.place, values)
        self.positions.index_copy_(1, self.place, positions.expand(len(self.positions), -1))
        self._bias.index_fill_(1, self.place, 0.0)
        self.place.add_(1)

    def crop(self, count: int) -> None:
        """Forget the last `count` columns."""
        self.end -= count
        self._bias = self.place = None  # a forgotten column may have been padding

    def _grow(self, capacity: int) -> None:
        # Names alone are listed: a dictionary of the old tensors would keep all of them until the last is copied.
        for name in [*list_entry_tensors(self)]:
            old = getattr(self, name)
            new = old.new_zeros(old.shape[0], capacity, *old.shape[2:])
            new[:, : self.end] = old[:, : self.end]
            setattr(self, name, new)
        self._bias = self.place = None

    def recent(self, count: int) -> Tensor:
        """Return the positions of the last `count` appended tokens, [S, count]."""
        return self.positions[:, self.end - count : self.end]

    def for_kernels(self) -> Entries:
        """Return the entries in the form that kernels take."""
        positions = self.positions if self.gaps else None
        return Entries(self.keys, self.values, self.columns, positions, log_weights=self.log_weights)

    def aligned(self) -> Block:
        """Return the entries as one dense block, itself or a copy."""
        return self

    def grouped(self) -> list[Block]:
        """Return the entries as dense blocks with little padding."""
        return [self]

    def whole(self, seen: int) -> tuple[Tensor, Tensor] | None:
        """Return views [S, seen, D] of keys and values if all segments hold `seen` entries without a gap."""
        return None if self.padded or self.end != seen else (self.keys[:, :seen], self.values[:, :seen])

    def select(self, chosen: Ints) -> Block:
        """Return a block that holds row r of this one as segment s, for all (r, s) of `chosen` [S', 2], s ascending."""
        rows, segments = torch.from_numpy(chosen).to(self.keys.device).unbind(1)
        chosen_entries = {name: held[rows] for name, held in list_entry_tensors(self).items()}
        return replace(self, segments=segments, **chosen_entries, _bias=None, place=None)

    def spread(self, limits: Tensor) -> Tensor:
        """Repeat a number of each segment [S] for its entries, in the shape of `positions` or [S, 1]."""
        return limits[:, None]

    def showing(self, visible: Tensor, heads: int) -> Block:
        """Return the same entries, with tokens that are not `visible` [B, T] treated as padding."""
        positions = hide_positions(self.positions, self.segments[:, None] // heads, visible)
        return replace(self, positions=positions, padded=True, _bias=None, place=None)

    def kept(self, keep: Tensor, counts: Ints) -> Iterator[tuple[Block, Where, Ints]]:
        """Copy the entries `keep` (bool, as `positions`), `counts` [S] of each segment; nothing may be appended.

        Yields blocks, where in this one their entries were, and which of its rows they hold.
        """
        for members in group_segments(counts.tolist(), keep.device):
            rows = np.array(members)
            width = int(counts[rows].max())
            index = torch.from_numpy(rows).to(keep.device)
            columns, filled = align_right(keep[index], width)
            where = (index[:, None], columns)
            padded = bool((counts[rows] < width).any())
            held = {name: states[where] for name, states in list_entry_tensors(self).items()}
            if padded:
                held["positions"].masked_fill_(~filled, -1)
            yield Block(self.segments[index], end=width, padded=padded, **held), where, rows

    def held(self) -> Tensor:
        """Return the entries of each segment, padding not counted, [S] int64 on the CPU."""
        return (self.positions[:, : self.end] >= 0).sum(-1).cpu()

    def positions_of(self, row: int) -> Tensor:
        """Return the positions of one segment, -1 where there is no entry."""
        return self.positions[row, : self.end]

    def tensors(self) -> list[Tensor]:
        """Return all tensors that take memory."""
        return [*list_entry_tensors(self).values(), *([] if self._bias is None else [self._bias])]

    def narrowed(self, rows: Ints, width: int) -> Block:
        """Return some rows in `width` columns, which must hold all of their entries."""
        index = torch.from_numpy(rows).to(self.keys.device)

        def cut(tensor: Tensor, empty: int) -> Tensor:
            chosen = tensor[index, max(self.end - width, 0) : self.end]
            missing = width - chosen.shape[1]
            front = chosen.new_full((len(rows), missing, *chosen.shape[2:]), empty)
            return torch.cat([front, chosen], 1) if missing else chosen

        held = {
            name: cut(states, -1 if name == "positions" else 0) for name, states in list_entry_tensors(self).items()
        }
        return Block(self.segments[index], end=width, padded=True, **held)

    @classmethod
    def stacked(cls, blocks: Sequence[Block], padded: bool) -> Block:
        """Stack the segments of blocks of one width, in ascending order."""
        segments = torch.cat([block.segments for block in blocks])
        order = torch.argsort(segments)
        held = {name: torch.cat(parts)[order] for name, parts in align_tensors(blocks).items()}
        return cls(segments[order], end=blocks[0].end, padded=padded, **held)


def list_entry_tensors(block: Any) -> dict[str, Any]:
    """Return the tensors of a block that have a row for every entry, by field; log weights if it has any."""
    held = {name: getattr(block, name) for name in ("keys", "values", "positions", "log_weights")}
    return {name: tensor for name, tensor in held.items() if tensor is not None}


def align_tensors(blocks: Sequence[Any]) -> dict[str, list[Any]]:
    """Collect the entry tensors of some blocks by field; log weights of all if any has some."""
    names = ["keys", "values", "positions"]
    parts = {name: [getattr(block, name) for block in blocks] for name in names}
    if any(block.log_weights is not None for block in blocks):
        parts["log_weights"] = [
            block.keys.new_zeros(block.positions.shape) if block.log_weights is None else block.log_weights
            for block in blocks
        ]
    return parts


class Segmented:
    """Segments (sequence * Hkv + kv head) spread over blocks; `names` [S] per block says which are where."""

    batch: int
    heads: int
    blocks: Sequence[Any]

    def __init__(self, names: Sequence[Tensor]) -> None:
        self._sizes = [len(part) for part in names]
        self._order = torch.cat(list(names))
        self._back = torch.argsort(self._order)

    def split(self, states: Tensor) -> list[Tensor]:
        """Split states of all segments, [B * Hkv, ...], into one part per block."""
        if len(self._sizes) == 1:  # its segments are all segments, in order
            return [states]
        return list(torch.split_with_sizes(states.index_select(0, self._order), self._sizes))

    def join(self, parts: list[Tensor]) -> Tensor:
        """Undo `split`."""
        return parts[0] if len(parts) == 1 else torch.cat(parts).index_select(0, self._back)

    def places(self) -> list[tuple[int, int]]:
        """Return the block that each segment is in, and its row there."""
        places = [(block, row) for block, size in enumerate(self._sizes) for row in range(size)]
        return [places[number] for number in self._back.tolist()]

    def rows_of(self, sequences: Sequence[int]) -> list[Ints]:
        """Return of each block its rows of these sequences and their segments in a store of these alone, [S', 2]."""
        places = self.places()
        pairs: list[list[tuple[int, int]]] = [[] for _ in self._sizes]
        segments = [sequence * self.heads + head for sequence in sequences for head in range(self.heads)]
        for new, old in enumerate(segments):
            block, row = places[old]
            pairs[block].append((row, new))
        return [np.array(chosen, dtype=np.int64) for chosen in pairs]

    def separate(self) -> None:
        """Continue in copies, so that earlier attention can still be differentiated."""
        for block in self.blocks:
            block.separate()

    def kept_positions(self, row: int, head: int) -> list[int]:
        """Return the token indices of the entries of one sequence and head, ascending."""
        block, index = self.places()[row * self.heads + head]
        held = self.blocks[block].positions_of(index)
        return sorted(held[held >= 0].tolist())

    def nbytes(self) -> int:
        """Return the bytes allocated: entries, positions and what is beside them, padding and spare room included."""
        return sum(tensor.untyped_storage().nbytes() for block in self.blocks for tensor in block.tensors())


def hide_positions(positions: Tensor, sequences: Tensor, visible: Tensor) -> Tensor:
    """Return `positions` of entries of these `sequences`, -1 for those that are not `visible` [B, T] bool."""
    return positions.masked_fill(~visible[sequences, positions.clamp(min=0)], -1)


def copy_dense_blocks(
    keys: Tensor,
    values: Tensor,
    keep: Tensor,
    index: Tensor,
    lengths: Sequence[int],
    log_weights: Tensor | None = None,
) -> Iterator[tuple[Block, Tensor]]:
    """Copy the kept entries of a dense layer; yield blocks with the columns [S, width] they come from.

    `lengths` [B * Hkv] are how many entries of each segment are kept; for the rest see `RaggedStore.pack`.
    """
    heads = keys.shape[1]
    flat_keep = keep.flatten(0, 1)
    for members in group_segments(lengths, keys.device):
        segments = make_index(np.array(members), keys.device)
        width = int(max(lengths[i] for i in members))
        columns, filled = align_right(flat_keep[segments], width)
        # sequence and head apart: flattening a transposed layer would copy all of it
        row = (segments // heads)[:, None]
        head = (segments % heads)[:, None]
        where = index[row, columns].int()
        # Known on the host, so that a block without padding needs no mask.
        padded = any(lengths[i] < width for i in members)
        if padded:
            where = torch.where(filled, where, -1)
        weights = None if log_weights is None else log_weights[row, head, columns]
        entries = keys[row, head, columns], values[row, head, columns], where
        yield Block(segments, *entries, width, padded, weights), columns


def group_segments(lengths: Sequence[int], device: torch.device) -> list[list[int]]:
    """Group segments so that every group can be padded to its longest, in few groups where these are what costs.

    Starts from one group per distinct length and merges neighbours, cheapest first, while the allowance lasts: on a CPU
    `WASTE` of all entries, elsewhere `PADDING_SHARE` of them or `SMALL`, and no more than `LAUNCHES` for any merger.
    """
    by_length = group_by_key(range(len(lengths)), lambda index: lengths[index])
    groups = [(length, by_length[length]) for length in sorted(by_length)]
    host = device.type == "cpu"
    allowance = int(sum(lengths) * WASTE) if host else max(SMALL, int(sum(lengths) * PADDING_SHARE))
    max_groups = allowance if host else LAUNCHES
    while len(groups) > 1:
        # Padding that a group takes when it joins the next longer one.
        costs = [(b[0] - a[0]) * len(a[1]) for a, b in pairwise(groups)]
        cheapest = min(range(len(costs)), key=costs.__getitem__)
        if costs[cheapest] > min(max_groups, allowance):
            break
        allowance -= costs[cheapest]
        length, members = groups[cheapest + 1]
        groups[cheapest : cheapest + 2] = [(length, sorted(groups[cheapest][1] + members))]
    return [members for _, members in groups]


def make_index(numbers: Ints, device: torch.device) -> Tensor:
    """Return an index tensor of whole numbers; where they count up from 0 it is made on the device, without a copy."""
    if (numbers == np.arange(len(numbers))).all():
        return torch.arange(len(numbers), device=device)
    return torch.from_numpy(numbers).to(device)


def align_right(keep: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the kept columns of each row, ascending and right-aligned in `width` columns, and where they are."""
    count = keep.sum(-1, keepdim=True)
    # Columns that are not kept are all written to a spare one at the end, which is cut off.
    slot = torch.where(keep, keep.cumsum(-1) - 1 + width - count, width)
    columns = torch.arange(keep.shape[1], device=keep.device).expand_as(slot)
    index = torch.zeros(keep.shape[0], width + 1, dtype=torch.int64, device=keep.device).scatter_(1, slot, columns)
    filled = torch.arange(width, device=keep.device)[None] >= width - count
    return index[:, :width], filled

"""Flat storage: all segments of a layer behind one another, without padding, for one call of attention.

Behind each segment is the same spare room, as all of them get the same tokens. Right after prefill there is none; it
comes with the first append and then grows by an eighth of the mean segment. Where a segment begins and ends is known to
the device alone, so that a token is added in place and without a decision of the host's; how many rows segments had
before anything was appended the host knows, too. Only kernels read this form: for everything else it is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvsearch.core.arrays import Ints
from kvsearch.kernels.attention import Entries
from kvsearch.policies.decoding import widen_marks
from kvsearch.runtime.store.blocks import (
    GROWTH_SHARE,
    MIN_SPARE,
    Block,
    Where,
    align_tensors,
    group_segments,
    hide_positions,
    list_entry_tensors,
    make_index,
)

CPU = torch.device("cpu")


@dataclass
class FlatBlock:
    """Segments behind one another: rows `[starts, ends)` of each are in use, up to `spare` more than its `counts`."""

    segments: Tensor  # [S] int64, 0 to S - 1
    keys: Tensor  # [N, D], N = sum(counts) + S * spare
    values: Tensor  # [N, Dv]
    positions: Tensor  # [N] int32, index of the token in its sequence, -1 where padding was appended
    counts: Ints  # [S] entries before tokens were appended
    starts: Tensor  # [S] int64
    ends: Tensor  # [2, S] int64: where each segment goes on, and how many rows it has in use
    spare: int = 0
    appended: int = 0
    padded: bool = False  # padding was appended to some segment
    fixed: bool = False  # room was made ahead of time
    stable: bool = False  # tensors are those of the last step that was foreseen
    log_weights: Tensor | None = None  # [N], see `Block`

    def __post_init__(self) -> None:
        self.longest = int(self.counts.max())

    @classmethod
    def compact(cls, held: Mapping[str, Any], counts: Ints, lengths: Tensor) -> FlatBlock:
        """Make a block of entry tensors by name, without spare room; `counts` and `lengths` [S] are equal."""
        stop = lengths.cumsum(0)
        segments = torch.arange(len(counts), device=stop.device)
        return cls(segments, counts=counts, starts=stop - lengths, ends=torch.stack([stop, lengths]), **held)

    @classmethod
    def pack(
        cls,
        keys: Tensor,
        values: Tensor,
        keep: Tensor,
        index: Tensor,
        counts: Ints,
        log_weights: Tensor | None = None,
    ) -> tuple[FlatBlock, Tensor]:
        """Copy the kept entries of a dense layer; return them and their places [N] in what is [B, Hkv, T], flattened.

        `counts` [B * Hkv] are how many entries of each segment are kept; for the rest see `RaggedStore.pack`.
        """
        heads, length = keys.shape[1:3]
        places = find_true_places(keep.flatten(), int(counts.sum()))
        column = places % length
        segment = places // length
        row = segment // heads
        head = segment % heads  # apart: flattening a transposed layer would copy all of it
        held = {"keys": keys[row, head, column], "values": values[row, head, column]}
        held["positions"] = index[row, column].int()
        if log_weights is not None:
            held["log_weights"] = log_weights[row, head, column]
        return cls.compact(held, counts, keep.flatten(0, 1).sum(-1)), places

    @classmethod
    def joined(cls, parts: Sequence[FlatBlock]) -> FlatBlock:
        """Put the segments of some blocks, to which nothing is appended, behind one another."""
        parts = [part.moved(0) if part.spare else part for part in parts]
        held = {name: torch.cat(tensors) for name, tensors in align_tensors(parts).items()}
        counts = np.concatenate([part.counts for part in parts])
        return cls.compact(held, counts, torch.cat([part.ends[1] for part in parts]))

    @classmethod
    def of_blocks(cls, blocks: Sequence[Block], appended: int) -> FlatBlock:
        """Copy all segments of a layer out of dense blocks, whose last `appended` columns came after the prompt."""
        places = []
        for block in blocks:
            held = block.positions[:, : block.end] >= 0
            # Appended padding is a row, too: all segments of a flat store have as many appended rows.
            held[:, block.end - appended :] = True
            places.append(held)
        lengths = torch.cat([held.sum(-1) for held in places])
        names = torch.cat([block.segments for block in blocks]).cpu().numpy()
        entries = {
            name: torch.cat([tensor[:, : held.shape[1]][held] for tensor, held in zip(tensors, places, strict=True)])
            for name, tensors in align_tensors(blocks).items()
        }
        whole = cls.compact(entries, lengths.cpu().numpy(), lengths).moved(0, np.argsort(names))
        whole = replace(whole, counts=whole.counts - appended, spare=appended, appended=appended)
        whole.padded = bool((whole.recent(appended) < 0).any())
        return whole

    # --- tokens that come and go ----------------------------------------------------------------------------------

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, padded: bool) -> None:
        count = keys.shape[1]
        if self.appended + count > self.spare:
            used = int(self.counts.mean()) + self.appended
            self._grow(self.appended + count + max(MIN_SPARE, int(used * GROWTH_SHARE)))
        self.fixed = False
        self.put(keys, values, positions)
        self.appended += count
        self.padded |= padded

    def separate(self) -> None:
        """Do nothing: kernels are not differentiated, and all else gets copies."""

    def prepare_step(self, room: int) -> bool:
        # Growing binds new tensors, which ends captured steps, so room is made once, and again only when it has run
        # out.
        if (not self.fixed and self.appended + room > self.spare) or self.appended == self.spare:
            self._grow(self.appended + room)
        anew = not self.stable
        self.fixed = True
        self.stable = True
        self.appended += 1
        return anew

    def put(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        count = keys.shape[1]
        # Where segments end is known to the device alone, so rows are addressed there.
        rows = self.ends[0]
        if count > 1:
            rows = (rows[:, None] + torch.arange(count, device=rows.device)).flatten()
        self.keys.index_copy_(0, rows, keys.flatten(0, 1))
        self.values.index_copy_(0, rows, values.flatten(0, 1))
        self.positions.index_copy_(0, rows, positions.expand(len(keys), -1).flatten())
        # The row may have been another entry's before: a new token carries nothing.
        if self.log_weights is not None:
            self.log_weights.index_fill_(0, rows, 0.0)
        self.ends.add_(count)

    def release(self) -> None:
        self.fixed = False

    def crop(self, count: int) -> None:
        # Rows behind the end are never looked at, so nothing is cleared.
        self.ends.sub_(count)
        self.appended -= count

    def recent(self, count: int) -> Tensor:
        return self.positions[self.ends[0][:, None] + torch.arange(-count, 0, device=self.ends.device)]

    # --- other places ---------------------------------------------------------------------------------------------

    def _grow(self, spare: int) -> None:
        starts, ends, source = self._layout(spare, self.counts)
        # One by one, and by name: only one of them is there twice for a moment, and no dictionary keeps the others.
        for name in [*list_entry_tensors(self)]:
            setattr(self, name, _take_rows(getattr(self, name), source))
        self.starts = starts
        self.ends = ends
        self.spare = spare
        self.fixed = False
        self.stable = False

    def moved(self, spare: int, rows: Ints | None = None) -> FlatBlock:
        """Copy segments `rows` [S'] (None: all) to a block of their own, with other spare room behind each."""
        counts = self.counts if rows is None else self.counts[rows]
        starts, ends, source = self._layout(spare, counts, rows)
        held: dict[str, Any] = {name: _take_rows(states, source) for name, states in list_entry_tensors(self).items()}
        return replace(
            self,
            segments=torch.arange(len(counts), device=starts.device),
            counts=counts,
            starts=starts,
            ends=ends,
            spare=spare,
            fixed=False,
            stable=False,
            **held,
        )

    def _layout(self, spare: int, counts: Ints, rows: Ints | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return starts and ends of segments `rows` with other spare room, and the row here that each row is of.

        Behind the rows in use those are any. The host waits for nothing, and copies `rows` at most to the device.
        """
        starts = self.starts
        used = self.ends[1]
        if rows is not None:
            index = make_index(rows, starts.device)
            starts = starts[index]
            used = used[index]
        # Sizes are known to the device alone, but their sum to the host: with it, repeating waits for nothing.
        sizes = used + (spare - self.appended)
        total = int(counts.sum()) + spare * len(counts)
        first = sizes.cumsum(0) - sizes
        shift = torch.repeat_interleave(starts - first, sizes, output_size=total)
        source = (torch.arange(total, device=shift.device) + shift).clamp_(max=len(self.keys) - 1)
        return first, torch.stack([first + used, used]), source

    def select(self, chosen: Ints) -> FlatBlock:
        return self.moved(self.spare, chosen[:, 0])

    def kept(self, keep: Tensor, counts: Ints) -> Iterator[tuple[FlatBlock, Where, Ints]]:
        where = find_true_places(keep, int(counts.sum()))
        lengths = torch.from_numpy(counts).to(where.device)
        held = {name: states[where] for name, states in list_entry_tensors(self).items()}
        block = FlatBlock.compact(held, counts, lengths)
        yield block, where, np.arange(len(counts))

    def showing(self, visible: Tensor, heads: int) -> FlatBlock:
        positions = hide_positions(self.positions, self.spread(self.segments // heads), visible)
        return replace(self, positions=positions, padded=True)

    def spread(self, limits: Tensor) -> Tensor:
        sizes = self.ends[1] + (self.spare - self.appended)
        return torch.repeat_interleave(limits, sizes, output_size=len(self.keys))

    # --- what is held ---------------------------------------------------------------------------------------------

    @property
    def columns(self) -> int:
        """The most rows that a segment may have in use."""
        return self.longest + (self.spare if self.fixed else self.appended)

    def for_kernels(self) -> Entries:
        positions = self.positions if self.padded else None
        return Entries(self.keys, self.values, self.columns, positions, self.ends[1], self.starts, self.log_weights)

    def aligned(self) -> Block:
        return self._aligned(np.arange(len(self.counts)), self.columns)

    def grouped(self) -> list[Block]:
        """Return copies in blocks as a CPU would have them, so that files are the same wherever they are written."""
        members = (np.array(group) for group in group_segments(self.counts.tolist(), CPU))
        return [self._aligned(rows, int(self.counts[rows].max()) + self.appended) for rows in members]

    def _aligned(self, rows: Ints, width: int) -> Block:
        index = make_index(rows, self.keys.device)
        ends, used = self.ends[:, index]
        column = torch.arange(-width, 0, device=index.device)
        held = column >= -used[:, None]
        # Columns in front of a shorter segment show rows of its neighbour, which are masked below.
        where = (ends[:, None] + column).clamp_(min=0)
        entries = {name: states[where] for name, states in list_entry_tensors(self).items()}
        # Known on the host: this does not ask the device which rows are padding.
        padded = bool((self.counts[rows] + self.appended < width).any())
        for name, states in entries.items() if padded else ():
            states.masked_fill_(widen_marks(~held, states), -1 if name == "positions" else 0)
        return Block(self.segments[index], end=width, padded=padded or self.padded, **entries)

    def whole(self, seen: int) -> tuple[Tensor, Tensor] | None:
        if self.padded or (self.counts + self.appended != seen).any():
            return None
        shape = len(self.counts), seen - self.appended + self.spare
        return self.keys.view(*shape, -1)[:, :seen], self.values.view(*shape, -1)[:, :seen]

    def held(self) -> Tensor:
        counts = torch.from_numpy(self.counts + self.appended)
        return counts - (self.recent(self.appended) < 0).sum(-1).cpu() if self.padded else counts

    def positions_of(self, row: int) -> Tensor:
        first = int((self.counts[:row] + self.spare).sum())
        return self.positions[first : first + int(self.counts[row]) + self.appended]

    def tensors(self) -> list[Tensor]:
        return [self.segments, *list_entry_tensors(self).values(), self.starts, self.ends]


AnyBlock = Block | FlatBlock


def regroup(held: Sequence[AnyBlock]) -> list[AnyBlock]:
    """Put the same segments into as few blocks as is economical, if that is fewer: attention is one call for each."""
    if len(held) == 1:
        return list(held)
    blocks = [block for source in held for block in source.grouped()]
    counts = np.concatenate([block.held().numpy() for block in blocks])
    groups = group_segments(counts.tolist(), blocks[0].keys.device)
    if len(groups) >= len(blocks):
        return list(blocks)
    home = np.concatenate([np.full(len(block.segments), number) for number, block in enumerate(blocks)])
    row = np.concatenate([np.arange(len(block.segments)) for block in blocks])
    # Each group takes its rows out of the blocks where they are now, and is sorted by segment.
    joint: list[AnyBlock] = []
    for members in groups:
        group = np.array(members)
        width = int(counts[members].max())
        parts = [blocks[b].narrowed(row[group[home[group] == b]], width) for b in np.unique(home[group])]
        joint.append(Block.stacked(parts, padded=bool((counts[group] < width).any())))
    return joint


def find_true_places(flags: Tensor, count: int) -> Tensor:
    """Return the indices of True flags [M], ascending, [count] int64; as the host knows the count, it does not wait."""
    return torch.searchsorted(flags.cumsum(0), torch.arange(1, count + 1, device=flags.device))


def _take_rows(states: Tensor, source: Tensor) -> Tensor:
    """Return rows `source` of states, zeros where there is none to take."""
    return states.index_select(0, source) if len(states) else states.new_zeros(len(source), *states.shape[1:])

"""Ragged storage: every (sequence, kv head) keeps its own number of entries, and only those are in memory.

Segments of (nearly) equal length share one dense block, aligned at the right, so that a new token is one slice write
for all of them and attention is one call per block. Right after prefill a block has no spare column; room for new
tokens comes with the first append and then grows by an eighth.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvsearch.arrays import Ints
from kvsearch.errors import InternalError

WASTE = 1 / 64  # on a CPU, padding allowed inside blocks, as a share of the entries of the layer
# On other devices every block is some 5 to 20 kernels per step, of about 4 microseconds to launch: time to read 2^17
# entries at 2 TB/s. So blocks are joined while that costs no more of each, and all in all no more memory than this:
SHARE, SMALL = 1 / 4, 2**14  # of the entries of the layer, or this many where that is more (4 MiB in bf16, D = 64)
LAUNCHES = 2**17
GROWTH = 1 / 8
MIN_SPARE = 32


@dataclass
class Block:
    """Segments with a common right edge: columns `[0, end)` are in use, those left of a segment's start are padding."""

    segments: Tensor  # [S] int64 ascending, sequence * Hkv + kv head
    keys: Tensor  # [S, capacity, D]
    values: Tensor  # [S, capacity, Dv]
    positions: Tensor  # [S, capacity] int32, index of the token in its sequence, -1 where no entry
    end: int
    padded: bool  # some column left of `end` is empty in some segment
    _bias: Tensor | None = None  # [S, capacity], made when first asked for
    place: Tensor | None = None  # [1] int64, where `put` writes next; None: it does not, before `fix`

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
        """What to add to the logits, [S, columns]: -inf where there is no entry, else 0; None when every one has one.

        Spare columns count as filled, so that decode steps need not touch it, but in a fixed block.
        """
        if self.place is not None:
            return self._bias
        if not self.padded:
            return None
        if self._bias is None:
            empty = self.positions < 0
            empty[:, self.end :] = False
            self._bias = torch.zeros(empty.shape, dtype=self.keys.dtype, device=empty.device)
            self._bias.masked_fill_(empty, float("-inf"))
        return self._bias[:, : self.end]

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, padded: bool) -> None:
        """Add q columns: keys [S, q, D], values [S, q, Dv], positions [S or 1, q] int32, -1 for padding if `padded`."""
        count = keys.shape[1]
        if self.end + count > self.keys.shape[1]:
            self._grow(self.end + count + max(MIN_SPARE, int(self.end * GROWTH)))
        if self.place is not None:
            self._bias = self.place = None
        columns = slice(self.end, self.end + count)
        self.keys[:, columns] = keys
        self.values[:, columns] = values
        self.positions[:, columns] = positions
        self.end += count
        if padded:
            self.padded, self._bias = True, None

    def fix(self, room: int) -> None:
        """Make room for so many columns and let `put` fill them, until something else is done to the block."""
        if self.end + room > self.keys.shape[1]:
            self._grow(self.end + room)
        self.positions[:, self.end :] = -1
        empty = self.positions < 0
        self._bias = torch.zeros(empty.shape, dtype=self.keys.dtype, device=empty.device)
        self._bias.masked_fill_(empty, float("-inf"))
        self.place = torch.full((1,), self.end, device=empty.device)

    def put(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Add one column to a fixed block: keys [S, 1, D], values [S, 1, Dv], positions [S or 1, 1] int32, no padding.

        That changes tensors in place and depends on no value; `end` is for the host to count.
        """
        if self.place is None or self._bias is None:
            raise InternalError("a token was put into a block that is not fixed")
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
        for name in ("keys", "values", "positions"):
            old = getattr(self, name)
            new = old.new_zeros(old.shape[0], capacity, *old.shape[2:])
            new[:, : self.end] = old[:, : self.end]
            setattr(self, name, new)
        self._bias = self.place = None

    def select(self, rows: Tensor, segments: Tensor) -> Block:
        """Return the block that holds this block's rows `rows` under the new names `segments`, both [S'] int64."""
        keys, values, positions = self.keys[rows], self.values[rows], self.positions[rows]
        return replace(self, segments=segments, keys=keys, values=values, positions=positions, _bias=None, place=None)

    def narrowed(self, rows: NDArray[np.int64], width: int) -> Block:
        """Return some rows in `width` columns, which must hold all of their entries."""
        index = torch.from_numpy(rows).to(self.keys.device)

        def cut(tensor: Tensor, empty: int) -> Tensor:
            chosen = tensor[index, max(self.end - width, 0) : self.end]
            missing = width - chosen.shape[1]
            front = chosen.new_full((len(rows), missing, *chosen.shape[2:]), empty)
            return torch.cat([front, chosen], 1) if missing else chosen

        keys, values, positions = cut(self.keys, 0), cut(self.values, 0), cut(self.positions, -1)
        return Block(self.segments[index], keys, values, positions, width, padded=True)

    @classmethod
    def stacked(cls, blocks: Sequence[Block], padded: bool) -> Block:
        """Stack the segments of blocks of one width, in ascending order."""
        segments = torch.cat([block.segments for block in blocks])
        order = torch.argsort(segments)
        keys, values, positions = (
            torch.cat([getattr(block, name) for block in blocks])[order] for name in ("keys", "values", "positions")
        )
        return cls(segments[order], keys, values, positions, blocks[0].end, padded)


class Segmented:
    """Segments (sequence * Hkv + kv head) spread over blocks; `names` [S] per block says which are where."""

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


class RaggedStore(Segmented):
    """The entries one layer kept for a batch, as a few dense blocks."""

    def __init__(self, blocks: list[Block], heads: int, tokens: Tensor, even: bool) -> None:
        self.blocks, self.batch, self.heads = blocks, len(tokens), heads
        self.tokens = tokens.clone()  # [B] int32 tokens of each sequence
        self._most = tokens  # and how many they were before some were forgotten
        self.even = even  # all sequences have the same number of tokens
        self.appended = 0
        self.room = 0  # tokens that there is room for ahead of time, in fixed blocks; 0: they are not
        self.packed = 0  # how often tensors were made anew, so that what refers to them is not used any more
        super().__init__([block.segments for block in blocks])

    @classmethod
    def pack(
        cls,
        keys: Tensor,
        values: Tensor,
        keep: Tensor,
        index: Tensor,
        known: tuple[Ints, Sequence[int]] | None = None,
    ) -> RaggedStore:
        """Copy the kept entries out of a dense layer.

        `keys` [B, Hkv, T, D] and `values` [B, Hkv, T, Dv] are left untouched, `keep` is [B, Hkv, T] bool, `index`
        [B, T] the index of each column's token in its sequence, -1 for padding. The host waits for the device once,
        unless it is told what is `known`: entries kept, [B, Hkv], and the tokens of each sequence.
        """
        batch, heads = keys.shape[:2]
        tokens = index[:, -1].int() + 1
        if known is None:
            counts = torch.cat([keep.flatten(0, 1).sum(-1), tokens]).tolist()
            lengths, lasting = counts[: batch * heads], counts[batch * heads :]
        else:
            lengths, lasting = known[0].flatten().tolist(), list(known[1])
        blocks = [block for block, _ in dense_blocks(keys, values, keep, index, lengths)]
        return cls(blocks, heads, tokens, even=len(set(lasting)) == 1)

    @classmethod
    def joined(cls, stores: Sequence[RaggedStore]) -> RaggedStore:
        """Join the sequences of several stores in one batch, in their order; nothing may have been appended to them."""
        heads, blocks, first = stores[0].heads, [], 0
        for store in stores:
            if store.appended:
                raise InternalError("stores that have taken in tokens cannot be joined")
            blocks += [replace(block, segments=block.segments + first * heads) for block in store.blocks]
            first += store.batch
        tokens = torch.cat([store.tokens for store in stores])
        even = all(store.even for store in stores) and len({int(store.tokens[0]) for store in stores}) == 1
        return cls(regrouped(blocks), heads, tokens, even)

    def append(self, keys: Tensor, values: Tensor, valid: Tensor | None = None) -> None:
        """Add q tokens to every segment.

        `keys` [B, Hkv, q, D], `values` [B, Hkv, q, Dv], `valid` [B, q] bool is False for padding (None: there is none).
        """
        count = keys.shape[2]
        if valid is None:
            positions = (self.tokens[:1] if self.even else self.tokens)[:, None]
            if count > 1:
                positions = positions + torch.arange(count, dtype=torch.int32, device=keys.device)
        else:
            positions = (self.tokens[:, None] + valid.cumsum(-1).int() - 1).masked_fill(~valid, -1)
            self.even = False
        for block, own_keys, own_values, own_positions in self._by_block(keys, values, positions):
            block.append(own_keys, own_values, own_positions, valid is not None)
        self.tokens += count if valid is None else valid.sum(-1).int()
        self.appended += count

    def reserve(self, tokens: int) -> None:
        """Make room for so many tokens ahead of time, whenever there is none; 0: steps are as small as they can be."""
        self.room = tokens
        for block in self.blocks:
            block.place = block._bias = None

    def foresee(self) -> None:
        """Do the host's part of the next token, where room is reserved: `put` is the device's."""
        for block in self.blocks:
            if block.place is None or block.end == block.keys.shape[1]:
                block.fix(self.room)
                self.packed += 1
            block.end += 1
        self.appended += 1

    def plan(self) -> tuple[Hashable, ...]:
        """Return what the foreseen step depends on that the host decided: nothing, all steps are the same."""
        return ()

    def tidy(self) -> None:
        """Do nothing after a token: none has left."""

    def put(self, keys: Tensor, values: Tensor) -> None:
        """Add the foreseen token to every segment, keys [B, Hkv, 1, D] and values [B, Hkv, 1, Dv]; none is padding."""
        positions = (self.tokens[:1] if self.even else self.tokens)[:, None]
        for block, own_keys, own_values, own_positions in self._by_block(keys, values, positions):
            block.put(own_keys, own_values, own_positions)
        self.tokens += 1

    def _by_block(
        self, keys: Tensor, values: Tensor, positions: Tensor
    ) -> Iterator[tuple[Block, Tensor, Tensor, Tensor]]:
        """Share out tokens, keys and values [B, Hkv, q, D] and positions [B or 1, q], over the blocks."""
        rows = [positions] * len(self.blocks)
        if len(positions) > 1:
            rows = self.split(positions.repeat_interleave(self.heads, 0))
        yield from zip(self.blocks, self.split(keys.flatten(0, 1)), self.split(values.flatten(0, 1)), rows, strict=True)

    @property
    def longest(self) -> Tensor:
        """The most tokens that each sequence has had, [B] int32."""
        return torch.maximum(self._most, self.tokens)

    @longest.setter
    def longest(self, tokens: Tensor) -> None:
        self._most = tokens.clone()

    def crop(self, count: int) -> None:
        """Forget the last `count` appended tokens."""
        self.longest, lost = self.longest, torch.zeros_like(self.tokens)
        for block in self.blocks:
            gone = block.positions[:, block.end - count : block.end] >= 0
            lost[block.segments // self.heads] = gone.sum(-1).int()  # the same for all heads of a sequence
            block.crop(count)
        self.tokens -= lost
        self.appended -= count

    def dense(self, seen: int) -> tuple[Tensor, Tensor] | None:
        """Return views [B, Hkv, seen, D] of the store if nothing is evicted and nothing padded, else None."""
        block = self.blocks[0]
        if len(self.blocks) > 1 or block.padded or block.end != seen:
            return None
        shape = (self.batch, self.heads)
        keys, values = block.keys[:, :seen], block.values[:, :seen]
        return keys.view(*shape, *keys.shape[1:]), values.view(*shape, *values.shape[1:])

    def select_rows(self, rows: Sequence[int]) -> RaggedStore:
        """Return sequences `rows` of this store, in that order and as often as named, as a new store."""
        home = {s: (b, r) for b, block in enumerate(self.blocks) for r, s in enumerate(block.segments.tolist())}
        members: list[list[tuple[int, int]]] = [[] for _ in self.blocks]
        for new_row, old_row in enumerate(rows):
            for head in range(self.heads):
                block, row = home[old_row * self.heads + head]
                members[block].append((row, new_row * self.heads + head))
        device = self.blocks[0].keys.device
        blocks = []
        for block_index, pairs in enumerate(members):
            if pairs:
                chosen = torch.tensor(pairs, device=device)
                blocks.append(self.blocks[block_index].select(chosen[:, 0], chosen[:, 1]))
        index = torch.as_tensor(rows, device=device)
        chosen_store = RaggedStore(blocks, self.heads, self.tokens[index], self.even)
        chosen_store.appended, chosen_store.longest = self.appended, self.longest[index]
        return chosen_store

    def entries(self) -> Tensor:
        """Return the entries held per sequence and kv head, [B, Hkv] int64 (padding not counted)."""
        held = torch.zeros(self.batch * self.heads, dtype=torch.int64)
        for block in self.blocks:
            held[block.segments.cpu()] = (block.positions[:, : block.end] >= 0).sum(-1).cpu()
        return held.view(self.batch, self.heads)

    def most_entries(self) -> Tensor:
        """Return the most entries held at a time, [B, Hkv] int64."""
        return self.entries() + (self.longest - self.tokens)[:, None].cpu()

    def kept_positions(self, row: int, head: int) -> list[int]:
        """Return the token indices of the entries of one sequence and head, ascending."""
        wanted = row * self.heads + head
        for block in self.blocks:
            for index in torch.nonzero(block.segments == wanted).flatten().tolist():
                held = block.positions[index, : block.end]
                return sorted(held[held >= 0].tolist())
        return []

    def nbytes(self) -> int:
        """Return the bytes allocated: keys, values, positions and biases, padding and spare columns included."""
        return sum(
            tensor.untyped_storage().nbytes()
            for block in self.blocks
            for tensor in (block.keys, block.values, block.positions, block._bias)
            if tensor is not None
        )


def regrouped(blocks: list[Block]) -> list[Block]:
    """Put the same segments into as few blocks as is economical, if that is fewer: attention is one call for each."""
    counts = np.concatenate([(block.positions[:, : block.end] >= 0).sum(-1).cpu().numpy() for block in blocks])
    groups = bucket(counts.tolist(), blocks[0].keys.device)
    if len(groups) >= len(blocks):
        return blocks
    home = np.concatenate([np.full(len(block.segments), number) for number, block in enumerate(blocks)])
    row = np.concatenate([np.arange(len(block.segments)) for block in blocks])
    made = []
    for members in groups:
        group, width = np.array(members), int(counts[members].max())
        parts = [blocks[b].narrowed(row[group[home[group] == b]], width) for b in np.unique(home[group])]
        made.append(Block.stacked(parts, padded=bool((counts[group] < width).any())))
    return made


def dense_blocks(
    keys: Tensor, values: Tensor, keep: Tensor, index: Tensor, lengths: Sequence[int]
) -> Iterator[tuple[Block, Tensor]]:
    """Copy the kept entries of a dense layer; yield blocks with the columns [S, width] they come from.

    `lengths` [B * Hkv] are how many entries of each segment are kept; for the rest see `RaggedStore.pack`.
    """
    heads, flat_keep = keys.shape[1], keep.flatten(0, 1)
    for members in bucket(lengths, keys.device):
        segments = index_of(np.array(members), keys.device)
        width = int(max(lengths[i] for i in members))
        columns, filled = right_aligned(flat_keep[segments], width)
        # sequence and head apart: flattening a transposed layer would copy all of it
        row, head = (segments // heads)[:, None], (segments % heads)[:, None]
        where = index[row, columns].int()
        padded = any(lengths[i] < width for i in members)
        if padded:
            where = torch.where(filled, where, -1)
        yield Block(segments, keys[row, head, columns], values[row, head, columns], where, width, padded), columns


def bucket(lengths: Sequence[int], device: torch.device) -> list[list[int]]:
    """Group segments so that every group can be padded to its longest, in few groups where these are what costs.

    Starts from one group per distinct length and merges neighbours, cheapest first, while the allowance lasts: on a CPU
    `WASTE` of all entries, elsewhere `SHARE` of them or `SMALL`, and no more than `LAUNCHES` for any merger.
    """
    by_length: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        by_length.setdefault(length, []).append(index)
    groups = [(length, by_length[length]) for length in sorted(by_length)]
    host = device.type == "cpu"
    allowance = int(sum(lengths) * WASTE) if host else max(SMALL, int(sum(lengths) * SHARE))
    most = allowance if host else LAUNCHES
    while len(groups) > 1:
        costs = [(b[0] - a[0]) * len(a[1]) for a, b in pairwise(groups)]
        cheapest = min(range(len(costs)), key=costs.__getitem__)
        if costs[cheapest] > min(most, allowance):
            break
        allowance -= costs[cheapest]
        length, members = groups[cheapest + 1]
        groups[cheapest : cheapest + 2] = [(length, sorted(groups[cheapest][1] + members))]
    return [members for _, members in groups]


def index_of(numbers: Ints, device: torch.device) -> Tensor:
    """Return whole numbers as a tensor, made on the device where they count up from 0, which needs no copy."""
    if (numbers == np.arange(len(numbers))).all():
        return torch.arange(len(numbers), device=device)
    return torch.from_numpy(numbers).to(device)


def right_aligned(keep: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the kept columns of each row, ascending and right-aligned in `width` columns, and where they are."""
    count = keep.sum(-1, keepdim=True)
    slot = torch.where(keep, keep.cumsum(-1) - 1 + width - count, width)
    columns = torch.arange(keep.shape[1], device=keep.device).expand_as(slot)
    index = torch.zeros(keep.shape[0], width + 1, dtype=torch.int64, device=keep.device).scatter_(1, slot, columns)
    filled = torch.arange(width, device=keep.device)[None] >= width - count
    return index[:, :width], filled

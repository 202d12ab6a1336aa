"""Ragged storage: every (sequence, kv head) keeps its own number of entries, and only those are in memory.

Segments of (nearly) equal length share one dense block, aligned at the right, so that a new token is one slice write
for all of them and attention is one call per block. Right after prefill a block has no spare column; room for new
tokens comes with the first append and then grows by an eighth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

WASTE = 1 / 64  # padding allowed inside blocks, as a share of the entries of the layer
GROWTH = 1 / 8
MIN_SPARE = 32


@dataclass
class Block:
    """Segments with a common right edge: columns `[0, end)` are in use, those left of a segment's start are padding."""

    segments: Tensor  # [S] int64 ascending, sequence * Hkv + kv head
    keys: Tensor  # [S, capacity, D]
    values: Tensor  # [S, capacity, Dv]
    positions: Tensor  # [S, capacity] int32, -1 where no entry
    end: int
    padded: bool  # some column left of `end` is empty in some segment

    @property
    def visible(self) -> Tensor | None:
        """Columns that hold an entry, [S, end] bool; None when all do."""
        return self.positions[:, : self.end] >= 0 if self.padded else None

    def append(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Add q columns: keys and values [B*Hkv, q, D], positions [B*Hkv, q] int32 with -1 for padding."""
        count = keys.shape[1]
        if self.end + count > self.keys.shape[1]:
            self._grow(self.end + count + max(MIN_SPARE, int(self.end * GROWTH)))
        columns = slice(self.end, self.end + count)
        self.keys[:, columns] = keys[self.segments]
        self.values[:, columns] = values[self.segments]
        self.positions[:, columns] = positions[self.segments]
        self.end += count

    def _grow(self, capacity: int) -> None:
        for name in ("keys", "values", "positions"):
            old = getattr(self, name)
            new = old.new_zeros(old.shape[0], capacity, *old.shape[2:])
            new[:, : self.end] = old[:, : self.end]
            setattr(self, name, new)

    def select(self, rows: Tensor, segments: Tensor) -> Block:
        """The block that holds this block's rows `rows` under the new names `segments`, both [S'] int64."""
        return replace(
            self, segments=segments, keys=self.keys[rows], values=self.values[rows], positions=self.positions[rows]
        )


class RaggedStore:
    """The entries one layer kept for a batch, as a few dense blocks."""

    def __init__(self, blocks: list[Block], batch: int, heads: int) -> None:
        self.blocks, self.batch, self.heads = blocks, batch, heads
        self.appended = 0

    @classmethod
    def pack(cls, keys: Tensor, values: Tensor, keep: Tensor, positions: Tensor) -> RaggedStore:
        """Copy the kept entries out of a dense layer.

        `keys` [B, Hkv, T, D] and `values` [B, Hkv, T, Dv] are left untouched, `keep` is [B, Hkv, T] bool,
        `positions` [B, T] int32. One host synchronisation (the lengths of the segments).
        """
        batch, heads, length, _ = keys.shape
        flat_keep = keep.flatten(0, 1)
        lengths = flat_keep.sum(-1).tolist()
        blocks = []
        for members in bucket(lengths):
            segments = torch.tensor(members, device=keys.device)
            width = max(lengths[i] for i in members)
            index, filled = _right_aligned(flat_keep[segments], width)
            rows = segments[:, None]
            where = positions[segments // heads].gather(1, index).int()
            padded = any(lengths[i] < width for i in members)
            blocks.append(
                Block(
                    segments,
                    keys.flatten(0, 1)[rows, index],
                    values.flatten(0, 1)[rows, index],
                    torch.where(filled, where, -1) if padded else where,
                    width,
                    padded,
                )
            )
        return cls(blocks, batch, heads)

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, padded: bool) -> None:
        """Add q tokens to every segment: keys [B, Hkv, q, D], values [B, Hkv, q, Dv], positions [B, q] (-1: padding)."""
        flat_keys, flat_values = keys.flatten(0, 1), values.flatten(0, 1)
        per_segment = positions.int().repeat_interleave(self.heads, 0)
        for block in self.blocks:
            block.append(flat_keys, flat_values, per_segment)
            block.padded |= padded
        self.appended += keys.shape[2]

    def crop(self, count: int) -> None:
        """Forget the last `count` appended tokens."""
        for block in self.blocks:
            block.end -= count
        self.appended -= count

    def select_rows(self, rows: Sequence[int]) -> RaggedStore:
        """Sequences `rows` of this store, in that order and as often as named, as a new store."""
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
        chosen_store = RaggedStore(blocks, len(rows), self.heads)
        chosen_store.appended = self.appended
        return chosen_store

    def entries(self) -> Tensor:
        """Entries held per sequence and kv head, [B, Hkv] int64 (padding not counted)."""
        held = torch.zeros(self.batch * self.heads, dtype=torch.int64)
        for block in self.blocks:
            held[block.segments.cpu()] = (block.positions[:, : block.end] >= 0).sum(-1).cpu()
        return held.view(self.batch, self.heads)

    def kept_positions(self, row: int, head: int) -> list[int]:
        """Positions of the entries of one sequence and head, ascending."""
        wanted = row * self.heads + head
        for block in self.blocks:
            for index in torch.nonzero(block.segments == wanted).flatten().tolist():
                held = block.positions[index, : block.end]
                return sorted(held[held >= 0].tolist())
        return []

    def nbytes(self) -> int:
        """Bytes of storage really allocated: keys, values and positions, padding and spare columns included."""
        return sum(
            tensor.untyped_storage().nbytes()
            for block in self.blocks
            for tensor in (block.keys, block.values, block.positions)
        )


def bucket(lengths: Sequence[int]) -> list[list[int]]:
    """Group segments so that padding every group to its longest costs at most `WASTE` of all entries.

    Starts from one group per distinct length and merges neighbours, cheapest first, while the allowance lasts.
    """
    by_length: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        by_length.setdefault(length, []).append(index)
    groups = [(length, by_length[length]) for length in sorted(by_length)]
    allowance = int(sum(lengths) * WASTE)
    while len(groups) > 1:
        costs = [(b[0] - a[0]) * len(a[1]) for a, b in zip(groups, groups[1:], strict=False)]
        cheapest = min(range(len(costs)), key=costs.__getitem__)
        if costs[cheapest] > allowance:
            break
        allowance -= costs[cheapest]
        length, members = groups[cheapest + 1]
        groups[cheapest : cheapest + 2] = [(length, sorted(groups[cheapest][1] + members))]
    return [members for _, members in groups]


def _right_aligned(keep: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Indices of the kept columns of each row, ascending and right-aligned in `width` columns, and where they are."""
    count = keep.sum(-1, keepdim=True)
    slot = torch.where(keep, keep.cumsum(-1) - 1 + width - count, width)
    columns = torch.arange(keep.shape[1], device=keep.device).expand_as(slot)
    index = torch.zeros(keep.shape[0], width + 1, dtype=torch.int64, device=keep.device).scatter_(1, slot, columns)
    filled = torch.arange(width, device=keep.device)[None] >= width - count
    return index[:, :width], filled

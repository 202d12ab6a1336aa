"""Ragged storage: every (sequence, kv head) keeps its own number of entries, and only those are in memory.

Where the kernels serve, all segments of a layer lie behind one another (`flat.FlatBlock`); elsewhere segments of
(nearly) equal length share a dense block (`blocks.Block`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvsearch.core.arrays import Ints
from kvsearch.kernels.dispatch import serves
from kvsearch.runtime.store.blocks import Block, Segmented, copy_dense_blocks
from kvsearch.runtime.store.flat import AnyBlock, FlatBlock, regroup


class RaggedStore(Segmented):
    """The entries one layer kept for a batch, in as few blocks as is economical."""

    def __init__(
        self,
        blocks: Sequence[AnyBlock],
        heads: int,
        tokens: Tensor,
        even: bool,
        appended: int = 0,
        most_tokens: Tensor | None = None,
    ) -> None:
        self.blocks: list[AnyBlock] = list(blocks)
        self.batch = len(tokens)
        self.heads = heads
        self.tokens = tokens.clone()  # [B] int32 tokens of each sequence
        # and how many they were before some were forgotten
        self.most_tokens = tokens if most_tokens is None else most_tokens
        self.even = even  # all sequences have the same number of tokens
        self.appended = appended
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
        counts: Ints,
        lengths: Sequence[int],
        log_weights: Tensor | None = None,
    ) -> RaggedStore:
        """Copy the kept entries out of a dense layer.

        `keys` [B, Hkv, T, D] and `values` [B, Hkv, T, Dv] are left untouched, `keep` is [B, Hkv, T] bool, `index`
        [B, T] the index of each column's token in its sequence, -1 for padding. `counts` [B, Hkv] are the entries that
        are kept, `lengths` the tokens of each sequence, so that the host need not wait for the device. `log_weights`
        [B, Hkv, T] are added to logits, in the dtype of keys (None: nothing is).
        """
        blocks: list[AnyBlock]
        if serves(keys, values):
            blocks = [FlatBlock.pack(keys, values, keep, index, counts.flatten(), log_weights)[0]]
        else:
            made = copy_dense_blocks(keys, values, keep, index, counts.flatten().tolist(), log_weights)
            blocks = [block for block, _ in made]
        return cls(blocks, keys.shape[1], index[:, -1].int() + 1, even=len(set(lengths)) == 1)

    @classmethod
    def joined(cls, stores: Sequence[RaggedStore], even: bool) -> RaggedStore:
        """Join the sequences of several stores in one batch, in their order; nothing may have been appended to them.

        They are `even` if all have the same number of tokens.
        """
        heads = stores[0].heads
        first = 0
        held = [block for store in stores for block in store.blocks]
        flat = [block for block in held if isinstance(block, FlatBlock)]
        if len(flat) == len(held):
            blocks: list[AnyBlock] = [FlatBlock.joined(flat)]
        else:
            parts: list[Block] = []
            for store in stores:
                own = [block for ragged in store.blocks for block in ragged.grouped()]
                parts += [replace(block, segments=block.segments + first * heads) for block in own]
                first += store.batch
            blocks = regroup(parts)
        tokens = torch.cat([store.tokens for store in stores])
        return cls(blocks, heads, tokens, even)

    def append(self, keys: Tensor, values: Tensor, valid: Tensor | None = None) -> None:
        """Add q tokens to every segment.

        `keys` [B, Hkv, q, D], `values` [B, Hkv, q, Dv], `valid` [B, q] bool is False for padding (None: there is none).
        """
        count = keys.shape[2]
        if valid is None:
            # Where all sequences have as many tokens, one row of positions is broadcast to all.
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
        """Reserve room for `tokens` tokens ahead, again whenever it has run out; 0: none."""
        self.room = tokens
        for block in self.blocks:
            block.release()

    def prepare_step(self) -> None:
        """Prepare the next step on the host, where room is reserved; `put` is the device's part."""
        for block in self.blocks:
            if block.prepare_step(self.room):
                self.packed += 1
        self.appended += 1

    def plan(self) -> tuple[Hashable, ...]:
        """Return a key of the prepared step: whether padding has come, nothing else."""
        return self.even, *(block.padded for block in self.blocks)

    def finish_step(self) -> None:
        """Do nothing: no entry leaves after a token."""

    def put(self, keys: Tensor, values: Tensor) -> None:
        """Add the foreseen token to every segment, keys [B, Hkv, 1, D] and values [B, Hkv, 1, Dv]; none is padding."""
        positions = (self.tokens[:1] if self.even else self.tokens)[:, None]
        for block, own_keys, own_values, own_positions in self._by_block(keys, values, positions):
            block.put(own_keys, own_values, own_positions)
        self.tokens += 1

    def _by_block(
        self, keys: Tensor, values: Tensor, positions: Tensor
    ) -> Iterator[tuple[AnyBlock, Tensor, Tensor, Tensor]]:
        """Share out tokens, keys and values [B, Hkv, q, D] and positions [B or 1, q], over the blocks."""
        rows = [positions] * len(self.blocks)
        if len(positions) > 1:
            rows = self.split(positions.repeat_interleave(self.heads, 0))
        yield from zip(self.blocks, self.split(keys.flatten(0, 1)), self.split(values.flatten(0, 1)), rows, strict=True)

    @property
    def longest(self) -> Tensor:
        """The most tokens that each sequence has had, [B] int32."""
        return torch.maximum(self.most_tokens, self.tokens)

    def crop(self, count: int) -> None:
        """Forget the last `count` appended tokens."""
        # The peak is kept before tokens go.
        self.most_tokens = self.longest
        lost = torch.zeros_like(self.tokens)
        for block in self.blocks:
            gone = (block.recent(count) >= 0).sum(-1).int()
            lost[block.segments // self.heads] = gone  # the same for all heads of a sequence
            block.crop(count)
        self.tokens -= lost
        self.appended -= count

    def showing(self, visible: Tensor | None) -> list[AnyBlock]:
        """Return the blocks without entries of tokens that are not `visible` [B, T] bool, by index (None: all are)."""
        return self.blocks if visible is None else [block.showing(visible, self.heads) for block in self.blocks]

    def dense(self, seen: int) -> tuple[Tensor, Tensor] | None:
        """Return views [B, Hkv, seen, D] of the store if nothing is evicted and nothing padded, else None."""
        # More than one block means that heads hold different numbers of entries.
        states = None if len(self.blocks) > 1 else self.blocks[0].whole(seen)
        if states is None:
            return None
        shape = (self.batch, self.heads)
        keys, values = states
        return keys.view(*shape, *keys.shape[1:]), values.view(*shape, *values.shape[1:])

    def select_rows(self, rows: Sequence[int]) -> RaggedStore:
        """Return sequences `rows` of this store, in that order and as often as named, as a new store."""
        pairs = zip(self.blocks, self.rows_of(rows), strict=True)
        blocks = [block.select(chosen) for block, chosen in pairs if len(chosen)]
        index = torch.as_tensor(rows, device=self.tokens.device)
        return RaggedStore(blocks, self.heads, self.tokens[index], self.even, self.appended, self.longest[index])

    def entries(self) -> Tensor:
        """Return the entries held per sequence and kv head, [B, Hkv] int64 (padding not counted)."""
        held = torch.zeros(self.batch * self.heads, dtype=torch.int64)
        for block in self.blocks:
            held[block.segments.cpu()] = block.held()
        return held.view(self.batch, self.heads)

    def most_entries(self) -> Tensor:
        """Return the most entries held at a time, [B, Hkv] int64."""
        return self.entries() + (self.longest - self.tokens)[:, None].cpu()

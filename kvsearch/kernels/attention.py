"""Attention of a few queries to the entries of ragged segments, and the mean softmax row that policies read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvsearch.kernels.blocks import LEAST, MAX_CHUNKS, BlockSizes, chunks, power_of_two, whole_blocks
from kvsearch.kernels.dispatch import launch

ROW_BLOCK = 256  # columns of the row that one program merges


@dataclass(frozen=True)
class Entries:
    """What S segments hold: columns of one block, or rows of one flat store behind one another, which has both last.

    Entries whose position is negative are not looked at.
    """

    keys: Tensor  # [S, C, D], or flat [N, D]; the last dimension contiguous
    values: Tensor  # [S, C, Dv], or flat [N, Dv]
    columns: int  # the most that a segment has, known on the host: C for a block
    positions: Tensor | None = None  # [S, C] or flat [N], whole numbers; None: every column is an entry
    lengths: Tensor | None = None  # [S] whole numbers, rows of each segment
    starts: Tensor | None = None  # [S] int64, the first row of each segment
    log_weights: Tensor | None = None  # as positions, floats that are added to logits; None: all are 0


@dataclass(frozen=True)
class Chunked:
    """Queries [S, M, D] that attend to the `entries` of their segments, in chunks.

    Segments of a flat store are as long as only the device knows, and have as many chunks as they need. Programs are
    counted by its rows: up to one a segment too many. `keeps_logits` is for blocks.
    """

    query: Tensor
    entries: Entries
    scaling: float
    softcap: float | None
    sinks: Tensor | None  # [S, G] fp32
    keeps_logits: bool

    @property
    def columns(self) -> int:
        return self.entries.columns

    @property
    def flat(self) -> bool:
        return self.entries.starts is not None

    @property
    def value_dim(self) -> int:
        return self.entries.values.shape[-1]

    @cached_property
    def blocks(self) -> BlockSizes:
        return BlockSizes.of(self.query.shape[1], self.query.shape[2], self.value_dim, self.query.dtype)

    @cached_property
    def chunk(self) -> int:
        """Columns of a chunk, by what segments have on average, and so that none has more than `MAX_CHUNKS`."""
        segments = len(self.query)
        usual = min(self.columns, whole_blocks(len(self.entries.keys), segments)) if self.flat else self.columns
        block = self.blocks.columns
        # By the mean length, as there are programs enough for all chunks together; a bound on chunks of one segment
        # holds for the longest.
        _, chunk = chunks(usual, segments * self.tiles, block, self.query.device)
        return max(chunk, whole_blocks(whole_blocks(self.columns, MAX_CHUNKS), block) * block)

    @property
    def splits(self) -> int:
        """The most chunks that a segment has."""
        return max(1, whole_blocks(self.columns, self.chunk))

    @property
    def parts(self) -> int:
        """How many chunks there are in all segments, at most."""
        segments = len(self.query)
        if self.flat and not self.whole:
            return segments + len(self.entries.keys) // self.chunk
        return segments * self.splits

    @property
    def tiles(self) -> int:
        return whole_blocks(self.query.shape[1], self.blocks.rows)

    @property
    def whole(self) -> bool:
        """Whether there is one chunk, so that the first launch writes the output."""
        return self.splits == 1

    @cached_property
    def output(self) -> Tensor:
        """[S, M, Dv]."""
        return self.query.new_empty(*self.query.shape[:2], self.value_dim)

    @cached_property
    def partial(self) -> Tensor:
        """[parts, M, Dv], or the output."""
        return self.output if self.whole else self.scratch(self.parts, self.query.shape[1], self.value_dim)

    @cached_property
    def statistics(self) -> Tensor:
        """Maximum and sum of every chunk's softmax, [parts, 2, M], where something reads them."""
        read = self.keeps_logits or not self.whole
        return self.scratch(self.parts, 2, self.query.shape[1]) if read else self.output

    @cached_property
    def logits(self) -> Tensor:
        """[S, M, columns], where they are kept."""
        return self.scratch(*self.query.shape[:2], self.columns) if self.keeps_logits else self.output

    @cached_property
    def beside(self) -> Tensor:
        """The sinks, or a tensor that stands in for them."""
        return self.output if self.sinks is None else self.sinks.contiguous()

    @property
    def searched(self) -> int:
        """Segments among which a program of a flat store looks for its own, rounded up."""
        return power_of_two(len(self.query)) if self.flat else LEAST

    @property
    def merging(self) -> dict[str, int]:
        """What the launches that merge chunks are compiled for."""
        return {"DV": self.value_dim, "BDV": self.blocks.value_dim, "SP": power_of_two(self.splits),
                "BM": power_of_two(self.query.shape[1])}  # fmt: skip

    def scratch(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.query.device)

    def attend(self, rows: int = 1, arriving: tuple[Tensor, ...] = (), pauses: bool = False) -> None:
        """Run `attend_chunks`, with the last `rows` tokens of every segment.

        `arriving` are key and value of a token that is stored, too, with slots, clock, pauses, and what counts programs
        that are done.
        """
        from kvsearch.kernels.jit.attention import attend_chunks

        blocks = self.blocks
        query = self.query
        entries = self.entries
        keys = entries.keys
        values = entries.values
        weights = entries.log_weights
        # A launch takes no None: any tensor stands in for what its constants say is never read.
        starts, lengths, positions, beta = (
            keys if given is None else given for given in (entries.starts, entries.lengths, entries.positions, weights)
        )
        sizes: dict[str, Any] = {"BM": blocks.rows, "BN": blocks.columns, "BD": blocks.dim, "BDV": blocks.value_dim}
        launch(attend_chunks, (self.parts, 1, self.tiles) if self.flat else (len(query), self.splits, self.tiles),
            query, keys, values, starts, lengths, positions, beta, self.beside, self.output, self.partial,
            self.statistics, self.logits, *(arriving or (keys,) * 6), self.scaling,
            1.0 if self.softcap is None else self.softcap,
            self.columns, self.chunk, query.shape[1], self.splits, len(query), query.stride(0), query.stride(1),
            keys.stride(0), keys.stride(-2), values.stride(0), values.stride(-2), positions.stride(0), beta.stride(0),
            ROWS=rows, D=query.shape[2], DV=self.value_dim, **sizes, BS=self.searched, FLAT=self.flat,
            HOLES=entries.positions is not None, APPEND=bool(arriving), PAUSES=pauses,
            SOFTCAP=self.softcap is not None, SINKS=self.sinks is not None, WHOLE=self.whole, LOGITS=self.keeps_logits,
            WEIGHTED=weights is not None, num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip

    def merge(self, row: Tensor | None, rows: int = 1, places: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Run `merge_chunks` where there is something to merge, and return the output.

        It writes the mean `row` [S, columns], if one is wanted, or, with `places` (positions and the first cell of each
        segment), adds it up in the sums of a layer, [2, cells].
        """
        from kvsearch.kernels.jit.attention import merge_chunks

        # One program for each query's output, and one for each block of the row.
        jobs = 0 if self.whole else self.query.shape[1]
        if row is not None:
            jobs += whole_blocks(self.columns, ROW_BLOCK)
        if jobs:
            positions, first = places or (self.output, self.output)
            lengths = self.output if self.entries.lengths is None else self.entries.lengths
            written = self.output if row is None else row
            launch(merge_chunks, (len(self.query), jobs),
                self.partial, self.statistics, self.logits, self.beside, self.output, written, lengths, positions,
                first, self.columns, self.chunk, self.query.shape[1], self.splits, len(self.query), written.stride(0),
                positions.stride(0), written.shape[-1], ROWS=rows, **self.merging, BN=ROW_BLOCK, BS=self.searched,
                FLAT=self.flat, SINKS=self.sinks is not None, OUTPUT=not self.whole, LOGITS=row is not None,
                LAYER=places is not None, num_warps=4,
            )  # fmt: skip
        return self.output


def attend(
    query: Tensor,
    entries: Entries,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    rows: int = 1,
    want_row: bool = False,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attend with the last `rows` tokens of every segment to its entries, their own included, causally.

    Args:
        query: [S, G * rows, D], the tokens of each head of the query group behind one another.
        entries: keys and values of the same dtype.
        scaling: logits = scaling * q.k.
        softcap: logits become softcap * tanh(logits / softcap).
        sinks: [S, G] fp32, logits that take their share of every softmax and have no value.
        rows: tokens.
        want_row: give the mean of the softmax over the query group, too; of one token and a block.
        into: [S, columns] fp32, where to write the row, if it is wanted.

    Returns:
        The output [S, G * rows, Dv], 0 where nothing is visible, and the row or None: [S, columns] fp32, 0 where
        there is no entry. Accumulated in fp32; nothing waits for the device.
    """
    query = query if query.stride(-1) == 1 else query.contiguous()
    made = Chunked(query, entries, scaling, softcap, sinks, want_row)
    made.attend(rows)
    row = made.scratch(len(query), entries.columns) if want_row and into is None else into
    return made.merge(row, rows), row

"""Sizes of the blocks that a program works on: chosen by head dimension and dtype, without trying any out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsearch.kernels.dispatch import launch, processors

LEAST = 16  # what a matrix product on tensor cores takes
MOST_ROWS = 64
MOST_CHUNKS = 64  # of a segment
LEAST_CHUNK = 256  # columns
WAVES = 4  # programs for each multiprocessor: segments are of different lengths


class BlockSizes(NamedTuple):
    """Block sizes of attention: all powers of two, 16 at least."""

    rows: int  # queries
    columns: int  # entries
    dim: int  # of a query and key, padded
    value_dim: int
    warps: int
    stages: int

    @classmethod
    def of(cls, queries: int, dim: int, value_dim: int, dtype: torch.dtype) -> BlockSizes:
        """Choose blocks that fit the registers of a program and, with `stages` steps, 99 KiB of shared memory.

        On Hopper, whose blocks have 227 KiB, 64 rows of 128 numbers of half precision take 112.
        """
        padded = power_of_two(dim)
        padded_values = power_of_two(value_dim)
        widest = max(padded, padded_values) * dtype.itemsize  # bytes: 512 for 128 numbers of fp32 or 256 of bf16
        most = MOST_ROWS if dtype.itemsize == 2 else LEAST  # fp32 is not for tensor cores
        rows = min(most, power_of_two(queries))
        columns = 64 if widest <= 256 else 32
        warps = 8 if rows > 32 or (most == LEAST and widest > 256) else 4  # with 4, fp32 of 128 numbers spills
        return cls(rows, columns, padded, padded_values, warps, 3 if widest <= 256 else 2)


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is not below `size`, 16 at least."""
    return max(LEAST, 1 << (size - 1).bit_length())


def whole_blocks(size: int, block: int) -> int:
    """Return how many blocks hold `size` columns."""
    return -(-size // block)


def chunks(columns: int, programs: int, block: int, device: torch.device) -> tuple[int, int]:
    """Return how many chunks to cut segments into and how many columns each has, by what the host knows."""
    wanted = -(-WAVES * processors(device) // programs)
    most = min(MOST_CHUNKS, max(1, columns // LEAST_CHUNK))
    chunk = whole_blocks(-(-columns // max(1, min(wanted, most))), block) * block
    return max(1, -(-columns // chunk)), chunk


@dataclass(frozen=True)
class Chunked:
    """Queries [S, M, D] that attend to segments of `columns` entries at most, in chunks.

    Segments of a flat store are as long as only the device knows, and have as many chunks as they need. Programs are
    counted by its rows: up to one a segment too many. `keeps_logits` is for blocks.
    """

    query: Tensor
    value_dim: int
    columns: int
    scaling: float
    softcap: float | None
    sinks: Tensor | None  # [S, G] fp32
    keeps_logits: bool
    stored: int | None = None  # rows of a flat store; None: segments are `columns` long, in a block

    @cached_property
    def blocks(self) -> BlockSizes:
        return BlockSizes.of(self.query.shape[1], self.query.shape[2], self.value_dim, self.query.dtype)

    @cached_property
    def chunk(self) -> int:
        """Columns of a chunk, by what segments have on average, and so that none has more than `MOST_CHUNKS`."""
        segments = len(self.query)
        usual = self.columns if self.stored is None else min(self.columns, whole_blocks(self.stored, segments))
        block = self.blocks.columns
        _, chunk = chunks(usual, segments * self.tiles, block, self.query.device)
        return max(chunk, whole_blocks(whole_blocks(self.columns, MOST_CHUNKS), block) * block)

    @property
    def splits(self) -> int:
        """The most chunks that a segment has."""
        return max(1, whole_blocks(self.columns, self.chunk))

    @property
    def parts(self) -> int:
        """How many chunks there are in all segments, at most."""
        segments = len(self.query)
        return segments * self.splits if self.stored is None or self.whole else segments + self.stored // self.chunk

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
        """The sinks, or something in their place."""
        return self.output if self.sinks is None else self.sinks.contiguous()

    @property
    def searched(self) -> int:
        """Segments among which a program of a flat store looks for its own, rounded up."""
        return LEAST if self.stored is None else power_of_two(len(self.query))

    @property
    def merging(self) -> dict[str, int]:
        """What the launches that merge chunks are compiled for."""
        return {"DV": self.value_dim, "BDV": self.blocks.value_dim, "SP": power_of_two(self.splits),
                "BM": power_of_two(self.query.shape[1])}  # fmt: skip

    def scratch(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.query.device)

    def launch(
        self,
        keys: Tensor,
        values: Tensor,
        pointers: tuple[Tensor, Tensor, Tensor],
        strides: tuple[int, int, int],
        arriving: tuple[Tensor, ...],
        rows: int = 1,
        **kinds: bool,
    ) -> None:
        """Run `attend_chunks`: `pointers` are starts, lengths and positions, `strides` those of segments.

        Strides are of keys, values and positions; `arriving` are the token's key and value, slots, clock, pauses, and
        what counts programs that are done.
        """
        from kvsearch.kernels.jit.attention import attend_chunks

        blocks = self.blocks
        query = self.query
        flat = self.stored is not None
        k_seg, v_seg, p_seg = strides
        sizes: dict[str, Any] = {"BM": blocks.rows, "BN": blocks.columns, "BD": blocks.dim, "BDV": blocks.value_dim}
        launch(attend_chunks, (self.parts, 1, self.tiles) if flat else (len(query), self.splits, self.tiles),
            query, keys, values, *pointers, self.beside, self.output, self.partial, self.statistics, self.logits,
            *arriving, self.scaling, 1.0 if self.softcap is None else self.softcap, self.columns, self.chunk,
            query.shape[1], self.splits, len(query), query.stride(0), query.stride(1), k_seg, keys.stride(-2), v_seg,
            values.stride(-2), p_seg, self.columns,
            ROWS=rows, D=query.shape[2], DV=self.value_dim, **sizes, BS=self.searched, FLAT=flat, **kinds,
            SOFTCAP=self.softcap is not None, SINKS=self.sinks is not None, WHOLE=self.whole, LOGITS=self.keeps_logits,
            num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip

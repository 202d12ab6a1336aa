"""Sizes of the blocks that a program works on: chosen by head dimension and dtype, without trying any out."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvsearch.kernels.dispatch import processors

LEAST = 16  # what a matrix product on tensor cores takes
MAX_QUERY_ROWS = 64
MAX_CHUNKS = 64  # of a segment
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
        max_rows = MAX_QUERY_ROWS if dtype.itemsize == 2 else LEAST  # fp32 is not for tensor cores
        rows = min(max_rows, power_of_two(queries))
        columns = 64 if widest <= 256 else 32
        if dtype.itemsize == 4 and widest == 512:
            columns = LEAST  # twice as many spill on Hopper
        warps = 8 if rows > 32 or widest > 512 else 4
        return cls(rows, columns, padded, padded_values, warps, 3 if widest <= 256 else 2)


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is not below `size`, 16 at least."""
    return max(LEAST, 1 << (size - 1).bit_length())


def whole_blocks(size: int, block: int) -> int:
    """Return how many blocks hold `size` columns."""
    return -(-size // block)


def chunks(columns: int, programs: int, block: int, device: torch.device) -> tuple[int, int]:
    """Return how many chunks to cut segments into and how many columns each has, by what the host knows."""
    # Few segments are cut into many chunks, so that all multiprocessors have work.
    wanted = -(-WAVES * processors(device) // programs)
    max_chunks = min(MAX_CHUNKS, max(1, columns // LEAST_CHUNK))
    chunk = whole_blocks(-(-columns // max(1, min(wanted, max_chunks))), block) * block
    return max(1, -(-columns // chunk)), chunk

"""The first launch of attention: segments in chunks, each with softmax statistics of its own, to be merged."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvsearch.kernels.blocks import Blocks, chunks, whole_blocks


@dataclass(frozen=True)
class Chunked:
    """Queries [S, M, D] that attend to segments of `columns` entries at most; `logits` says whether these are kept."""

    query: Tensor
    value_dim: int
    columns: int
    scaling: float
    softcap: float | None
    sinks: Tensor | None  # [S, G] fp32
    keeps_logits: bool

    @cached_property
    def blocks(self) -> Blocks:
        return Blocks.of(self.query.shape[1], self.query.shape[2], self.value_dim, self.query.dtype)

    @cached_property
    def chunks(self) -> tuple[int, int]:
        """How many chunks there are, and their columns."""
        return chunks(self.columns, len(self.query) * self.tiles, self.blocks.columns, self.query.device)

    @property
    def splits(self) -> int:
        return self.chunks[0]

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
        """[S, splits, M, Dv], or the output."""
        segments, count, _ = self.query.shape
        return self.output if self.whole else self.scratch(segments, self.splits, count, self.value_dim)

    @cached_property
    def statistics(self) -> Tensor:
        """Maximum and sum of every chunk's softmax, [S, splits, 2, M], where something reads them."""
        segments, count, _ = self.query.shape
        read = self.keeps_logits or not self.whole
        return self.scratch(segments, self.splits, 2, count) if read else self.output

    @cached_property
    def logits(self) -> Tensor:
        """[S, M, columns], where they are kept."""
        return self.scratch(*self.query.shape[:2], self.columns) if self.keeps_logits else self.output

    @cached_property
    def beside(self) -> Tensor:
        """The sinks, or something in their place."""
        return self.output if self.sinks is None else self.sinks.contiguous()

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

        Strides are of keys, values and positions; `arriving` are the token's key and value, slots, clock and pauses.
        """
        from kvsearch.kernels.jit.attention import attend_chunks

        blocks, query, dim = self.blocks, self.query, self.query.shape[2]
        splits, chunk = self.chunks
        k_seg, v_seg, p_seg = strides
        sizes: dict[str, Any] = {"BM": blocks.rows, "BN": blocks.columns, "BD": blocks.dim, "BDV": blocks.value_dim}
        attend_chunks[(len(query), splits, self.tiles)](
            query, keys, values, *pointers, self.beside, self.output, self.partial, self.statistics, self.logits,
            *arriving, self.scaling, 1.0 if self.softcap is None else self.softcap, self.columns, chunk,
            query.shape[1], splits, query.stride(0), query.stride(1), k_seg, keys.stride(-2), v_seg, values.stride(-2),
            p_seg, self.columns,
            ROWS=rows, D=dim, DV=self.value_dim, **sizes, SOFTCAP=self.softcap is not None,
            SINKS=self.sinks is not None, WHOLE=self.whole, LOGITS=self.keeps_logits, **kinds,
            num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip

"""What entries receive from query rows, without a matrix of rows x entries and without fp32 copies of keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kvsearch.kernels.blocks import BlockSizes, chunks, whole_blocks
from kvsearch.kernels.dispatch import launch


@dataclass(frozen=True)
class Rows:
    """Query rows and the entries they look at: those with a position that is not negative and not behind their own."""

    queries: Tensor  # [B, Hq, rows, D], of the dtype of the keys
    keys: Tensor  # [B, Hkv, T, D]
    columns: Tensor  # [B, T] int64 positions, -1 where there is no entry
    places: Tensor  # [B, rows] int64 positions of the rows, -1 where padding
    scaling: float  # logits = scaling * q.k
    softcap: float | None = None
    sinks: Tensor | None = None  # [B or 1, Hkv, G] fp32, logits that are no entry
    causal: bool = False  # row r sees no column behind T - rows + r

    @classmethod
    def of_last(
        cls,
        queries: Tensor,
        keys: Tensor,
        scaling: float,
        softcap: float | None,
        sinks: Tensor | None,
        valid: Tensor | None = None,
    ) -> Rows:
        """Return the rows of the last tokens of `keys`; each sees the `valid` [B, T] tokens up to itself.

        `sinks` [Hkv, G] are logits beside every row that are no entry.
        """
        index = torch.arange(keys.shape[2], device=keys.device).expand(len(keys), -1)
        columns = index if valid is None else index.masked_fill(~valid, -1)
        beside = None if sinks is None else sinks[None]
        places = columns[:, -queries.shape[2] :]
        return cls(queries, keys, columns, places, scaling, softcap, beside, causal=True)

    @property
    def group(self) -> int:
        return self.queries.shape[1] // self.keys.shape[1]

    def normalisers(self) -> Tensor:
        """Return log sum exp of every row, [B * Hkv, G, rows] fp32; +inf for those that see nothing."""
        from kvsearch.kernels.jit.scoring import normalise_rows

        batch, heads, length, _ = self.keys.shape
        rows = self.queries.shape[2]
        group = self.group
        states, strides, blocks, options = self._launch(rows * group)
        tiles = whole_blocks(rows * group, blocks.rows)
        splits, chunk = chunks(length, batch * heads * tiles, blocks.columns, self.keys.device)
        # Columns are split over programs where rows are too few to fill the device; sums of exponentials are joined
        # below.
        totals = self.keys.new_empty(batch * heads, splits, rows, group, dtype=torch.float32)
        launch(normalise_rows, (tiles, batch * heads, splits),  # no other axis takes more than 65,535 programs
            *states, self.columns, self.places, totals, self.scaling, self.softcap or 1.0, heads, rows, length, chunk,
            *strides, splits, **options,
        )  # fmt: skip
        totals = totals.logsumexp(1).transpose(1, 2)
        seen = totals > float("-inf")
        if self.sinks is not None:
            beside = self.sinks.expand(batch, heads, group).reshape(batch * heads, group, 1)
            totals = torch.logaddexp(totals, beside)
        # exp(x - inf) is 0: a row that sees nothing gives nothing, and needs no branch.
        return totals.masked_fill(~seen, float("inf")).contiguous()

    def received(self, how: Literal["mean", "max"]) -> Tensor:
        """Return what every entry receives from all rows, over the query group, [B, Hkv, T] fp32."""
        sums = self.keys.new_empty(self.keys.shape[:3], dtype=torch.float32)
        self._add(self.normalisers(), sums, sums, sums, how)
        return sums

    def peaks(self, context: int, norms: Tensor | None, weights: Tensor | None, group: Literal["sum", "max"]) -> Tensor:
        """Return the most that each of the first `context` entries receives from one row, [B, Hkv, context] fp32.

        It is the maximum over rows k of w_k agg_g A[q_g, k, j] n[g, j]: `norms` [B, Hkv, G, context] are the n, fp32,
        `weights` [B, rows] the w, fp32, both not negative (None: 1), and agg over the query group is `group`.
        """
        from kvsearch.kernels.jit.scoring import find_peaks

        batch, heads, length, _ = self.keys.shape
        rows = self.queries.shape[2]
        states, strides, blocks, options = self._launch(rows)
        normalisers = self.normalisers()
        factors = (normalisers if given is None else given.contiguous() for given in (norms, weights))
        largest = self.keys.new_empty(batch, heads, context, dtype=torch.float32)
        launch(find_peaks, (whole_blocks(context, blocks.columns), batch * heads),
            *states, self.columns, self.places, normalisers, *factors, largest, self.scaling, self.softcap or 1.0,
            heads, rows, length, context, *strides,
            NORMED=norms is not None, WEIGHTED=weights is not None, GROUP=group, **options,
        )  # fmt: skip
        return largest

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return the mean and unbiased variance over the rows that see anything, [B, Hkv, G, T] fp32 each."""
        batch, heads, length, _ = self.keys.shape
        # Two passes: a variance about the mean, not a difference of large sums.
        normalisers = self.normalisers()
        counts = (normalisers[:, 0] < float("inf")).sum(-1).clamp(min=1).float()
        mean = self.keys.new_empty(batch, heads, self.group, length, dtype=torch.float32)
        scatter = torch.empty_like(mean)
        self._add(normalisers, counts, mean, scatter, "moments")
        return mean, scatter / (counts - 1).clamp(min=1).view(batch, heads, 1, 1)

    def _add(self, normalisers: Tensor, counts: Tensor, out: Tensor, scatter: Tensor, how: str) -> None:
        from kvsearch.kernels.jit.scoring import add_columns

        batch, heads, length, _ = self.keys.shape
        rows = self.queries.shape[2]
        states, strides, blocks, options = self._launch(rows)
        launch(add_columns, (whole_blocks(length, blocks.columns), batch * heads),
            *states, self.columns, self.places, normalisers, counts, out, scatter, self.scaling, self.softcap or 1.0,
            heads, rows, length, *strides, HOW=how, **options,
        )  # fmt: skip

    def _launch(self, rows: int) -> tuple[tuple[Tensor, Tensor], tuple[int, ...], BlockSizes, dict[str, Any]]:
        """Return queries and keys, the strides of all that is read, blocks for so many rows, and constants."""
        states = tuple(t if t.stride(-1) == 1 else t.contiguous() for t in (self.queries, self.keys))
        strides = tuple(stride for state in states for stride in state.stride()[:3])
        dim = self.keys.shape[-1]
        blocks = BlockSizes.of(rows, dim, dim, self.keys.dtype)
        options = {
            "G": self.group, "CAUSAL": self.causal, "SOFTCAP": self.softcap is not None, "D": dim, "BM": blocks.rows,
            "BN": blocks.columns, "BD": blocks.dim, "num_warps": blocks.warps, "num_stages": blocks.stages,
        }  # fmt: skip
        return (states[0], states[1]), (*strides, self.columns.stride(0), self.places.stride(0)), blocks, options

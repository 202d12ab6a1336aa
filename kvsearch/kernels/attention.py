"""Attention of a few queries to the entries of ragged segments, and the mean softmax row that policies read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvsearch.kernels.blocks import Blocks, chunks, power_of_two, whole_blocks


@dataclass(frozen=True)
class Entries:
    """What S segments hold: columns of one block, or rows of one flat store behind one another.

    Columns from `lengths` on are not looked at, nor those whose position is negative.
    """

    keys: Tensor  # [S, C, D], or flat [N, D]; the last dimension contiguous
    values: Tensor  # [S, C, Dv], or flat [N, Dv]
    columns: int  # the most that a segment has, known on the host: C for a block
    positions: Tensor | None = None  # [S, C] or flat [N], whole numbers; None: every column is an entry
    lengths: Tensor | None = None  # [S] whole numbers, columns of each segment; None: all `columns`
    starts: Tensor | None = None  # [S] int64, the first row of each segment in a flat store; None: a block

    @property
    def flat(self) -> bool:
        return self.starts is not None


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
        want_row: give the mean of the softmax over the query group, too; of one token.
        into: [S, columns] fp32, of a block: where to write the row.

    Returns:
        The output [S, G * rows, Dv], 0 where nothing is visible, and the row or None: [S, columns] fp32, or flat [N],
        0 where there is no entry. Accumulated in fp32; nothing waits for the device.
    """
    from kvsearch.kernels.jit.attention import attend_chunks, merge_chunks

    segments, count, dim = query.shape
    keys, values, columns = entries.keys, entries.values, entries.columns
    value_dim, device = values.shape[-1], query.device
    blocks = Blocks.of(count, dim, value_dim, query.dtype)
    tiles = -(-count // blocks.rows)
    splits, chunk = chunks(columns, segments * tiles, blocks.columns, device)
    query = query if query.stride(-1) == 1 else query.contiguous()
    output = query.new_empty(segments, count, value_dim)
    whole = splits == 1
    partial = output if whole else _fp32(device, segments, splits, count, value_dim)
    statistics = output if whole and not want_row else _fp32(device, segments, splits, 2, count)
    logits = _fp32(device, segments, count, columns) if want_row else output
    positions = keys if entries.positions is None else entries.positions
    lengths = keys if entries.lengths is None else entries.lengths
    starts = keys if entries.starts is None else entries.starts
    kinds = {"FLAT": entries.flat, "RAGGED": entries.lengths is not None, "SINKS": sinks is not None}
    sinks = output if sinks is None else sinks.contiguous()
    attend_chunks[(segments, splits, tiles)](
        query, keys, values, starts, lengths, positions, sinks, output, partial, statistics, logits, *[keys] * 5,
        scaling, 1.0 if softcap is None else softcap, columns, chunk, count, splits,
        query.stride(0), query.stride(1), _segment_stride(keys, entries), keys.stride(-2),
        _segment_stride(values, entries), values.stride(-2), 0 if entries.flat else positions.stride(0), columns,
        ROWS=rows, D=dim, DV=value_dim, BM=blocks.rows, BN=blocks.columns, BD=blocks.dim, BDV=blocks.value_dim,
        HOLES=entries.positions is not None, SOFTCAP=softcap is not None, WHOLE=whole, LOGITS=want_row, **kinds,
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    if whole and not want_row:
        return output, None
    row = output if not want_row else _empty_row(entries, segments) if into is None else into
    row_blocks = whole_blocks(columns, ROW_BLOCK) if want_row else 0
    merge_chunks[(segments, (0 if whole else count) + row_blocks)](
        partial, statistics, logits, sinks, output, row, starts, lengths,
        columns, count, splits, columns, 0 if entries.flat else row.stride(0), row.stride(-1),
        ROWS=rows, DV=value_dim, BDV=blocks.value_dim, SP=power_of_two(splits), BM=power_of_two(count), BN=ROW_BLOCK,
        OUTPUT=not whole, LOGITS=want_row, **kinds, num_warps=4,
    )  # fmt: skip
    return output, row if want_row else None


ROW_BLOCK = 256  # columns of the row that one program merges


def _segment_stride(states: Tensor, entries: Entries) -> int:
    return 0 if entries.flat else states.stride(0)


def _fp32(device: torch.device, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=device)


def _empty_row(entries: Entries, segments: int) -> Tensor:
    device = entries.keys.device
    if entries.flat:  # places between segments are nobody's
        return _fp32(device, len(entries.keys)).zero_()
    return _fp32(device, segments, entries.columns)

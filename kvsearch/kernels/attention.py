"""Attention of a few queries to the entries of ragged segments, and the mean softmax row that policies read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvsearch.kernels.blocks import Chunked, whole_blocks
from kvsearch.kernels.dispatch import launch


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
        into: [S, columns] fp32, where to write the row.

    Returns:
        The output [S, G * rows, Dv], 0 where nothing is visible, and the row or None: [S, columns] fp32, 0 where
        there is no entry. Accumulated in fp32; nothing waits for the device.
    """
    from kvsearch.kernels.jit.attention import merge_chunks

    query = query if query.stride(-1) == 1 else query.contiguous()
    segments, count, _ = query.shape
    keys = entries.keys
    values = entries.values
    columns = entries.columns
    flat = entries.starts is not None
    stored = len(keys) if flat else None
    made = Chunked(query, values.shape[-1], columns, scaling, softcap, sinks, want_row, stored)
    starts, lengths, positions = (
        keys if given is None else given for given in (entries.starts, entries.lengths, entries.positions)
    )
    strides = (0, 0, 0) if flat else (keys.stride(0), values.stride(0), positions.stride(0))
    holes = entries.positions is not None
    made.launch(keys, values, (starts, lengths, positions), strides, (keys,) * 6, rows, HOLES=holes)
    if made.whole and not want_row:
        return made.output, None
    row = made.output if into is None else into
    if want_row and into is None:
        row = made.scratch(segments, columns)
    row_blocks = whole_blocks(columns, ROW_BLOCK) if want_row else 0
    launch(merge_chunks, (segments, (0 if made.whole else count) + row_blocks),
        made.partial, made.statistics, made.logits, made.beside, made.output, row, lengths,
        columns, made.chunk, count, made.splits, segments, columns, row.stride(0), row.stride(-1),
        ROWS=rows, **made.merging, BN=ROW_BLOCK, BS=made.searched, OUTPUT=not made.whole, LOGITS=want_row, FLAT=flat,
        SINKS=sinks is not None, num_warps=4,
    )  # fmt: skip
    return made.output, row if want_row else None


ROW_BLOCK = 256  # columns of the row that one program merges

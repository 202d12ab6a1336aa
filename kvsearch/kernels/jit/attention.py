"""Attention of a few queries to ragged segments: partial softmaxes over chunks of a segment, then their merger.

A segment's queries [M, D] are its query group's, token by token within a head: query m is token m % ROWS. The last ROWS
entries are these tokens' own. Softmax statistics are in units of log2.
"""

import triton
import triton.language as tl

from kvsearch.kernels.jit.common import LOG2E, finite, logits_of, product, scaled


@triton.jit
def attend_chunks(
    Q, K, V, Starts, Lengths, Positions, Weights, Sinks, Out, Acc, Stat, Logit,
    NewKeys, NewValues, Slot, Seen, Active, Done,
    scale, softcap, columns, chunk, M, splits, segments,
    q_seg, q_row, k_seg, k_col, v_seg, v_col, p_seg, w_seg,
    ROWS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BS: tl.constexpr,
    FLAT: tl.constexpr, HOLES: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, WHOLE: tl.constexpr, LOGITS: tl.constexpr,
    APPEND: tl.constexpr = False, PAUSES: tl.constexpr = False, WEIGHTED: tl.constexpr = False,
):  # fmt: skip
    """Attend to one chunk of one segment; grid (S, splits, tiles of queries), or FLAT: (all chunks or more, 1, tiles).

    WHOLE: there is one chunk, and the output is written at once; else `Acc` [chunks, M, DV] and `Stat` [chunks, 2, M]
    (maximum, sum) are. LOGITS, of a block: `Logit` [S, M, columns] gets the logits, -inf where hidden.
    WEIGHTED: `Weights`, as `Positions`, are added to the logits.
    APPEND, of a block with HOLES, for one token: `NewKeys` [S, D] and `NewValues` [S, DV] are attended to as if they
    were in slot `Slot` [S], and written there by the program whose chunk it is in, with position `Seen` [S]; where
    PAUSES, only for segments that are `Active` [S]; its weight is 0. `Done` [S] becomes 0, for `finish_step`.
    """
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    d, dv, n = tl.arange(0, BD), tl.arange(0, BDV), tl.arange(0, BN)
    if FLAT:
        # Lengths are on the device, so the host launches a number of programs that is enough for any: each finds its
        # segment by counting chunks, and those too many have nothing to do.
        part = tl.program_id(0).to(tl.int64)
        counts = count_chunks(Lengths, chunk, segments, BS)
        seg = tl.minimum(tl.sum((tl.cumsum(counts, 0) <= part).to(tl.int64), 0), segments - 1)
        split = (part - chunks_before(counts, seg, BS)).to(tl.int32)  # behind the last one for programs too many
        stop = tl.load(Lengths + seg).to(tl.int32)
        start = tl.load(Starts + seg).to(tl.int64)
        K += start * k_col
        V += start * v_col
        Positions += start
        Weights += start
    else:
        seg = tl.program_id(0).to(tl.int64)
        split = tl.program_id(1)
        part = seg * splits + split
        # Blocks are dense, so a segment and its chunk follow from the numbers of the program.
        stop = columns
        K += seg * k_seg
        V += seg * v_seg
        Positions += seg * p_seg
        Weights += seg * w_seg
    q = tl.load(Q + seg * q_seg + m[:, None] * q_row + d[None, :], mask=(m < M)[:, None] & (d < D)[None, :], other=0.0)
    if APPEND:
        slot = tl.load(Slot + seg).to(tl.int32)
        if (split == 0) & (tl.program_id(2) == 0):
            tl.store(Done + seg, 0)
        # Slot -1 is in no chunk: a segment that pauses stores nothing, and attends to no new token.
        if PAUSES:
            slot = tl.where(tl.load(Active + seg) != 0, slot, -1)
    limit = stop - (ROWS - 1) + m % ROWS  # what is at or behind it is later than the query
    # Softmax in one pass (Milakov and Gimelshein 2018): the maximum so far, the sum and the output below it; both are
    # scaled down when a larger logit comes.
    peak = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BDV), tl.float32)
    first = split * chunk
    last = tl.minimum(first + chunk, stop)
    for c in range(first, last, BN):
        there = c + n < last
        if HOLES:
            there = there & (tl.load(Positions + c + n, mask=there, other=-1) >= 0)
        wrote = c + n < last
        if APPEND:  # its slot is left to what follows the loop, whoever fills it meanwhile
            there = there & (c + n != slot)
            wrote = wrote & (c + n != slot)
        # Column times stride goes beyond 32 bits in long blocks.
        far = tl.cast(c, tl.int64)
        k = tl.load(
            K + far * k_col + n[:, None] * k_col + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0
        )
        s = logits_of(q, k, scale, softcap, SOFTCAP)
        if WEIGHTED:
            s += tl.load(Weights + c + n, mask=there, other=0.0).to(tl.float32)[None, :] * LOG2E
        s = tl.where(there[None, :] & ((c + n)[None, :] < limit[:, None]), s, float("-inf"))
        if LOGITS:
            tl.store(Logit + (seg * M + m[:, None]) * columns + (c + n)[None, :], s,
                     mask=(m < M)[:, None] & wrote[None, :])  # fmt: skip
        now = tl.maximum(peak, tl.max(s, 1))
        p = tl.exp2(s - finite(now)[:, None])
        shrink = tl.exp2(peak - finite(now))
        v = tl.load(
            V + far * v_col + n[:, None] * v_col + dv[None, :], mask=there[:, None] & (dv < DV)[None, :], other=0.0
        )
        acc = acc * shrink[:, None] + product(p.to(v.dtype), v)
        total = total * shrink + tl.sum(p, 1)
        peak = now
    if APPEND:
        # The token is attended to from registers: in memory its slot may hold either what was there or what is stored
        # here.
        if (slot >= first) & (slot < last):
            k = tl.load(NewKeys + seg * D + d, mask=d < D, other=0.0)
            v = tl.load(NewValues + seg * DV + dv, mask=dv < DV, other=0.0)
            s = scaled(tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1), scale, softcap, SOFTCAP)
            if LOGITS:
                tl.store(Logit + (seg * M + m) * columns + slot, s, mask=m < M)
            now = tl.maximum(peak, s)
            p = tl.exp2(s - now)
            shrink = tl.exp2(peak - now)
            acc = acc * shrink[:, None] + p[:, None] * v.to(tl.float32)[None, :]
            total = total * shrink + p
            peak = now
            tl.store(K + slot.to(tl.int64) * k_col + d, k, mask=d < D)
            tl.store(V + slot.to(tl.int64) * v_col + dv, v, mask=dv < DV)
            tl.store(Positions + slot, tl.load(Seen + seg).to(Positions.dtype.element_ty))
            if WEIGHTED:
                tl.store(Weights + slot, 0.0)
    if LOGITS or not WHOLE:
        # Read by the launch that merges chunks, or that makes the row of the logits.
        stat = Stat + part * 2 * M
        tl.store(stat + m, peak, mask=m < M)
        tl.store(stat + M + m, total, mask=m < M)
    own = (m < M)[:, None] & (dv < DV)[None, :]
    if WHOLE:
        if SINKS:
            # A sink takes its share of the sum, and has no value to add to the output.
            sink = tl.load(Sinks + seg * (M // ROWS) + m // ROWS, mask=m < M, other=0.0) * LOG2E
            largest = tl.maximum(peak, sink)
            acc = acc * tl.exp2(peak - largest)[:, None]
            total = total * tl.exp2(peak - largest) + tl.exp2(sink - largest)
        # Where nothing is visible this is 0 / 1, not NaN.
        out = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(Out + (seg * M + m[:, None]) * DV + dv[None, :], out.to(Out.dtype.element_ty), mask=own)
    else:
        tl.store(Acc + (part * M + m[:, None]) * DV + dv[None, :], acc, mask=own)


@triton.jit
def count_chunks(Lengths, chunk, segments, BS: tl.constexpr):
    """Return the chunks of each segment of a flat store, [BS]: one at least, none behind the last segment."""
    s = tl.arange(0, BS)
    lengths = tl.load(Lengths + s, mask=s < segments, other=0)
    return tl.where(s < segments, tl.maximum((lengths + chunk - 1) // chunk, 1), 0)


@triton.jit
def chunks_before(counts, seg, BS: tl.constexpr):
    """Return how many chunks the segments before one have."""
    return tl.sum(tl.where(tl.arange(0, BS) < seg, counts, 0), 0)


@triton.jit
def merge_chunks(
    Acc, Stat, Logit, Sinks, Out, Row, Lengths, Positions, First,
    columns, chunk, M, splits, segments, r_seg, p_seg, cells,
    ROWS: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, SP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BS: tl.constexpr, FLAT: tl.constexpr, SINKS: tl.constexpr, OUTPUT: tl.constexpr, LOGITS: tl.constexpr,
    LAYER: tl.constexpr,
):  # fmt: skip
    """Merge the chunks of a segment; grid (S, M + blocks of columns): one query's output, or a block of the row.

    OUTPUT: the first M programs of a segment write `Out` [S, M, DV]. LOGITS, of a block: the others write the mean
    softmax of all M queries to `Row`, BN columns each, 0 where hidden; or, of a LAYER, add it, and 1, to `Row`
    [2, cells] where the entries are: those at position i of `Positions` have cell `First` [S] + i.
    """
    seg = tl.program_id(0).to(tl.int64)
    job = tl.program_id(1)
    if OUTPUT:
        if job < M:
            first = seg * splits
            count = splits
            if FLAT:
                counts = count_chunks(Lengths, chunk, segments, BS)
                first = chunks_before(counts, seg, BS)
                count = tl.sum(tl.where(tl.arange(0, BS) == seg, counts, 0), 0).to(tl.int32)
            merge_output(Acc, Stat, Sinks, Out, seg, first, count, job, M, ROWS, DV, BDV, SP, SINKS)
    if LOGITS:
        block = job - M if OUTPUT else job
        if block >= 0:
            m = tl.arange(0, BM)
            c = block * BN + tl.arange(0, BN)
            peak, total = normalisers(Stat, Sinks, seg, m, M, splits, SP, BM, SINKS)
            row = mean_row(Logit, peak, total, seg, m, c, columns, M)
            if LAYER:
                position = tl.load(Positions + seg * p_seg + c, mask=c < columns, other=-1)
                cell = Row + tl.load(First + seg) + position
                # Heads of a layer hold different entries: the sum and its count make a mean over those that hold it.
                tl.atomic_add(cell, row, mask=position >= 0)
                tl.atomic_add(cell + cells, row * 0.0 + 1.0, mask=position >= 0)
            else:
                tl.store(Row + seg * r_seg + c, row, mask=c < columns)


@triton.jit
def merge_output(
    Acc, Stat, Sinks, Out, seg, first, count, m, M,
    ROWS: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, SP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Write the output of query `m` of a segment, whose chunks are `count` from `first` on."""
    sp, dv = tl.arange(0, SP), tl.arange(0, BDV)
    stat = Stat + (first + sp) * 2 * M + m
    peaks = tl.load(stat, mask=sp < count, other=float("-inf"))
    totals = tl.load(stat + M, mask=sp < count, other=0.0)
    peak = tl.max(peaks, 0)
    beside = 0.0
    if SINKS:
        sink = tl.load(Sinks + seg * (M // ROWS) + m // ROWS) * LOG2E
        peak = tl.maximum(peak, sink)
        beside = tl.exp2(sink - peak)
    # Each chunk's sum and output are below its own maximum; this brings them below the common one.
    share = tl.exp2(peaks - finite(peak))
    total = tl.sum(totals * share, 0) + beside
    acc = tl.load(
        Acc + ((first + sp[:, None]) * M + m) * DV + dv[None, :],
        mask=(totals > 0)[:, None] & (dv < DV)[None, :],  # a chunk where nothing is visible wrote zeros
        other=0.0,
    )
    out = tl.sum(acc * share[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(Out + (seg * M + m) * DV + dv, out.to(Out.dtype.element_ty), mask=dv < DV)


@triton.jit
def normalisers(
    Stat, Sinks, seg, m, M, splits, SP: tl.constexpr, BM: tl.constexpr, SINKS: tl.constexpr
):  # fmt: skip
    """Return maximum and sum of the softmax of queries m [BM] over all chunks of a segment; 0 and 1 if it is empty."""
    sp = tl.arange(0, SP)
    stat = Stat + (seg * splits + sp[None, :]) * 2 * M + m[:, None]
    known = (m < M)[:, None] & (sp < splits)[None, :]
    peaks = tl.load(stat, mask=known, other=float("-inf"))
    totals = tl.load(stat + M, mask=known, other=0.0)
    peak = tl.max(peaks, 1)
    beside = tl.zeros((BM,), tl.float32)
    if SINKS:
        sink = tl.load(Sinks + seg * M + m, mask=m < M, other=0.0) * LOG2E
        peak = tl.maximum(peak, sink)
        beside = tl.exp2(sink - peak)
    peak = finite(peak)
    total = tl.sum(totals * tl.exp2(peaks - peak[:, None]), 1) + beside
    return peak, tl.where(total > 0, total, 1.0)


@triton.jit
def mean_row(Logit, peak, total, seg, m, n, columns, M):
    """Return the mean softmax of a segment's M queries in columns n [BN]."""
    s = tl.load(Logit + (seg * M + m[:, None]) * columns + n[None, :], mask=(m < M)[:, None] & (n < columns)[None, :],
                other=float("-inf"))  # fmt: skip
    return tl.sum(tl.exp2(s - peak[:, None]) / total[:, None], 0) / M

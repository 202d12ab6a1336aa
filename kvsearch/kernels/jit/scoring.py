"""What entries receive from query rows: the normaliser of every row, then sums over rows for a block of entries.

Rows [B, Hq, rows, D] see the entries whose position is not negative and not later than their own. CAUSAL: none is
missing, so that row r sees no column behind T - rows + r. Nothing of size rows x T is made.
"""

import triton
import triton.language as tl

from kvsearch.kernels.jit.common import LOG2E, finite, logits_of


@triton.jit
def normalise_rows(
    Q, K, Columns, Places, Lse, scale, softcap, heads, rows, length, chunk,
    q_batch, q_head, q_row, k_batch, k_head, k_col, c_batch, p_batch, splits,
    G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Write log sum exp of a chunk of columns, `Lse` [B * Hkv, splits, rows * G]; grid (tiles, B * Hkv, splits).

    The rows of the query group are taken together: m is row m // G of head m % G of the group.
    """
    segment = tl.program_id(1).to(tl.int64)
    batch, head = segment // heads, segment % heads
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    row, known = m // G, m < rows * G
    d, n = tl.arange(0, BD), tl.arange(0, BN)
    query = Q + batch * q_batch + (head * G + m % G)[:, None] * q_head + row.to(tl.int64)[:, None] * q_row
    q = tl.load(query + d[None, :], mask=known[:, None] & (d < D)[None, :], other=0.0)
    place = tl.load(Places + batch * p_batch + row, mask=known, other=-1)
    first = tl.program_id(2) * chunk
    last = tl.minimum(first + chunk, length)
    if CAUSAL:
        # No row of this tile sees a column behind its last row's own.
        last = tl.minimum(last, length - rows + ((tl.program_id(0) + 1) * BM - 1) // G + 1)
    peak = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    for c in range(first, last, BN):
        column = tl.load(Columns + batch * c_batch + c + n, mask=c + n < last, other=-1)
        key = K + batch * k_batch + head * k_head + tl.cast(c, tl.int64) * k_col + n[:, None] * k_col
        k = tl.load(key + d[None, :], mask=(column >= 0)[:, None] & (d < D)[None, :], other=0.0)
        seen = (column >= 0)[None, :] & (column[None, :] <= place[:, None])
        s = tl.where(seen, logits_of(q, k, scale, softcap, SOFTCAP), float("-inf"))
        now = tl.maximum(peak, tl.max(s, 1))
        # As in attention: the sum so far is scaled down when a larger logit comes.
        total = total * tl.exp2(peak - finite(now)) + tl.sum(tl.exp2(s - finite(now)[:, None]), 1)
        peak = now
    lse = (peak + tl.log2(tl.where(total > 0, total, 1.0))) / LOG2E  # -inf where nothing is seen
    tl.store(Lse + (segment * splits + tl.program_id(2)) * rows * G + m, lse, mask=known)


@triton.jit
def probabilities(
    query, place_at, lse_at, k, column, r, rows, scale, softcap, q_row,
    D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Return the attention of rows r to r + BM of one head to a block of entries, [BM, BN], and which rows see any."""
    row, d = r + tl.arange(0, BM), tl.arange(0, BD)
    at = query + row.to(tl.int64)[:, None] * q_row + d[None, :]
    q = tl.load(at, mask=(row < rows)[:, None] & (d < D)[None, :], other=0.0)
    place = tl.load(place_at + row, mask=row < rows, other=-1)
    lse = tl.load(lse_at + row, mask=row < rows, other=float("inf"))  # as of a row that sees nothing
    seen = (column >= 0)[None, :] & (column[None, :] <= place[:, None])
    s = tl.where(seen, logits_of(q, k, scale, softcap, SOFTCAP), float("-inf"))
    return tl.exp2(s - lse[:, None] * LOG2E), lse < float("inf")


@triton.jit
def entries(
    key_at, column_at, rows, length, k_col,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Return a program's block of entries: their indices, positions and keys, and the first row that may see them."""
    c = tl.program_id(0) * BN + tl.arange(0, BN)
    d = tl.arange(0, BD)
    column = tl.load(column_at + c, mask=c < length, other=-1)
    key = key_at + c.to(tl.int64)[:, None] * k_col
    k = tl.load(key + d[None, :], mask=(column >= 0)[:, None] & (d < D)[None, :], other=0.0)
    first = 0
    if CAUSAL:
        # Rows before this one end in front of the block; rounded down to a whole tile.
        first = tl.maximum(0, tl.program_id(0) * BN - (length - rows)) // BM * BM
    return c, column, k, first


@triton.jit
def add_columns(
    Q, K, Columns, Places, Lse, Counts, Out, Scatter, scale, softcap, heads, rows, length,
    q_batch, q_head, q_row, k_batch, k_head, k_col, c_batch, p_batch,
    G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """Add up what a block of entries receives from all rows; grid (blocks of columns, B * Hkv).

    `Lse` [B * Hkv, G, rows], +inf where a row sees nothing. HOW: "mean" and "max" write sums
    over the query group [B * Hkv, T], "moments" the mean over `Counts` [B * Hkv] rows and `Scatter`, the sum of squares
    about it, [B * Hkv, G, T] each. All in fp32.
    """
    segment = tl.program_id(1).to(tl.int64)
    batch, head = segment // heads, segment % heads
    c, column, k, first = entries(
        K + batch * k_batch + head * k_head, Columns + batch * c_batch, rows, length, k_col, D, BM, BN, BD, CAUSAL
    )
    received = tl.zeros((BN,), tl.float32)
    for g in range(G):
        query = Q + batch * q_batch + (head * G + g) * q_head
        place_at, lse_at = Places + batch * p_batch, Lse + (segment * G + g) * rows
        tile = tl.zeros((BM, BN), tl.float32)  # added up over rows once: that takes all warps
        for r in range(first, rows, BM):
            p, _ = probabilities(query, place_at, lse_at, k, column, r, rows, scale, softcap, q_row, D, BM, BD, SOFTCAP)
            tile += p
        of_head = tl.sum(tile, 0)
        if HOW == "mean":
            received += of_head / G
        elif HOW == "max":
            received = tl.maximum(received, of_head)
        else:
            of_head = of_head / tl.load(Counts + segment)
            squares = tl.zeros((BM, BN), tl.float32)
            for r in range(0, rows, BM):  # rows that do not see an entry are apart from its mean, too
                p, real = probabilities(
                    query, place_at, lse_at, k, column, r, rows, scale, softcap, q_row, D, BM, BD, SOFTCAP
                )
                apart = tl.where(real[:, None], p - of_head[None, :], 0.0)
                squares += apart * apart
            tl.store(Out + (segment * G + g) * length + c, of_head, mask=c < length)
            tl.store(Scatter + (segment * G + g) * length + c, tl.sum(squares, 0), mask=c < length)
    if HOW == "mean" or HOW == "max":
        tl.store(Out + segment * length + c, received, mask=c < length)


@triton.jit
def find_peaks(
    Q, K, Columns, Places, Lse, Norms, Weights, Out, scale, softcap, heads, rows, length, context,
    q_batch, q_head, q_row, k_batch, k_head, k_col, c_batch, p_batch,
    G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr, NORMED: tl.constexpr, WEIGHTED: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write the most that each entry receives from one row, `Out` [B * Hkv, context] fp32; of the first ones alone.

    What a row gives is the "sum" or "max" (GROUP) over the query group of attention times `Norms`
    [B * Hkv, G, context], times the row's `Weights` [B, rows]. `Lse` as for `add_columns`; grid (blocks of columns,
    B * Hkv).
    """
    segment = tl.program_id(1).to(tl.int64)
    batch, head = segment // heads, segment % heads
    c, column, k, first = entries(
        K + batch * k_batch + head * k_head, Columns + batch * c_batch, rows, length, k_col, D, BM, BN, BD, CAUSAL
    )
    peak = tl.zeros((BN,), tl.float32)
    for r in range(first, rows, BM):
        # A row gives what its whole query group gives, so heads are combined before the maximum over rows.
        given = tl.zeros((BM, BN), tl.float32)
        for g in range(G):
            query = Q + batch * q_batch + (head * G + g) * q_head
            place_at = Places + batch * p_batch
            lse_at = Lse + (segment * G + g) * rows
            p, _ = probabilities(query, place_at, lse_at, k, column, r, rows, scale, softcap, q_row, D, BM, BD, SOFTCAP)
            if NORMED:
                p *= tl.load(Norms + (segment * G + g) * context + c, mask=c < context, other=0.0)[None, :]
            given = given + p if GROUP == "sum" else tl.maximum(given, p)
        if WEIGHTED:
            row = r + tl.arange(0, BM)
            given *= tl.load(Weights + batch * rows + row, mask=row < rows, other=0.0)[:, None]
        peak = tl.maximum(peak, tl.max(given, 0))
    tl.store(Out + segment * context + c, peak, mask=c < context)

"""Rules with more state, or more of an order, than a number per entry: Scissorhands and CAKE."""

import triton
import triton.language as tl

from kvsearch.kernels.jit.attention import normalisers
from kvsearch.kernels.jit.leaving import choose, close, limits_of, mean_row

HIGHEST = tl.constexpr(2**63 - 1)


@triton.jit
def leave_persistent(
    Stat, Logit, Sinks, Positions, Mass, Low, Ring, Slot, Clock, Budgets, First, Recent, Active,
    seg, width, capacity, M, splits, l_col, p_seg, s_seg,
    SP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SINKS: tl.constexpr, PAUSES: tl.constexpr,
    HISTORY: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Order by 1 - low / seen, then by the attention received (Scissorhands): see `policies.scissorhands`.

    `Low` [S, C] int16 counts the rows of the last HISTORY in which an entry got less than an even share, `Ring`
    [S, C, BYTES] uint8 has a bit for each of them, `Mass` [S, C] fp32 the attention received.
    """
    arrived, seen, first, recent, budget = limits_of(Clock, Budgets, First, Recent, Active, seg, PAUSES)
    m = tl.arange(0, BM)
    peak, total = normalisers(Stat, Sinks, seg, m, M, splits, SP, BM, SINKS)
    Positions += seg * p_seg
    count = seen - seen
    for c in range(0, width, BN):
        n = c + tl.arange(0, BN)
        count += tl.sum((tl.load(Positions + n, mask=n < width, other=-1) >= 0).to(tl.int64), 0)
    even = 1.0 / count.to(tl.float32)
    at = ((seen - 1) % HISTORY).to(tl.int32)
    bit = 1 << (at % 8)
    lowest, latest, place = seen - seen + HIGHEST, seen - seen - 1, seen - seen - 1
    for c in range(0, width, BN):
        n = c + tl.arange(0, BN)
        there = n < width
        position = tl.load(Positions + n, mask=there, other=-1)
        held = position >= 0
        p = mean_row(Logit, peak, total, seg, m, n, width, M, l_col)
        entry = seg * s_seg + n
        byte = Ring + entry * BYTES + at // 8
        marks = tl.load(byte, mask=there, other=0).to(tl.int32)
        low = tl.load(Low + entry, mask=there, other=0).to(tl.int32)
        mass = tl.load(Mass + entry, mask=there, other=0.0)
        if arrived != 0:
            is_low = (held & (p < even)).to(tl.int32)
            low += is_low - ((marks & bit) != 0).to(tl.int32)
            mass += p
            tl.store(byte, ((marks & (255 - bit)) | (is_low * bit)).to(tl.uint8), mask=there)
            tl.store(Low + entry, low.to(tl.int16), mask=there)
            tl.store(Mass + entry, mass, mask=there)
        visible = tl.maximum(tl.minimum(seen - position, HISTORY), 1)
        ratio = (low.to(tl.int64) << 31) // visible
        bits = mass.to(tl.int32, bitcast=True).to(tl.int64)  # in the order of the masses, which are not negative
        free = held & (position >= first) & (position < seen - recent)
        value = tl.where(free, ((2147483648 - ratio) << 31) | bits, HIGHEST)
        lowest, latest, place = choose(value, position, free, n, lowest, latest, place)
    tl.debug_barrier()  # the state is written by other threads than those that clear a slot
    if arrived != 0:
        gone = close(Positions, Clock, Slot, seg, seen, recent, count, budget, place, capacity)
        entry = seg * s_seg + gone
        tl.store(Low + entry, 0, mask=gone >= 0)
        tl.store(Mass + entry, 0.0, mask=gone >= 0)
        stop = tl.where(gone >= 0, BYTES, 0)
        for b in range(0, BYTES, BN):
            part = b + tl.arange(0, BN)
            tl.store(Ring + entry * BYTES + part, tl.zeros((BN,), tl.uint8), mask=part < stop)


@triton.jit
def leave_pooled(
    Stat, Logit, Sinks, Positions, Row, Order, Slot, Clock, Budgets, First, Recent, Active,
    seg, width, capacity, M, splits, l_col, p_seg,
    SP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SINKS: tl.constexpr, PAUSES: tl.constexpr,
    KERNEL: tl.constexpr, POOLING: tl.constexpr, PROTECT: tl.constexpr,
):  # fmt: skip
    """Order by the row, pooled over KERNEL neighbours in the order of positions (CAKE): see `policies.cake`.

    `Order` [S, width] int64 are the slots by ascending position, `Row` [S, width] fp32 is scratch. The last PROTECT
    tokens are no neighbours, and have no priority.
    """
    arrived, seen, first, recent, budget = limits_of(Clock, Budgets, First, Recent, Active, seg, PAUSES)
    m = tl.arange(0, BM)
    peak, total = normalisers(Stat, Sinks, seg, m, M, splits, SP, BM, SINKS)
    Positions += seg * p_seg
    Row += seg * width
    Order += seg * width
    count = seen - seen
    for c in range(0, width, BN):
        n = c + tl.arange(0, BN)
        position = tl.load(Positions + n, mask=n < width, other=-1)
        count += tl.sum((position >= 0).to(tl.int64), 0)
        tl.store(Row + n, mean_row(Logit, peak, total, seg, m, n, width, M, l_col), mask=n < width)
    tl.debug_barrier()  # the row is read by other threads than those that wrote it
    lowest, latest, place = float("inf"), seen - seen - 1, seen - seen - 1
    for c in range(0, width, BN):
        rank = c + tl.arange(0, BN)
        slot = tl.load(Order + rank, mask=rank < width, other=0)
        position = tl.load(Positions + slot, mask=rank < width, other=-1)
        candidate = (position >= 0) & (position < seen - PROTECT)
        pooled = tl.zeros((BN,), tl.float32)
        for offset in range(-(KERNEL // 2), KERNEL // 2 + 1):
            other = rank + offset
            beside = tl.load(Order + other, mask=(other >= 0) & (other < width), other=0)
            there = tl.load(Positions + beside, mask=(other >= 0) & (other < width), other=-1)
            seen_there = (there >= 0) & (there < seen - PROTECT)
            p = tl.load(Row + beside, mask=seen_there, other=0.0)
            if POOLING == "max":  # attention is not negative
                pooled = tl.maximum(pooled, p)
            else:
                pooled += p
        if POOLING == "avg":
            pooled = pooled / KERNEL
        free = (position >= first) & (position < seen - recent)
        value = tl.where(free & candidate, pooled, float("inf"))
        lowest, latest, place = choose(value, position, free, slot, lowest, latest, place)
    tl.debug_barrier()
    if arrived != 0:
        close(Positions, Clock, Slot, seg, seen, recent, count, budget, place, capacity)

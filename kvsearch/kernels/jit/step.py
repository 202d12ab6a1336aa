"""The end of a decode step: the policy's running state takes the attention row in, and an entry leaves every full head.

One program does this for one segment, so that nothing of the row is written to memory. Scissorhands and CAKE have rules
of their own: more state, or more of an order, than a number per entry.
"""

import triton
import triton.language as tl

from kvsearch.kernels.jit.attention import merge_output, normalisers

HIGHEST = tl.constexpr(2**63 - 1)


@triton.jit
def limits_of(Clock, Budgets, First, Recent, Active, seg, PAUSES: tl.constexpr):
    """Return whether a token comes to a segment, its tokens with that one, first and recent ones that stay, budget."""
    arrived = 1
    if PAUSES:
        arrived = (tl.load(Active + seg) != 0).to(tl.int32)
    seen = tl.load(Clock + seg) + arrived
    return arrived, seen, tl.load(First + seg), tl.load(Recent + seg), tl.load(Budgets + seg)


@triton.jit
def mean_row(Logit, peak, total, seg, m, n, width, M, l_col):
    """Return the mean softmax of a segment's M queries in slots n [BN]."""
    s = tl.load(Logit + (seg * M + m[:, None]) * l_col + n[None, :], mask=(m < M)[:, None] & (n < width)[None, :],
                other=float("-inf"))  # fmt: skip
    return tl.sum(tl.exp2(s - peak[:, None]) / total[:, None], 0) / M


@triton.jit
def choose(value, position, free, n, lowest, latest, place):
    """Return value, position and slot of the lowest entry: of those found, or of slots n [BN]; the later of equals.

    What is not `free` has the highest value there is.
    """
    least = tl.min(value, 0)
    last = tl.max(tl.where(free & (value <= least), position, -1), 0)
    where = tl.max(tl.where(free & (position == last), n, -1), 0)
    better = (where >= 0) & ((least < lowest) | (place < 0) | ((least == lowest) & (last > latest)))
    return (
        tl.where(better, least, lowest),
        tl.where(better, last.to(tl.int64), latest),
        tl.where(better, where.to(tl.int64), place),
    )


@triton.jit
def close(Positions, Clock, Slot, seg, seen, recent, count, budget, place, capacity):
    """Write down the token, free the slot `place` of a segment that holds too much, and return it; -1: none."""
    tl.store(Clock + seg, seen)
    tl.store(Clock + tl.num_programs(0) + seg, seen - recent - 1)
    gone = tl.where(count > budget, place, -1)
    tl.store(Positions + gone, -1, mask=gone >= 0)
    tl.store(Slot + seg, tl.where(gone >= 0, gone, tl.minimum(count, capacity - 1)))
    return gone


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


@triton.jit
def spread_row(
    Acc, Stat, Logit, Sinks, Out, Positions, Sums, First,
    width, cells, M, splits, l_col, p_seg,
    DV: tl.constexpr, BDV: tl.constexpr, SP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SINKS: tl.constexpr, OUTPUT: tl.constexpr,
):  # fmt: skip
    """Add the mean softmax of a segment, and 1, to `Sums` [2, cells] where its entries are; grid as `merge_chunks`.

    The entry at position i of a segment has cell `First` [S] + i.
    """
    seg = tl.program_id(0).to(tl.int64)
    job = tl.program_id(1)
    if OUTPUT:
        if job < M:
            merge_output(Acc, Stat, Sinks, Out, seg, job, M, splits, 1, DV, BDV, SP, SINKS)
    block = job - M if OUTPUT else job
    if block >= 0:
        m, n = tl.arange(0, BM), block * BN + tl.arange(0, BN)
        peak, total = normalisers(Stat, Sinks, seg, m, M, splits, SP, BM, SINKS)
        position = tl.load(Positions + seg * p_seg + n, mask=n < width, other=-1)
        row = mean_row(Logit, peak, total, seg, m, n, width, M, l_col)
        cell = Sums + tl.load(First + seg) + position
        tl.atomic_add(cell, row, mask=position >= 0)
        tl.atomic_add(cell + cells, row * 0.0 + 1.0, mask=position >= 0)


@triton.jit
def finish_step(
    Acc, Stat, Logit, Sinks, Out, Positions, State, More, Ring, Given, Slot, Clock, Budgets, First, Recent, Active,
    width, capacity, M, splits, l_col, p_seg, s_seg, cells,
    DV: tl.constexpr, BDV: tl.constexpr, SP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SINKS: tl.constexpr, OUTPUT: tl.constexpr, PAUSES: tl.constexpr, RULE: tl.constexpr, SCORED: tl.constexpr,
    HISTORY: tl.constexpr = 0, BYTES: tl.constexpr = 0,
    KERNEL: tl.constexpr = 0, POOLING: tl.constexpr = "", PROTECT: tl.constexpr = 0,
):  # fmt: skip
    """Merge the output and choose what leaves; grid (S, M + 1 if OUTPUT else 1).

    RULE: an entry's priority is its "position", its "mass" (`State`, to which the mean softmax of the M queries is
    added), "stored" in `State`, for the new entry from `Given` [S] where SCORED, else +inf, or the mean "row" of the
    layer: `More` [2, cells] at `Given` [S] + position, see `spread_row`. For "persistence" and "pooled" see
    `leave_persistent` and `leave_pooled`.
    """
    seg = tl.program_id(0).to(tl.int64)
    job = tl.program_id(1)
    if OUTPUT:
        if job < M:
            merge_output(Acc, Stat, Sinks, Out, seg, job, M, splits, 1, DV, BDV, SP, SINKS)
    if job == (M if OUTPUT else 0):
        if RULE == "persistence":
            leave_persistent(Stat, Logit, Sinks, Positions, State, More, Ring, Slot, Clock, Budgets, First, Recent,
                             Active, seg, width, capacity, M, splits, l_col, p_seg, s_seg,
                             SP, BM, BN, SINKS, PAUSES, HISTORY, BYTES)  # fmt: skip
        elif RULE == "pooled":
            leave_pooled(Stat, Logit, Sinks, Positions, More, Given, Slot, Clock, Budgets, First, Recent,
                         Active, seg, width, capacity, M, splits, l_col, p_seg,
                         SP, BM, BN, SINKS, PAUSES, KERNEL, POOLING, PROTECT)  # fmt: skip
        else:
            leave(Stat, Logit, Sinks, Positions, State, More, Given, Slot, Clock, Budgets, First, Recent, Active,
                  seg, width, capacity, M, splits, l_col, p_seg, s_seg, cells,
                  SP, BM, BN, SINKS, PAUSES, RULE, SCORED)  # fmt: skip


@triton.jit
def leave(
    Stat, Logit, Sinks, Positions, State, Sums, Given, Slot, Clock, Budgets, First, Recent, Active,
    seg, width, capacity, M, splits, l_col, p_seg, s_seg, cells,
    SP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SINKS: tl.constexpr, PAUSES: tl.constexpr, RULE: tl.constexpr, SCORED: tl.constexpr,
):  # fmt: skip
    """Update the state, free the slot of the lowest entry where there are too many, and say where the next one goes."""
    arrived, seen, first, recent, budget = limits_of(Clock, Budgets, First, Recent, Active, seg, PAUSES)
    slot = tl.load(Slot + seg)
    if PAUSES:
        slot = tl.where(arrived != 0, slot, -1)
    m = tl.arange(0, BM)
    if RULE == "mass":
        peak, total = normalisers(Stat, Sinks, seg, m, M, splits, SP, BM, SINKS)
    lowest, latest, place, count = float("inf"), seen - seen - 1, slot - slot - 1, slot - slot
    for c in range(0, width, BN):
        n = c + tl.arange(0, BN)
        position = tl.load(Positions + seg * p_seg + n, mask=n < width, other=-1)
        held = position >= 0
        state = State + seg * s_seg + n
        if RULE == "mass":
            p = mean_row(Logit, peak, total, seg, m, n, width, M, l_col)
            priority = tl.load(state, mask=n < width, other=0.0)
            if arrived != 0:
                priority += p
                tl.store(state, priority, mask=n < width)
        elif RULE == "stored":
            new = n == slot
            score = float("inf")
            if SCORED:
                score = tl.load(Given + seg)
            priority = tl.where(new, score, tl.load(state, mask=n < width, other=0.0))
            tl.store(state, priority, mask=new)
        elif RULE == "row":
            cell = Sums + tl.load(Given + seg) + position
            priority = tl.load(cell, mask=held, other=0.0) / tl.load(cell + cells, mask=held, other=1.0)
        else:
            priority = position.to(tl.float32)
        count += tl.sum(held.to(tl.int64), 0)
        free = held & (position >= first) & (position < seen - recent)
        value = tl.where(free, priority, float("inf"))
        lowest, latest, place = choose(value, position, free, n, lowest, latest, place)
    tl.debug_barrier()  # the state is written by other threads than those that clear a slot
    if arrived != 0:
        gone = close(Positions + seg * p_seg, Clock, Slot, seg, seen, recent, count, budget, place, capacity)
        if RULE == "mass" or RULE == "stored":
            tl.store(State + seg * s_seg + gone, 0.0, mask=gone >= 0)

"""The end of a decode step: the policy's running state takes the attention row in, and an entry leaves every full head.

Several programs do this for one segment, each for some of its slots, so that nothing of the row is written to memory.
The last of them to be done compares what they found. Scissorhands and CAKE have rules of their own: more state, or more
of an order, than a number per entry. Priorities are compared as whole numbers of 64 bits.
"""

import triton
import triton.language as tl

from kvsearch.kernels.jit.attention import mean_row, merge_output, normalisers

HIGHEST = tl.constexpr(2**63 - 1)


@triton.jit
def ordered(priority):
    """Return whole numbers in the order of fp32 priorities, equal for both zeros."""
    # Adding 0 makes -0 a +0, so that both have the same bits. Bits of negative floats ascend as these fall, and are
    # turned round but for the sign.
    bits = (priority + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def choose(value, position, free, n, lowest, latest, place):
    """Return value, position and slot of the lowest entry: of those found, or of slots n [BN]; the later of equals."""
    # Where nothing is free `where` is -1, and what was best so far stays.
    value = tl.where(free, value, HIGHEST)
    least = tl.min(value, 0)
    last = tl.max(tl.where(free & (value == least), position, -1), 0)
    where = tl.max(tl.where(free & (position == last), n, -1), 0)
    better = (where >= 0) & ((place < 0) | (least < lowest) | ((least == lowest) & (last > latest)))
    return tl.where(better, least, lowest), tl.where(better, last, latest), tl.where(better, where, place)


@triton.jit
def persistence(
    p, position, even, n, there, Mass, Low, Ring, arrived, seen, HISTORY: tl.constexpr, BYTES: tl.constexpr
):  # fmt: skip
    """Return the order by 1 - low / seen, then by the attention received (Scissorhands), of slots n [BN].

    See `policies.scissorhands`. `Low` [C] int16 counts the rows of the last HISTORY in which an entry got less than an
    even share, `Ring` [C, BYTES] uint8 has a bit for each of them, `Mass` [C] fp32 the attention received. All take the
    row p [BN] of a token that arrived in.
    """
    # The row of a token overwrites that of the token HISTORY before it, so the count loses one mark as it gains one.
    at = ((seen - 1) % HISTORY).to(tl.int32)
    bit = 1 << (at % 8)
    byte = Ring + n * BYTES + at // 8
    marks = tl.load(byte, mask=there, other=0).to(tl.int32)
    low = tl.load(Low + n, mask=there, other=0).to(tl.int32)
    mass = tl.load(Mass + n, mask=there, other=0.0)
    if arrived != 0:
        is_low = ((position >= 0) & (p < even)).to(tl.int32)
        low += is_low - ((marks & bit) != 0).to(tl.int32)
        mass += p
        tl.store(byte, ((marks & (255 - bit)) | (is_low * bit)).to(tl.uint8), mask=there)
        tl.store(Low + n, low.to(tl.int16), mask=there)
        tl.store(Mass + n, mass, mask=there)
    visible = tl.maximum(tl.minimum(seen - position, HISTORY), 1)
    # Two different ratios of counts below 2^15 differ in their first 31 bits; the mass decides between equal ones.
    ratio = (low.to(tl.int64) << 31) // visible
    bits = mass.to(tl.int32, bitcast=True).to(tl.int64)  # in the order of the masses, which are not negative
    return ((2147483648 - ratio) << 31) | bits


@triton.jit
def pooled(
    Logit, peak, total, Positions, Before, behind, seg, m, n, stop, seen, width, M,
    BN: tl.constexpr, KERNEL: tl.constexpr, POOLING: tl.constexpr, PROTECT: tl.constexpr,
):  # fmt: skip
    """Return the row in slots n [BN], pooled over KERNEL neighbours in the order of positions (CAKE).

    See `policies.cake`. `Before` [capacity] are the slots whose entries came before each slot's, -1 for none, and
    `behind` numbers further the slots of the entries that came next. The last PROTECT tokens are no neighbours.
    """
    row = tl.zeros((BN,), tl.float32)
    for offset in range(-(KERNEL // 2), KERNEL // 2 + 1):
        link = Before + tl.where(offset < 0, 0, behind)
        beside = tl.where(n < stop, n, -1)
        for _ in range(tl.abs(offset)):
            beside = tl.load(link + beside, mask=beside >= 0, other=-1)
        there = tl.load(Positions + beside, mask=beside >= 0, other=-1)
        # Column `width` is behind the row, where `mean_row` reads as hidden.
        shown = tl.where((there >= 0) & (there < seen - PROTECT), beside, width)
        p = mean_row(Logit, peak, total, seg, m, shown, width, M)
        if POOLING == "max":  # attention is not negative
            row = tl.maximum(row, p)
        else:
            row += p
    if POOLING == "avg":
        row = row / KERNEL
    return row


@triton.jit
def relink(Before, behind, gone, newest):
    """Move slot `gone` behind the newest entry's slot in the links, as it is the next token's; see `pooled`."""
    moves = (gone >= 0) & (gone != newest)
    left = tl.load(Before + gone, mask=moves, other=-1)
    right = tl.load(Before + behind + gone, mask=moves, other=-1)
    last = tl.load(Before + behind + newest, mask=moves, other=-1)
    tl.store(Before + behind + left, right, mask=moves & (left >= 0))
    tl.store(Before + right, left, mask=moves & (right >= 0))
    tl.store(Before + behind + newest, gone.to(tl.int32), mask=moves)
    tl.store(Before + gone, newest.to(tl.int32), mask=moves)
    tl.store(Before + behind + gone, last, mask=moves)
    tl.store(Before + last, gone.to(tl.int32), mask=moves & (last >= 0))


@triton.jit
def finish_step(
    Acc, Stat, Logit, Sinks, Out, Positions, State, More, Ring, Given, Slot, Clock, Budgets, First, Recent, Active,
    Found, Done, width, chunk, parts, capacity, M, splits, p_seg, s_seg, cells,
    DV: tl.constexpr, BDV: tl.constexpr, SP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr,
    SINKS: tl.constexpr, OUTPUT: tl.constexpr, PAUSES: tl.constexpr, RULE: tl.constexpr, SCORED: tl.constexpr,
    HISTORY: tl.constexpr = 0, BYTES: tl.constexpr = 0,
    KERNEL: tl.constexpr = 0, POOLING: tl.constexpr = "", PROTECT: tl.constexpr = 0,
):  # fmt: skip
    """Merge the output and choose what leaves; grid (S, parts, and M more if OUTPUT), with `chunk` slots for a part.

    RULE: an entry's priority is its "position", its "mass" (`State`, to which the mean softmax of the M queries is
    added), "stored" in `State`, for the new entry from `Given` [S] where SCORED, else +inf, or the mean "row" of the
    layer: `More` [2, cells] at `Given` [S] + position, see `merge_chunks`. For "persistence" and "pooled" see the
    functions of these names; slots before and behind are `Given` [2, S, capacity]. `Found`
    [S, parts, 5] is what parts found, `Done` [S] how many are done, 0.
    """
    seg = tl.program_id(0).to(tl.int64)
    job = tl.program_id(1)
    if OUTPUT:
        if job < M:
            merge_output(Acc, Stat, Sinks, Out, seg, seg * splits, splits, job, M, 1, DV, BDV, SP, SINKS)
    part = job - M if OUTPUT else job
    if part >= 0:
        arrived = 1
        if PAUSES:
            arrived = (tl.load(Active + seg) != 0).to(tl.int32)
        seen = tl.load(Clock + seg) + arrived
        first = tl.load(First + seg)
        recent = tl.load(Recent + seg)
        # An int64 zero: a variable of a loop keeps the type that it begins with.
        nothing = seen - seen
        slot = tl.where(arrived != 0, tl.load(Slot + seg), -1)
        Positions += seg * p_seg
        State += seg * s_seg
        begin = part * chunk
        stop = tl.minimum(begin + chunk, width)
        m = tl.arange(0, BM)
        if RULE == "mass" or RULE == "persistence" or RULE == "pooled":
            peak, total = normalisers(Stat, Sinks, seg, m, M, splits, SP, BM, SINKS)
        if RULE == "persistence":
            More += seg * s_seg
            Ring += seg * s_seg * BYTES
            count = nothing
            for c in range(0, width, BN):
                n = c + tl.arange(0, BN)
                count += tl.sum((tl.load(Positions + n, mask=n < width, other=-1) >= 0).to(tl.int64), 0)
            # Every program counts all entries of its segment, which is cheaper than to wait for the others.
            even = 1.0 / count.to(tl.float32)
        lowest, latest, place = nothing, nothing - 1, nothing - 1
        held = nothing
        empty = nothing + capacity - 1
        for c in range(begin, stop, BN):
            n = c + tl.arange(0, BN)
            there = n < stop
            position = tl.load(Positions + n, mask=there, other=-1)
            entry = position >= 0
            if RULE == "persistence":
                p = mean_row(Logit, peak, total, seg, m, n, width, M)
                value = persistence(p, position, even, n, there, State, More, Ring, arrived, seen, HISTORY, BYTES)
            else:
                if RULE == "mass":
                    priority = tl.load(State + n, mask=there, other=0.0)
                    if arrived != 0:
                        priority += mean_row(Logit, peak, total, seg, m, n, width, M)
                        tl.store(State + n, priority, mask=there)
                elif RULE == "stored":
                    new = n == slot
                    score = float("inf")
                    if SCORED:
                        score = tl.load(Given + seg)
                    priority = tl.where(new, score, tl.load(State + n, mask=there, other=0.0))
                    tl.store(State + n, priority, mask=new & there)
                elif RULE == "row":
                    cell = More + tl.load(Given + seg) + position
                    priority = tl.load(cell, mask=entry, other=0.0) / tl.load(cell + cells, mask=entry, other=1.0)
                elif RULE == "pooled":
                    row = pooled(Logit, peak, total, Positions, Given + seg * capacity, tl.num_programs(0) * capacity,
                                 seg, m, n, stop, seen, width, M, BN, KERNEL, POOLING, PROTECT)  # fmt: skip
                    priority = tl.where(entry & (position < seen - PROTECT), row, float("inf"))
                else:
                    priority = position.to(tl.float32)
                value = ordered(priority)
            # Sinks and recent tokens stay, whatever their priority.
            free = entry & (position >= first) & (position < seen - recent)
            lowest, latest, place = choose(value, position, free, n, lowest, latest, place)
            held += tl.sum(entry.to(tl.int64), 0)
            empty = tl.minimum(empty, tl.min(tl.where(entry, empty, n), 0))  # behind the last slots is one, too
        report = Found + (seg * parts + part) * 5
        tl.store(report, lowest)
        tl.store(report + 1, latest)
        tl.store(report + 2, place)
        tl.store(report + 3, held)
        tl.store(report + 4, empty)
        tl.debug_barrier()  # all threads have written before others are told, and the state before a slot is cleared
        # The last program of a segment to come here compares what all have found; acquire and release make their writes
        # visible to it.
        if tl.atomic_add(Done + seg, 1, sem="acq_rel") == parts - 1:
            n = tl.arange(0, PARTS)
            each = Found + (seg * parts + n) * 5  # past the cache, as other programs have written it
            values = tl.load(each, mask=n < parts, other=0, cache_modifier=".cg")
            positions = tl.load(each + 1, mask=n < parts, other=-1, cache_modifier=".cg")
            places = tl.load(each + 2, mask=n < parts, other=-1, cache_modifier=".cg")
            held_in_all = tl.sum(tl.load(each + 3, mask=n < parts, other=0, cache_modifier=".cg"), 0)
            first_empty = tl.min(tl.load(each + 4, mask=n < parts, other=HIGHEST, cache_modifier=".cg"), 0)
            _, _, lowest_of_all = choose(values, positions, places >= 0, places, nothing, nothing - 1, nothing - 1)
            if arrived != 0:
                budget = tl.load(Budgets + seg)
                tl.store(Clock + seg, seen)
                tl.store(Clock + tl.num_programs(0) + seg, seen - recent - 1)
                # A segment within its budget loses nothing, and its next token goes to the first empty slot.
                gone = tl.where(held_in_all > budget, lowest_of_all, -1)
                tl.store(Positions + gone, -1, mask=gone >= 0)
                if RULE == "pooled":
                    relink(Given + seg * capacity, tl.num_programs(0) * capacity, gone, tl.load(Slot + seg))
                tl.store(Slot + seg, tl.where(gone >= 0, gone, first_empty))
                if RULE == "mass" or RULE == "stored" or RULE == "persistence":
                    tl.store(State + gone, 0.0, mask=gone >= 0)
                if RULE == "persistence":
                    tl.store(More + gone, 0, mask=gone >= 0)
                    end = tl.where(gone >= 0, BYTES, 0)
                    for b in range(0, BYTES, BN):
                        byte = b + tl.arange(0, BN)
                        tl.store(Ring + gone * BYTES + byte, tl.zeros((BN,), tl.uint8), mask=byte < end)

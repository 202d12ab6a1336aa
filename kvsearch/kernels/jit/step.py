"""The end of a decode step: the policy's running state takes the attention row in, and an entry leaves every full head.

One program does this for one segment, so that nothing of the row is written to memory.
"""

import triton
import triton.language as tl

from kvsearch.kernels.jit.attention import merge_output, normalisers


@triton.jit
def finish_step(
    Acc, Stat, Logit, Sinks, Out, Positions, State, Arriving, Slot, Seen, Budgets, First, Recent, Active,
    width, capacity, M, splits, l_col, p_seg, s_seg,
    DV: tl.constexpr, BDV: tl.constexpr, SP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SINKS: tl.constexpr, OUTPUT: tl.constexpr, PAUSES: tl.constexpr, RULE: tl.constexpr, SCORED: tl.constexpr,
):  # fmt: skip
    """Merge the output and choose what leaves; grid (S, M + 1 if OUTPUT else 1).

    RULE: an entry's priority is its "position", its "mass" (`State`, to which the mean softmax of the M queries is
    added) or "stored" in `State`, for the new entry from `Arriving` [S] where SCORED, else +inf. See `kernels.step`.
    """
    seg = tl.program_id(0).to(tl.int64)
    job = tl.program_id(1)
    if OUTPUT:
        if job < M:
            merge_output(Acc, Stat, Sinks, Out, seg, job, M, splits, 1, DV, BDV, SP, SINKS)
    if job == (M if OUTPUT else 0):
        leave(Stat, Logit, Sinks, Positions, State, Arriving, Slot, Seen, Budgets, First, Recent, Active,
              seg, width, capacity, M, splits, l_col, p_seg, s_seg,
              SP, BM, BN, SINKS, PAUSES, RULE, SCORED)  # fmt: skip


@triton.jit
def leave(
    Stat, Logit, Sinks, Positions, State, Arriving, Slot, Seen, Budgets, First, Recent, Active,
    seg, width, capacity, M, splits, l_col, p_seg, s_seg,
    SP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SINKS: tl.constexpr, PAUSES: tl.constexpr, RULE: tl.constexpr, SCORED: tl.constexpr,
):  # fmt: skip
    """Update the state, free the slot of the lowest entry where there are too many, and say where the next one goes."""
    arrived = 1
    if PAUSES:
        arrived = (tl.load(Active + seg) != 0).to(tl.int32)
    seen = tl.load(Seen + seg) + arrived
    slot = tl.load(Slot + seg)
    if PAUSES:
        slot = tl.where(arrived != 0, slot, -1)
    first, recent, budget = tl.load(First + seg), tl.load(Recent + seg), tl.load(Budgets + seg)
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
            s = tl.load(Logit + (seg * M + m[:, None]) * l_col + n[None, :],
                        mask=(m < M)[:, None] & (n < width)[None, :], other=float("-inf"))  # fmt: skip
            p = tl.exp2(s - peak[:, None]) / total[:, None]
            priority = tl.load(state, mask=n < width, other=0.0)
            if arrived != 0:
                priority += tl.sum(p, 0) / M
                tl.store(state, priority, mask=n < width)
        elif RULE == "stored":
            new = n == slot
            score = float("inf")
            if SCORED:
                score = tl.load(Arriving + seg)
            priority = tl.where(new, score, tl.load(state, mask=n < width, other=0.0))
            tl.store(state, priority, mask=new)
        else:
            priority = position.to(tl.float32)
        count += tl.sum(held.to(tl.int64), 0)
        free = held & (position >= first) & (position < seen - recent)
        value = tl.where(free, priority, float("inf"))
        least = tl.min(value, 0)
        last = tl.max(tl.where(free & (value <= least), position, -1), 0)  # the later one among equals
        where = tl.max(tl.where(free & (position == last), n, -1), 0)
        better = (where >= 0) & ((least < lowest) | (place < 0) | ((least == lowest) & (last > latest)))
        lowest = tl.where(better, least, lowest)
        latest = tl.where(better, last.to(tl.int64), latest)
        place = tl.where(better, where.to(tl.int64), place)
    tl.debug_barrier()  # the state is written by other threads than those that clear a slot
    if arrived != 0:
        tl.store(Seen + seg, seen)
        if (count > budget) & (place >= 0):
            tl.store(Positions + seg * p_seg + place, -1)
            if RULE != "position":
                tl.store(State + seg * s_seg + place, 0.0)
            tl.store(Slot + seg, place)
        else:
            tl.store(Slot + seg, tl.minimum(count, capacity - 1))

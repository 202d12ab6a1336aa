"""The end of a decode step: the policy's running state takes the attention row in, and an entry leaves every full head.

One program does this for one segment, so that nothing of the row is written to memory.
"""

import triton
import triton.language as tl

from kvsearch.kernels.jit.attention import merge_output, normalisers
from kvsearch.kernels.jit.leaving import choose, close, limits_of, mean_row
from kvsearch.kernels.jit.rules import leave_persistent, leave_pooled


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

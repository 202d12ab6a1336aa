"""What all rules do at the end of a decode step: the row, the lowest entry so far, and the slot that is freed."""

import triton
import triton.language as tl


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

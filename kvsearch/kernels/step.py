"""A decode step of one block of slots in two launches: append, attend, update the running state, free a slot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvsearch.kernels.attention import Chunked, Entries
from kvsearch.kernels.blocks import chunks, power_of_two
from kvsearch.kernels.dispatch import launch

RANKED = 512  # slots that a program looks at together

Rule = Literal["position", "mass", "stored", "row", "persistence", "pooled"]
WEIGHING = ("mass", "row", "persistence", "pooled")  # rules that read the attention row


@dataclass(frozen=True)
class Slots:
    """S segments with C slots each, all changed in place; an empty slot has position -1 and 0 for state."""

    keys: Tensor  # [S, C, D]
    values: Tensor  # [S, C, Dv]
    positions: Tensor  # [S, C] int64
    state: tuple[Tensor, ...]  # what `rule` reads: [S, C] fp32; or fp32, int16 and [S, C, bytes] uint8; or nothing
    slot: Tensor  # [S] int64, where the next token goes
    clock: Tensor  # [2, S] int64, tokens so far, and the newest position that may leave
    budgets: Tensor  # [S] int64; a segment that holds more gives one entry up
    sinks: Tensor  # [S] int64, how many of the first tokens always stay
    recent: Tensor  # [S] int64, and of the last
    # [2, S, C] int32, for "pooled": slots whose entries came before and behind, -1 for none
    links: Tensor | None = None
    # for "row", where all heads of a layer add theirs up: attention, and heads that hold the entry, [2, N] fp32, zeros;
    # and the place of position 0 of each segment there, [S] int64
    sums: tuple[Tensor, Tensor] | None = None
    log_weights: Tensor | None = None  # [S, C], see `Entries`; the token's own is 0


def step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slots: Slots,
    width: int,
    rule: Rule,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    arriving: Callable[[], Tensor | None] | None = None,
    active: Tensor | None = None,
    constants: Mapping[str, int | str] | None = None,
) -> Tensor:
    """Run a decode step with one token per segment; see `attention.attend` for arguments not described here.

    Args:
        query: [S, G, D].
        key: [S, D], stored in the slot where the token goes.
        value: [S, Dv].
        slots: the next token goes to one without an entry, the first of them if none leaves now.
        width: slots in use, the token's own among them.
        rule: the entry that leaves has the lowest priority, and of equal ones the latest position: "position" itself,
            "mass", the attention received so far (mean over the group), as it is "stored" when entries arrive, the
            mean "row" of the layer (one more launch), "persistence" (Scissorhands) or the row, "pooled" (CAKE).
        scaling: logits = scaling * q.k.
        softcap: see `attend`.
        sinks: [S, G] fp32, see `attend`.
        arriving: gives [S] fp32, the priority of the new entry where these are stored, which is in its slot by then;
            None, or nothing given: +inf.
        active: [S] bool, segments to which a token comes; None: all. The others stay as they are.
        constants: what the rule is compiled for: HISTORY of "persistence", KERNEL, POOLING and PROTECT of "pooled".

    Returns:
        The output [S, G, Dv].
    """
    from kvsearch.kernels.jit.step import finish_step

    keys = slots.keys
    positions = slots.positions
    entries = Entries(keys, slots.values, width, positions, log_weights=slots.log_weights)
    made = Chunked(query.contiguous(), entries, scaling, softcap, sinks, rule in WEIGHING)
    output = made.output
    # Any tensor: it is read only with PAUSES.
    paused = slots.slot if active is None else active
    segments = len(query)
    parts, chunk = chunks(width, segments, RANKED, keys.device)
    # Not zeroed here, which would be one more launch: the first launch does it.
    done = torch.empty(segments, dtype=torch.int32, device=keys.device)
    reports = torch.empty(segments, parts, 5, dtype=torch.int64, device=keys.device)
    made.attend(
        arriving=(key.contiguous(), value.contiguous(), slots.slot, slots.clock, paused, done),
        pauses=active is not None,
    )
    # Between the launches: the token is in its slot, and nothing has left yet.
    scores = None if arriving is None else arriving()
    given = output if scores is None else scores.contiguous()
    more = output
    if slots.sums is not None:
        more, given = slots.sums
        made.merge(more, places=(positions, given))
    elif rule == "pooled" and slots.links is not None:
        given = slots.links
    # Missing tensors are stood in for by any other; the rule says which are read.
    state, more, ring = (*slots.state, *(output, more, output)[len(slots.state) :])
    merges = not made.whole and slots.sums is None
    launch(finish_step, (segments, parts + (query.shape[1] if merges else 0)),
        made.partial, made.statistics, made.logits, made.beside, output, positions, state, more, ring, given,
        slots.slot, slots.clock, slots.budgets, slots.sinks, slots.recent, paused, reports, done,
        width, chunk, parts, positions.shape[1], query.shape[1], made.splits, positions.stride(0),
        state.stride(0), more.shape[-1], **made.merging, BN=RANKED, PARTS=power_of_two(parts), SINKS=sinks is not None,
        OUTPUT=merges, PAUSES=active is not None, RULE=rule, SCORED=scores is not None, BYTES=ring.shape[-1],
        **(constants or {}), num_warps=4,
    )  # fmt: skip
    return output

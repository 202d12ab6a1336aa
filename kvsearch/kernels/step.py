"""A decode step of one block of slots in two launches: append, attend, update the running state, free a slot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvsearch.kernels.blocks import Blocks, chunks, power_of_two

RANKED = 512  # slots that a program looks at together

Rule = Literal["position", "mass", "stored"]


@dataclass(frozen=True)
class Slots:
    """S segments with C slots each, all changed in place; an empty slot has position -1 and 0 for state."""

    keys: Tensor  # [S, C, D]
    values: Tensor  # [S, C, Dv]
    positions: Tensor  # [S, C] int64
    state: Tensor | None  # [S, C] fp32, what `rule` reads
    slot: Tensor  # [S] int64, where the next token goes
    seen: Tensor  # [S] int64, tokens so far
    budgets: Tensor  # [S] int64; a segment that holds more gives one entry up
    sinks: Tensor  # [S] int64, how many of the first tokens always stay
    recent: Tensor  # [S] int64, and of the last


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
    arriving: Callable[[], Tensor] | None = None,
    active: Tensor | None = None,
) -> Tensor:
    """Take in one token per segment; see `attention.attend` for what is not said here.

    Args:
        query: [S, G, D].
        key: [S, D], stored in the slot where the token goes.
        value: [S, Dv].
        slots: free slots are those behind the entries but one, where the next token goes.
        width: slots in use, the token's own among them.
        rule: the entry that leaves has the lowest priority, and of equal ones the latest position: "position" itself,
            "mass", the attention received so far (mean over the group), or as it is "stored" when entries arrive.
        scaling: logits = scaling * q.k.
        softcap: see `attend`.
        sinks: [S, G] fp32, see `attend`.
        arriving: gives [S] fp32, the priority of the new entry where these are stored, which is in its slot by then;
            None: +inf.
        active: [S] bool, segments to which a token comes; None: all. The others stay as they are.

    Returns:
        The output [S, G, Dv].
    """
    from kvsearch.kernels.jit.attention import attend_chunks
    from kvsearch.kernels.jit.step import finish_step

    segments, count, dim = query.shape
    keys, values, positions = slots.keys, slots.values, slots.positions
    value_dim, device = values.shape[-1], query.device
    blocks = Blocks.of(count, dim, value_dim, query.dtype)
    tiles = -(-count // blocks.rows)
    splits, chunk = chunks(width, segments * tiles, blocks.columns, device)
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    output = query.new_empty(segments, count, value_dim)
    weighs, whole = rule == "mass", splits == 1
    partial = output if whole else _fp32(device, segments, splits, count, value_dim)
    statistics = _fp32(device, segments, splits, 2, count) if weighs or not whole else output
    logits = _fp32(device, segments, count, width) if weighs else output
    state, state_stride = (output, 0) if slots.state is None else (slots.state, slots.state.stride(0))
    paused = slots.slot if active is None else active
    kinds = {"SINKS": sinks is not None, "PAUSES": active is not None}
    sinks = output if sinks is None else sinks.contiguous()
    attend_chunks[(segments, splits, tiles)](
        query, keys, values, keys, keys, positions, sinks, output, partial, statistics, logits,
        key, value, slots.slot, slots.seen, paused,
        scaling, 1.0 if softcap is None else softcap, width, chunk, count, splits,
        query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        positions.stride(0), width,
        ROWS=1, D=dim, DV=value_dim, BM=blocks.rows, BN=blocks.columns, BD=blocks.dim, BDV=blocks.value_dim,
        FLAT=False, RAGGED=False, HOLES=True, APPEND=True, SOFTCAP=softcap is not None, WHOLE=whole, LOGITS=weighs,
        **kinds, num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    scores = output if arriving is None else arriving().contiguous()
    finish_step[(segments, 1 if whole else count + 1)](
        partial, statistics, logits, sinks, output, positions, state, scores,
        slots.slot, slots.seen, slots.budgets, slots.sinks, slots.recent, paused,
        width, positions.shape[1], count, splits, width, positions.stride(0), state_stride,
        DV=value_dim, BDV=blocks.value_dim, SP=power_of_two(splits), BM=power_of_two(count), BN=RANKED,
        OUTPUT=not whole, RULE=rule, SCORED=arriving is not None, **kinds, num_warps=4,
    )  # fmt: skip
    return output


def _fp32(device: torch.device, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=device)

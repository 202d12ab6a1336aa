"""A decode step of one block by the fused kernels, where there is one for the policy and the device."""

from __future__ import annotations

from torch import Tensor

from kvsearch.kernels.dispatch import serves
from kvsearch.kernels.step import LayerSums, Slots, step
from kvsearch.policies.decoding import Step
from kvsearch.runtime.board import Board
from kvsearch.runtime.logits import Logits
from kvsearch.runtime.rule import StepRule
from kvsearch.runtime.slots import SlotBlock, Turn


def fused_step(
    block: SlotBlock,
    turn: Turn,
    rule: StepRule,
    states: tuple[Tensor, Tensor, Tensor],
    logits: Logits,
    active: Tensor | None,
    board: Board | None = None,
) -> Tensor | None:
    """Take in a token and free a slot in one go, [S, G, Dv]; None, and nothing done, where that is not served.

    `states` are the token's query [S, G, D], key [S, D] and value [S, Dv]; it is padding where not `active` [S] bool
    (None: nowhere). `board` is where all heads of a layer add up their rows: where it is wanted the block is of all.
    """
    cached, limits = block.cached, block.limits
    query, key, value = states
    if turn.leaving.most > 1 or not serves(query, cached.keys, cached.values, key, value):
        return None
    if (running := rule.running) is None or (board is not None and len(board.parts) > 1):
        return None
    state = () if running in ("position", "row", "pooled") else tuple(cached.state.entries.values())
    slots = Slots(
        cached.keys, cached.values, cached.positions, state, block.slot, block.clock,
        limits.budgets, limits.sinks, limits.recent,
    )  # fmt: skip

    def arriving() -> Tensor | None:
        seen = block.seen + (1 if active is None else active)
        own = Step(block.first(turn.width), block.slot, seen, None)
        return rule.arriving(own, block.rows, limits.heads, logits)

    sums = None
    if board is not None:
        board.made_anew.zero_()
        sums = LayerSums(board.sums, board.first[0][:, 0])
    how = logits.scaling, logits.softcap, logits.sinks_of(cached.heads)
    constants = rule.policy.running_constants
    return step(query, key, value, slots, turn.width, running, *how, arriving, active, constants, sums)

"""A decode step of one block by the fused kernels, where there is one for the policy and the device."""

from __future__ import annotations

from torch import Tensor

from kvsearch.kernels.dispatch import serves
from kvsearch.kernels.step import Slots, step
from kvsearch.policies.decoding import Step
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
) -> Tensor | None:
    """Take in a token and free a slot in one go, [S, G, Dv]; None, and nothing done, where that is not served.

    `states` are the token's query [S, G, D], key [S, D] and value [S, Dv]; it is padding where not `active` [S] bool
    (None: nowhere).
    """
    cached, limits = block.cached, block.limits
    query, key, value = states
    if turn.leaving.most > 1 or not serves(query, cached.keys, cached.values, key, value):
        return None
    if (running := rule.running) is None:
        return None
    state = None if running == "position" else next(iter(cached.state.entries.values()))
    slots = Slots(
        cached.keys, cached.values, cached.positions, state, block.slot, block.seen,
        limits.budgets, limits.sinks, limits.recent,
    )  # fmt: skip

    def arriving() -> Tensor:
        seen = block.seen + (1 if active is None else active)
        own = Step(block.first(turn.width), block.slot, seen, None)
        return rule.arriving(own, block.rows, block.names, logits)

    scores = arriving if running == "stored" and rule.policy.online else None
    how = logits.scaling, logits.softcap, logits.sinks_of(cached.heads)
    return step(query, key, value, slots, turn.width, running, *how, scores, active)

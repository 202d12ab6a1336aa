"""A layer while its decode rule is in force: token by token, attention first, then the rule, then the slot is free.

A step has two parts. `foresee` is the host's: it makes room and decides what the step does. `step` is the device's: it
changes tensors in place and looks at no value. `attend` runs both; who compiles or captures steps runs the first ahead.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

from kvsearch.arrays import Bools, Ints
from kvsearch.errors import InternalError
from kvsearch.kernels.dispatch import serves
from kvsearch.policies import Observation
from kvsearch.policies.decoding import State, Step, slots_of
from kvsearch.runtime.attention import slot_attention
from kvsearch.runtime.board import Board
from kvsearch.runtime.fused import fused_step
from kvsearch.runtime.logits import Logits
from kvsearch.runtime.rule import StepRule
from kvsearch.runtime.slots import SlotBlock, SlotSource, SlotStore, Turn, capacities, pack, source_of


class Decoding:
    """The entries of one layer and the rule that decides which of them leave."""

    def __init__(self, store: SlotStore, rule: StepRule, peak: Ints, columns: int) -> None:
        self.store, self.rule = store, rule
        self.peak = peak  # the most each segment has held
        self.columns = columns  # tokens so far, padding counted
        self.room = 0  # tokens that there is room for ahead of time; 0: steps are as small as they can be
        self.packed = 0  # how often the storage was made anew, so that what refers to it is not used any more
        self.board: Board | None = None

    @classmethod
    def begin(cls, observation: Observation, keep: Tensor, counts: Ints, rule: StepRule, state: State) -> Decoding:
        """Start from a prompt: the entries `keep` [B, Hkv, T] bool, `counts` [B, Hkv] of them.

        `state` is as `StepRule.start` gives it.
        """
        store = pack([source_of(observation, keep, counts, state)], rule, *keep.shape[:2])
        return cls(store, rule, store.used(), keep.shape[2])

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        valid: Tensor | None,
        positions: Tensor,
        logits: Logits,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Take in q tokens one after the other, each seeing what the rule left; [B, Hq, q, D] -> [B, Hq, q, Dv].

        `key` [B, Hkv, q, D] and `value` [B, Hkv, q, Dv] are the tokens' own, `positions` [B, q] their rotary positions,
        `valid` [B, q] bool says which are no padding (None: all), `hidden` [B, Hkv, q] what the policy makes of their
        hidden states, where it wants them.
        """
        arrived = None if valid is None else valid.cpu().numpy()
        outputs = []
        for token in range(query.shape[2]):
            one = slice(token, token + 1)
            real = active = None
            if valid is not None and arrived is not None and not arrived[:, token].all():
                real, active = arrived[:, token], valid[:, token]
            states = None if hidden is None else hidden[:, :, token]
            self.foresee(real)
            step = (query[:, :, one], key[:, :, one], value[:, :, one])
            outputs.append(self.step(*step, positions[:, one], logits, states, active))
            self.tidy()
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)

    # --- the host's part ------------------------------------------------------------------------------------------

    def foresee(self, real: Bools | None = None) -> None:
        """Make room for the next token and decide what its step does; it is padding where not `real` [B]."""
        if not all(block.has_room() for block in self.store.blocks):
            self._repack()
        store, heads = self.store, self.store.heads
        over = np.zeros(store.batch, dtype=bool)
        for block in store.blocks:
            keys, mine = block.cached.keys, None if real is None else real[block.names // heads]
            dtype = torch.float32 if self.rule.policy.row is not None else keys.dtype
            used = block.foresee(mine, self.room > 0, None if serves(keys, block.cached.values) else dtype)
            over[block.names[used > block.limits.host] // heads] = True
            self.peak[block.names] = np.maximum(self.peak[block.names], used)
        self.rule.foresee(over, real)
        self.columns += 1
        if self.rule.policy.row == "layer" and (self.board is None or not self.board.holds(self.columns)):
            slots = [block.capacity for block in store.blocks]
            self.packed += self.board is not None
            sequences, columns = [block.rows for block in store.blocks], self.columns + self.room
            empty = torch.inf if self.rule.ranks_by_row else 0.0  # then no slot without an entry comes into question
            self.board = Board.growing(sequences, slots, store.batch, columns, empty)

    def tidy(self) -> None:
        """Give up slots that are not needed any more, once many entries have left."""
        for block in self.store.blocks:
            if block.turn is None or block.turn.leaving.most <= 1:
                continue
            # where room is reserved, budgets stay within reach: tensors move once at most
            wanted = block.limits.host + 1 if self.room else capacities(block.used, block.limits.host)
            if int(wanted.max()) < block.capacity:
                self._repack()
                return

    def reserve(self, tokens: int) -> None:
        """Make room for so many tokens ahead of time, and let all steps look at all slots; 0: as before."""
        self.room = tokens
        wanted = (capacities(block.used, block.limits.host, tokens) for block in self.store.blocks)
        if tokens and any((most > block.capacity).any() for most, block in zip(wanted, self.store.blocks, strict=True)):
            self._repack()
        for block in self.store.blocks:
            block.biased = False

    def plan(self) -> tuple[Hashable, ...] | None:
        """Return all that the foreseen step depends on and the host decided: steps of equal plans are the same.

        None: there is no other like it.
        """
        if self.rule.noting:
            return None
        turns = (_foreseen(block) for block in self.store.blocks)
        return self.rule.due, *((*turn[:3], *turn.leaving[1:], turn.holes) for turn in turns)

    def _repack(self) -> None:
        """Make new blocks for what is held."""
        sources = []
        for block in self.store.blocks:
            cached = block.in_use()
            slots = slots_of(cached.held, cached.positions, int(block.used.max()))
            sources.append(SlotSource(block.names, cached, slots, block.used, block.seen))
        self.store = pack(sources, self.rule, self.store.batch, self.store.heads, self.room)
        self.packed += 1
        self.board = None

    # --- the device's part ----------------------------------------------------------------------------------------

    def step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        logits: Logits,
        hidden: Tensor | None = None,
        active: Tensor | None = None,
    ) -> Tensor:
        """Take in the token that was foreseen; see `attend` for the tensors, of which q is 1.

        Not `active` [B] bool (None: all are) has padding. Nothing here waits for the device, depends on values, or
        binds a tensor that lasts.
        """
        store, policy = self.store, self.rule.policy
        self.rule.begin(query, positions, active, hidden)
        segments = store.batch * store.heads
        parts = (store.split(states.reshape(segments, -1, states.shape[-1])) for states in (query, key, value))
        outputs: list[Tensor] = []
        rows: list[Tensor | None] = []
        done: set[int] = set()
        for index, (block, own, keys, values) in enumerate(zip(store.blocks, *parts, strict=True)):
            turn, mine = _foreseen(block), None if active is None else active[block.rows]
            fused = fused_step(block, turn, self.rule, (own, keys[:, 0], values[:, 0]), logits, mine, self.board)
            if fused is not None:
                outputs.append(fused)
                rows.append(None)
                done.add(index)
                continue
            block.put(keys[:, 0], values[:, 0], turn, mine)
            into = None if self.board is None else self.board.own(index, turn.width)
            cached, bias = block.first(turn.width), block.bias_of(turn)
            output, row = slot_attention(own, cached, bias, logits, policy.row is not None, into, turn.full)
            outputs.append(output)
            rows.append(row)
        if self.board is not None:
            rows[:] = self.board.layer_rows([b.first(_foreseen(b).width).positions for b in store.blocks])
        for index, (block, row) in enumerate(zip(store.blocks, rows, strict=True)):
            if index not in done:
                self._evict(block, row, active, logits)
        return store.join(outputs).view(store.batch, -1, 1, outputs[0].shape[-1])

    def _evict(self, block: SlotBlock, row: Tensor | None, active: Tensor | None, logits: Logits) -> None:
        mine, turn = None if active is None else active[block.rows], _foreseen(block)
        cached = block.first(turn.width)
        before = None if mine is None else cached.state.changed(torch.clone, torch.clone)
        full = turn.full or (self.board is not None and self.board.empty > 0)
        step = Step(cached, block.slot, block.seen, row, full=full)
        places = block.rows, block.limits
        gone = self.rule.decide(step, *places, turn.leaving, mine, logits, block.slot, block.edge)
        if mine is not None and before is not None:
            cached.state.restore(before, ~mine)
        block.free(gone, turn, mine)

    def dense(self, seen: int) -> tuple[Tensor, Tensor] | None:
        """Return keys and values [B, Hkv, seen, D] if nothing is evicted and nothing padded, else None."""
        if any((block.used != seen).any() or block.width != seen for block in self.store.blocks):
            return None
        shape = (self.store.batch, self.store.heads)
        keys = self.store.join([block.in_use().keys for block in self.store.blocks])
        values = self.store.join([block.in_use().values for block in self.store.blocks])
        return keys.view(*shape, *keys.shape[1:]), values.view(*shape, *values.shape[1:])

    @property
    def batch(self) -> int:
        return self.store.batch

    def most_entries(self) -> Tensor:
        """Return the most entries held at a time, [B, Hkv] int64."""
        return torch.from_numpy(self.peak.reshape(self.batch, -1))

    def entries(self) -> Tensor:
        """Return the entries held per sequence and kv head, [B, Hkv] int64."""
        return self.store.entries()

    def kept_positions(self, row: int, head: int) -> list[int]:
        """Return the token indices of the entries of one sequence and head, ascending."""
        return self.store.kept_positions(row, head)

    def select_rows(self, rows: Sequence[int]) -> Decoding:
        """Return sequences `rows` of the batch, in that order and as often as named."""
        peak = self.peak.reshape(-1, self.store.heads)[list(rows)].flatten()
        return Decoding(self.store.select_rows(rows), self.rule.select_rows(rows), peak, self.columns)

    def copy(self) -> Decoding:
        """Return the same, to go its own way."""
        return self.select_rows(range(self.store.batch))

    def nbytes(self) -> int:
        """Return the bytes held, running state included."""
        return self.store.nbytes() + self.rule.nbytes()


def _foreseen(block: SlotBlock) -> Turn:
    if block.turn is None:
        raise InternalError("a step was run that was not foreseen")
    return block.turn

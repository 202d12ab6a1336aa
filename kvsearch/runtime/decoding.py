"""A layer while its decode rule is in force: token by token, attention first, then the rule, then the slot is free."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvsearch.arrays import Bools, Ints
from kvsearch.policies import Observation
from kvsearch.policies.decoding import State, Step, slots_of
from kvsearch.runtime.attention import slot_attention
from kvsearch.runtime.logits import Logits
from kvsearch.runtime.rule import StepRule
from kvsearch.runtime.slots import SlotBlock, SlotSource, SlotStore, pack, source_of


class Decoding:
    """The entries of one layer and the rule that decides which of them leave."""

    def __init__(self, store: SlotStore, rule: StepRule, peak: Ints, columns: int) -> None:
        self.store, self.rule = store, rule
        self.peak = peak  # the most each segment has held
        self.columns = columns  # tokens so far, padding counted

    @classmethod
    def begin(cls, observation: Observation, keep: Tensor, rule: StepRule, state: State) -> Decoding:
        """Start from a prompt: the entries `keep` [B, Hkv, T] bool, with `state` as `StepRule.start` gives it."""
        store = pack([source_of(observation, keep, state)], rule, *keep.shape[:2])
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
            self._store(key[:, :, token], value[:, :, token], real, active)
            states = None if hidden is None else hidden[:, :, token]
            self.rule.begin(query[:, :, one], positions[:, one], self._over(), real, active, states)
            outputs.append(self._attend(query[:, :, token], real, active, logits))
        return torch.stack(outputs, 2)

    def _store(self, key: Tensor, value: Tensor, real: Bools | None, active: Tensor | None) -> None:
        store = self.store
        if not all(block.has_room() for block in store.blocks):
            self._repack([None] * len(store.blocks))
            store = self.store
        parts = zip(store.blocks, store.split(key.flatten(0, 1)), store.split(value.flatten(0, 1)), strict=True)
        for block, keys, values in parts:
            block.put(keys, values, *self._of_block(block, real, active))
        self.columns += 1
        self.peak = np.maximum(self.peak, store.used())

    def _of_block(
        self, block: SlotBlock, real: Bools | None, active: Tensor | None
    ) -> tuple[Bools | None, Tensor | None]:
        """Return what is known of sequences [B], for the segments of a block [S]."""
        if real is None or active is None:
            return None, None
        return real[block.names // self.store.heads], active[block.rows]

    def _over(self) -> Bools:
        """Return the sequences with a head over its budget, [B]."""
        over = np.zeros(self.store.batch, dtype=bool)
        for block in self.store.blocks:
            over[block.names[block.used > block.limits.host] // self.store.heads] = True
        return over

    def _attend(self, query: Tensor, real: Bools | None, active: Tensor | None, logits: Logits) -> Tensor:
        """Compute one token's attention [B, Hq, D] -> [B, Hq, Dv], and what follows from it."""
        store, policy = self.store, self.rule.policy
        queries = store.split(query.reshape(store.batch * store.heads, -1, query.shape[-1]))
        outputs: list[Tensor] = []
        rows: list[Tensor | None] = []
        for block, part in zip(store.blocks, queries, strict=True):
            cached = block.in_use()
            empty = None if block.full else ~cached.held
            output, row = slot_attention(part, cached, empty, logits, policy.row is not None)
            outputs.append(output)
            rows.append(row)
        if policy.row == "layer":
            parts = zip(store.blocks, rows, strict=True)
            known = [(block.rows, block.in_use().positions, row) for block, row in parts if row is not None]
            rows = list(layer_rows(known, store.batch, self.columns))
        self._evict(rows, real, active, logits)
        return store.join(outputs).view(store.batch, -1, outputs[0].shape[-1])

    def _evict(self, rows: Sequence[Tensor | None], real: Bools | None, active: Tensor | None, logits: Logits) -> None:
        leaving = []
        for block, row in zip(self.store.blocks, rows, strict=True):
            came, mine = self._of_block(block, real, active)
            cached = block.in_use()
            before = None if mine is None else cached.state.changed(torch.clone, torch.clone)
            step = Step(cached, block.slot, block.seen, row)
            gone, block.used = self.rule.decide(step, block.rows, block.limits, block.used, came, mine, logits)
            if mine is not None and before is not None:
                cached.state.restore(before, ~mine)
            leaving.append(gone)
        if any(gone is not None and gone.shape[1] > 1 for gone in leaving):
            self._repack(leaving)
            return
        for block, gone in zip(self.store.blocks, leaving, strict=True):
            block.free(None if gone is None else gone[:, 0], None if active is None else active[block.rows])

    def _repack(self, leaving: Sequence[Tensor | None]) -> None:
        """Make new blocks for what stays once `leaving` has left."""
        sources = []
        for block, gone in zip(self.store.blocks, leaving, strict=True):
            cached = block.in_use()
            held = cached.held if gone is None else cached.staying(gone)
            sources.append(SlotSource(block.names, cached, slots_of(held, cached.positions), block.used, block.seen))
        self.store = pack(sources, self.rule, self.store.batch, self.store.heads)

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


def layer_rows(parts: Sequence[tuple[Tensor, Tensor, Tensor]], batch: int, columns: int) -> list[Tensor]:
    """Average attention rows over all heads of the layer that hold an entry (TOVA), [S, C] fp32 per part.

    A part is the sequence of each segment [S], its positions [S, C], all below `columns`, and its own rows [S, C].
    """
    sums = parts[0][2].new_zeros(batch, columns + 1)  # empty slots go to the last place
    counts = torch.zeros_like(sums)
    places = []
    for sequences, positions, row in parts:
        held = positions >= 0
        where = (sequences[:, None].expand_as(positions), torch.where(held, positions, columns))
        sums.index_put_(where, row, accumulate=True)
        counts.index_put_(where, held.float(), accumulate=True)
        places.append(where)
    mean = sums / counts.clamp(min=1)
    return [mean[where] for where in places]

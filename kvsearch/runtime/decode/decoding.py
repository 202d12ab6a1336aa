"""A layer that evicts while it decodes: each token is stored and attends, then the rule frees a slot.

A step has two parts. `prepare_step` is the host's: it makes room and decides what the step does. `step` is the
device's: it changes tensors in place and looks at no value. `attend` runs both; who compiles or captures steps runs the
first ahead.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvsearch.core.arrays import Bools, Ints
from kvsearch.core.errors import assert_present
from kvsearch.kernels.dispatch import needs_gradients, serves
from kvsearch.kernels.step import Slots, step
from kvsearch.policies.decoding import LOG_WEIGHTS, Cached, Step, list_slots
from kvsearch.runtime.attention import attend_slots
from kvsearch.runtime.decode.rule import StepRule
from kvsearch.runtime.logits import Logits
from kvsearch.runtime.store.blocks import GROWTH_SHARE, MIN_SPARE, Segmented, make_index
from kvsearch.runtime.store.slots import SlotBlock, SlotSource, StepPlan, compute_capacities, pack, select_segments


class Decoding(Segmented):
    """The cached entries of one layer for a batch, with the decode rule that evicts them."""

    def __init__(self, blocks: list[SlotBlock], rule: StepRule, columns: int, peak: Ints | None = None) -> None:
        self.rule = rule
        self.heads = rule.heads
        self.batch = len(rule.next_position)
        self._hold(blocks)
        self.peak = self.used() if peak is None else peak  # the most each segment has held
        self.columns = columns  # tokens so far, padding counted
        self.room = 0  # tokens that there is room for ahead of time; 0: steps are as small as they can be
        self.packed = 0  # how often the storage was made anew, so that what refers to it is not used any more

    def _hold(self, blocks: list[SlotBlock]) -> None:
        self.blocks = blocks
        self.averages: AttentionAverages | None = None
        super().__init__([make_index(block.names, block.slot.device) for block in blocks])

    @classmethod
    def joined(cls, parts: Sequence[Decoding]) -> Decoding:
        """Join several batches, to which no token has come yet, into one, in their order."""
        rule = StepRule.joined([part.rule for part in parts])
        sources = []
        first = 0
        for part in parts:
            sources += [replace(source, names=source.names + first * rule.heads) for source in part._sources()]
            first += part.batch
        return cls(pack(sources, rule), rule, max(part.columns for part in parts))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        logits: Logits,
        hidden: Tensor | None = None,
        arrived: Tensor | None = None,
        shown: Tensor | None = None,
    ) -> Tensor:
        """Decode q tokens one after the other, each seeing what the rule left; [B, Hq, q, D] -> [B, Hq, q, Dv].

        `key` [B, Hkv, q, D] and `value` [B, Hkv, q, Dv] are the tokens' own, `positions` [B, q] their rotary positions,
        `hidden` [B, Hkv, q] what the policy makes of their hidden states, where it wants them; for `arrived` and
        `shown` see `read_mask.Visible`.
        """
        # Read once for all tokens: each read waits for the device.
        known = None if arrived is None else arrived.cpu().numpy()
        outputs = []
        # One after the other, as each token sees what the rule has left after the one before it.
        for token in range(query.shape[2]):
            this = slice(token, token + 1)
            real = active = None
            if arrived is not None and known is not None and not known[:, token].all():
                real = known[:, token]
                active = arrived[:, token]
            states = None if hidden is None else hidden[:, :, token]
            self.prepare_step(real)
            step = (query[:, :, this], key[:, :, this], value[:, :, this])
            outputs.append(self.step(*step, positions[:, this], logits, states, active, shown))
            self.finish_step()
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)

    # --- the host's part ------------------------------------------------------------------------------------------

    def prepare_step(self, real: Bools | None = None) -> None:
        """Prepare the next step on the host: make room, and decide what it does; padding where not `real` [B]."""
        # All segments of a block have the same number of slots, so the fullest one says when it is full.
        if any(int(block.used.max()) == block.capacity for block in self.blocks):
            self._repack()
        heads = self.heads
        over = np.zeros(self.batch, dtype=bool)
        for block in self.blocks:
            keys = block.cached.keys
            real_segments = None if real is None else real[block.names // heads]
            dtype = None if serves(keys, block.cached.values) else self._bias_dtype(keys)
            used = block.prepare_step(real_segments, self.room > 0, dtype)
            # A sequence is over its budgets if any of its heads is.
            over[block.names[used > block.limits.host] // heads] = True
            self.peak[block.names] = np.maximum(self.peak[block.names], used)
        self.rule.prepare_step(over, real)
        for block in self.blocks if self.rule.running == "pooled" else ():
            # CAKE's kernel pools over neighbours by position. A step without that kernel loses the links; made anew
            # they are another tensor, which captured steps do not know.
            if block.links is None and serves(block.cached.keys, block.cached.values):
                block.link()
                self.packed += 1
        self.columns += 1
        # The table has a column for every token of a sequence, so it is made anew, with room to spare, as these come.
        if self.rule.policy.row == "layer" and (self.averages is None or self.columns > self.averages.columns):
            slots = [block.capacity for block in self.blocks]
            self.packed += self.averages is not None
            sequences = [block.rows for block in self.blocks]
            columns = self.columns + self.room
            empty = torch.inf if self.rule.ranks_by_row else 0.0  # then no slot without an entry comes into question
            self.averages = AttentionAverages(sequences, slots, self.batch, columns, empty)

    def _bias_dtype(self, keys: Tensor) -> torch.dtype:
        return torch.float32 if self.rule.policy.row is not None else keys.dtype

    def finish_step(self) -> None:
        """Shrink the storage once many entries have left."""
        for block in self.blocks:
            if block.step_plan is None or block.step_plan.leaving.max_leaving <= 1:
                continue
            # where room is reserved, budgets stay within reach: tensors move once at most
            wanted = block.limits.host + 1 if self.room else compute_capacities(block.used, block.limits.host)
            if int(wanted.max()) < block.capacity:
                self._repack()
                return

    def reserve(self, tokens: int) -> None:
        """Reserve room for `tokens` tokens ahead, and let all steps look at all slots; 0: as before."""
        self.room = tokens
        wanted = (compute_capacities(block.used, block.limits.host, tokens) for block in self.blocks)
        if tokens and any((needed > block.capacity).any() for needed, block in zip(wanted, self.blocks, strict=True)):
            self._repack()
        # Steps look at all slots from now on, so what is added to logits no longer fits.
        for block in self.blocks:
            block.biased = False

    def plan(self) -> tuple[Hashable, ...] | None:
        """Return a key of the prepared step: steps with equal keys do the same on the device.

        None: it cannot be repeated.
        """
        if self.rule.noting:
            return None
        # All but `stay`: these counts change at every step, and the device never sees them.
        plans = (_plan_step(block) for block in self.blocks)
        return self.rule.due, *((*plan[:3], *plan.leaving[1:], plan.holes) for plan in plans)

    def _sources(self) -> list[SlotSource]:
        """Return all entries as sources for `pack`."""
        sources = []
        for block in self.blocks:
            cached = block.first(block.width)
            slots = list_slots(cached.held, cached.positions, int(block.used.max()))
            sources.append(SlotSource(block.names, cached, slots, block.used, block.seen))
        return sources

    def _repack(self) -> None:
        """Move all entries to new blocks."""
        self._hold(pack(self._sources(), self.rule, self.room))
        self.packed += 1

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
        visible: Tensor | None = None,
    ) -> Tensor:
        """Run the prepared step for one token per sequence; tensors as for `attend`, with q = 1.

        Not `active` [B] bool (None: all are) has padding. Attention sees the tokens that are `visible` [B, T] bool, by
        their index in the sequence (None: all); the rule, which decides what leaves, knows all of them. Nothing here
        waits for the device, depends on values, or binds a tensor that lasts.
        """
        policy = self.rule.policy
        # A step writes in place, which would spoil what a backward pass reads, so it goes on in copies. Which entries
        # leave is a choice and has no gradient.
        learning = needs_gradients(query, key, value)
        if learning:
            self.separate()
        with torch.set_grad_enabled(torch.is_grad_enabled() and not learning):
            self.rule.begin(query, positions, active, hidden)
        segments = self.batch * self.heads
        parts = (self.split(states.reshape(segments, -1, states.shape[-1])) for states in (query, key, value))
        outputs: list[Tensor] = []
        rows: list[Tensor | None] = []
        evicting: list[SlotBlock] = []  # blocks whose step is not done in one go
        for index, (block, own, keys, values) in enumerate(zip(self.blocks, *parts, strict=True)):
            step_plan = _plan_step(block)
            arriving = None if active is None else active[block.rows]
            fused = None
            # The fused kernel sees in the positions alone which slots hold an entry: it cannot hide some of them for
            # one step.
            if visible is None:
                fused = make_fused_step(
                    block, step_plan, self.rule, (own, keys[:, 0], values[:, 0]), logits, arriving, self.averages
                )
            # The token is stored, has attended, and a slot is free: nothing else is to be done for this block.
            if fused is not None:
                outputs.append(fused)
                continue
            block.put(keys[:, 0], values[:, 0], step_plan, arriving)
            into = None if self.averages is None else self.averages.parts[index][0, :, : step_plan.width]
            cached = block.first(step_plan.width)
            bias = None if not step_plan.bias or block.bias is None else block.bias[:, : step_plan.width]
            full = step_plan.full
            # A hidden entry looks like an empty slot to attention, and keeps its slot.
            if visible is not None:
                cached = block.showing(step_plan, visible)
                full = False
                bias = cache_bias(cached, self._bias_dtype(cached.keys))
            output, row = attend_slots(own, cached, bias, logits, policy.row is not None, into, full)
            outputs.append(output)
            rows.append(row)
            evicting.append(block)
        if self.averages is not None and evicting:  # all blocks of the layer
            rows[:] = self.averages.layer_rows([b.first(_plan_step(b).width).positions for b in evicting])
        if learning:
            self.separate()
        with torch.set_grad_enabled(torch.is_grad_enabled() and not learning):
            for block, row in zip(evicting, rows, strict=True):
                self._evict(block, row, active, logits)
        return self.join(outputs).view(self.batch, -1, 1, outputs[0].shape[-1])

    def _evict(self, block: SlotBlock, row: Tensor | None, active: Tensor | None, logits: Logits) -> None:
        arriving = None if active is None else active[block.rows]
        step_plan = _plan_step(block)
        cached = block.first(step_plan.width)
        # Rules update all segments; those without a token are put back to this.
        before = None if arriving is None else cached.state.changed(torch.clone, torch.clone)
        full = step_plan.full or (self.averages is not None and self.averages.empty > 0)
        step = Step(cached, block.slot, block.seen, row, full=full)
        places = block.rows, block.limits
        gone = self.rule.decide(step, *places, step_plan.leaving, arriving, logits, block.slot, block.edge)
        if arriving is not None and before is not None:
            cached.state.restore(before, ~arriving)
        block.free(gone, step_plan, arriving)
        # Only the fused kernel keeps these up to date.
        block.links = None

    def dense(self, seen: int) -> tuple[Tensor, Tensor] | None:
        """Return keys and values [B, Hkv, seen, D] if nothing is evicted and nothing padded, else None."""
        if any((block.used != seen).any() or block.width != seen for block in self.blocks):
            return None
        shape = (self.batch, self.heads)
        keys = self.join([block.first(block.width).keys for block in self.blocks])
        values = self.join([block.first(block.width).values for block in self.blocks])
        return keys.view(*shape, *keys.shape[1:]), values.view(*shape, *values.shape[1:])

    def most_entries(self) -> Tensor:
        """Return the most entries held at a time, [B, Hkv] int64."""
        return torch.from_numpy(self.peak.reshape(self.batch, -1))

    def used(self) -> Ints:
        """Return the entries held per segment, [B * Hkv]."""
        held = np.zeros(self.batch * self.heads, dtype=np.int64)
        for block in self.blocks:
            held[block.names] = block.used
        return held

    def entries(self) -> Tensor:
        """Return the entries held per sequence and kv head, [B, Hkv] int64."""
        return torch.from_numpy(self.used().reshape(self.batch, self.heads))

    def select_rows(self, rows: Sequence[int]) -> Decoding:
        """Return sequences `rows` of the batch, in that order and as often as named."""
        pairs = zip(self.blocks, self.rows_of(rows), strict=True)
        blocks = [select_segments(block, chosen, self.heads) for block, chosen in pairs if len(chosen)]
        peak = self.peak.reshape(-1, self.heads)[list(rows)].flatten()
        return Decoding(blocks, self.rule.select_rows(rows), self.columns, peak)

    def copy(self) -> Decoding:
        """Return an independent copy."""
        return self.select_rows(range(self.batch))

    def nbytes(self) -> int:
        """Return the bytes held, running state and free slots included."""
        return super().nbytes() + self.rule.nbytes()


def cache_bias(cached: Cached, dtype: torch.dtype) -> Tensor:
    """Return the attention bias of slots, [S, C]: 0, or -inf where there is no entry.

    Padding may see no entry at all: it sees every slot then, so that what becomes of it is finite.
    """
    held = cached.held
    shown = held | ~held.any(-1, keepdim=True)
    return torch.zeros(held.shape, dtype=dtype, device=held.device).masked_fill_(~shown, float("-inf"))


def _plan_step(block: SlotBlock) -> StepPlan:
    return assert_present(block.step_plan, "a step was run that was not foreseen")


def make_fused_step(
    block: SlotBlock,
    step_plan: StepPlan,
    rule: StepRule,
    states: tuple[Tensor, Tensor, Tensor],
    logits: Logits,
    active: Tensor | None,
    averages: AttentionAverages | None = None,
) -> Tensor | None:
    """Run a decode step as a fused kernel; return its output [S, G, Dv], or None, nothing done, where none serves.

    `states` are the token's query [S, G, D], key [S, D] and value [S, Dv]; it is padding where not `active` [S] bool
    (None: nowhere). `averages` is where all heads of a layer add up their rows: where it is wanted the block is of all.
    """
    cached = block.cached
    limits = block.limits
    query, key, value = states
    # The kernel frees one slot of a segment, and gradients do not pass through it.
    if step_plan.leaving.max_leaving > 1 or not serves(query, cached.keys, cached.values, key, value):
        return None
    if (running := rule.running) is None or (averages is not None and len(averages.parts) > 1):
        return None
    read = {name: held for name, held in cached.state.entries.items() if name != LOG_WEIGHTS}
    state = () if running in ("position", "row", "pooled") else tuple(read.values())
    sums = None
    if averages is not None:
        # Heads add to these by atomic operations, so they begin at zero.
        averages.made_anew.zero_()
        sums = averages.sums, averages.first[0][:, 0]
    slots = Slots(
        cached.keys, cached.values, cached.positions, state, block.slot, block.clock,
        limits.budgets, limits.sinks, limits.recent, block.links, sums, cached.log_weights,
    )  # fmt: skip

    def arriving() -> Tensor | None:
        # The new entry is scored between the two launches, and the clock goes on in the second.
        seen = block.seen + (1 if active is None else active)
        own = Step(block.first(step_plan.width), block.slot, seen, None)
        return rule.arriving(own, block.rows, limits.heads, logits)

    how = logits.scaling, logits.softcap, logits.sinks_of(cached.heads)
    constants = rule.policy.running_constants
    return step(query, key, value, slots, step_plan.width, running, *how, arriving, active, constants)


class AttentionAverages:
    """Averages of attention rows over the heads of a layer, made from a column of sums for every token of a sequence.

    There are columns for some tokens to come, too. `rows` are the sequences of the segments of each part, [S], and
    `slots` says how many slots a part has; slots without an entry get `empty`, 0 or infinity.
    """

    def __init__(
        self, rows: Sequence[Tensor], slots: Sequence[int], batch: int, columns: int, empty: float = 0.0
    ) -> None:
        self.columns = columns + max(MIN_SPARE, int(columns * GROWTH_SHARE))
        self.empty = empty
        width = self.columns + 1  # in front, a column for slots without an entry
        self.sums = torch.empty(2, batch * width, device=rows[0].device)  # of attention, and how many hold the entry
        self.made_anew = self.sums.view(2, batch, width)[..., 1 if empty else 0 :]
        if empty:
            self.sums[0].fill_(empty)  # in front nothing but 0 is added to it
            self.sums[1].fill_(1.0)
        # Where position 0 of each segment is; the position -1 of an empty slot falls on the column in front.
        self.first = [sequences[:, None] * width + 1 for sequences in rows]  # [S, 1]
        # what is added up: attention, to be written by who makes it, and 1
        self.parts = [self.sums.new_ones(2, len(places), count) for places, count in zip(rows, slots, strict=True)]

    def layer_rows(self, positions: Sequence[Tensor]) -> list[Tensor]:
        """Average the rows over all heads of the layer that hold an entry, [S, C] fp32, for positions of each part."""
        self.made_anew.zero_()
        places = []
        for held, first, own in zip(positions, self.first, self.parts, strict=True):
            place = (held + first).view(-1)
            self.sums.scatter_add_(1, place.expand(2, -1), own[:, :, : held.shape[1]].detach().reshape(2, -1))
            places.append(place)
        # Columns that no head holds are 0 / 0, and nothing gathers them.
        mean = self.sums[0] / self.sums[1]
        return [mean.gather(0, place).view_as(held) for place, held in zip(places, positions, strict=True)]

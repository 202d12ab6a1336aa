"""Teacher-forced replay: what a layer would attend to, and evict, over K given tokens, without running them one by one.

A decode rule uses nothing but its own layer's queries, keys and values. When these are known for all K tokens, as in
teacher forcing with the layer's input unperturbed, the logits of all tokens come from one product and their outputs
from another; only the choice of what leaves goes token by token, over as many slots as are held.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvsearch.arrays import Ints
from kvsearch.policies import Observation
from kvsearch.policies.checks import require_finite
from kvsearch.policies.decoding import Cached, State, Step, by_position, entries_at
from kvsearch.runtime.attention import causal_mask
from kvsearch.runtime.board import Board
from kvsearch.runtime.collector import Rotary
from kvsearch.runtime.eviction import Kept, PhaseRule, select
from kvsearch.runtime.logits import Logits
from kvsearch.runtime.rule import Limits, StepRule
from kvsearch.runtime.slots import segments_of


class Shared(NamedTuple):
    """What replays of the same tokens have in common."""

    keys: Tensor  # [B, Hkv, T + K, D]
    values: Tensor  # [B, Hkv, T + K, Dv]
    scores: Tensor  # [B * Hkv, G, K, T + K] fp32, attention logits of the tokens over all columns

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, query: Tensor, logits: Logits) -> Shared:
        """Make it of the keys and values of prompt and tokens, and the tokens' queries; see `replay`."""
        flat = keys.flatten(0, 1)
        scores = logits.of(query.reshape(len(flat), -1, query.shape[-1]), flat)
        return cls(keys, values, scores.view(len(flat), -1, query.shape[2], flat.shape[1]))


class Stretch(NamedTuple):
    """Tokens during which the same slots were there."""

    held: Tensor  # [S, k, C] bool, what each of them attended to
    columns: Tensor | None  # [S, C] column of each slot; None: a slot for every column


@dataclass(frozen=True)
class Replay:
    """What came of K tokens in one layer."""

    outputs: Tensor  # [B, Hq, K, Dv] attention outputs
    held: Tensor  # [B, Hkv, T + K] int64, indices of the tokens held at the end, -1 elsewhere
    most: Tensor  # [B, Hkv] int64, the most entries held at a time
    stretches: tuple[Stretch, ...]

    @property
    def shown(self) -> Tensor:
        """What each token attended to: the prompt's entries, then the tokens', [B, Hkv, K, T + K] bool."""
        batch, heads, width = self.held.shape
        parts = [spread(one.held, one.columns, width) for one in self.stretches]
        return torch.cat(parts, 1).view(batch, heads, -1, width)

    @property
    def kept(self) -> list[list[list[int]]]:
        """Per sequence and kv head: token indices held at the end, ascending."""
        return [[sorted(row[row >= 0].tolist()) for row in heads] for heads in self.held]


def replay(
    observation: Observation,
    prefill: PhaseRule | None,
    decode: PhaseRule | None,
    tokens: tuple[Tensor, Tensor, Tensor],
    logits: Logits,
    rotary: Rotary,
    shared: Shared | None = None,
    hidden: Tensor | None = None,
) -> Replay:
    """Compute attention of the K tokens after a prompt under a layer's phase rules, as decoding them one by one would.

    `observation` is the dense prompt with what the policies need of it; `tokens` are the queries [B, Hq, K, D], keys
    [B, Hkv, K, D] and values [B, Hkv, K, Dv] that follow. No tensor given is changed. Scratch memory is that of the
    logits, B * Hq * K * (T + K) fp32. `shared` spares computing again what does not depend on the rules. `hidden`
    [B, Hkv, K] is what the decode policy makes of the tokens' hidden states, where it wants them.
    """
    left = select(observation, prefill, decode, rotary)
    if shared is None or left.observation is not observation:  # merging changes keys and values
        states = (left.observation.keys, left.observation.values)
        keys, values = (torch.cat(pair, 2) for pair in zip(states, tokens[1:], strict=True))
        shared = Shared.of(keys, values, tokens[0], logits)
    return _ReplayState(left, tokens, logits, shared, hidden).run()


class _ReplayState:
    """All prompt and new columns of a layer side by side; what is held is a matter of `positions`.

    Once much has left, the slots that are not needed any more are given up: `columns` says which are there.
    """

    def __init__(
        self,
        left: Kept,
        tokens: tuple[Tensor, Tensor, Tensor],
        logits: Logits,
        shared: Shared,
        hidden: Tensor | None = None,
    ) -> None:
        self.query, self.hidden = tokens[0], hidden
        self.rule, self.logits, self.shared = left.rule, logits, shared
        seen = left.observation
        self.batch, self.heads, self.length = left.keep.shape
        self.count = self.query.shape[2]
        self.rows = torch.arange(self.batch, device=self.query.device).repeat_interleave(self.heads)
        self.names = np.arange(len(self.rows))
        self.limits = None if left.rule is None else left.rule.limits(self.names, self.query.device)
        self.board: Board | None = None
        self.cached = self._columns(left)
        self.columns: Tensor | None = None  # [S, C] column of each slot; None: all of them
        self.own = self.length  # slot of the first token
        self.seen = seen.seen.repeat_interleave(self.heads)
        self.following = seen.seen if seen.next_position is None else seen.next_position
        self.used: Ints = left.keep.flatten(0, 1).sum(-1).cpu().numpy()
        self.most = self.used
        self.waiting: list[Tensor] = []  # what the tokens of this stretch attended to, [S, C] bool each
        self.stretches: list[Stretch] = []
        self.outputs: list[Tensor] = []  # [S, G, k, Dv]

    def _columns(self, left: Kept) -> Cached:
        """Make a slot for every column; the tokens' own are empty yet."""
        prompt = segments_of(left.observation, left.state)
        held = prompt.positions.masked_fill(~left.keep.flatten(0, 1), -1)

        def longer(tensor: Tensor) -> Tensor:
            return torch.cat([tensor, tensor.new_zeros(len(tensor), self.count, *tensor.shape[2:])], 1)

        keys, values = self.shared.keys.flatten(0, 1), self.shared.values.flatten(0, 1)
        changing = left.rule is not None and left.rule.policy.merges
        cached = replace(
            prompt,
            keys=keys.clone() if changing else keys,
            values=values.clone() if changing else values,
            positions=torch.cat([held, held.new_full((len(held), self.count), -1)], 1),
            state=prompt.state.changed(longer, torch.clone),
        )
        # what an empty slot has for state is zero
        _clear(cached.state, cached.positions < 0)
        return cached

    def run(self) -> Replay:
        if self.rule is None or self.limits is None:
            self.waiting = list(self._unruled().unbind(1))
        else:
            for token in range(self.count):
                self._step(self.rule, self.limits, token)
            require_finite(self.rule.looks)
        self._close()
        held = spread(self.cached.positions[:, None], self.columns, self.length + self.count, -1)
        return Replay(
            torch.cat(self.outputs, 2).view(self.batch, -1, self.count, self.cached.values.shape[-1]),
            held.view(self.batch, self.heads, -1),
            torch.from_numpy(self.most.reshape(self.batch, self.heads)),
            tuple(self.stretches),
        )

    def _step(self, rule: StepRule, limits: Limits, token: int) -> None:
        self.cached.positions[:, self.own + token] = self.seen
        self.seen, self.used = self.seen + 1, self.used + 1
        self.most = np.maximum(self.most, self.used)
        held, row = self.cached.held, None
        self.waiting.append(held)
        if rule.policy.merges or rule.policy.row is not None:
            scores = self._scores(token).masked_fill(~held[:, None], float("-inf"))
            weights = self.logits.softmax(scores, self.cached.heads)
            row = weights.mean(1)
            if rule.policy.merges:
                self.outputs.append((weights.to(self.cached.values.dtype) @ self.cached.values)[:, :, None])
        self._evict(rule, limits, token, row)

    def _unruled(self) -> Tensor:
        """Return what the tokens see where nothing leaves after the prompt, [S, K, T + K] bool."""
        columns = self.cached.positions[:, : self.length] >= 0
        own = causal_mask(self.count, self.count, columns.device).expand(len(columns), -1, -1)
        shown = torch.cat([columns[:, None].expand(-1, self.count, -1), own], -1)
        arrived = torch.arange(self.count, device=columns.device)
        self.cached.positions[:, self.length :] = self.seen[:, None] + arrived
        self.most = self.used + self.count
        return shown

    def _close(self) -> None:
        """Compute the outputs of the tokens of this stretch, unless they are there."""
        if not self.waiting:
            return
        held = torch.stack(self.waiting, 1)
        first = sum(stretch.held.shape[1] for stretch in self.stretches)
        self.stretches.append(Stretch(held, self.columns))
        self.waiting = []
        if self.rule is not None and self.rule.policy.merges:
            return
        scores = self._scores(slice(first, first + held.shape[1])).masked_fill(~held[:, None], float("-inf"))
        weights = self.logits.softmax(scores, self.cached.heads).to(self.cached.values.dtype)
        result = weights.flatten(1, 2) @ self.cached.values
        self.outputs.append(result.view(*weights.shape[:3], -1))

    def _scores(self, tokens: int | slice) -> Tensor:
        """Return the attention logits of a token over the slots, [S, G, C] fp32, or of several, [S, G, k, C]."""
        if self.rule is not None and self.rule.policy.merges:  # keys are not those given for long
            query = self.query[:, :, tokens]
            return self.logits.of(query.reshape(len(self.rows), -1, query.shape[-1]), self.cached.keys)
        scores = self.shared.scores[:, :, tokens]
        if self.columns is None:
            return scores
        columns = self.columns.view(len(self.rows), *[1] * (scores.dim() - 2), -1)
        return scores.gather(-1, columns.expand(*scores.shape[:-1], -1))

    def _evict(self, rule: StepRule, limits: Limits, token: int, row: Tensor | None) -> None:
        over = np.any((self.used > limits.host).reshape(self.batch, self.heads), axis=-1)
        states = None if self.hidden is None else self.hidden[:, :, token]
        rule.foresee(over)
        rule.begin(self.query[:, :, token : token + 1], (self.following + token)[:, None], hidden=states)
        if row is not None and rule.policy.row == "layer":
            positions = self.cached.positions
            if self.board is None:
                self.board = Board([self.rows], [positions.shape[1]], self.batch, self.length + self.count)
            self.board.own(0, positions.shape[1]).copy_(row)
            row = self.board.layer_rows([positions])[0]
        step = Step(self.cached, torch.full_like(self.rows, self.own + token), self.seen, row)
        plan = limits.leaving(self.used, None)
        leaving = rule.decide(step, self.rows, self.names, limits, plan, None, self.logits)
        self.used = plan.stay
        if leaving is not None:
            gone = self.cached.held & ~self.cached.staying(leaving)
            self.cached.positions.masked_fill_(gone, -1)
            _clear(self.cached.state, gone)
            self._give_up_slots(token)

    def _give_up_slots(self, token: int) -> None:
        """Keep slots for what is held after `token` and for the tokens to come, if that is less than half of them."""
        used, ahead = int(self.used.max()), self.count - token - 1
        cached, width = self.cached, self.cached.positions.shape[1]
        if 2 * (used + ahead) >= width:
            return
        self._close()
        coming = torch.arange(width - ahead, width, device=self.rows.device).expand(len(self.rows), -1)
        slots = torch.cat([by_position(cached.positions, cached.held)[:, :used], coming], 1)

        def chosen(tensor: Tensor) -> Tensor:
            index = slots.view(*slots.shape, *[1] * (tensor.dim() - 2)).expand(-1, -1, *tensor.shape[2:])
            return tensor.gather(1, index)

        self.columns = slots if self.columns is None else self.columns.gather(1, slots)
        self.own = used - token - 1
        self.cached = replace(
            cached,
            keys=entries_at(cached.keys, slots),
            values=entries_at(cached.values, slots),
            positions=cached.positions.gather(1, slots),
            state=cached.state.changed(chosen, lambda tensor: tensor),
        )


def _clear(state: State, slots: Tensor) -> None:
    """Zero the state of slots [S, C] bool, in place."""
    for tensor in state.entries.values():
        tensor.masked_fill_(slots.view(*slots.shape, *[1] * (tensor.dim() - 2)), 0)


def spread(slots: Tensor, columns: Tensor | None, width: int, empty: int = 0) -> Tensor:
    """Spread values of slots [S, k, C] by column, [S, k, width], `empty` where a column has no slot."""
    if columns is None:
        return slots
    found = slots.new_full((*slots.shape[:2], width), empty)
    return found.scatter_(2, columns[:, None].expand(-1, slots.shape[1], -1), slots)

"""Replay tokens one after the other: what leaves after each, for segments of many sequences and layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvsearch.core.arrays import Ints
from kvsearch.policies.checks import require_finite
from kvsearch.policies.decoding import LOG_WEIGHTS, Cached, Step, gather_entries, sort_by_position, widen_marks
from kvsearch.policies.scoring import choose_chunk_bytes
from kvsearch.runtime.attention import make_causal_mask
from kvsearch.runtime.decode.decoding import AttentionAverages
from kvsearch.runtime.decode.rule import Limits, StepRule
from kvsearch.runtime.logits import Logits

LOGIT_TABLES = 3  # of attention logits that there are at a time: logits, masked ones, weights


# k tokens during which the same slots were there: what each of them attended to, [S, k, C] bool, and the column of each
# slot, [S, C]; None: a slot for every column
Stretch = tuple[Tensor, Tensor | None]


@dataclass(eq=False)
class ReplayState:
    """Entries held while K tokens are replayed, for the S segments of N sequences (a sequence's side by side).

    `cached` has the slots of the prompt and K empty ones behind them; its `positions` say which hold an entry. Once
    much has left, the slots that are not needed any more are given up: `columns` [S, C] says which column of prompt and
    tokens each is (None: all are there).
    """

    query: Tensor  # [N, Hq, K, D]
    cached: Cached
    columns: Tensor | None
    used: Ints  # [S] entries held
    seen: Tensor  # [S] tokens so far
    following: Tensor  # [N] rotary position of the first token
    rule: StepRule | None
    logits: Logits
    width: int  # T + K
    hidden: Tensor | None = None  # what the decode policy makes of the tokens' hidden states, [N, Hkv, K]

    def __post_init__(self) -> None:
        self.batch, _, self.count, dim = self.query.shape
        segments = len(self.used)
        self.heads = segments // self.batch
        self.by_segment = self.query.reshape(segments, -1, self.count, dim)  # [S, G, K, D]
        self.rows = torch.arange(self.batch, device=self.query.device).repeat_interleave(self.heads)
        self.limits = None if self.rule is None else self.rule.limits(np.arange(segments), self.query.device)
        self.averages: AttentionAverages | None = None
        self.own = self.cached.positions.shape[1] - self.count  # slot of the first token
        self.waiting: list[Tensor] = []  # what the tokens of this stretch attended to, [S, C] bool each
        self.stretches: list[Stretch] = []
        self.outputs: list[Tensor] = []  # [S, G, k, Dv]
        if int(self.used.min()) < self.own:  # else the only empty slots are those of the tokens, which are clear
            _clear(self.cached)

    def run(self) -> Tensor:
        """Replay all tokens; return their outputs, [S, G, K, Dv]."""
        if self.rule is None or self.limits is None:
            self.waiting = list(self._unruled().unbind(1))
        else:
            for token in range(self.count):
                self._step(self.rule, self.limits, token)
            require_finite(self.rule.checks)
        self._close()
        return torch.cat(self.outputs, 2)

    def _step(self, rule: StepRule, limits: Limits, token: int) -> None:
        # The token takes its slot, attends to what is held, and only then the rule decides what leaves, as at runtime.
        self.cached.positions[:, self.own + token] = self.seen
        self.seen = self.seen + 1
        self.used = self.used + 1
        held = self.cached.held
        row = None
        self.waiting.append(held)
        # Rules that read no attention need no logits here: outputs are made for a stretch at once, see `_close`.
        if rule.policy.merges or rule.policy.row is not None:
            carried = self.cached.log_weights
            bias = None if carried is None else carried[:, None].float()
            scores = self.logits.of(self.by_segment[:, :, token], self.cached.keys, bias)
            weights = self.logits.softmax(scores.masked_fill_(~held[:, None], float("-inf")), self.cached.heads)
            row = weights.mean(1)
            # Merging changes values that this token has seen as they were, so its output cannot wait.
            if rule.policy.merges:
                self.outputs.append((weights.to(self.cached.values.dtype) @ self.cached.values)[:, :, None])
        self._evict(rule, limits, token, row)

    def _unruled(self) -> Tensor:
        """Return which slots the tokens see where nothing is evicted after the prompt, [S, K, C] bool."""
        held = self.cached.held[:, : self.own]
        own = make_causal_mask(self.count, self.count, held.device).expand(len(held), -1, -1)
        arrived = torch.arange(self.count, device=held.device)
        self.cached.positions[:, self.own :] = self.seen[:, None] + arrived
        return torch.cat([held[:, None].expand(-1, self.count, -1), own], -1)

    def _close(self) -> None:
        """Compute the outputs of this stretch's tokens, if they are missing; some segments at a time."""
        if not self.waiting:
            return
        held = torch.stack(self.waiting, 1)
        first = sum(before.shape[1] for before, _ in self.stretches)
        self.stretches.append((held, self.columns))
        self.waiting = []
        # These outputs were made token by token.
        if self.rule is not None and self.rule.policy.merges:
            return
        cached = self.cached
        query = self.by_segment[:, :, first : first + held.shape[1]]
        outputs = cached.values.new_empty(*query.shape[:3], cached.values.shape[-1])
        step = max(1, choose_chunk_bytes(held.device) // (4 * LOGIT_TABLES * query.shape[1] * held[0].numel()))
        for start in range(0, len(held), step):
            part = slice(start, start + step)
            bias = None if cached.log_weights is None else cached.log_weights[part, None].float()
            scores = self.logits.of(query[part].flatten(1, 2), cached.keys[part], bias).view(*query[part].shape[:3], -1)
            scores = scores.masked_fill_(~held[part, None], float("-inf"))
            weights = self.logits.softmax(scores, cached.heads[part]).to(cached.values.dtype)
            outputs[part] = (weights.flatten(1, 2) @ cached.values[part]).view_as(outputs[part])
        self.outputs.append(outputs)

    def _evict(self, rule: StepRule, limits: Limits, token: int, row: Tensor | None) -> None:
        over = np.any((self.used > limits.host).reshape(self.batch, self.heads), axis=-1)
        states = None if self.hidden is None else self.hidden[:, :, token]
        rule.prepare_step(over)
        rule.begin(self.query[:, :, token : token + 1], (self.following + token)[:, None], hidden=states)
        if row is not None and rule.policy.row == "layer":
            positions = self.cached.positions
            if self.averages is None:
                self.averages = AttentionAverages([self.rows], [positions.shape[1]], self.batch, self.width)
            self.averages.parts[0][0, :, : positions.shape[1]].copy_(row)
            # The same sums as at runtime, so that a replay ranks by the very same numbers.
            row = self.averages.layer_rows([positions])[0]
        step = Step(self.cached, torch.full_like(self.rows, self.own + token), self.seen, row)
        plan = limits.leaving(self.used, None)
        leaving = rule.decide(step, self.rows, limits, plan, None, self.logits)
        self.used = plan.stay
        if leaving is not None:
            self.cached.positions.masked_fill_(~self.cached.staying(leaving), -1)
            self._give_up_slots(token)
            _clear(self.cached)

    def _give_up_slots(self, token: int) -> None:
        """Keep slots for what is held after `token` and for the tokens to come, if that is less than half of them."""
        used = int(self.used.max())
        ahead = self.count - token - 1
        cached = self.cached
        width = self.cached.positions.shape[1]
        if 2 * (used + ahead) >= width:
            return
        # Slots change their meaning below, so what was attended to in them is written down first.
        self._close()
        coming = torch.arange(width - ahead, width, device=self.rows.device).expand(len(self.rows), -1)
        # What is held by position, then the slots of the tokens to come, which are the last ones.
        slots = torch.cat([sort_by_position(cached.positions, cached.held)[:, :used], coming], 1)
        self.columns = slots if self.columns is None else self.columns.gather(1, slots)
        # So that the next token, number `token + 1`, goes to the first slot behind the entries.
        self.own = used - token - 1
        self.cached = cached.at_slots(lambda tensor: gather_entries(tensor, slots))


def _clear(cached: Cached) -> None:
    """Zero the state of slots without an entry, in place, but for log weights: outputs come when some have left."""
    empty = ~cached.held
    for name, tensor in cached.state.entries.items():
        if name == LOG_WEIGHTS:
            continue
        tensor.masked_fill_(widen_marks(empty, tensor), 0)


def spread_entries(slots: Tensor, columns: Tensor | None, width: int) -> Tensor:
    """Spread marks of slots [S, k, C] bool by column, [S, k, width], False where a column has no slot."""
    if columns is None:
        return slots
    table = slots.new_zeros((*slots.shape[:2], width))
    return table.scatter_(2, columns[:, None].expand(-1, slots.shape[1], -1), slots)

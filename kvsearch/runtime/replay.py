"""Teacher-forced replay: what a layer would attend to, and evict, over K given tokens, without running them one by one.

A decode rule uses nothing but its own layer's queries, keys and values. When these are known for all K tokens, as in
teacher forcing with the layer's input unperturbed, the logits of all tokens come from one product and their outputs
from another; only the choice of what leaves goes token by token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvsearch.policies import Observation
from kvsearch.policies.decoding import State, Step
from kvsearch.runtime.attention import Logits
from kvsearch.runtime.collector import Rotary
from kvsearch.runtime.decoding import layer_rows
from kvsearch.runtime.eviction import Kept, PhaseRule, select
from kvsearch.runtime.rule import DecodeRule, Ints, Limits
from kvsearch.runtime.slots import segments_of


@dataclass(frozen=True)
class Replay:
    """What came of K tokens in one layer."""

    outputs: Tensor  # [B, Hq, K, Dv] attention outputs
    shown: Tensor  # [B, Hkv, K, T + K] bool, what each token attended to: the prompt's entries, then the tokens'
    kept: list[list[list[int]]]  # per sequence and kv head: token indices held at the end, ascending
    most: Tensor  # [B, Hkv] int64, the most entries held at a time


def replay(
    observation: Observation,
    prefill: PhaseRule | None,
    decode: PhaseRule | None,
    tokens: tuple[Tensor, Tensor, Tensor],
    logits: Logits,
    rotary: Rotary,
) -> Replay:
    """Attention of the K tokens after a prompt under a layer's phase rules, as decoding them one by one would give.

    `observation` is the dense prompt with what the policies need of it; `tokens` are the queries [B, Hq, K, D], keys
    [B, Hkv, K, D] and values [B, Hkv, K, Dv] that follow. No tensor given is changed. Scratch memory is that of the
    logits, B * Hq * K * (T + K) fp32.
    """
    return _Course(select(observation, prefill, decode, rotary), tokens, logits).run()


class _Course:
    """All prompt and new columns of a layer side by side; what is held is a matter of `positions`."""

    def __init__(self, left: Kept, tokens: tuple[Tensor, Tensor, Tensor], logits: Logits) -> None:
        self.query, key, value = tokens
        self.rule, self.logits = left.rule, logits
        seen = left.observation
        self.batch, self.heads, self.length = left.keep.shape
        self.count = key.shape[2]
        self.rows = torch.arange(self.batch, device=key.device).repeat_interleave(self.heads)
        everyone = np.arange(len(self.rows))
        self.limits = None if left.rule is None else left.rule.limits(everyone, key.device)
        prompt = segments_of(seen, left.state)
        held = prompt.positions.masked_fill(~left.keep.flatten(0, 1), -1)

        def longer(tensor: Tensor) -> Tensor:
            return torch.cat([tensor, tensor.new_zeros(len(tensor), self.count, *tensor.shape[2:])], 1)

        self.cached = replace(
            prompt,
            keys=torch.cat([prompt.keys, key.flatten(0, 1)], 1),
            values=torch.cat([prompt.values, value.flatten(0, 1)], 1),
            positions=torch.cat([held, held.new_full((len(held), self.count), -1)], 1),
            state=prompt.state.changed(longer, torch.clone),
        )
        # what an empty slot has for state is zero
        _clear(self.cached.state, self.cached.positions < 0)
        self.seen = seen.seen.repeat_interleave(self.heads)
        self.following = seen.seen if seen.next_position is None else seen.next_position
        self.used: Ints = left.keep.flatten(0, 1).sum(-1).cpu().numpy()
        self.most = self.used

    def run(self) -> Replay:
        policy = None if self.rule is None else self.rule.policy
        changing = policy is not None and policy.merges  # keys and values are not those given for long
        scores = None if changing else self._scores(slice(None))
        outputs, shown = [], []
        for token in range(self.count):
            self._arrive(token)
            held = self.cached.held
            shown.append(held)
            if self.rule is None or self.limits is None:
                continue
            row = None
            if changing or self.rule.policy.row is not None:
                mine = self._scores(slice(token, token + 1))[:, :, 0] if scores is None else scores[:, :, token]
                weights = mine.masked_fill(~held[:, None], float("-inf")).softmax(-1)
                row = weights.mean(1)
                if changing:
                    outputs.append(weights.to(self.cached.values.dtype) @ self.cached.values)
            self._evict(self.rule, self.limits, token, row)
        mask = torch.stack(shown, 1)
        if scores is not None:
            weights = scores.masked_fill(~mask[:, None], float("-inf")).softmax(-1).to(self.cached.values.dtype)
            result = (weights.flatten(1, 2) @ self.cached.values).view(*weights.shape[:3], -1)
        else:
            result = torch.stack(outputs, 2)
        return Replay(
            result.reshape(self.batch, -1, *result.shape[2:]),
            mask.view(self.batch, self.heads, *mask.shape[1:]),
            self._kept(),
            self._shaped(self.most),
        )

    def _scores(self, tokens: slice) -> Tensor:
        """Attention logits of some tokens over all columns, [S, G, k, T + K] fp32."""
        query = self.query[:, :, tokens]
        packed = query.reshape(len(self.rows), -1, query.shape[-1])
        scores = self.logits.of(packed, self.cached.keys)
        return scores.view(len(self.rows), -1, query.shape[2], scores.shape[-1])

    def _arrive(self, token: int) -> None:
        self.cached.positions[:, self.length + token] = self.seen
        self.seen = self.seen + 1
        self.used = self.used + 1
        self.most = np.maximum(self.most, self.used)

    def _evict(self, rule: DecodeRule, limits: Limits, token: int, row: Tensor | None) -> None:
        over = np.any((self.used > limits.host).reshape(self.batch, self.heads), axis=-1)
        rule.begin(self.query[:, :, token : token + 1], (self.following + token)[:, None], over)
        newest = self.length + token
        if row is not None and rule.policy.row == "layer":
            row = layer_rows([(self.rows, self.cached.positions, row)], self.batch, newest + 1)[0]
        step = Step(self.cached, torch.full_like(self.rows, newest), self.seen, row)
        leaving, self.used = rule.decide(step, self.rows, limits, self.used, None, None, self.logits)
        if leaving is not None:
            gone = self.cached.held & ~self.cached.staying(leaving)
            self.cached.positions.masked_fill_(gone, -1)
            _clear(self.cached.state, gone)

    def _kept(self) -> list[list[list[int]]]:
        held = [sorted(row[row >= 0].tolist()) for row in self.cached.positions]
        return [held[first : first + self.heads] for first in range(0, len(held), self.heads)]

    def _shaped(self, numbers: Ints) -> Tensor:
        return torch.from_numpy(numbers.reshape(self.batch, self.heads))


def _clear(state: State, slots: Tensor) -> None:
    """Zero the state of slots [S, C] bool, in place."""
    for tensor in state.entries.values():
        tensor.masked_fill_(slots.view(*slots.shape, *[1] * (tensor.dim() - 2)), 0)

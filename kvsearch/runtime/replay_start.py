"""What a replay starts from: what is left of the prompts of layers that are alike, side by side, once for each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvsearch.arrays import Ints
from kvsearch.policies import Observation
from kvsearch.policies.decoding import Cached, State
from kvsearch.runtime.blocks import right_aligned
from kvsearch.runtime.collector import Rotary
from kvsearch.runtime.eviction import Kept
from kvsearch.runtime.logits import Logits
from kvsearch.runtime.replay_state import Start
from kvsearch.runtime.rule import StepRule

States = tuple[Tensor, Tensor]  # keys [S, C, D] and values [S, C, Dv]


@dataclass(frozen=True, eq=False)
class Followed:
    """One layer with B prompts of T tokens, and K tokens that follow one of them, M times."""

    observation: Observation  # the dense prompts, with what the policies need of them
    tokens: tuple[Tensor, Tensor, Tensor]  # queries [M, Hq, K, D], keys [M, Hkv, K, D], values [M, Hkv, K, Dv]
    logits: Logits
    rotary: Rotary
    rows: Tensor | None = None  # [M] the prompt that each row of tokens follows, on the host; None: one each, in order
    hidden: Tensor | None = None  # hidden states that entered the attention at the tokens, [M, K, d_model]

    def of_rows(self, prompts: Tensor) -> Tensor:
        """Return something of the prompts [B, ...] for every row of tokens, [M, ...]."""
        return at_rows(prompts, self.rows)

    @property
    def whole(self) -> States:
        """Keys and values of prompts and tokens, by segment, [M * Hkv, T + K, D] each."""
        seen, (_, keys, values) = self.observation, self.tokens
        pairs = ((seen.keys, keys), (seen.values, values))
        made = [torch.cat([self.of_rows(prompt), own], 2).flatten(0, 1) for prompt, own in pairs]
        return made[0], made[1]

    @property
    def kind(self) -> tuple[object, ...]:
        """What layers have in common whose segments can stand side by side."""
        keys, logits = self.observation.keys, self.logits
        shapes = (keys.shape, self.tokens[0].shape, self.tokens[2].shape)
        own = None if logits.sinks is None else self.observation.layer
        return (*shapes, keys.dtype, keys.device, logits.scaling, logits.softcap, own)


def at_rows(prompts: Tensor, rows: Tensor | None) -> Tensor:
    """Return the prompts [B, ...] of these `rows` [M], on the host, [M, ...]; None: all as they are."""
    return prompts if rows is None else prompts[rows.to(prompts.device)]


def start_of(layers: Sequence[Followed], left: Sequence[Kept], whole: Callable[[], States]) -> Start:
    """Put what is left of the prompts of layers that are alike side by side, with slots for the tokens behind it.

    `whole` are keys and values of all that there is, for where nearly all of it is left.
    """
    pairs = list(zip(layers, left, strict=True))
    count, (_, heads, length) = layers[0].tokens[0].shape[2], left[0].keep.shape
    used: Ints = np.concatenate([_rows_of(one.counts, layer.rows) for layer, one in pairs]).flatten()
    most = int(used.max())
    few = 2 * (most + count) < length + count
    parts = [_Prompts(layer, one, most if few else None) for layer, one in pairs]
    rules = [_of_rows(one.rule, layer.rows) for layer, one in pairs if one.rule is not None]
    rule = StepRule.joined(rules) if rules else None
    if few or any(one.observation is not layer.observation for layer, one in pairs):
        keys, values = (torch.cat(states) for states in zip(*(part.states() for part in parts), strict=True))
    else:
        keys, values = whole()
        if rule is not None and rule.policy.merges:
            keys, values = keys.clone(), values.clone()
    numbers = [layer.observation.layer for layer in layers]
    cached = Cached(
        keys,
        values,
        torch.cat([part.positions() for part in parts]),
        joined([part.state() for part in parts]),
        numbers[0] if len(numbers) == 1 else _of_segments(numbers, len(used), keys.device),
        torch.arange(heads, device=keys.device).repeat(len(used) // heads),
    )
    return Start(
        torch.cat([layer.tokens[0] for layer in layers]),
        cached,
        torch.cat([part.columns() for part in parts]) if few else None,
        used,
        torch.cat([layer.of_rows(layer.observation.seen) for layer in layers]),
        torch.cat([layer.of_rows(_coming(layer.observation)) for layer in layers]),
        rule,
        layers[0].logits,
        length + count,
    )


def joined(states: Sequence[State]) -> State:
    """Join the states of segments."""
    first = states[0]
    return State(
        {name: torch.cat([one.entries[name] for one in states]) for name in first.entries},
        {name: torch.cat([one.heads[name] for one in states]) for name in first.heads},
    )


class _Prompts:
    """What is left of the prompts of one layer, by segment; the K slots for the tokens are behind it.

    With `most`, the most entries that a segment has left, there are as many slots for them; else one for every column.
    """

    def __init__(self, layer: Followed, left: Kept, most: int | None) -> None:
        self.layer, self.left, self.count = layer, left, layer.tokens[0].shape[2]
        self.batch, self.heads, self.length = left.keep.shape
        self.chosen: tuple[Tensor, Tensor] | None = None  # columns [B, Hkv, most], and whether they are kept
        if most is not None:
            columns, filled = right_aligned(left.keep.flatten(0, 1), most)
            shape = (self.batch, self.heads, most)
            self.chosen = columns.view(shape), filled.view(shape)

    def states(self) -> States:
        seen, (_, keys, values) = self.left.observation, self.layer.tokens
        return self._with(seen.keys, keys), self._with(seen.values, values)

    def positions(self) -> Tensor:
        """Return the index of the token in every slot, [S, C]; -1 for none."""
        index = self.left.observation.index[:, None].expand(self.left.keep.shape)
        held = index.masked_fill(~self.left.keep, -1)
        if self.chosen is not None:
            held = index.gather(2, self.chosen[0]).masked_fill(~self.chosen[1], -1)
        own = held.new_full((len(self.layer.tokens[0]), self.heads, self.count), -1)
        return torch.cat([self.layer.of_rows(held), own], 2).flatten(0, 1)

    def state(self) -> State:
        def longer(tensor: Tensor) -> Tensor:
            rows = len(self.layer.tokens[0])
            return self._with(tensor, tensor.new_zeros(rows, self.heads, self.count, *tensor.shape[3:]))

        return self.left.state.changed(longer, lambda tensor: self.layer.of_rows(tensor).flatten(0, 1).clone())

    def columns(self) -> Tensor:
        """Return the column of every slot, [S, C]."""
        every = torch.arange(self.length + self.count, device=self.left.keep.device)
        own = every[self.length :].expand(len(self.layer.tokens[0]), self.heads, -1)
        return self._with(every[: self.length].expand(self.batch, self.heads, -1), own)

    def _with(self, prompt: Tensor, own: Tensor) -> Tensor:
        """Return something of every slot, [S, C, ...], of columns of the prompt [B, Hkv, T, ...] and of the tokens."""
        if self.chosen is not None:
            index = self.chosen[0].view(*self.chosen[0].shape, *[1] * (prompt.dim() - 3))
            prompt = prompt.gather(2, index.expand(-1, -1, -1, *prompt.shape[3:]))
        return torch.cat([self.layer.of_rows(prompt), own], 2).flatten(0, 1)


def _rows_of(counts: Ints, rows: Tensor | None) -> Ints:
    return counts if rows is None else counts[rows.numpy()]


def _of_rows(rule: StepRule, rows: Tensor | None) -> StepRule:
    return rule if rows is None else rule.select_rows(rows.tolist())


def _coming(prompt: Observation) -> Tensor:
    """Return the rotary positions of the tokens that come next, [B]."""
    return prompt.seen if prompt.next_position is None else prompt.next_position


def _of_segments(numbers: Sequence[int], segments: int, device: torch.device) -> Tensor:
    """Return the number of the layer of every segment, [S, 1]."""
    return torch.tensor(numbers, device=device).repeat_interleave(segments // len(numbers))[:, None]

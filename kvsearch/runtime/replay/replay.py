"""Teacher-forced replay: what layers attend to and evict over K given tokens, without decoding one by one.

A decode rule uses nothing but its own layer's queries, keys and values. When these are known for all K tokens, as in
teacher forcing with the layer's input unperturbed, the outputs of all tokens come from one product; only the choice of
what leaves goes token by token, for all sequences and layers side by side, over as many slots as are held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from kvsearch.core.arrays import Ints
from kvsearch.core.errors import KvsearchError
from kvsearch.core.items import group_by_key
from kvsearch.models.architecture import read_output_weight
from kvsearch.policies import Observation, Policy
from kvsearch.policies.decoding import Cached, State, widen_marks
from kvsearch.runtime.decode.rule import StepRule, is_same_in_layers
from kvsearch.runtime.eviction import Kept, PhaseRule, select
from kvsearch.runtime.logits import Logits
from kvsearch.runtime.replay.replay_state import ReplayState, Stretch, spread_entries
from kvsearch.runtime.store.blocks import align_right
from kvsearch.signals.attention_rows import (
    attention_change,
    eviction_errors,
    importance_rows,
    kept_prefix_errors,
)


@dataclass(frozen=True)
class Replay:
    """The outcome of K replayed tokens in one layer."""

    outputs: Tensor  # [M, Hq, K, Dv] attention outputs
    stretches: Sequence[Stretch]
    width: int  # T + K

    @property
    def shown(self) -> Tensor:
        """What each token attended to: the prompt's entries, then the tokens', [M, Hkv, K, T + K] bool."""
        batch, _, count, _ = self.outputs.shape
        parts = [spread_entries(held, columns, self.width) for held, columns in self.stretches]
        return torch.cat(parts, 1).view(batch, -1, count, self.width)


class Replays:
    """Replays some layers, side by side where they are alike, under any number of rules.

    Holds keys and values of prompts and tokens for every row of tokens, once a rule has needed them. No tensor given is
    changed. Scratch memory is that of one token's logits, M * Hq * (T + K) fp32 a few times for each layer.
    """

    def __init__(self, layers: Sequence[FollowedLayer]) -> None:
        self.layers = layers
        alike = group_by_key(range(len(layers)), lambda place: layers[place].kind)
        self.stacks = [(places, _Stack([layers[place] for place in places])) for places in alike.values()]

    def under(self, prefill: PhaseRule | None, decode: PhaseRule | None) -> list[Replay]:
        """Compute attention of the tokens under phase rules, as decoding them one by one would, for each layer.

        Raises:
            IncompatibleError, EnvironmentFault: scores of a policy are not finite; it names the layer.
        """
        replays: dict[int, Replay] = {}
        for places, stack in self.stacks:
            replays.update(zip(places, stack.under(prefill, decode), strict=True))
        return [replays[place] for place in range(len(self.layers))]


class _Stack:
    """Layers of one kind, replayed together."""

    def __init__(self, layers: Sequence[FollowedLayer]) -> None:
        self.layers = layers
        self._whole: SegmentStates | None = None

    def under(self, prefill: PhaseRule | None, decode: PhaseRule | None) -> list[Replay]:
        if len(self.layers) == 1:
            return self._together(prefill, decode)
        # Layers side by side share one rule; where that reads weights of its layer, each is asked alone.
        if decode is None or is_same_in_layers(decode.policy):
            try:
                return self._together(prefill, decode)
            except KvsearchError:  # what is wrong is told of the layer that it is wrong in
                pass
        return [layer.replay(prefill, decode) for layer in self.layers]

    def _together(self, prefill: PhaseRule | None, decode: PhaseRule | None) -> list[Replay]:
        left = [select(layer.noted, prefill, decode) for layer in self.layers]
        state = start_of(self.layers, left, self._states)
        if decode is not None:
            state.hidden = self._hidden(decode.policy)
        outputs = state.run()
        replays = []
        heads = state.heads
        segments = len(outputs) // len(self.layers)
        for first in range(0, len(outputs), segments):
            some = slice(first, first + segments)
            replays.append(
                Replay(
                    outputs[some].reshape(segments // heads, -1, *outputs.shape[2:]),
                    [(held[some], None if slots is None else slots[some]) for held, slots in state.stretches],
                    state.width,
                )
            )
        return replays

    def _states(self) -> SegmentStates:
        """Return keys and values of all prompts and tokens; made once."""
        if self._whole is None:
            keys, values = zip(*(layer.states for layer in self.layers), strict=True)
            alone = len(keys) == 1
            self._whole = (keys[0], values[0]) if alone else (torch.cat(keys), torch.cat(values))
        return self._whole

    def _hidden(self, policy: Policy) -> Tensor | None:
        """Return what a policy makes of the hidden states of the tokens, [N, Hkv, K], where it wants them."""
        of_hidden = policy.needs().hidden
        parts = []
        for layer in self.layers:
            if of_hidden is None or layer.hidden is None:
                return None
            parts.append(of_hidden(layer.hidden, layer.noted.layer))
        return torch.cat(parts)


SegmentStates = tuple[Tensor, Tensor]  # keys [S, C, D] and values [S, C, Dv]


Noted = TypeVar("Noted")


@dataclass(frozen=True, eq=False)
class LayerContinuation(Generic[Noted]):
    """States of one layer under the full cache: B prompts of T tokens, and M rows of K tokens, each after one prompt.

    Layers are replayed whose prompts were noted as they are: with what the policies need of them.
    """

    index: int  # of the model layer
    noted: Noted  # what the pass made of the prompts
    prompt: SegmentStates  # keys [B, Hkv, T, D], values [B, Hkv, T, Dv]
    tokens: tuple[Tensor, Tensor, Tensor]  # queries [M, Hq, K, D], keys [M, Hkv, K, D], values [M, Hkv, K, Dv]
    module: nn.Module
    logits: Logits
    hidden: Tensor | None = None  # hidden states that entered the attention at the tokens, [M, K, d_model]
    rows: Tensor | None = None  # [M] the prompt that each row of tokens follows, on the host; None: one each, in order

    @property
    def query(self) -> Tensor:
        """Queries of the tokens, [M, Hq, K, D]."""
        return self.tokens[0]

    @cached_property
    def keys(self) -> Tensor:
        """Keys of prompts and tokens, [M, Hkv, T + K, D]."""
        return torch.cat([self.of_rows(self.prompt[0]), self.tokens[1]], 2)

    @cached_property
    def values(self) -> Tensor:
        """Values of prompts and tokens, [M, Hkv, T + K, Dv]."""
        return torch.cat([self.of_rows(self.prompt[1]), self.tokens[2]], 2)

    def importance(self, norms: Tensor | None, group: str, weights: Tensor | None = None) -> Tensor:
        """Return how much the tokens look at each entry of the prompts, [M, Hkv, T]; see `importance_rows`."""
        how = self.logits
        rows = (self.query, self.keys, norms, self.prompt[0].shape[2], how.scaling, how.softcap)
        return importance_rows(*rows, group, how.sinks, weights)

    def change(self, shown: Tensor) -> tuple[Tensor, Tensor]:
        """Return how outputs change where only `shown` entries are seen, and the attention that the others had.

        See `attention_change`.
        """
        how = self.logits
        return attention_change(self.query, self.keys, self.values, shown, how.scaling, how.softcap, how.sinks)

    def of_row(self, row: int, count: int) -> LayerContinuation[Noted]:
        """Return the layer with the first `count` tokens of one row alone."""
        query, key, value = (states[row : row + 1, :, :count] for states in self.tokens)
        rows = torch.tensor([row]) if self.rows is None else self.rows[row : row + 1]
        return replace(self, tokens=(query, key, value), hidden=None, rows=rows)

    def at_places(self, places: Tensor) -> LayerContinuation[Noted]:
        """Return the layer with the queries of the tokens at `places` alone, to be measured by `eviction_errors`."""
        return replace(self, tokens=(self.query[:, :, places], *self.tokens[1:]))

    def eviction_errors(self, keeps: Tensor, places: Tensor, factors: Tensor) -> Tensor:
        """Measure how far outputs of kv heads move that keep parts of the one prompt, [n, Hkv], by masks [n, Hkv, T].

        `query` has the tokens at `places` alone; see the function `eviction_errors`.
        """
        how = self.logits
        states = self.query[0], self.keys[0], self.values[0]
        at = self.prompt[0].shape[2] + places.to(self.query.device)
        return eviction_errors(*states, at, keeps, factors, how.scaling, how.softcap, how.sinks)

    def prefix_errors(self, slopes: Tensor, orders: Sequence[Tensor]) -> Tensor:
        """Return the weighted output errors of kv heads that keep the first entries of the one prompt, [n, Hkv, T + 1].

        `slopes` [K, Hq, Dv] fp32 are derivatives by the attention outputs; see `kept_prefix_errors`.
        """
        how = self.logits
        by_head = slopes.to(self.query.device).transpose(0, 1)
        states = self.query[0], self.keys[0], self.values[0]
        return kept_prefix_errors(*states, by_head, orders, how.scaling, how.softcap, how.sinks)

    @cached_property
    def output_weight(self) -> Tensor:
        """W_O per query head, [Hq, Dv, d_model] fp32."""
        return read_output_weight(self.module, self.query.shape[1], self.query.dtype)

    def of_rows(self, prompts: Tensor) -> Tensor:
        """Return something of the prompts [B, ...] for every row of tokens, [M, ...]."""
        return select_rows(prompts, self.rows)

    def replay(self: LayerContinuation[Observation], prefill: PhaseRule | None, decode: PhaseRule | None) -> Replay:
        """Return what the tokens attend to in this layer under these rules, its input as under the full cache."""
        return Replays([self]).under(prefill, decode)[0]

    @cached_property
    def full_outputs(self: LayerContinuation[Observation]) -> Tensor:
        """Attention outputs under the full cache as a replay computes them, [M, Hq, K, Dv]."""
        return self.replay(None, None).outputs

    @property
    def states(self) -> SegmentStates:
        """Keys and values of prompts and tokens, by segment, [M * Hkv, T + K, D] each; a copy."""
        pairs = zip(self.prompt, self.tokens[1:], strict=True)
        keys, values = (torch.cat([self.of_rows(prompt), own], 2).flatten(0, 1) for prompt, own in pairs)
        return keys, values

    @property
    def kind(self: LayerContinuation[Observation]) -> tuple[object, ...]:
        """The key that layers share whose segments can be replayed side by side."""
        keys = self.prompt[0]
        logits = self.logits
        shapes = (keys.shape, self.query.shape, self.tokens[2].shape)
        own = None if logits.sinks is None else self.noted.layer
        return (*shapes, keys.dtype, keys.device, logits.scaling, logits.softcap, own)


FollowedLayer = LayerContinuation[Observation]  # of prompts that were noted as they are


def select_rows(prompts: Tensor, rows: Tensor | None) -> Tensor:
    """Return the prompts [B, ...] of these `rows` [M], on the host, [M, ...]; None: all as they are."""
    return prompts if rows is None else prompts[rows.to(prompts.device)]


def start_of(layers: Sequence[FollowedLayer], left: Sequence[Kept], whole: Callable[[], SegmentStates]) -> ReplayState:
    """Make the replay state of layers of one kind: kept prompt entries side by side, with slots for the tokens.

    `whole` are keys and values of all that there is, for where nearly all of it is left.
    """
    pairs = list(zip(layers, left, strict=True))
    count = layers[0].tokens[0].shape[2]
    _, heads, length = left[0].keep.shape
    used: Ints = np.concatenate(
        [kept.counts if layer.rows is None else kept.counts[layer.rows.numpy()] for layer, kept in pairs]
    ).flatten()
    longest = int(used.max())
    # To gather what is left is a copy: it pays if slots are less than half of the columns.
    few = 2 * (longest + count) < length + count
    parts = [_Prompts(layer, kept, longest if few else None) for layer, kept in pairs]
    rules = [
        kept.rule if layer.rows is None else kept.rule.select_rows(layer.rows.tolist())
        for layer, kept in pairs
        if kept.rule is not None
    ]
    rule = StepRule.joined(rules) if rules else None
    if few or any(kept.observation is not layer.noted for layer, kept in pairs):
        keys, values = (torch.cat(states) for states in zip(*(part.states() for part in parts), strict=True))
    else:
        keys, values = whole()
        # Merging writes to keys and values, which all replays of these layers share.
        if rule is not None and rule.policy.merges:
            keys = keys.clone()
            values = values.clone()
    # One number where there is one layer, as policies get it at runtime.
    numbers: Any = layers[0].noted.layer
    if len(layers) > 1:  # the number of the layer of every segment, [S, 1]
        each = torch.tensor([layer.noted.layer for layer in layers], device=keys.device)
        numbers = each.repeat_interleave(len(used) // len(layers))[:, None]
    cached = Cached(
        keys,
        values,
        torch.cat([part.positions() for part in parts]),
        State.joined([part.state() for part in parts]),
        numbers,
        torch.arange(heads, device=keys.device).repeat(len(used) // heads),
    )
    return ReplayState(
        torch.cat([layer.tokens[0] for layer in layers]),
        cached,
        torch.cat([part.columns() for part in parts]) if few else None,
        used,
        torch.cat([layer.of_rows(layer.noted.seen) for layer in layers]).repeat_interleave(heads),
        torch.cat([layer.of_rows(layer.noted.following) for layer in layers]),
        rule,
        layers[0].logits,
        length + count,
    )


class _Prompts:
    """Kept prompt entries of one layer, by segment, with K slots for the tokens behind them.

    With `max_entries`, the most entries that a segment has left, there are as many slots for them; else one for every
    column.
    """

    def __init__(self, layer: FollowedLayer, left: Kept, max_entries: int | None) -> None:
        self.layer = layer
        self.left = left
        self.count = layer.tokens[0].shape[2]
        self.batch, self.heads, self.length = left.keep.shape
        self.chosen: tuple[Tensor, Tensor] | None = None  # columns [B, Hkv, max_entries], and whether they are kept
        if max_entries is not None:
            columns, filled = align_right(left.keep.flatten(0, 1), max_entries)
            shape = (self.batch, self.heads, max_entries)
            self.chosen = columns.view(shape), filled.view(shape)

    def states(self) -> SegmentStates:
        seen = self.left.observation
        _, keys, values = self.layer.tokens
        return self._with(seen.keys, keys), self._with(seen.values, values)

    def positions(self) -> Tensor:
        """Return the index of the token in every slot, [S, C]; -1 for none."""
        # What is not kept looks like an empty slot, whether it has one or not.
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
            index = widen_marks(self.chosen[0], prompt).expand(-1, -1, -1, *prompt.shape[3:])
            prompt = prompt.gather(2, index)
        return torch.cat([self.layer.of_rows(prompt), own], 2).flatten(0, 1)

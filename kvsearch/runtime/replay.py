"""Teacher-forced replay: what layers would attend to, and evict, over K given tokens, without running them one by one.

A decode rule uses nothing but its own layer's queries, keys and values. When these are known for all K tokens, as in
teacher forcing with the layer's input unperturbed, the outputs of all tokens come from one product; only the choice of
what leaves goes token by token, for all sequences and layers side by side, over as many slots as are held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvsearch.errors import KvsearchError
from kvsearch.policies import Policy
from kvsearch.runtime.eviction import PhaseRule, select
from kvsearch.runtime.replay_start import Followed, States, start_of
from kvsearch.runtime.replay_state import ReplayState, Stretch, spread
from kvsearch.runtime.rule import same_in_layers


@dataclass(frozen=True)
class Replay:
    """What came of K tokens in one layer."""

    outputs: Tensor  # [M, Hq, K, Dv] attention outputs
    most: Tensor  # [M, Hkv] int64, the most entries held at a time
    stretches: tuple[Stretch, ...]
    positions: Tensor  # [M * Hkv, C] index of the token in every slot that is there at the end, -1 for none
    columns: Tensor | None  # [M * Hkv, C] column of each; None: a slot for every column
    width: int  # T + K

    @property
    def held(self) -> Tensor:
        """Indices of the tokens held at the end, -1 elsewhere, [M, Hkv, T + K] int64."""
        found = spread(self.positions[:, None], self.columns, self.width, -1)
        return found.view(*self.most.shape, -1)

    @property
    def shown(self) -> Tensor:
        """What each token attended to: the prompt's entries, then the tokens', [M, Hkv, K, T + K] bool."""
        parts = [spread(one.held, one.columns, self.width) for one in self.stretches]
        return torch.cat(parts, 1).view(*self.most.shape, -1, self.width)

    @property
    def kept(self) -> list[list[list[int]]]:
        """Per sequence and kv head: token indices held at the end, ascending."""
        return [[sorted(row[row >= 0].tolist()) for row in heads] for heads in self.held]


class Replays:
    """Replays of some layers, side by side where they are alike, under one rule after the other.

    Holds keys and values of prompts and tokens for every row of tokens, once a rule has needed them. No tensor given is
    changed. Scratch memory is that of one token's logits, M * Hq * (T + K) fp32 a few times for each layer.
    """

    def __init__(self, layers: Sequence[Followed]) -> None:
        self.layers = layers
        alike: dict[object, list[int]] = {}
        for place, layer in enumerate(layers):
            alike.setdefault(layer.kind, []).append(place)
        self.stacks = [(places, _Stack([layers[place] for place in places])) for places in alike.values()]

    def under(self, prefill: PhaseRule | None, decode: PhaseRule | None) -> list[Replay]:
        """Compute attention of the tokens under phase rules, as decoding them one by one would, for each layer.

        Raises:
            IncompatibleError, EnvironmentFault: scores of a policy are not finite; it names the layer.
        """
        found: dict[int, Replay] = {}
        for places, stack in self.stacks:
            found.update(zip(places, stack.under(prefill, decode), strict=True))
        return [found[place] for place in range(len(self.layers))]


def replay(layer: Followed, prefill: PhaseRule | None, decode: PhaseRule | None) -> Replay:
    """Replay one layer; see `Replays`."""
    return Replays([layer]).under(prefill, decode)[0]


class _Stack:
    """Layers that are alike."""

    def __init__(self, layers: Sequence[Followed]) -> None:
        self.layers = layers
        self._whole: States | None = None

    def under(self, prefill: PhaseRule | None, decode: PhaseRule | None) -> list[Replay]:
        if len(self.layers) == 1:
            return self._together(prefill, decode)
        if decode is None or same_in_layers(decode.policy):
            try:
                return self._together(prefill, decode)
            except KvsearchError:  # what is wrong is told of the layer that it is wrong in
                pass
        return [replay(layer, prefill, decode) for layer in self.layers]

    def _together(self, prefill: PhaseRule | None, decode: PhaseRule | None) -> list[Replay]:
        left = [select(layer.observation, prefill, decode, layer.rotary) for layer in self.layers]
        start = start_of(self.layers, left, self._states)
        if decode is not None:
            start = replace(start, hidden=self._hidden(decode.policy))
        state = ReplayState(start)
        outputs, made = state.run(), []
        heads, segments = state.heads, len(outputs) // len(self.layers)
        for first in range(0, len(outputs), segments):
            mine = slice(first, first + segments)
            made.append(
                Replay(
                    outputs[mine].reshape(segments // heads, -1, *outputs.shape[2:]),
                    torch.from_numpy(state.most[mine].reshape(-1, heads)),
                    tuple(stretch.of(mine) for stretch in state.stretches),
                    state.cached.positions[mine],
                    None if state.columns is None else state.columns[mine],
                    start.width,
                )
            )
        return made

    def _states(self) -> States:
        """Return keys and values of all prompts and tokens; made once."""
        if self._whole is None:
            keys, values = zip(*(layer.whole for layer in self.layers), strict=True)
            alone = len(keys) == 1
            self._whole = (keys[0], values[0]) if alone else (torch.cat(keys), torch.cat(values))
        return self._whole

    def _hidden(self, policy: Policy) -> Tensor | None:
        """Return what a policy makes of the hidden states of the tokens, [N, Hkv, K], where it wants them."""
        what, made = policy.needs().hidden, []
        for layer in self.layers:
            if what is None or layer.hidden is None:
                return None
            made.append(what(layer.hidden, layer.observation.layer))
        return torch.cat(made)

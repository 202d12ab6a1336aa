"""One attention layer without a model: random prompts and tokens, for the decode rule and for the replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from kvsearch.policies import Needs, Observation, Policy
from kvsearch.policies.carry import REFERENCES
from kvsearch.runtime.collector import DensePrompt
from kvsearch.runtime.decode.decoding import Decoding
from kvsearch.runtime.decode.rule import decode_needs
from kvsearch.runtime.eviction import PhaseRule, evict
from kvsearch.runtime.logits import Logits, OutputProjection
from kvsearch.runtime.replay.replay import FollowedLayer, LayerContinuation
from kvsearch.testing.policy_contract import DIM, rope

WIDTH = 6  # of the model, behind the output projection


@dataclass(frozen=True)
class Scene:
    """A padded prompt, the tokens that follow it, and budgets; `pads[row]` columns of the prompt are padding."""

    heads: int
    group: int
    length: int
    pads: tuple[int, ...]
    tokens: int
    budgets: tuple[int, ...]  # one per kv head
    seed: int
    softcap: float | None = None
    carries: bool = False  # whether what is kept of the prompt carries what leaves it, under policies that do not merge


@st.composite
def scenes(draw: st.DrawFn, max_tokens: int = 8) -> Scene:
    length = draw(st.integers(1, 12))
    pads = draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=2))
    heads = draw(st.integers(1, 2))
    budgets = draw(st.lists(st.integers(1, length + 3), min_size=heads, max_size=heads))
    return Scene(
        heads, draw(st.sampled_from([1, 2, 7])), length, tuple(pads), draw(st.integers(1, max_tokens)), tuple(budgets),
        draw(st.integers(0, 99)), draw(st.sampled_from([None, None, 2.0])), draw(st.booleans()),
    )  # fmt: skip


class Layer:
    """The tensors of a scene."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        generator = torch.Generator().manual_seed(scene.seed)

        def normal(heads: int) -> Tensor:
            return torch.randn(len(scene.pads), heads, scene.length + scene.tokens, DIM, generator=generator)

        query_heads = scene.heads * scene.group
        self.query, self.key, self.value = normal(query_heads), normal(scene.heads), normal(scene.heads)
        self.module: Any = nn.Module()
        self.module.o_proj = nn.Linear(query_heads * DIM, WIDTH, bias=False)
        with torch.no_grad():
            self.module.o_proj.weight.copy_(torch.randn(WIDTH, query_heads * DIM, generator=generator))
        self.valid = torch.arange(scene.length)[None] >= torch.tensor(scene.pads)[:, None]
        self.logits = Logits(DIM**-0.5, scene.softcap, OutputProjection(self.module, query_heads, scene.heads))

    def prompt(self, states: Tensor) -> Tensor:
        return states[:, :, : self.scene.length]

    def observation(self, *policies: Policy, chunk: int | None = None) -> Observation:
        """What the runtime gathers of the prompt for the prefill needs and the decode needs of the policies."""
        needs = [need for policy in policies for need in (policy.needs(), decode_needs(policy))]
        needs.append(Needs(references=REFERENCES))
        prompt = DensePrompt(needs, rope, layer=3)
        positions = (self.valid.cumsum(-1) - 1).clamp(min=0)
        for first in range(0, self.scene.length, chunk or self.scene.length):
            last = min(self.scene.length, first + (chunk or self.scene.length))
            states = (self.key[:, :, :last], self.value[:, :, :last])
            prompt.add(
                self.query[:, :, first:last], states, positions[:, first:last], self.valid[:, :last], self.logits
            )
        return prompt.observation()

    def rule(self, policy: Policy) -> PhaseRule:
        budgets = torch.tensor(self.scene.budgets)
        carry = "match" if self.scene.carries and not policy.merges else "none"
        return PhaseRule(policy, lambda lengths: budgets.expand(len(lengths), -1), carry)

    def followed(self, observation: Observation) -> FollowedLayer:
        """The layer with the tokens that follow, to be replayed."""
        states = (observation.keys, observation.values)
        return LayerContinuation(observation.layer, observation, states, self.tokens(), self.module, self.logits)

    def tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        first = self.scene.length
        return self.query[:, :, first:], self.key[:, :, first:], self.value[:, :, first:]

    def decode(self, prefill: Policy | None, decode: Policy) -> tuple[Tensor, Decoding]:
        """Token by token: outputs [B, Hq, K, D], and what is held at the end."""
        used = [policy for policy in (prefill, decode) if policy is not None]
        holder = evict(self.observation(*used), prefill and self.rule(prefill), self.rule(decode))
        outputs = []
        self.seen = []  # what each token found held, per sequence and head
        for index, (query, key, value) in enumerate(zip(*(t.split(1, 2) for t in self.tokens()), strict=True)):
            positions = self.valid.sum(-1, keepdim=True) + index
            self.seen.append(held(holder))
            outputs.append(holder.attend(query, key, value, positions, self.logits))
        return torch.cat(outputs, 2), holder


def held(holder: Decoding) -> list[list[list[int]]]:
    """Token indices held, per sequence and head."""
    return [[holder.kept_positions(row, head) for head in range(holder.heads)] for row in range(holder.batch)]

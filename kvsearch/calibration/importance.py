"""One full-cache pass per context: policy ranks of its entries, then true importance from each question asked of it.

The importance comes from the rows of the question and answer tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvsearch.calibration.observing import DensePass, ObservingLayer
from kvsearch.policies import Observation, Policy, rank_under
from kvsearch.policies.base import Needs
from kvsearch.runtime.attention import logit_scale
from kvsearch.runtime.collector import Rotary
from kvsearch.signals.effect import layer_effects
from kvsearch.signals.oracle import importance_rows


@dataclass
class Captured:
    """What one question revealed: per layer the importance [Hkv, T] fp32 and the scale of the layer's signals."""

    importance: Tensor  # [L, Hkv, T] fp32, not normalised
    output_norm: Tensor  # [L] mean L2 norm of the attention output of the question's rows
    residual_norm: Tensor  # [L] mean L2 norm of the residual stream entering the layer
    logits: Tensor  # [K, vocabulary]


class CaptureLayer(ObservingLayer):
    """Ranks the context of one layer, and measures what later tokens look at."""

    def __init__(self, index: int, rotary_tables: Rotary, policies: Sequence[Policy], group: str) -> None:
        super().__init__(index, [*(policy.needs() for policy in policies), Needs(projection=True)], rotary_tables)
        self.policies, self.group = policies, group
        self.ranks: list[Tensor] = []
        self.norms: Tensor | None = None
        self.importance: Tensor | None = None
        self.output_norm = torch.zeros(())

    def observe(self, observation: Observation) -> None:
        self.ranks = [rank_under(policy, observation) for policy in self.policies]
        self.norms = observation.projected_norms("l2")

    def measure(self, module: nn.Module, query: Tensor, key: Tensor, output: Tensor, kwargs: dict[str, Any]) -> None:
        self.importance = importance_rows(
            query, key, self.norms, self.get_seq_length(), logit_scale(query, kwargs), kwargs.get("softcap"), self.group
        )
        weight: Tensor = module.o_proj.weight  # type: ignore[union-attr, assignment]
        self.output_norm = nn.functional.linear(output.flatten(2), weight).float().norm(dim=-1).mean().cpu()


class Capture(DensePass[CaptureLayer]):
    """The full-cache pass over one context, and the questions asked of it.

    Args:
        model: a model whose attention implementation is "kvsearch".
        policies: the policies whose ranking of the context is wanted.
        context: token ids [1, T].
        group: how the query heads of a kv head are aggregated, "sum" or "max".
    """

    def __init__(self, model: Any, policies: Sequence[Policy], context: Tensor, group: str = "sum") -> None:
        super().__init__(model, context, policies, lambda index, tables: CaptureLayer(index, tables, policies, group))

    def ranks(self, policy: int = 0) -> Tensor:
        """Ranks under the policy of that index, [L, Hkv, T] int32 on the CPU."""
        return torch.stack([layer.ranks[policy][0].cpu() for layer in self.observed])

    def ask(self, tokens: Tensor) -> Captured:
        """Teacher-force `tokens` [1, K] (a question and its answer) after the context and measure what they look at."""
        output = self.follow(tokens, output_hidden_states=True)
        hidden = [output.hidden_states[index] for index in self.shape.full_layers]
        return Captured(
            torch.stack([layer.importance[0].cpu() for layer in self.observed if layer.importance is not None]),
            torch.stack([layer.output_norm for layer in self.observed]),
            torch.stack([state[0].float().norm(dim=-1).mean().cpu() for state in hidden]),
            output.logits[0],
        )

    def effects(self, tokens: Tensor, answer: int, logits: Tensor, protected: Tensor) -> Tensor:
        """What the answer loses when one layer keeps only `protected` [L, Hkv, T] of the context, [L] nats.

        `tokens` [1, K] hold the answer from index `answer` on, `logits` [K, V] are theirs under the full cache.
        """
        predicting = slice(answer - 1, -1)  # the rows that predict the answer's tokens

        def without(row: int, keep: Tensor) -> Tensor:
            return self.follow_seeing(tokens, {row: keep})[predicting]

        return layer_effects(logits[predicting], without, protected)

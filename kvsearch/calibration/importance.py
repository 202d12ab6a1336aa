"""One full-cache pass per context: policy ranks of its entries, then true importance from each question asked of it.

The importance comes from the rows of the question and answer tokens only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvsearch.models.architecture import describe, output_projection
from kvsearch.policies import Observation, Policy, rank_under
from kvsearch.policies.base import Needs
from kvsearch.runtime.cache import check_rotary
from kvsearch.runtime.observe import DensePass
from kvsearch.signals.divergence import divergence
from kvsearch.signals.oracle import importance_rows, residual_weights


@dataclass
class QuestionImportance:
    """What one question revealed: per layer the importance [Hkv, T] fp32 and the scale of the layer's signals."""

    importance: Tensor  # [L, Hkv, T] fp32, not normalised
    output_norm: Tensor  # [L] mean L2 norm of the attention output of the question's rows
    residual_norm: Tensor  # [L] mean L2 norm of the residual stream entering the layer
    logits: Tensor  # [K, vocabulary]


Look = tuple[Needs, Callable[[Observation], Any]]


class RankedContext(NamedTuple):
    """What is kept of the context in one layer; `noted` is what a `look` made of it."""

    ranks: list[Tensor]  # [1, Hkv, T] int32 for each policy
    norms: Tensor  # [1, Hkv, G, T] fp32, L2 norms of the projected values
    noted: Any


class ImportancePass(DensePass[RankedContext]):
    """The full-cache pass over one context, and the questions asked of it.

    Args:
        model: a model whose attention implementation is "kvsearch".
        policies: the policies whose ranking of the context is wanted.
        context: token ids [1, T].
        group: how the query heads of a kv head are aggregated, "sum" or "max".
        refusal: see `DensePass`.
        look: what else to note of the context in every layer, and what that needs.
        plus: whether attention counts relative to the residual stream that it is added to, as in KVzip+.
    """

    def __init__(
        self,
        model: Any,
        policies: Sequence[Policy],
        context: Tensor,
        group: str = "sum",
        refusal: str | None = None,
        look: Look | None = None,
        plus: bool = False,
    ) -> None:
        more, note = look or (Needs(), lambda _: None)

        def observe(prompt: Observation) -> RankedContext:
            ranks = [rank_under(policy, prompt) for policy in policies]
            return RankedContext(ranks, prompt.projected_norms("l2"), note(prompt))

        check_rotary(model, policies)
        needs = [*(policy.needs() for policy in policies), Needs(projection=True), more]
        super().__init__(model, dict.fromkeys(describe(model).full_layers, needs), observe, context, refusal=refusal)
        self.group, self.plus = group, plus

    def ranks(self, policy: int = 0) -> Tensor:
        """Return the ranks under the policy of that index, [L, Hkv, T] int32 on the CPU."""
        return torch.stack([context.ranks[policy][0].cpu() for context in self.noted])

    @torch.no_grad()
    def ask(self, tokens: Tensor) -> QuestionImportance:
        """Teacher-force `tokens` [1, K] (a question and its answer) after the context and measure what they look at."""
        importance, output_norms, residual_norms = [], [], []
        with self.following(tokens, output_hidden_states=True) as output:
            for layer in self.continuations():
                length, how = layer.prompt[0].shape[2], layer.logits
                rows = (layer.query, layer.keys, layer.noted.norms, length, how.scaling, how.softcap, self.group)
                states = output.hidden_states[layer.index]
                weights = residual_weights(states) if self.plus else None
                importance.append(importance_rows(*rows, sinks=how.sinks, weights=weights)[0].cpu())
                block = nn.functional.linear(layer.output.flatten(2), output_projection(layer.module).weight)
                output_norms.append(block.float().norm(dim=-1).mean().cpu())
                residual_norms.append(states[0].float().norm(dim=-1).mean().cpu())
            logits = output.logits[0]
        norms = torch.stack(output_norms), torch.stack(residual_norms)
        return QuestionImportance(torch.stack(importance), *norms, logits)

    def effects(self, tokens: Tensor, answer: int, logits: Tensor, protected: Tensor) -> Tensor:
        """Measure what the answer loses when one layer keeps only `protected` [L, Hkv, T] of the context, [L] nats.

        Attention norms differ between layers for reasons that do not reach the output, so the effect on it is measured
        instead: one more pass over the K tokens for every layer that is measured.
        `tokens` [1, K] hold the answer from index `answer` on, `logits` [K, V] are theirs under the full cache.
        """
        predicting = slice(answer - 1, -1)  # the rows that predict the answer's tokens
        without = (self.logits_seeing(tokens, {row: keep})[predicting] for row, keep in enumerate(protected))
        return torch.tensor([divergence(logits[predicting], changed) for changed in without])

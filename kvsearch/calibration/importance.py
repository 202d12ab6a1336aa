"""One full-cache pass per context: policy ranks of its entries, then true importance from each question asked of it.

The importance comes from the rows of the question and answer tokens only.

What an answer loses when one layer alone sees nothing but protected entries says little where layers can stand in for
each other: with three of them that retrieve the same, each alone may go. Integrated gradients share out what is lost
together. Losses are -log p of the answer's tokens, in nats; `protected` [L, Hkv, T] bool are the entries that stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.nn.utils.rnn import pad_sequence

from kvsearch.calibration.polykv.tree import SweptPass
from kvsearch.calibration.prompts import Continuation
from kvsearch.core.errors import IncompatibleError
from kvsearch.models.architecture import describe
from kvsearch.models.weights import require_gradients
from kvsearch.policies import Observation, Policy, rank_under
from kvsearch.policies.base import Needs
from kvsearch.runtime.attention import gated_attention
from kvsearch.runtime.cache import check_rotary
from kvsearch.runtime.replay.forced_answers import TOGETHER
from kvsearch.signals.predictions import divergence, token_losses

NODES = 11  # of the quadrature along the path


Look = tuple[Needs, Callable[[Observation], Any]]


class RankedContext(NamedTuple):
    """What is kept of the context in one layer; `noted` is what a `look` made of it."""

    ranks: list[Tensor]  # [1, Hkv, T] int32 for each policy
    norms: Tensor  # [1, Hkv, G, T] fp32, L2 norms of the projected values
    noted: Any


class ImportancePass(SweptPass[RankedContext]):
    """The full-cache pass over one context, and the questions asked of it.

    Args:
        model: a model whose attention implementation is "kvsearch".
        policies: the policies whose ranking of the context is wanted.
        context: token ids [1, T].
        group: how the query heads of a kv head are aggregated, "sum" or "max".
        refusal: see `DensePass`.
        look: what else to note of the context in every layer, and what that needs.
    """

    def __init__(
        self,
        model: Any,
        policies: Sequence[Policy],
        context: Tensor,
        group: str = "sum",
        refusal: str | None = None,
        look: Look | None = None,
    ) -> None:
        more, note = look or (Needs(), lambda _: None)

        def observe(prompt: Observation) -> RankedContext:
            ranks = [rank_under(policy, prompt) for policy in policies]
            return RankedContext(ranks, prompt.projected_norms("l2"), note(prompt))

        check_rotary(model, policies)
        needs = [*(policy.needs() for policy in policies), Needs(projection=True), more]
        super().__init__(model, dict.fromkeys(describe(model).full_layers, needs), observe, context, refusal=refusal)
        self.group = group

    def ranks(self, policy: int = 0) -> Tensor:
        """Return the ranks under the policy of that index, [L, Hkv, T] int32 on the CPU."""
        return torch.stack([context.ranks[policy][0].cpu() for context in self.noted])

    @torch.no_grad()
    def ask(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Teacher-force `tokens` [1, K] (a question and its answer) after the context and measure what they look at.

        Returns the importance of entries, [L, Hkv, T] fp32, not normalised, and the logits [K, vocabulary].
        """
        with self.following(tokens) as output:
            return self.importance()[0], output.logits[0]

    def importance(self, weights: Tensor | None = None) -> Tensor:
        """Return the importance of entries for the tokens that follow just now, [M, L, Hkv, T] fp32, not normalised.

        `weights` [M, K] are those of the tokens (None: 1).
        """
        found = []
        for layer in self.continuations():
            each = None if weights is None else weights.to(layer.query.device)
            found.append(layer.importance(layer.noted.norms, self.group, each).cpu())
        return torch.stack(found, 1)

    @torch.no_grad()
    def importance_of(self, texts: Sequence[Tensor]) -> Tensor:
        """Return what each of M texts, token ids [K], looks at where it follows the context, [M, L, Hkv, T] fp32.

        Texts that can be are rows of one batch, `TOGETHER` at a time; equal to what `ask` returns up to rounding.
        """
        size = TOGETHER if self.observes_all else 1  # rows share what every layer of the model holds
        parts = []
        for first in range(0, len(texts), size):
            some = texts[first : first + size]
            tokens = pad_sequence(list(some), batch_first=True)
            counts = torch.tensor([len(text) for text in some])
            real = (torch.arange(tokens.shape[1]) < counts[:, None]).float()  # padding is behind: no token sees it
            rows = None if len(some) == 1 else torch.zeros(len(some), dtype=torch.long)
            with self.following(tokens.to(self.model.device), rows=rows, logits_to_keep=1):
                parts.append(self.importance(real))
        return torch.cat(parts)

    def effects(self, tokens: Tensor, answer: int, logits: Tensor, protected: Tensor) -> Tensor:
        """Measure what the answer loses when one layer keeps only `protected` [L, Hkv, T] of the context, [L] nats.

        Attention norms differ between layers for reasons that do not reach the output, so the effect on it is measured
        instead: in one sweep where layers are known well enough, else by one more pass for every layer.
        `tokens` [1, K] hold the answer from index `answer` on, `logits` [K, V] are theirs under the full cache.
        """
        predicting = slice(answer - 1, -1)  # the rows that predict the answer's tokens
        try:
            hidden = self._hidden_without(tokens, protected)
            without = (self.logits(each[0, predicting]) for each in hidden)
        except IncompatibleError:
            without = (self.logits_seeing(tokens, {row: keep})[predicting] for row, keep in enumerate(protected))
        full = logits[predicting]
        return torch.tensor([divergence(full, changed.to(full.device)) for changed in without])

    def _hidden_without(self, tokens: Tensor, protected: Tensor) -> Tensor:
        """Return what enters the final norm where one layer keeps only `protected`, [L, 1, K, d_model].

        Raises:
            IncompatibleError: the layers cannot be swept.
        """
        if not self.observes_all:
            raise IncompatibleError("a sweep goes through layers of full attention alone")
        with self.baseline_pass(tokens) as layers:

            def outputs(index: int, rows: Sequence[int]) -> list[Tensor]:
                layer = layers.pop(index)
                states = (layer.query, layer.keys, layer.values)
                seen = [protected[row].to(layer.query.device) for row in rows]
                shut = torch.zeros_like(seen[0], dtype=torch.float32)  # gates of all other entries
                return [gated_attention(states, keep, shut, layer.logits).transpose(1, 2) for keep in seen]

            return self.sweep({layer.index: [row] for row, layer in enumerate(self.observed)}, outputs)


@torch.enable_grad()
def integrated_gradients(passed: ImportancePass, after: Continuation, protected: Tensor, nodes: int = NODES) -> Tensor:
    """Return what each entry adds to the answer's loss on the way from all kept to all removed, [L, Hkv, T] fp32.

    One gate for all entries that are not protected, in all layers, goes from 1 to 0, and the derivatives by each
    entry's gate are summed up along the way (integrated gradients, arXiv 1703.01365, Eq. 1; Gauss-Legendre quadrature
    of `nodes` points, as many passes forward and backward over the tokens). Their sum is the loss of removing all
    together, up to quadrature, unless it jumps on the way, as where experts are chosen. Some may be below zero: the
    answer is better without.
    """
    require_gradients(passed.model, "give --normalization effect, which needs none, or load the model unquantised")
    tokens = after.tokens.to(passed.model.device)
    answer = after.tokens[0, max(after.answer, 1) :]
    keep = dict(enumerate(protected))
    found = torch.zeros(protected.shape)
    # recurrent layers write their states in place; allowing for that is slow
    recurrent = not all(hasattr(layer, "keys") for layer in passed.cache.layers)
    for node, weight in zip(*np.polynomial.legendre.leggauss(nodes), strict=True):
        gates = torch.full(protected.shape, (1 + float(node)) / 2, requires_grad=True)
        writable = allow_mutation_on_saved_tensors() if recurrent else nullcontext()
        with writable, passed.following(tokens, keep, dict(enumerate(gates))) as output:
            loss = token_losses(output.logits[0][after.predicting], answer).sum()
            (slope,) = torch.autograd.grad(loss, gates)
        found -= float(weight) / 2 * slope
    return found.masked_fill(protected, 0.0)

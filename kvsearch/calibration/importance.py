"""One full-cache pass per context: policy ranks of its entries, then what each question and its answer look at.

Importance is how much the tokens of question and answer attend to an entry. An output error is how the answer suffers
where a head loses entries. What one layer is worth alone says little where layers can stand in for each other: of three
that retrieve the same, each may go. So errors are weighted by gradients along the way on which all layers lose their
entries together. `protected` [L, Hkv, T] bool are the entries that stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.nn.utils.rnn import pad_sequence

from kvsearch.calibration.polykv.tree import TreeLayer
from kvsearch.calibration.prompts import Continuation
from kvsearch.models.architecture import describe
from kvsearch.models.weights import require_gradients
from kvsearch.policies import Observation, Policy, rank_under
from kvsearch.policies.base import Needs
from kvsearch.runtime.cache import check_rotary
from kvsearch.runtime.observe import DensePass
from kvsearch.runtime.replay.forced_answers import TOGETHER
from kvsearch.signals.predictions import log_odds

NODES = 3  # of the quadrature along the way; at the full cache alone, gradients make worse budgets


Look = tuple[Sequence[Needs], Callable[[Observation], Any]]


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
    """

    layer = TreeLayer  # rows of tokens share the context, without a copy for each

    def __init__(
        self,
        model: Any,
        policies: Sequence[Policy],
        context: Tensor,
        group: str = "sum",
        refusal: str | None = None,
        look: Look | None = None,
    ) -> None:
        more, note = look or ((), lambda _: None)

        def observe(prompt: Observation) -> RankedContext:
            ranks = [rank_under(policy, prompt) for policy in policies]
            return RankedContext(ranks, prompt.projected_norms("l2"), note(prompt))

        check_rotary(model, policies)
        needs = [*(policy.needs() for policy in policies), Needs(projection=True), *more]
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


def output_errors(
    passed: ImportancePass, after: Continuation, protected: Tensor, orders: Sequence[Tensor], nodes: int = NODES
) -> Tensor:
    """Measure how an answer suffers where a head keeps only the first entries of an order, [n, L, Hkv, T + 1] fp32.

    Each of the n `orders` [L, Hkv, T] has the entries of every head, the one that stays longest first. The error at
    index b is that of the head alone with its first b entries: how its attention output changes, weighted by what the
    answer loses for that (`output_slopes`); see `kept_prefix_errors`.

    Takes `nodes` passes forward and back over the tokens, and one forward, whatever n is. All errors are NaN where the
    model computes NaN.

    Raises:
        IncompatibleError: the model passes no gradients back.
    """
    slopes = output_slopes(passed, after, protected, nodes)
    with passed.following(after.tokens.to(passed.model.device)) as output:
        layers = list(passed.continuations())
    errors = [
        layer.prefix_errors(slope, [order[row] for order in orders]).cpu()
        for row, (layer, slope) in enumerate(zip(layers, slopes, strict=True))
    ]
    return torch.stack(errors, 1).masked_fill(output.logits.isnan().any().cpu(), torch.nan)


def errors_taken_away(errors: Tensor, always: int) -> Tensor:
    """Return what each entry takes away from `errors` [..., T + 1] by the entries before it, [..., T].

    Nothing is decided about the first entries, which stay `always`: they take nothing away, and nor does an entry that
    makes the error larger.
    """
    worth: Tensor = nn.functional.pad(-errors[..., always:].cummin(-1).values.diff(dim=-1), (always, 0))
    return worth


@torch.enable_grad()
def output_slopes(passed: ImportancePass, after: Continuation, protected: Tensor, nodes: int = NODES) -> list[Tensor]:
    """Return the derivatives of an answer's log-odds by the attention outputs of each layer, [K, Hq, Dv] fp32.

    They are means along the way from the full cache to the `protected` entries alone: one gate for all other entries of
    all layers goes from 1 to 0 (Gauss-Legendre quadrature of `nodes` points, as for integrated gradients, arXiv
    1703.01365, Eq. 1). So layers that stand in for each other share what is lost for lack of both, while under the full
    cache none of them seems to matter. Log-odds have a slope where the model is sure, and log p has none.

    Raises:
        IncompatibleError: the model passes no gradients back.
    """
    require_gradients(passed.model, "give --normalization layer, which needs none, or load the model unquantised")
    tokens = after.tokens.to(passed.model.device)
    answer = after.tokens[0, max(after.answer, 1) :]
    keep = dict(enumerate(protected))
    # recurrent layers write their states in place; allowing for that is slow
    recurrent = not all(hasattr(layer, "keys") for layer in passed.cache.layers)
    means: list[Tensor] = []
    for node, weight in zip(*np.polynomial.legendre.leggauss(nodes), strict=True):
        # gates have gradients so that outputs do, whatever the weights of the model have
        gates = torch.full(protected.shape, (1 + float(node)) / 2, requires_grad=True)
        writable = allow_mutation_on_saved_tensors() if recurrent else nullcontext()
        with writable, passed.following(tokens, keep, dict(enumerate(gates))) as output:
            odds = log_odds(output.logits[0][after.predicting], answer).sum()
            outputs = [layer.gated_output for layer in passed.observed if layer.gated_output is not None]
            slopes = [float(weight) / 2 * slope[0].float() for slope in torch.autograd.grad(odds, outputs)]
        means = [mean + slope for mean, slope in zip(means, slopes, strict=True)] if means else slopes
    return means

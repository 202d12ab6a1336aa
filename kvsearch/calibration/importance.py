"""Importance of cache entries: one full-cache pass per context, then the attention of each question and answer.

Importance is how much the tokens of question and answer attend to an entry. An output error is how the answer suffers
where a head loses entries. What one layer is worth alone says little where layers can stand in for each other: of three
that retrieve the same, each may go. So errors are weighted by gradients along the way on which all layers lose their
entries together. `protected` [L, Hkv, T] bool are the entries that stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.nn.utils.rnn import pad_sequence

from kvsearch.calibration.polykv.tree import TreeLayer
from kvsearch.calibration.prompts import Continuation
from kvsearch.core.errors import assert_present
from kvsearch.models.architecture import describe
from kvsearch.models.weights import require_gradients
from kvsearch.policies import Observation, Policy, rank_under
from kvsearch.policies.base import Needs
from kvsearch.runtime.cache import check_rotary
from kvsearch.runtime.observe import DensePass
from kvsearch.runtime.replay.forced_answers import TOGETHER
from kvsearch.runtime.replay.replay import LayerContinuation
from kvsearch.signals.predictions import compute_log_odds

QUADRATURE_NODES = 3  # of the quadrature along the way; at the full cache alone, gradients make worse budgets

MAX_GATED_PAIRS = 2**26  # of queries and entries of a layer at most, of rows of one batch that pass gradients back

ContextLook = tuple[Sequence[Needs], Callable[[Observation], Any]]


@dataclass(frozen=True, eq=False)
class RankedContext:
    """Ranks and norms of the context in one layer; `noted` is the result of a `look`."""

    ranks: list[Tensor]  # [1, Hkv, T] int32 for each policy
    measure_norms: Callable[[], Tensor]
    noted: Any

    @cached_property
    def norms(self) -> Tensor:
        """L2 norms of the projected values, [1, Hkv, G, T] fp32; computed on demand."""
        return self.measure_norms()


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
        look: ContextLook | None = None,
    ) -> None:
        more, note = look or ((), lambda _: None)

        def observe(prompt: Observation) -> RankedContext:
            ranks = [rank_under(policy, prompt) for policy in policies]
            project = assert_present(prompt.projection, "values are projected where importance is measured")
            return RankedContext(ranks, partial(project, prompt.values, "l2"), note(prompt))

        check_rotary(model, policies)
        needs = [*(policy.needs() for policy in policies), Needs(projection=True), *more]
        super().__init__(model, dict.fromkeys(describe(model).full_layers, needs), observe, context, refusal=refusal)
        self.group = group

    def ranks(self, policy: int = 0) -> Tensor:
        """Return the ranks under the policy of that index, [L, Hkv, T] int32 on the CPU."""
        return torch.stack([context.ranks[policy][0].cpu() for context in self.noted])

    @torch.no_grad()
    def ask(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Teacher-force `tokens` [1, K] (a question and its answer) after the context, and measure importance.

        Returns the importance of entries, [L, Hkv, T] fp32, not normalised, and the logits [K, vocabulary].
        """
        with self.weigh(tokens) as output:
            return self.stack_weighed(), output.logits[0]

    def weigh(self, tokens: Tensor, **kwargs: Any) -> AbstractContextManager[Any]:
        """Teacher-force `tokens` [1, K] in layers that measure the importance of entries as they attend."""
        return self.weighing(tokens, self.group, attrgetter("norms"), **kwargs)

    def stack_weighed(self) -> Tensor:
        """Stack the importance of entries for the tokens of `weigh`, [L, Hkv, T] fp32 on the CPU, not normalised."""
        return torch.stack([importance[0].cpu() for importance in self.weighed().values()])

    def importance(self, weights: Tensor) -> Tensor:
        """Return the importance of entries for the current suffix tokens, [M, L, Hkv, T] fp32, not normalised.

        `weights` [M, K] are how much each token counts.
        """
        by_layer = [
            layer.importance(layer.noted.norms, self.group, weights.to(layer.query.device)).cpu()
            for layer in self.continuations()
        ]
        return torch.stack(by_layer, 1)

    @torch.no_grad()
    def measure_importance_of(self, texts: Sequence[Tensor]) -> Tensor:
        """Measure the importance of entries for each of M texts (token ids [K]) after the context, [M, L, Hkv, T] fp32.

        Texts are rows of one batch, `TOGETHER` at a time; equal to what `ask` returns up to rounding.
        """
        parts = []
        for first in range(0, len(texts), TOGETHER):
            batch = texts[first : first + TOGETHER]
            tokens = pad_sequence(list(batch), batch_first=True)
            counts = torch.tensor([len(text) for text in batch])
            real = (torch.arange(tokens.shape[1]) < counts[:, None]).float()  # padding is behind: no token sees it
            rows = None if len(batch) == 1 else torch.zeros(len(batch), dtype=torch.long)
            with self.following(tokens.to(self.model.device), rows=rows, logits_to_keep=1):
                parts.append(self.importance(real))
        return torch.cat(parts)


def measure_output_errors(
    context_pass: ImportancePass,
    questions: Sequence[Continuation],
    protected: Tensor,
    orders: Sequence[Tensor],
    nodes: int = QUADRATURE_NODES,
) -> Iterator[Tensor]:
    """Yield the output error of each answer where a head keeps a prefix of an order, [n, L, Hkv, T + 1] fp32.

    Each of the n `orders` [L, Hkv, T] has the entries of every head, the one that stays longest first. The error at
    index b is that of the head alone with its first b entries: how its attention output changes, weighted by what the
    answer loses for that (`measure_output_slopes`); see `kept_prefix_errors`.

    Takes a pass forward and back over rows of tokens, `nodes` + 1 of each question, whatever n is. All errors of an
    answer are NaN where the model computes NaN.

    Raises:
        IncompatibleError: the model passes no gradients back.
    """
    for slopes, layers in measure_output_slopes(context_pass, questions, protected, nodes):
        errors = [
            layer.prefix_errors(slope, [order[row] for order in orders]).cpu()
            for row, (layer, slope) in enumerate(zip(layers, slopes, strict=True))
        ]
        yield torch.stack(errors, 1)


def compute_error_drops(errors: Tensor, always: int) -> Tensor:
    """Compute the drop of `errors` [..., T + 1] by each entry after the ones before it, [..., T].

    The first `always` entries stay in any case: their drop is 0, as is that of an entry that increases the error.
    """
    worth: Tensor = nn.functional.pad(-errors[..., always:].cummin(-1).values.diff(dim=-1), (always, 0))
    return worth


class WeighedAnswer(NamedTuple):
    """A question with its answer after a context: its `layers`, and the slopes of the answer by their outputs.

    `slopes` [K, Hq, Dv] fp32 are derivatives of its log-odds by attention outputs, NaN where the model computes NaN.
    """

    slopes: list[Tensor]
    layers: list[LayerContinuation[RankedContext]]


def measure_output_slopes(
    context_pass: ImportancePass, questions: Sequence[Continuation], protected: Tensor, nodes: int = QUADRATURE_NODES
) -> Iterator[WeighedAnswer]:
    """Yield the derivatives of answers' log-odds by the attention outputs of each layer.

    They are means along the way from the full cache to the `protected` entries alone: one gate for all other entries of
    all layers goes from 1 to 0 (Gauss-Legendre quadrature of `nodes` points, as for integrated gradients, arXiv
    1703.01365, Eq. 1). So layers that stand in for each other share what is lost for lack of both, while under the full
    cache none of them seems to matter. Log-odds have a slope where the model is sure, and log p has none.

    Raises:
        IncompatibleError: the model passes no gradients back.
    """
    require_gradients(context_pass.model, "give --normalization layer, which needs none, or load the model unquantised")
    heads = describe(context_pass.model).query_heads
    longest = max((question.tokens.shape[1] for question in questions), default=1)
    size = max(1, MAX_GATED_PAIRS // ((nodes + 1) * heads * longest * protected.shape[-1]))
    for first in range(0, len(questions), size):
        yield from _weigh_batch(context_pass, questions[first : first + size], protected, nodes)


@torch.enable_grad()
def _weigh_batch(
    context_pass: ImportancePass, questions: Sequence[Continuation], protected: Tensor, nodes: int
) -> list[WeighedAnswer]:
    """Measure slopes in one batch: a row of every question under the full cache, then one per node."""
    device = context_pass.model.device
    places, weights = np.polynomial.legendre.leggauss(nodes)
    # padding is behind: no token sees it
    tokens = (
        pad_sequence([question.tokens[0] for question in questions], batch_first=True).to(device).repeat(nodes + 1, 1)
    )
    # gates have gradients so that outputs do, whatever the weights of the model have
    gates = torch.tensor((1 + places) / 2, dtype=torch.float32, device=device)
    gates = gates.repeat_interleave(len(questions)).requires_grad_()
    starts = [question.predicting.start for question in questions]
    # recurrent layers write their states in place; allowing for that is slow
    recurrent = not all(hasattr(layer, "keys") for layer in context_pass.cache.layers)
    writable = allow_mutation_on_saved_tensors() if recurrent else nullcontext()
    rows = torch.zeros(len(tokens), dtype=torch.long)
    first = min(starts)
    keep = dict(enumerate(protected))
    with writable, context_pass.following(tokens, keep, gates, rows, logits_to_keep=tokens.shape[1] - first) as output:
        logits = output.logits.view(nodes + 1, len(questions), *output.logits.shape[1:])
        odds = logits.new_zeros((), dtype=torch.float32)
        for number, question in enumerate(questions):
            answer = question.tokens[0, max(question.answer, 1) :]
            predicting = slice(starts[number] - first, question.tokens.shape[1] - 1 - first)
            for of_node in logits[1:, number]:
                odds = odds + compute_log_odds(of_node[predicting], answer).sum()
        outputs = [layer.gated_output for layer in context_pass.observed if layer.gated_output is not None]
        shares = torch.tensor(weights / 2, dtype=torch.float32)
        means = []
        for slope in torch.autograd.grad(odds, outputs):
            by_node = slope.float().view(nodes, len(questions), *slope.shape[1:])
            means.append(torch.einsum("n,n...->...", shares.to(slope.device), by_node))
        broken = logits[0].detach().isnan().flatten(1).any(1).cpu()
        layers = list(context_pass.continuations())
    answers = []
    for number, question in enumerate(questions):
        count = question.tokens.shape[1]
        slopes = [mean[number, :count].masked_fill(broken[number].to(mean.device), torch.nan) for mean in means]
        answers.append(WeighedAnswer(slopes, [layer.of_row(number, count) for layer in layers]))
    return answers

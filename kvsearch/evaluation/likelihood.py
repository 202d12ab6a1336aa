"""Log-likelihoods of texts that follow compressed contexts, teacher-forced on what the cache holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvsearch.core.errors import NonFiniteError
from kvsearch.models.architecture import require_same_rotary
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.decode.replies import NO_LOGITS, check_logits
from kvsearch.runtime.program import require_room
from kvsearch.runtime.shared_prefill import count_held_entries, read_prompts
from kvsearch.runtime.stock import CACHE
from kvsearch.signals.predictions import token_losses

Likelihood = tuple[float, bool]  # log-probability in nats, and whether greedy decoding would give just this text


def count_compressible(context: Sequence[int]) -> int:
    """Return how many tokens of a context are compressed: all but the last.

    That one follows the compressed cache, so that all of a continuation, its first token included, is predicted from
    what the cache holds. A single token is read as it is: there is nothing to compress.
    """
    return max(len(context) - 1, 1)


def score(
    model: Any,
    program: Program,
    contexts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[Sequence[int]]],
) -> list[tuple[list[Likelihood], int]]:
    """Score continuations (token ids, at least one) of every context (token ids, at least one), one batch.

    Returns for each context the likelihoods of its continuations, in their order, and the entries that were held before
    they were read. Contexts are read once, and continuations that differ in their last token only are fed once. The
    model must run the attention implementation "kvsearch".

    Raises:
        NonFiniteError: the model emits NaN; `row` is the context.
        EnvironmentFault: the device has too little memory for the contexts.
    """
    leads = [torch.tensor(context[: count_compressible(context)]) for context in contexts]
    lengths = [len(lead) for lead in leads]
    longest = max(len(text) for several in continuations for text in several)
    ends = max(len(context) - len(lead) for context, lead in zip(contexts, leads, strict=True))
    require_same_rotary(model, lengths, ends + longest - 1)
    require_room(model, {"the plan": program}, lengths)
    cache = PlanCache(model, program)
    first, mask = read_prompts(model, [cache], leads)
    check_logits(first)
    held = count_held_entries(model, cache, lengths)
    followers: list[dict[tuple[int, ...], list[int]]] = [{} for _ in contexts]  # continuations by what is fed
    for follower, context, lead, texts in zip(followers, contexts, leads, continuations, strict=True):
        for index, text in enumerate(texts):
            # The last token of a text is only predicted: choices like " A" and " B" are one pass.
            follower.setdefault((*context[len(lead) :], *text[:-1]), []).append(index)
    cache.activate_past_recording()  # sliding-window layers must be able to forget a text, too
    mark = cache.mark()
    likelihoods: list[dict[int, Likelihood]] = [{} for _ in contexts]
    for number in range(max(map(len, followers))):
        # Every text follows the context, not the text before it.
        cache.rewind(mark)
        # a context without a text of that number repeats its last one, unheard
        fed = [list(follower)[min(number, len(follower) - 1)] for follower in followers]
        logits = torch.cat([first, _feed_texts(model, cache, mask, fed)], 1) if any(fed) else first
        for row, follower in enumerate(followers):
            for index in follower[fed[row]] if number < len(follower) else ():
                predicting = logits[row, : 1 + len(fed[row])]
                likelihoods[row][index] = _measure_likelihood(predicting, continuations[row][index], row)
    return [
        ([by_index[index] for index in sorted(by_index)], entries)
        for by_index, entries in zip(likelihoods, held, strict=True)
    ]


def _measure_likelihood(logits: Tensor, text: Sequence[int], row: int) -> Likelihood:
    """Measure a text's log-likelihood from logits [1 + K, V]: of the context's end and of K tokens fed after it."""
    predicted = logits[-len(text) :].float()
    if not bool(predicted.isfinite().all()):
        raise NonFiniteError(NO_LOGITS, row)
    tokens = torch.tensor(text, device=logits.device)
    is_greedy = bool((predicted.argmax(-1) == tokens).all())
    return -float(token_losses(predicted, tokens).sum()), is_greedy


@torch.no_grad()
def _feed_texts(model: Any, cache: PlanCache, mask: Tensor, fed: Sequence[Sequence[int]]) -> Tensor:
    """Return logits [B, K, V] of texts fed after contexts of `mask` [B, T]; padded at the right, where it is unseen."""
    width = max(len(text) for text in fed)
    ids = torch.tensor([[*text, *[0] * (width - len(text))] for text in fed], device=mask.device)
    positions = mask.sum(-1, keepdim=True) + torch.arange(width, device=mask.device)
    seen = torch.cat([mask, torch.ones_like(ids)], 1)
    logits: Tensor = model(input_ids=ids, attention_mask=seen, position_ids=positions, **{CACHE: cache}).logits
    return logits

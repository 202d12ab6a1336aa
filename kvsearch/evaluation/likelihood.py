"""Log-likelihoods of texts that follow compressed contexts, teacher-forced on what the cache holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.decode.replies import NonFiniteError, next_tokens
from kvsearch.runtime.program import require_room
from kvsearch.runtime.shared_prefill import held_entries, read_prompts
from kvsearch.runtime.stock import CACHE
from kvsearch.signals.predictions import token_losses


class Likelihood(NamedTuple):
    """The log-probability of a continuation, in nats, and whether greedy decoding would give just this one."""

    logprob: float
    greedy: bool


@dataclass(frozen=True)
class ScoredContext:
    """The continuations of one context, in their order, and the entries held before they were read."""

    likelihoods: list[Likelihood]
    entries: int


def compressible(context: Sequence[int]) -> int:
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
    pad: int,
) -> list[ScoredContext]:
    """Score continuations (token ids, at least one) of every context (token ids, at least one), one batch.

    Contexts are read once. The model must run the attention implementation "kvsearch".

    Raises:
        NonFiniteError: the model emits NaN; `row` is the context.
        EnvironmentFault: the device has too little memory for the contexts.
    """
    leads = [torch.tensor(context[: compressible(context)]) for context in contexts]
    require_room(model, {"the plan": program}, [len(lead) for lead in leads])
    cache = PlanCache(model, program)
    first, mask = read_prompts(model, [cache], leads, pad)
    next_tokens(first)  # refuses NaN
    held = held_entries(model, cache, [len(lead) for lead in leads])
    followers = [
        _Followers(context[len(lead) :], texts)
        for context, lead, texts in zip(contexts, leads, continuations, strict=True)
    ]
    cache.activate_past_recording()  # sliding-window layers must be able to forget a text, too
    mark = cache.mark()
    for number in range(max(len(found.fed) for found in followers)):
        cache.rewind(mark)
        # a context without a text of that number repeats its last one, unheard
        fed = [found.fed[min(number, len(found.fed) - 1)] for found in followers]
        logits = torch.cat([first, _forced(model, cache, mask, fed, pad)], 1) if any(fed) else first
        for row, found in enumerate(followers):
            if number < len(found.fed):
                found.hear(number, logits[row], row)
    return [ScoredContext(found.answers(), entries) for found, entries in zip(followers, held, strict=True)]


class _Followers:
    """What is fed after one compressed context: its `rest` and a continuation without its last token.

    Continuations that differ in their last token only are fed once.
    """

    def __init__(self, rest: Sequence[int], texts: Sequence[Sequence[int]]) -> None:
        self.texts = texts
        self._sharing: dict[tuple[int, ...], list[int]] = {}
        for index, text in enumerate(texts):
            self._sharing.setdefault((*rest, *text[:-1]), []).append(index)
        self.fed = list(self._sharing)
        self._found: dict[int, Likelihood] = {}

    def hear(self, number: int, logits: Tensor, row: int) -> None:
        """Take the predictions [1 + K, V] of the context's end and of the K tokens of `fed[number]` that follow it."""
        fed = self.fed[number]
        for index in self._sharing[fed]:
            text = torch.tensor(self.texts[index], device=logits.device)
            predicted = logits[: 1 + len(fed)][-len(text) :].float()
            if not bool(predicted.isfinite().all()):
                raise NonFiniteError(row)
            greedy = bool((predicted.argmax(-1) == text).all())
            self._found[index] = Likelihood(-float(token_losses(predicted, text).sum()), greedy)

    def answers(self) -> list[Likelihood]:
        return [self._found[index] for index in range(len(self.texts))]


@torch.no_grad()
def _forced(model: Any, cache: PlanCache, mask: Tensor, fed: Sequence[Sequence[int]], pad: int) -> Tensor:
    """Return logits [B, K, V] of texts fed after contexts of `mask` [B, T]; padded at the right, where it is unseen."""
    width = max(len(text) for text in fed)
    ids = torch.tensor([[*text, *[pad] * (width - len(text))] for text in fed], device=mask.device)
    positions = mask.sum(-1, keepdim=True) + torch.arange(width, device=mask.device)
    seen = torch.cat([mask, torch.ones_like(ids)], 1)
    logits: Tensor = model(input_ids=ids, attention_mask=seen, position_ids=positions, **{CACHE: cache}).logits
    return logits

"""Perplexity under plans: contexts are compressed, and what follows them is predicted from what is left.

Every context is read once for all methods, and its continuation is teacher-forced on each compressed cache. The first
token of a continuation is predicted by the last position of the context, before anything is evicted: all methods lose
the same on it, and it counts like the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.core.progress import Progress, counted
from kvsearch.evaluation.samples import WindowLoss
from kvsearch.models.architecture import describe, text_config
from kvsearch.models.loading import LoadedModel
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import running
from kvsearch.runtime.program import full_cache, require_room
from kvsearch.runtime.shared_prefill import held_entries, prefill_all, with_unplanned
from kvsearch.runtime.stock import CACHE
from kvsearch.signals.predictions import token_losses
from kvsearch.strategies.names import FULL
from kvsearch.tasks.splits import draw
from kvsearch.tasks.windows import PerplexityText, Window

MOST_LOGITS = 2**25  # of one forward pass: 128 MiB in fp32
LEAST = 2


def measure_perplexity(
    loaded: LoadedModel,
    programs: Mapping[str, Program],
    text: PerplexityText,
    context: int,
    continuation: int,
    *,
    stride: int | None = None,
    windows: int | None = None,
    batch: int = 8,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[WindowLoss]:
    """Return what a text's continuations lose under the full cache ("full") and every program, windows in text order.

    The text is cut every `stride` tokens (default: into windows that do not overlap); of its windows up to `windows`
    are drawn without replacement. Special tokens that the tokenizer puts first come on top of every context. Takes
    memory for the compressed caches of all programs and of `batch` windows.

    Raises:
        UsageError: the text is shorter than one window, or a number is too small.
        IncompatibleError: windows are longer than the model takes, or it emits NaN; the message names the window.
    """
    lead, chosen = _windows(loaded, text, context, continuation, stride, windows, seed)
    methods = {FULL: full_cache(loaded.model), **programs}
    parts = [chosen[first : first + batch] for first in range(0, len(chosen), batch)]
    samples: list[WindowLoss] = []
    measured = loaded.map(partial(_measure, programs=methods, text=text.name, lead=lead), parts)
    for losses in counted(measured, len(parts), progress):
        samples += losses
    order = {method: number for number, method in enumerate(methods)}
    return sorted(samples, key=lambda sample: order[sample.method])  # stable: windows stay in the order of the text


def _windows(
    loaded: LoadedModel,
    text: PerplexityText,
    context: int,
    continuation: int,
    stride: int | None,
    wanted: int | None,
    seed: int,
) -> tuple[list[int], list[Window]]:
    """Return the special tokens that come first, and the windows to measure in the order of the text."""
    if continuation < LEAST or (wanted is not None and wanted < 1):
        raise UsageError(
            f"perplexity needs a window or more and continuations of {LEAST} tokens or more, of which the first is "
            f"predicted before anything is evicted: got {continuation} tokens"
            + ("" if wanted is None else f", {wanted} windows")
        )
    tokenizer, limit = loaded.tokenizer, describe(loaded.model).max_positions
    lead: list[int] = tokenizer("")["input_ids"]
    if limit and len(lead) + context + continuation - 1 > limit:
        raise IncompatibleError(
            f"windows of {context} + {continuation} tokens are longer than the {limit} tokens that the model takes: "
            "shorten them"
        )
    # not verbose: it would warn that the text is longer than the model takes
    encode = partial(tokenizer, add_special_tokens=False, verbose=False)
    every = text.windows(lambda part: encode(part)["input_ids"], context, continuation, stride)
    return lead, every if wanted is None else sorted(draw(every, wanted, seed), key=lambda window: window.start)


@torch.no_grad()
def _measure(
    loaded: LoadedModel, windows: Sequence[Window], programs: Mapping[str, Program], text: str, lead: Sequence[int]
) -> Iterator[WindowLoss]:
    """Yield the losses of one batch of windows under every program."""
    model = loaded.model
    ids = torch.tensor([[*lead, *window.context] for window in windows], device=loaded.device)
    following = torch.tensor([window.continuation for window in windows], device=loaded.device)
    lengths = [ids.shape[1]] * len(windows)
    require_room(model, programs, lengths)
    with running(model):
        caches = {method: PlanCache(model, program) for method, program in programs.items()}
        logits = prefill_all(model, list(caches.values()), ids, torch.ones_like(ids))
        first = token_losses(logits, following[:, :1])
        for method in programs:
            cache = caches.pop(method)  # its memory is free again after this round
            entries, size = held_entries(model, cache, lengths), cache.nbytes() / len(windows)
            losses = torch.cat([first, *_forced(model, cache, following)], 1).tolist()
            most = with_unplanned(model, cache, cache.most_entries(), [cache.get_seq_length()] * len(windows))
            for row, window in enumerate(windows):
                if not all(map(math.isfinite, losses[row])):
                    raise IncompatibleError(
                        f"{text}, window at token {window.start}, method {method}: the model emits NaN or infinite "
                        "logits: check its dtype and weights"
                    )
                yield WindowLoss(method, window.start, tuple(losses[row]), entries[row], size, most[row])


def _forced(model: Any, cache: PlanCache, tokens: Tensor) -> Iterator[Tensor]:
    """Yield losses of all `tokens` [B, n] but the first, predicted by cache and tokens before, [B, k] a pass."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    step = max(1, MOST_LOGITS // (len(tokens) * text_config(model).vocab_size))
    for given, wanted in zip(torch.split(inputs, step, 1), torch.split(targets, step, 1), strict=True):
        seen = cache.get_seq_length()
        mask = torch.ones(len(given), seen + given.shape[1], dtype=torch.long, device=given.device)
        positions = torch.arange(seen, mask.shape[1], device=given.device).expand_as(given)
        logits = model(input_ids=given, attention_mask=mask, position_ids=positions, **{CACHE: cache}).logits
        yield token_losses(logits, wanted)

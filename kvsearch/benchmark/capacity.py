"""How many sequences a device decodes at once with a kind of cache, and how fast that is."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from transformers import StaticCache

from kvsearch.benchmark.speed import (
    CacheKind,
    Workload,
    cache_nbytes,
    decode_seconds,
    peak_bytes,
    prefill_seconds,
    random_prompts,
    step_seconds,
)
from kvsearch.core.errors import EnvironmentFault
from kvsearch.models.memory import free_memory, is_out_of_memory

FEWER = 16  # a batch that does not fit is tried again with a sixteenth less
PROBED = 2  # steps that tell what a step takes beside the cache, and that warm a batch up


@torch.no_grad()
def largest_batch(model: Any, kind: CacheKind, work: Workload, memory: int) -> tuple[int, float]:
    """Return the largest batch of contexts whose caches fit into `memory` bytes, and its tokens per second.

    Contexts have `work.length` tokens. The cache of `kind` has room for `PROBED` tokens more than the steps of `work`.

    One prompt is read, and its cache repeated: how many prompts are read at a time is another matter. The batch follows
    from the bytes of one sequence, its cache and what a step takes beside it; where a device has less room than that,
    fewer are tried.

    Raises:
        EnvironmentFault: not one sequence fits.
    """
    model.set_attn_implementation(kind.implementation)
    one = kind.make()
    prefill_seconds(model, one, random_prompts(model, 1, work.length))
    held = cache_nbytes(one)
    beside = peak_bytes(model.device, lambda: decode_seconds(model, one, 1, min(PROBED, work.steps)))
    batch = memory // (held + beside)
    while batch > 0:
        try:
            cache = _repeated(kind, one, batch)
            step_seconds(model, cache, batch, PROBED)
            seconds = step_seconds(model, cache, batch, work.steps)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            cache = None
            free_memory()
            batch -= max(1, batch // FEWER)
        else:
            return batch, batch * work.steps / seconds
    raise EnvironmentFault(
        f"{kind.name} takes {(held + beside) / 1e9:.2f} GB for one context of {work.length:,} tokens, and "
        f"{memory / 1e9:.2f} GB may be used: give a shorter --length or more --max-memory"
    )


def _repeated(kind: CacheKind, one: Any, batch: int) -> Any:
    """Return a cache of `batch` equal sequences; the cache of one of them stays as it is."""
    if isinstance(one, StaticCache):  # which cannot be repeated
        cache = kind.make()
        for layer, source in zip(cache.layers, one.layers, strict=True):
            keys, values = (states.expand(batch, *states.shape[1:]) for states in (source.keys, source.values))
            layer.lazy_initialization(keys, values)
            layer.keys.copy_(keys)
            layer.values.copy_(values)
            layer.cumulative_length.copy_(source.cumulative_length)
        return cache
    cache = deepcopy(one)
    cache.batch_repeat_interleave(batch)
    return cache

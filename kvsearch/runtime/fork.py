"""One prefill for many plans: what eviction leaves under each of them, as it would be alone.

Evicting after a layer's own attention over the prompt changes nothing that later layers compute, so one forward pass
over the prompt serves every plan. What several plans want of a layer (scores, ranks) is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from kvsearch.errors import UsageError
from kvsearch.models.architecture import describe, rotary
from kvsearch.policies import Observation
from kvsearch.runtime.attention import require_attention
from kvsearch.runtime.cache import PlanCache, join_states, layer_state, stateful_layers, stock_layers
from kvsearch.runtime.layer import EvictingLayer
from kvsearch.runtime.observe import PromptLayer, Rereads, reread
from kvsearch.runtime.own_caches import cache_class
from kvsearch.runtime.storage import RaggedStore


def prefill_all(model: Any, caches: Sequence[PlanCache], ids: Tensor, mask: Tensor, chunk: int | None = None) -> Tensor:
    """Run the prompt `ids` [B, T] once and leave every (empty) cache as if it had been run under it alone.

    `mask` [B, T] is 0 where padding (on the left). The model must run the attention implementation "kvsearch".

    With `chunk`, so many tokens are read at a time, which bounds what the model computes with. Every layer evicts when
    the last of them has passed, as policies look at the whole prompt, so the keys and values of all layers are there
    until then; what is kept is the same.

    Returns:
        Logits of the last position, [B, 1, V].

    Raises:
        UsageError: a cache is not empty.
    """
    if any(cache.get_seq_length() for cache in caches):
        raise UsageError("a prompt is shared by empty caches only: make new ones")
    require_attention("a shared prompt", model.config._attn_implementation)
    planned = [layer for cache in caches for layer in cache.planned.values()]
    again = reread(model, (need for layer in planned for need in layer.needs()), ids, mask)
    layers = stock_layers(model)
    for index in describe(model).full_layers:
        targets = [cache.layers[index] for cache in caches]
        needs = [need for target in targets if isinstance(target, EvictingLayer) for need in target.needs()]
        look = partial(_hand_on, targets, again)
        layers[index] = PromptLayer(index, needs, rotary(model, index), look, ids.shape[1])
    shared, positions = cache_class(model, Cache)(layers=layers), (mask.cumsum(-1) - 1).clamp(min=0)
    size = chunk or ids.shape[1]
    for first in range(0, ids.shape[1], size):
        part = slice(first, first + size)
        with torch.no_grad():
            output = model(
                input_ids=ids[:, part],
                attention_mask=mask[:, : part.stop],
                position_ids=positions[:, part],
                past_key_values=shared,
                logits_to_keep=1,
            )
    for index, layer in enumerate(shared.layers):
        if not isinstance(layer, PromptLayer):
            for cache in caches:
                vars(cache.layers[index]).update(layer_state(layer))
    logits: Tensor = output.logits
    return logits


def _hand_on(targets: Sequence[Any], again: Rereads, prompt: Observation) -> None:
    """Let every target evict; those without a plan take the prompt as it is."""
    prompt = replace(prompt, rereads=again.get(prompt.layer, {}))
    for target in targets:
        if isinstance(target, EvictingLayer):
            target.lazy_initialization(prompt.keys, prompt.values)
            target.seen = prompt.keys.shape[2]
            target.conclude(prompt)
        else:
            target.update(prompt.keys, prompt.values)


def can_join(cache: PlanCache) -> bool:
    """Tell whether a cache can become part of a larger batch: nothing leaves it while decoding."""
    return all(isinstance(layer.holder, RaggedStore) for layer in cache.planned.values())


def joined(caches: Sequence[PlanCache]) -> PlanCache:
    """Join caches that hold the same prompts under different plans, with the sequences of all of them as its batch.

    Several caches must plan the same layers and `can_join`; they are used up.
    """
    whole = caches[0]
    if len(caches) == 1:
        return whole
    stateful = stateful_layers(whole.layers)
    for index, layer in enumerate(whole.layers):
        others = [cache.layers[index] for cache in caches]
        if isinstance(layer, EvictingLayer):
            layer.holder = RaggedStore.joined([other.holder for other in others])
        elif index in stateful:
            vars(layer).update(join_states([vars(other) for other in others]))
        elif isinstance(layer, DynamicLayer) and layer.keys is not None:
            layer.keys = torch.cat([other.keys for other in others])
            layer.values = torch.cat([other.values for other in others])
    return whole

"""One prefill for many methods: a batch of prompts is read once, compressed by each, and answered together.

Evicting a prompt does not change what the model computes for it, so one prefill serves all methods; methods that evict
nothing while decoding then decode as one batch, their sequences side by side. Every method holds what it would hold
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from kvsearch.core.errors import NonFiniteError, UsageError
from kvsearch.core.items import group_by_key
from kvsearch.models.architecture import RotaryTables, check_length, describe, require_same_rotary, rotate_as_length
from kvsearch.models.memory import find_default_memory
from kvsearch.policies import Observation
from kvsearch.policies.base import Needs, SecondPass
from kvsearch.runtime.attention import require_attention
from kvsearch.runtime.cache import PlanCache
from kvsearch.runtime.decode.decoding import Decoding
from kvsearch.runtime.decode.replies import Finished, PeakEntries, Replies, check_logits, pad_left
from kvsearch.runtime.layer import EvictingLayer
from kvsearch.runtime.observe import DensePass, ObservedLayer, PromptLayer, Rereads, read_again, score_second_passes
from kvsearch.runtime.program import Program, estimate_prompt_bytes, make_full_program, require_room
from kvsearch.runtime.stock import (
    CACHE,
    find_stateful_layers,
    join_states,
    make_cache_class,
    make_stock_layers,
    read_layer_state,
)
from kvsearch.runtime.store.storage import RaggedStore

BatchItem = TypeVar("BatchItem")
ProgramKey = TypeVar("ProgramKey")


@dataclass(frozen=True)
class JointReplies:
    """Methods that reply as one batch: method m's sequence b is row m * B + b of `replies`.

    `entries` counts what a method, by name, holds of every sequence once the prompts are compressed, `nbytes` the bytes
    of the whole batch. `seconds` is what reading the prompts and compressing them took, for all methods they were read
    for, and `logits` [B, 1, V] are from the prompts' last tokens: the same object as long as the prompts were read
    once.
    """

    methods: tuple[str, ...]
    replies: Replies
    entries: dict[str, list[int]]
    nbytes: dict[str, int]
    seconds: float
    logits: Tensor


def compress_prompts(
    model: Any,
    programs: Mapping[str, Program],
    prompts: Sequence[Tensor],
    stop: set[int],
    finished: Finished | None = None,
    memory: int | None = None,
    answer_bytes: int = 0,
) -> Iterator[JointReplies]:
    """Prefill a batch of prompts once, compress it under every program, and yield the methods that reply together.

    Prompts are token ids [T] each. `memory` is the most bytes that the compressed caches of one prefill may take, with
    the `answer_bytes` that answers take of each program besides; where that is too little for all programs the prompts
    are read again. Default: 8 GiB, or half of what a GPU has free.

    Raises:
        IncompatibleError: a prompt is longer than the model takes.
        NonFiniteError: the model emits NaN for a prompt.
    """
    lengths = [len(prompt) for prompt in prompts]
    check_length(model, max(lengths))
    for portion in split_programs(model, programs, lengths, memory, answer_bytes):
        started = perf_counter()
        caches = {method: PlanCache(model, program) for method, program in portion.items()}
        logits, mask = read_prompts(model, list(caches.values()), prompts)
        # Before any method replies: NaN after the prompt comes of the model, not of a method.
        check_logits(logits)
        entries = {method: count_held_entries(model, cache, lengths) for method, cache in caches.items()}
        nbytes = {method: cache.nbytes() for method, cache in caches.items()}
        seconds = perf_counter() - started
        # caches can be one batch that plan the same layers and evict nothing while decoding
        joins = {method: tuple(cache.planned) if can_join(cache) else method for method, cache in caches.items()}
        for methods in make_batches(list(caches), len(caches), joins.__getitem__):
            masks = mask.repeat(len(methods), 1)
            batch = join_caches([caches[method] for method in methods], masks, lengths * len(methods))
            replies = Replies(model, batch, prompts, masks, logits, stop, finished)
            yield JointReplies(tuple(methods), replies, entries, nbytes, seconds, logits)


def make_batches(
    items: Sequence[BatchItem], size: int, alike: Callable[[BatchItem], object]
) -> Iterator[list[BatchItem]]:
    """Yield batches of at most `size` items that have the same `alike(item)`."""
    for group in group_by_key(items, alike).values():
        for first in range(0, len(group), size):
            yield group[first : first + size]


def read(model: Any, cache: PlanCache, prompts: Sequence[Tensor], stop: set[int], chunk: int | None = None) -> Replies:
    """Read and compress prompts of token ids [T] for one cache alone, `chunk` tokens at a time (None: whole).

    Raises:
        IncompatibleError: a prompt is longer than the model takes.
        NonFiniteError: the model emits NaN for a prompt.
        EnvironmentFault: the device has too little memory for what is kept.
    """
    lengths = [len(prompt) for prompt in prompts]
    check_length(model, max(lengths))
    require_room(model, {"the plan": cache.program}, lengths, chunk)
    logits, mask = read_prompts(model, [cache], prompts, chunk)
    check_logits(logits)
    return Replies(model, cache, prompts, mask, logits, stop)


def reply_after_prefill(
    passes: Sequence[DensePass[Any]], prompts: Sequence[Tensor], copies: int, stop: set[int], finished: Finished | None
) -> Replies:
    """Return replies after prompts of token ids [T] that `DensePass`es have read, each its own, under the full cache.

    Nothing is read again. With several `copies` prompt b is row c * B + b for every copy c, to be asked side by side.
    """
    model = passes[0].model
    caches = []
    for passed in passes:
        cache = PlanCache(model, make_full_program(model))
        for layer, target in zip(passed.cache.layers, cache.layers, strict=True):
            if isinstance(layer, ObservedLayer):
                valid = layer.keys.new_ones(len(layer.keys), layer.keys.shape[2], dtype=torch.bool)
                # Nothing is scored, as the full program keeps all: what an observation has besides entries does not
                # matter.
                _hand_on([target], {}, Observation(layer.keys, layer.values, valid, 1.0, layer=layer.index))
            else:
                vars(target).update(read_layer_state(layer))
        caches.append(cache)
    _, mask = pad_left(prompts, model.device)
    batch = join_caches(caches, mask, [len(prompt) for prompt in prompts])
    if copies > 1:
        batch = batch.of_rows([*range(len(prompts))] * copies)
    return Replies(
        model, batch, prompts, mask.repeat(copies, 1), torch.cat([passed.last for passed in passes]), stop, finished
    )


def count_held_entries(model: Any, cache: PlanCache, lengths: Sequence[int]) -> list[int]:
    """Count the entries of all full-attention layers per sequence, right after its prompt of `lengths` tokens."""
    entries: list[int] = PeakEntries(model, cache, torch.tensor(lengths)).most.tolist()
    return entries


def split_programs(
    model: Any,
    programs: Mapping[ProgramKey, Program],
    lengths: Sequence[int],
    memory: int | None = None,
    answer_bytes: int = 0,
) -> Iterator[dict[ProgramKey, Program]]:
    """Yield programs, in order, that fit into `memory` together, see `compress_prompts`; at least one at a time."""
    limit = find_default_memory(model.device) if memory is None else memory
    portion: dict[ProgramKey, Program] = {}
    taken = 0
    for method, program in programs.items():
        # twice, for as long as caches are put together
        size = 2 * estimate_prompt_bytes(model, program, lengths) + answer_bytes
        if portion and taken + size > limit:
            yield portion
            portion = {}
            taken = 0
        portion[method] = program
        taken += size
    yield portion


def read_prompts(
    model: Any, caches: Sequence[PlanCache], prompts: Sequence[Tensor], chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Read prompts of token ids [T] into every (empty) cache as `prefill_all` does, in batches without padding.

    With padding attention needs a mask, which takes longer, and leaves the kernels that never hold a matrix of logits.
    Prompts that are read twice are read one by one: then the second reading goes on from the first.

    Returns:
        Logits of the last position, [B, 1, V], and the mask of the prompts [B, T], 0 where shorter ones are padded.
    """
    lengths = [len(prompt) for prompt in prompts]
    require_same_rotary(model, lengths)
    mask = pad_left(prompts, model.device)[1]
    is_read_twice = chunk is None and bool(find_second_passes(caches))
    logits = []
    parts: list[Sequence[PlanCache]] = []
    # Neighbours alone, so that joined parts are in the order of the prompts.
    batches = [[prompt] for prompt in prompts] if is_read_twice else [list(alike) for _, alike in groupby(prompts, len)]
    for alike in batches:
        alone = torch.stack(alike).to(model.device)
        # The first part fills the caches that were given, so that joining leaves all of it in these.
        own = [PlanCache(model, cache.program, monitor=cache.monitor) for cache in caches] if parts else caches
        try:
            logits.append(prefill_all(model, own, alone, torch.ones_like(alone), chunk))
        except NonFiniteError as error:
            error.row += sum(map(len, logits))
            raise
        parts.append(own)
    for same in zip(*parts, strict=True):
        join_caches(same, mask, lengths)
    return torch.cat(logits), mask


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
    targets = {index: [cache.layers[index] for cache in caches] for index in describe(model).full_layers}
    needs = {
        index: [need for layer in planned if isinstance(layer, EvictingLayer) for need in layer.needs()]
        for index, planned in targets.items()
    }
    second_passes = find_second_passes(caches)
    # the mask comes last: a device is waited for
    if second_passes and len(ids) == 1 and chunk is None and bool(mask.all()):
        return _prefill_twice(model, caches, targets, needs, second_passes, ids)
    again = read_again(model, chain(*needs.values()), ids, mask)
    layers = make_stock_layers(model)
    for index, planned in targets.items():
        look = partial(_hand_on, planned, again)
        # Full-attention layers show the prompt to each cache in turn and store nothing. All others are transformers'
        # own, and every cache gets their state at the end.
        layers[index] = PromptLayer(index, needs[index], RotaryTables(model, index), look, ids.shape[1])
    shared = make_cache_class(model, Cache)(layers=layers)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    size = chunk or ids.shape[1]
    # Models whose rotary factors depend on the length would take the first chunk for a short prompt.
    whole = nullcontext() if chunk is None else rotate_as_length(model, int(positions.max()) + 1)
    with torch.no_grad(), whole:
        for first in range(0, ids.shape[1], size):
            part = slice(first, first + size)
            output = model(
                input_ids=ids[:, part],
                attention_mask=mask[:, : part.stop],
                position_ids=positions[:, part],
                logits_to_keep=1,
                **{CACHE: shared},
            )
    _copy_stock_layers(shared, caches)
    logits: Tensor = output.logits
    return logits


def find_second_passes(caches: Sequence[PlanCache]) -> set[SecondPass]:
    """Find the second passes over a prompt that the policies of some caches need."""
    needs = (need for cache in caches for layer in cache.planned.values() for need in layer.needs())
    return {need.reread for need in needs if need.reread is not None}


@torch.no_grad()
def _prefill_twice(
    model: Any,
    caches: Sequence[PlanCache],
    targets: Mapping[int, Sequence[Any]],
    needs: Mapping[int, Sequence[Needs]],
    second_passes: set[SecondPass],
    ids: Tensor,
) -> Tensor:
    """Read a prompt [1, T] once, and once more after itself for policies that need it; then every cache evicts.

    The full cache of the prompt is held until then, as the second reading attends to it. Returns the logits [1, 1, V].
    """
    projected = Needs(projection=any(how.plus for how in second_passes))
    first = {index: [*(replace(need, reread=None) for need in wanted), projected] for index, wanted in needs.items()}
    passed: DensePass[Observation] = DensePass(model, first, lambda prompt: prompt, ids)
    again = score_second_passes(passed, ids, second_passes, lambda prompt: prompt.projected_norms("l2"))
    for planned, prompt in zip(targets.values(), passed.noted, strict=True):
        _hand_on(planned, again, prompt)
    _copy_stock_layers(passed.cache, caches)
    return passed.last


def _copy_stock_layers(shared: Cache, caches: Sequence[PlanCache]) -> None:
    """Copy the state of the layers that are transformers' own to every cache."""
    for index, layer in enumerate(shared.layers):
        if not isinstance(layer, PromptLayer):
            for cache in caches:
                vars(cache.layers[index]).update(read_layer_state(layer))


def _hand_on(targets: Sequence[Any], again: Rereads, prompt: Observation) -> None:
    """Hand a prompt to every target layer: planned ones evict it, the others store it whole."""
    prompt = replace(prompt, rereads=again.get(prompt.layer, {}))
    for target in targets:
        compress_layer(target, prompt)


def compress_layer(target: Any, prompt: Observation) -> None:
    """Evict a prompt from an empty layer of a cache, where the layer is planned; any other stores it whole."""
    if isinstance(target, EvictingLayer):
        target.lazy_initialization(prompt.keys, prompt.values)
        target.seen = prompt.keys.shape[2]
        target.evict_prompt(prompt)
    else:
        target.update(prompt.keys, prompt.values)


def can_join(cache: PlanCache) -> bool:
    """Tell whether a cache can become part of a larger batch: nothing leaves it while decoding."""
    return all(isinstance(layer.holder, RaggedStore) for layer in cache.planned.values())


def join_caches(caches: Sequence[PlanCache], mask: Tensor, lengths: Sequence[int]) -> PlanCache:
    """Join caches of compressed prompts into one batch, in place of the first of them.

    They plan the same layers, by the same policies where these evict while decoding, and are used up. `mask` [B, T] is
    0 where the prompts are shorter than the longest, `lengths` [B] are their tokens.
    """
    joint = caches[0]
    if len(caches) == 1:
        return joint
    joint.read_mask.begin(mask.bool(), lengths)
    even = len(set(lengths)) == 1
    stateful = find_stateful_layers(joint.layers)
    for index, layer in enumerate(joint.layers):
        others = [cache.layers[index] for cache in caches]
        if isinstance(layer, EvictingLayer):
            held = [other.holder for other in others]
            layer.holder = Decoding.joined(held) if isinstance(held[0], Decoding) else RaggedStore.joined(held, even)
            layer.seen = mask.shape[1]
            received = [other.received for other in others if other.received is not None]
            if received:
                width = mask.shape[1]
                layer.received = torch.cat([nn.functional.pad(part, (0, width - part.shape[2])) for part in received])
        elif index in stateful:
            vars(layer).update(join_states([vars(other) for other in others]))
        elif isinstance(layer, DynamicLayer) and layer.keys is not None:
            states = [(other.keys, other.values) for other in others]
            # Counters are those of the longest sequence; keys and values are replaced at once.
            vars(layer).update(vars(max(others, key=lambda other: other.get_seq_length())))
            layer.keys, layer.values = (_pair_caches(part) for part in zip(*states, strict=True))
    # Their entries were copied: they are freed before the joint batch decodes.
    for cache in caches[1:]:
        cache.layers.clear()
    return joint


def _pair_caches(states: Sequence[Tensor]) -> Tensor:
    """Concatenate states [B, H, T, D] of several batches, with zeros in front of shorter ones."""
    width = max(part.shape[2] for part in states)
    return torch.cat([nn.functional.pad(part, (0, 0, width - part.shape[2], 0)) for part in states])

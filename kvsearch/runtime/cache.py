"""PlanCache: pass it to `model.generate(past_key_values=...)` and the plan is executed."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.models.architecture import (
    RotaryTables,
    find_class_name,
    find_rotary_switch,
    find_text_config,
    require_plain_rotary,
)
from kvsearch.models.memory import refuse_offloaded
from kvsearch.plan.schema import NO_CARRY
from kvsearch.policies import Policy
from kvsearch.policies.checks import require_finite
from kvsearch.runtime.collector import watch_hidden_states
from kvsearch.runtime.decode.decoding import Decoding
from kvsearch.runtime.eviction import PhaseRule
from kvsearch.runtime.layer import EvictingLayer
from kvsearch.runtime.program import PhaseProgram, Program
from kvsearch.runtime.read_mask import ReadMask
from kvsearch.runtime.sharing import Sharing
from kvsearch.runtime.stock import (
    count_stock_bytes,
    find_stateful_layers,
    fork_layer,
    make_cache_class,
    make_stock_layers,
    read_layer_state,
)
from kvsearch.runtime.store.cache_file import fill_layers, read_cache, write_cache

if TYPE_CHECKING:
    from kvsearch.plan import Plan


class PlanCache(Cache):  # type: ignore[misc]
    """A KV cache that keeps, in every planned layer and kv head, what the plan says, and frees the rest.

    Layers the plan does not govern (sliding windows, chunks, running states) keep transformers' own cache. The model
    must run the attention implementation "kvsearch" (`attach` sets it). With `exact`, layers that lost nothing use
    transformers' own decode attention and are bit-identical to it; otherwise decode packs query groups, which is
    faster.

    Args:
        model: the model that will use the cache.
        plan: a `Plan`, checked against the model, or a `Program`.
        prompt_length: tokens of the prompt, needed when it arrives in several forward passes (chunked prefill):
            eviction waits for the last of them. Default: the first forward pass is the prompt.
        exact: see above.
        monitor: measure `evicted_mass` of every prompt.

    Raises:
        IncompatibleError: the model or the plan does not fit (see `Program.from_plan`, `architecture.describe`).
        UsageError: see `Program.from_plan`.
        EnvironmentFault: weights of the model are on no device.

    Examples:
        >>> import torch
        >>> from kvsearch.models.loading import load
        >>> from kvsearch.policies import create_policy
        >>> from kvsearch.runtime import PlanCache, Program, attach
        >>> model = load("bundled").model
        >>> program = Program.uniform(model, create_policy("streaming"), entries=lambda length: 8)
        >>> cache = PlanCache(model, program)
        >>> with attach(model, program) as planned:
        ...     _ = planned(torch.arange(100)[None], past_key_values=cache)
        >>> cache.get_seq_length(), cache.entries().shape  # layers, sequences, kv heads
        (100, torch.Size([6, 1, 4]))
        >>> cache.kept_positions(layer=0)
        [0, 1, 2, 3, 96, 97, 98, 99]
    """

    def __new__(cls, model: Any = None, *_: Any, **__: Any) -> PlanCache:  # no model where one is copied
        # The code of some models asks whether a cache is of their own class, so the class depends on the model.
        cache: PlanCache = super().__new__(cls if model is None else make_cache_class(model, cls))
        return cache

    def __init__(
        self,
        model: Any,
        plan: Plan | Program,
        *,
        prompt_length: int | None = None,
        exact: bool = False,
        monitor: bool = False,
    ) -> None:
        refuse_offloaded(model, find_class_name(model))
        program = plan if isinstance(plan, Program) else Program.from_plan(model, plan)
        check_rotary(model, program.policies)
        if program.prefill is not None and program.prefill.carries:
            require_plain_rotary(model, "a plan whose entries carry what leaves")
        layers = make_stock_layers(model)
        config = find_text_config(model)
        sharing = None if program.allocation is None else Sharing(program.allocation, program)
        switch = find_rotary_switch(model)
        self.read_mask = ReadMask()
        for index in program.layers:
            # The very type: subclasses keep a window or a running state, which belongs to the model.
            if type(layers[index]) is not DynamicLayer:
                raise IncompatibleError(f"layer {index} is a {type(layers[index]).__name__}: it cannot be planned")
            layers[index] = EvictingLayer(
                index,
                _find_phase_rule(program.prefill, index),
                _find_phase_rule(program.decode, index),
                # Read when it is asked for, as `attach` may change it after the cache was made.
                lambda: str(config._attn_implementation),
                RotaryTables(model, index),
                self.read_mask,
                sharing=sharing,
                prompt_length=prompt_length,
                rotary_switch=switch,
                exact=exact,
                monitor=monitor,
            )
        self.monitor = monitor
        # Not super(): the class of a model may stand in between, and takes other arguments.
        Cache.__init__(self, layers=layers)
        watch_hidden_states(model, (need for layer in self.planned.values() for need in layer.needs()))
        self.program = program
        self.tokens: Tensor | None = None  # of a cache from a file: what it has read, [B, T], and where it is padded
        self.mask: Tensor | None = None
        self.rest = ""  # and the text behind that, see `save`

    @classmethod
    def load(cls, path: str | Path, model: Any, plan: Plan | None = None, *, exact: bool = False) -> PlanCache:
        """Return a cache as `save` wrote it, on the devices of `model`; the file stays as it is.

        What the model answers from it is what it would answer from the cache that was saved, on the same device to the
        bit. Go back to where it began with `mark` and `rewind`.

        Args:
            path: the file; weights of fitted rankings lie beside it.
            model: the model that the plan is for, in the dtype that the cache was made in.
            plan: the plan that the file must be of; None: any.
            exact: see the class.

        Returns:
            A cache; its `tokens` and `mask` [B, T] are what it has read, on the CPU: None where `save` was not given
            the tokens, or nothing is padding.

        Raises:
            UsageError: there is no such file, or it is damaged, of another kind or version, or weights are missing.
            IncompatibleError: it is of another model, dtype or plan.
            EnvironmentFault: it cannot be read.
        """
        header, tensors = read_cache(path)
        header.require(path, model, plan)
        cache = cls(model, header.plan, exact=exact)
        fill_layers(path, header, tensors, model, cache.layers)
        cache.tokens = tensors.get("tokens")
        cache.mask = tensors.get("mask")
        cache.rest = header.rest or ""
        if cache.mask is not None and not bool(cache.mask.all()):
            cache.read_mask.begin(cache.mask.bool(), cache.mask.sum(-1).tolist())
        return cache

    def save(
        self,
        path: str | Path,
        tokens: Tensor | None = None,
        mask: Tensor | None = None,
        overwrite: bool = False,
        rest: str | None = None,
    ) -> int:
        """Write what is held now to a file, in one step, and return its size in bytes; `load` makes the cache of it.

        Args:
            path: the file, in the safetensors format; weights of fitted rankings are written beside it.
            tokens: ids [B, T] of all that was read, padding included, to be kept with it.
            mask: [B, T], 0 where these are padding; None: as they were read.
            overwrite: replace a file that is there.
            rest: the text behind the tokens, which shares a token with what follows: see `PromptFormat.open_context`;
                None: as it was loaded.

        Raises:
            UsageError: the prompt is not complete, the cache was made of no `Plan`, `path` exists or cannot be written.
            EnvironmentFault: the disk is full, permissions are missing; an existing file is left as it was.
        """
        if self.program.plan is None:
            raise UsageError("a cache can be saved if it was made of a Plan, which says how to go on: this one was not")
        rest = self.rest if rest is None else rest
        return write_cache(path, self.program.plan, self.layers, self.read_mask, (tokens, mask), overwrite, rest)

    def __copy__(self) -> PlanCache:
        return self._with(self.__dict__)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlanCache:
        memo[id(self)] = copied = self._with({})
        copied.__dict__.update(deepcopy(self.__dict__, memo))
        return copied

    def _with(self, state: dict[str, Any]) -> PlanCache:
        # Without a model, as the type of this cache is the model's already.
        made: PlanCache = type(self).__new__(type(self))
        made.__dict__.update(state)
        return made

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise UsageError(
            "a PlanCache cannot be pickled, as its layers belong to a model: cache.save(path) writes it to a file, "
            "PlanCache.load(path, model) reads it again"
        )

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, Tensor | None]]:
        """Yield keys, values and the window of every layer, as stock caches do; UsageError where entries are gone."""
        for layer in self.layers:
            yield layer.keys, layer.values, getattr(layer, "_sliding_window_tensor", None)

    @property
    def planned(self) -> dict[int, EvictingLayer]:
        """The layers governed by the plan, by model layer index."""
        return {index: layer for index, layer in enumerate(self.layers) if isinstance(layer, EvictingLayer)}

    def set_prompt_length(self, prompt_length: int) -> None:
        """Set the length of the prompt, if the cache is empty and does not know it yet."""
        for layer in self.planned.values():
            if layer.seen == 0 and layer.prompt_length is None:
                layer.prompt_length = prompt_length

    def entries(self) -> torch.Tensor:
        """Count entries held, [planned layers, B, Hkv] int64, without padding; UsageError before the prompt ends."""
        return torch.stack([layer.evicted.entries() for layer in self.planned.values()])

    @property
    def evicted_mass(self) -> list[float]:
        """How much of the attention at the end of each prompt [B] is on entries that have left since, in [0, 1].

        It is 1 - exp(logsumexp over what is held - logsumexp over the whole prompt) of the logits of the last
        `MONITOR_ROWS` queries, the mean over them and all query heads of the planned layers. What entries carry of
        others is not counted.

        Raises:
            UsageError: the prompt is not complete, or the cache has no `monitor`.
        """
        masses = [layer.measure_evicted_mass() for layer in self.planned.values()]
        return [math.fsum(each) / len(each) for each in zip(*masses, strict=True)] or [0.0]

    def most_entries(self) -> torch.Tensor:
        """Return the most entries held at any time since the prompt passed or the last `rewind`, as `entries`.

        Tokens that `crop` took back count. The dense prompt does not: one layer of it at a time is in memory.
        """
        self.check_scores()
        return torch.stack([layer.evicted.most_entries() for layer in self.planned.values()])

    def check_scores(self) -> None:
        """Raise if a policy gave scores that are not finite while decoding; steps note it and do not wait for it.

        Raises:
            EnvironmentFault: a policy of another package did.
            IncompatibleError: one of kvsearch did: the model computes NaN or infinity.
        """
        rules = [layer.holder.rule for layer in self.planned.values() if isinstance(layer.holder, Decoding)]
        require_finite(check for rule in rules for check in rule.checks)
        for rule in rules:
            rule.checks.clear()

    def kept_positions(self, layer: int, row: int = 0, head: int = 0) -> list[int]:
        """Return the indices, among the tokens of sequence `row`, of the entries that one kv head holds, ascending."""
        holder = self.planned[layer].holder
        return [] if holder is None else holder.kept_positions(row, head)

    def nbytes(self) -> int:
        """Return the bytes of cache storage allocated now, in all layers."""
        return sum(self.layer_nbytes(index) for index in range(len(self.layers)))

    def layer_nbytes(self, index: int) -> int:
        """Return the bytes of cache storage allocated now, in one layer."""
        layer = self.layers[index]
        if isinstance(layer, EvictingLayer):
            return layer.nbytes()
        return count_stock_bytes(layer)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens in every layer (a negative count), or raise UsageError and change nothing."""
        # All layers are asked first: a crop that fails leaves every one of them as it was.
        for layer in self.planned.values():
            layer.croppable(tokens_to_remove)
        self._check_sliding(tokens_to_remove)
        if tokens_to_remove and (stateful := find_stateful_layers(self.layers)):
            raise UsageError(
                f"cannot take tokens back: layers {', '.join(map(str, stateful))} carry a running state (prompt lookup "
                "and assisted decoding do not work with this model; elsewhere cache.mark() and rewind())"
            )
        super().crop(tokens_to_remove)
        self.read_mask.crop(self.get_seq_length())

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.read_mask.crop(0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the batch: row b becomes what row `beam_idx[b]` was, [B']."""
        super().reorder_cache(beam_idx)
        self.read_mask.rearrange(lambda real: real[beam_idx.to(real.device)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep sequences `indices`, numbers or [B] bool."""
        super().batch_select_indices(indices)
        self.read_mask.rearrange(lambda real: real[indices.to(real.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times, copies side by side."""
        super().batch_repeat_interleave(repeats)
        self.read_mask.rearrange(lambda real: real.repeat_interleave(repeats, 0))

    def of_rows(self, rows: Sequence[int]) -> PlanCache:
        """Return an independent cache with copies of sequences `rows`; this one stays as it is.

        Raises:
            UsageError: the prompt is not complete.
        """
        index = torch.tensor(rows)
        chosen = copy(self)
        chosen.read_mask = copy(self.read_mask)
        chosen.read_mask.rearrange(lambda real: real[index.to(real.device)])
        chosen.layers = []
        for layer in self.layers:
            if isinstance(layer, EvictingLayer):
                chosen.layers.append(layer.of_rows(rows, chosen.read_mask))
            else:
                chosen.layers.append(fork_layer(layer))
                chosen.layers[-1].reorder_cache(index)
        return chosen

    def _check_sliding(self, tokens: int) -> None:
        for index, layer in enumerate(self.layers):
            # A window that has slid over its first token has dropped it for good, unless it was told to record the
            # past.
            forgets = isinstance(layer, DynamicSlidingWindowLayer) and not getattr(layer, "record_past", False)
            if tokens and forgets and layer.get_seq_length() >= layer.sliding_window:
                raise UsageError(
                    f"layer {index} holds its last {layer.sliding_window - 1} tokens only: call "
                    "activate_past_recording() on the cache before the tokens that are to be forgotten"
                )

    # --- one token in two parts, the host's and the device's ------------------------------------------------------

    def reserve(self, tokens: int) -> None:
        """Reserve room in planned layers for `tokens` tokens ahead, again whenever it has run out; 0: none."""
        for layer in self.planned.values():
            layer.reserve(tokens)

    @contextmanager
    def reserve_positions(self, positions: Tensor) -> Iterator[None]:
        """Prepare one decode step on the host, at rotary `positions` [B or 1, 1]; room is reserved for it.

        What the model does with it is the device's part: see `EvictingLayer.prepare_step`.
        """
        layers = self.planned.values()
        for layer in layers:
            layer.prepare_step(positions)
        try:
            yield
        finally:
            for layer in layers:
                layer.finish_step()

    @property
    def asked(self) -> bool:
        """Whether the model asked for the sequence's length in a prepared step, which then cannot be replayed."""
        return any(layer.asked for layer in self.planned.values())

    def step_plan(self) -> tuple[Hashable, ...] | None:
        """Return a key of the prepared step: steps with equal keys do the same; None: it cannot be repeated.

        That is so until a layer's `holder` is another one or has `packed` its tensors anew.
        """
        plans = [layer.holder.plan() for layer in self.planned.values() if layer.holder is not None]
        return None if None in plans else tuple(plans)

    def mark(self) -> CacheMark:
        """Save the state for `rewind`; under a plan with a decode phase that takes a copy of all entries.

        For models with sliding-window layers, call `activate_past_recording()` before the tokens to be forgotten.
        """
        states: dict[int, Any] = {
            index: read_layer_state(self.layers[index]) for index in find_stateful_layers(self.layers)
        }
        states |= {index: layer.mark() for index, layer in self.planned.items()}
        return CacheMark(self.get_seq_length(), self._sequences(), states)

    def rewind(self, mark: CacheMark) -> None:
        """Go back to `mark`, so that another question can follow the same context; any number of times."""
        tokens = self.get_seq_length() - mark.seen
        self._check_sliding(tokens)
        now = self._sequences()
        if now and not mark.sequences:
            raise UsageError("the mark was taken before the prompt was complete: use a new cache instead")
        if now and now != mark.sequences:
            raise UsageError(
                f"the mark is of {mark.sequences} sequences and the cache holds {now} now: those added or dropped "
                "since do not come back, take the mark after rearranging them"
            )
        for index, layer in enumerate(self.layers):
            if isinstance(layer, EvictingLayer):
                layer.rewind(mark.seen, mark.states[index])
            elif index in mark.states:
                # A running state is written in place, so the mark keeps one that nobody writes to.
                vars(layer).update(deepcopy(mark.states[index]))
            elif tokens:
                layer.crop(-tokens)
        self.read_mask.crop(mark.seen)

    def _sequences(self) -> int:
        """Return the batch size of a complete prompt, 0 before."""
        return max((layer.holder.batch for layer in self.planned.values() if layer.holder is not None), default=0)


class CacheMark(NamedTuple):
    """A state of a cache that `PlanCache.rewind` goes back to."""

    seen: int
    sequences: int  # of a complete prompt, 0 before
    states: dict[int, Any]  # what planned layers, and those with a running state, go back to


def _find_phase_rule(phase: PhaseProgram | None, layer: int) -> PhaseRule | None:
    if phase is None or layer not in phase.policies:
        return None
    return PhaseRule(phase.policies[layer], partial(phase.budgets, layer), phase.carries.get(layer, NO_CARRY))


def check_rotary(model: Any, policies: Iterable[Policy]) -> None:
    """Raise an IncompatibleError if a policy wants unrotated states and the rotary embedding cannot be undone."""
    for policy in policies:
        needs = policy.needs()
        if needs.query_statistics_from is not None or needs.unrotated:
            require_plain_rotary(model, f"policy {policy.name}")

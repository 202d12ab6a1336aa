"""PlanCache: pass it to `model.generate(past_key_values=...)` and the plan is executed."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from kvsearch.errors import IncompatibleError, UsageError
from kvsearch.models.architecture import describe, require_plain_rotary, rotary, text_config
from kvsearch.policies import Policy
from kvsearch.runtime.eviction import PhaseRule
from kvsearch.runtime.layer import EvictingLayer, Mark
from kvsearch.runtime.program import PhaseProgram, Program
from kvsearch.runtime.sharing import Sharing

if TYPE_CHECKING:
    from kvsearch.plan import Plan


class PlanCache(Cache):  # type: ignore[misc]
    """A KV cache that keeps, in every planned layer and kv head, what the plan says, and frees the rest.

    Layers the plan does not govern (sliding-window layers of the model) keep their stock cache. The model must run the
    attention implementation "kvsearch" (`attach` sets it). With `exact`, layers that lost nothing use transformers'
    own decode attention and are bit-identical to it; otherwise decode packs query groups, which is faster.

    Args:
        model: the model that will use the cache.
        plan: a `Plan`, checked against the model, or a `Program`.
        prompt_length: tokens of the prompt, needed when it arrives in several forward passes (chunked prefill):
            eviction waits for the last of them. Default: the first forward pass is the prompt.
        exact: see above.

    Raises:
        IncompatibleError: the model or the plan does not fit (see `Program.from_plan`, `architecture.describe`).
        UsageError: see `Program.from_plan`.
    """

    def __init__(
        self, model: Any, plan: Plan | Program, *, prompt_length: int | None = None, exact: bool = False
    ) -> None:
        program = plan if isinstance(plan, Program) else Program.from_plan(model, plan)
        check_rotary(model, program.policies)
        layers, config, tables = stock_layers(model), text_config(model), rotary(model)
        sharing = None if program.allocation is None else Sharing(program.allocation, program)
        for index in program.layers:
            if type(layers[index]) is not DynamicLayer:
                raise IncompatibleError(f"layer {index} is a {type(layers[index]).__name__}: it cannot be planned")
            layers[index] = EvictingLayer(
                index,
                _phase_rule(program.prefill, index),
                _phase_rule(program.decode, index),
                lambda: str(config._attn_implementation),
                tables,
                sharing=sharing,
                prompt_length=prompt_length,
                exact=exact,
            )
        super().__init__(layers=layers)

    @property
    def planned(self) -> dict[int, EvictingLayer]:
        """The layers governed by the plan, by model layer index."""
        return {index: layer for index, layer in enumerate(self.layers) if isinstance(layer, EvictingLayer)}

    def expect(self, prompt_length: int) -> None:
        """Say how long the prompt is, if the cache is empty and does not know it yet."""
        for layer in self.planned.values():
            if layer.seen == 0 and layer.prompt_length is None:
                layer.prompt_length = prompt_length

    def entries(self) -> torch.Tensor:
        """Count entries held, [planned layers, B, Hkv] int64, without padding; UsageError before the prompt ends."""
        held = [layer.holder.entries() for layer in self.planned.values() if layer.holder is not None]
        if not held:
            raise UsageError("the cache holds no evicted prompt yet: run the model on the whole prompt first")
        return torch.stack(held)

    def most_entries(self) -> torch.Tensor:
        """Return the most entries held at any time since the prompt passed or the last `rewind`, as `entries`.

        Tokens that `crop` took back count. The dense prompt, of which one layer at a time is alive, does not.
        """
        return torch.stack([layer.most_entries() for layer in self.planned.values()])

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
        if layer.keys is None:
            return 0
        return int(layer.keys.untyped_storage().nbytes() + layer.values.untyped_storage().nbytes())

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens in every layer (a negative count), or raise UsageError and change nothing."""
        for layer in self.planned.values():
            layer.croppable(tokens_to_remove)
        self._check_sliding(tokens_to_remove)
        super().crop(tokens_to_remove)

    def _check_sliding(self, tokens: int) -> None:
        for index, layer in enumerate(self.layers):
            forgets = isinstance(layer, DynamicSlidingWindowLayer) and not getattr(layer, "record_past", False)
            if tokens and forgets and layer.get_seq_length() >= layer.sliding_window:
                raise UsageError(
                    f"layer {index} holds its last {layer.sliding_window - 1} tokens only: call "
                    "activate_past_recording() on the cache before the tokens that are to be forgotten"
                )

    def mark(self) -> CacheMark:
        """Remember this state for `rewind`; under a plan with a decode phase that takes a copy of what is held.

        For models with sliding-window layers, call `activate_past_recording()` before the tokens to be forgotten.
        """
        return CacheMark(self.get_seq_length(), {index: layer.mark() for index, layer in self.planned.items()})

    def rewind(self, mark: CacheMark) -> None:
        """Forget what came after `mark`, so that another question can follow the same context; any number of times."""
        tokens = self.get_seq_length() - mark.seen
        self._check_sliding(tokens)
        for index, layer in enumerate(self.layers):
            if isinstance(layer, EvictingLayer):
                layer.rewind(mark.layers[index])
            elif tokens:
                layer.crop(-tokens)


class CacheMark(NamedTuple):
    """A state of a cache that `PlanCache.rewind` goes back to."""

    seen: int
    layers: dict[int, Mark]


def _phase_rule(phase: PhaseProgram | None, layer: int) -> PhaseRule | None:
    if phase is None or layer not in phase.policies:
        return None
    return PhaseRule(phase.policies[layer], partial(phase.budgets, layer))


def stock_layers(model: Any) -> list[Any]:
    """Return the layers of transformers' own cache for `model`; IncompatibleError if it is not supported."""
    shape = describe(model)
    return DynamicCache(config=text_config(model)).layers or [DynamicLayer() for _ in range(shape.layers)]


def check_rotary(model: Any, policies: Iterable[Policy]) -> None:
    """Raise an IncompatibleError if a policy wants unrotated queries and the rotary embedding cannot be undone."""
    for policy in policies:
        if policy.needs().query_statistics_from is not None:
            require_plain_rotary(model, f"policy {policy.name}")

"""Observe layers during a dense prefill, and tokens that follow it under the full cache.

Nothing here is T x T: a layer is shown as the policies of the runtime see it, with what they declare (a window of query
rows, key statistics) and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter
from typing import Any, Generic

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from kvsearch.core.errors import IncompatibleError, assert_present
from kvsearch.kernels.dispatch import serves
from kvsearch.models.architecture import (
    RotaryTables,
    describe,
    find_rotary_limit,
    require_continuation,
    require_same_rotary,
)
from kvsearch.policies import Observation
from kvsearch.policies.base import Needs, SecondPass
from kvsearch.runtime.attention import Output, attend_dense, make_causal_mask, require_attention, tag
from kvsearch.runtime.collector import DensePrompt, Rotary, read_hidden_states, watch_hidden_states
from kvsearch.runtime.collector import States as States
from kvsearch.runtime.gates import gated_attention
from kvsearch.runtime.logits import Logits
from kvsearch.runtime.program import make_full_program, require_room
from kvsearch.runtime.replay.replay import LayerContinuation, Noted, select_rows
from kvsearch.runtime.stock import CACHE, make_cache_class, make_stock_layers, read_layer_state
from kvsearch.runtime.store.blocks import align_right
from kvsearch.signals.attention_rows import attend_and_weigh, residual_weights

Rereads = Mapping[int, Mapping[SecondPass, Tensor]]  # by model layer: what entries got of each rereading, [B, Hkv, T]
LED_BY = 8  # tokens before a chunk that is read again
MIN_PASS_CHUNK = 16
MASKED_TOKENS = 1024  # at most, of rows of one batch that see different entries


def is_finite(states: Tensor) -> bool:
    """Return whether a tensor has neither NaN nor infinity (NaN shows as minimum and as maximum)."""
    return states.numel() == 0 or bool(torch.stack(states.aminmax()).isfinite().all())


class PromptLayer(DynamicLayer, Generic[Noted]):  # type: ignore[misc]
    """A cache layer that stores nothing: it runs one dense prompt and hands its observation to `look`.

    The prompt ends when `length` tokens have been seen; None: with the first forward pass.
    """

    def __init__(
        self,
        index: int,
        needs: Sequence[Needs],
        rotary: Rotary,
        look: Callable[[Observation], Noted],
        length: int | None = None,
    ) -> None:
        super().__init__()
        self.index = index
        self.look = look
        self.length = length
        self._passed = 0  # tokens
        self._prompt: DensePrompt | None = DensePrompt(needs, rotary, index, length)
        self._noted: Noted | None = None

    @property
    def noted(self) -> Noted:
        """What `look` made of the prompt."""
        return assert_present(self._noted, f"layer {self.index} has noted no prompt")

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        tag(key_states, self)
        self._passed += key_states.shape[-2]
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Return the tokens seen, which masks of later chunks depend on."""
        return self._passed

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Output:
        """Attend to the prompt, and look at it when it is complete."""
        prompt = assert_present(self._prompt, f"layer {self.index} is given a second prompt")
        output = prompt.attend(module, query, key, value, mask, **kwargs)
        if self.length is None or self._passed >= self.length:
            self._noted = self.look(prompt.observation())
            self._prompt = None
        return output


class ObservedLayer(PromptLayer[Noted]):
    """A cache layer that keeps its dense prompts; later tokens attend to them, or to what `keep` leaves, unstored.

    With a `refusal` prompts with NaN or infinity are an IncompatibleError of these words, before `look` sees them.
    """

    def __init__(
        self,
        index: int,
        needs: Sequence[Needs],
        rotary: Rotary,
        look: Callable[[Observation], Noted],
        refusal: str | None,
    ) -> None:
        super().__init__(index, needs, rotary, look)
        self.refusal = refusal
        self.wants_hidden = any(need.hidden is not None for need in needs)
        self.rows: Tensor | None = None  # [M] the prompt that each row of tokens follows, on the host; None: one each
        # [Hkv, T] bool: entries of a single prompt that tokens may see, [M, Hkv, T] of each row; None: all
        self.keep: Tensor | None = None
        self.gates: Tensor | None = None  # [m]: how far the last rows see the others, while those before see all
        self.gated_output: Tensor | None = None  # [m, K, Hq, Dv]: what they attend to through gates
        self.continuation: LayerContinuation[Noted] | None = None
        # how the importance of the prompt's entries is made of attention, by norms [1, Hkv, G, T]; None: it is not
        self.weigh: tuple[Callable[[Noted], Tensor | None], str] | None = None
        self.importance: Tensor | None = None  # [1, Hkv, T] fp32, of the last tokens

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Output:
        """Attend to the prompts, or to what `keep` leaves of them and to the tokens that follow."""
        # The first call is the prompt, all others are tokens that follow it.
        if not self.is_initialized:
            if self.refusal is not None and not all(map(is_finite, (query, key, value))):
                raise IncompatibleError(self.refusal)
            output = super().attend(module, query, key, value, mask, **kwargs)
            self.lazy_initialization(key, value)
            self.keys = key
            self.values = value
            return output
        require_continuation(module, query.shape[2])
        logits = Logits.of_call(module, query, key, kwargs)
        gated: list[Tensor] = []
        if self.keep is not None and self.gates is not None:
            # Rows behind gates are differentiated; the rows before them show what the full cache does, and need no
            # gradients.
            open_rows = len(query) - len(self.gates)
            through = (query[open_rows:], key[open_rows:], value[open_rows:])
            how = (self.keep.to(query.device), self.gates.to(query.device), logits)
            self.gated_output = gated_attention(through, (self.keys, self.values), *how)
            gated.append(self.gated_output)
            query, key, value = (states[:open_rows].detach() for states in (query, key, value))
            mask = None if mask is None else mask[:open_rows]
            followed = self.follow(module, (query, key, value), mask, **kwargs)
        elif self.keep is not None:
            keeps = self.keep if self.keep.dim() == 3 else self.keep[None]
            rows = [
                self._see_kept(module, (query[row : row + 1], key[row : row + 1], value[row : row + 1]), keep, **kwargs)
                for row, keep in enumerate(keeps)
            ]
            followed = torch.cat(rows)
        else:
            followed = self.follow(module, (query, key, value), mask, **kwargs)
        self.continuation = LayerContinuation(
            self.index, self.noted, (self.keys, self.values), (query, key, value), module, logits,
            read_hidden_states(module, slice(-query.shape[2], None))[: len(query)] if self.wants_hidden else None,
            self.rows,
        )  # fmt: skip
        return torch.cat([followed, *gated]) if gated else followed, None

    def _see_kept(self, module: nn.Module, tokens: States, keep: Tensor, **kwargs: Any) -> Tensor:
        """Attend with tokens [1, H, K, D] to the entries `keep` [Hkv, T] of the prompt and to themselves."""
        query, key, value = tokens
        heads, count = query.shape[1:3]
        # Kept entries are gathered side by side: a mask over the whole prompt would cost the logits of all of it.
        columns, filled = align_right(keep.to(query.device), int(keep.sum(-1).max()))
        keys, values = (
            torch.cat([prompt.gather(2, columns[None, ..., None].expand(-1, -1, -1, prompt.shape[-1])), own], 2)
            for prompt, own in ((self.keys, key), (self.values, value))
        )
        own = make_causal_mask(count, count, query.device).expand(len(filled), -1, -1)
        mask = torch.cat([filled[:, None].expand(-1, count, -1), own], -1)
        mask = mask.repeat_interleave(heads // len(filled), 0)[None]
        return attend_dense(module, query, keys, values, mask, **kwargs)[0]

    def follow(self, module: nn.Module, tokens: States, mask: Tensor | None, **kwargs: Any) -> Tensor:
        """Attend with tokens [M, H, K, D] to the prompts that they follow and to themselves, [M, K, Hq, Dv]."""
        prompt = (select_rows(self.keys, self.rows), select_rows(self.values, self.rows))
        keys, values = (torch.cat(pair, 2) for pair in zip(prompt, tokens[1:], strict=True))
        if self.weigh is None or self.rows is not None or serves(tokens[0], keys):
            return attend_dense(module, tokens[0], keys, values, mask, **kwargs)[0]
        norms, group = self.weigh
        how = Logits.of_call(module, tokens[0], tokens[1], kwargs)
        rows = (tokens[0], keys, values, norms(self.noted), self.keys.shape[2])
        output, self.importance = attend_and_weigh(*rows, how.scaling, how.softcap, group, how.sinks)
        return output.transpose(1, 2).contiguous()


class DensePass(Generic[Noted]):
    """A full-cache pass over one batch of prompts, and over tokens that follow them, any number of times.

    Holds the full cache of the prompts, and what `look` makes of them, for as long as it lives.

    Args:
        model: a model whose attention implementation is "kvsearch".
        needs: the layers to look at, and what must be gathered of the prompts there.
        look: what to make of the prompts in a layer, called once for each.
        prompts: token ids [B, T], padded on the left.
        mask: [B, T], 0 where padding; None: there is none.
        refusal: what to say where the model computes NaN on the prompts; None: that is not looked for.

    Raises:
        UsageError: the model runs another attention implementation.
        IncompatibleError: see `refusal`.
        EnvironmentFault: the device has too little memory for the full cache and what reading the prompts takes.
    """

    layer: type[ObservedLayer[Any]] = ObservedLayer

    def __init__(
        self,
        model: Any,
        needs: Mapping[int, Sequence[Needs]],
        look: Callable[[Observation], Noted],
        prompts: Tensor,
        mask: Tensor | None = None,
        refusal: str | None = None,
    ) -> None:
        require_attention("looking at layers", model.config._attn_implementation)
        require_room(model, {"the full cache": make_full_program(model)}, [prompts.shape[1]] * len(prompts))
        again = read_again(model, (need for wanted in needs.values() for need in wanted), prompts, mask)

        def seen(prompt: Observation) -> Noted:
            return look(replace(prompt, rereads=again.get(prompt.layer, {})))

        watch_hidden_states(model, (need for wanted in needs.values() for need in wanted))
        layers = make_stock_layers(model)
        for index, wanted in needs.items():
            layers[index] = self.layer(index, wanted, RotaryTables(model, index), seen if again else look, refusal)
        self.observed: list[ObservedLayer[Noted]] = [layers[index] for index in sorted(needs)]
        self.model = model
        self.cache = make_cache_class(model, Cache)(layers=layers)
        self.mask = mask
        real = torch.ones_like(prompts) if mask is None else mask
        self.lengths: Tensor = real.sum(-1)
        require_same_rotary(model, self.lengths)
        positions = (real.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            output = self._forward(prompts, mask, positions, logits_to_keep=1)
        self.last: Tensor = output.logits  # [B, 1, V], of the ends of the prompts
        if refusal is not None and bool(self.last.isnan().any()):
            raise IncompatibleError(refusal)

    @property
    def noted(self) -> list[Noted]:
        """What `look` made of the prompts, by layer."""
        return [layer.noted for layer in self.observed]

    @contextmanager
    def following(
        self,
        tokens: Tensor,
        keep: Mapping[int, Tensor] | None = None,
        gates: Tensor | None = None,
        rows: Tensor | None = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        """Teacher-force `tokens` [M, K] after the prompts, yield the model's output, and forget them again.

        `rows` [M], on the host, says which prompt each row of tokens follows (None: one each, in order).
        Where `keep` has the row of an observed layer, tokens see only those entries of its (single) prompt, [Hkv, T],
        or [M, Hkv, T] of each row of tokens. With `gates` [m] the last m rows of tokens see the others through these,
        see `gated_attention`, those before see all, and the output has gradients.
        """
        require_same_rotary(self.model, self.lengths, tokens.shape[1])
        # Transformers' own layers append what follows; put back to this, they have the prompt alone.
        before = [read_layer_state(layer) for layer in self.cache.layers]
        try:
            for row, entries in (keep or {}).items():
                self.observed[row].keep = entries
            for layer in self.observed:
                layer.gates = gates
                layer.rows = rows if rows is None or gates is None else rows[: len(rows) - len(gates)]
            for layer in self.cache.layers:
                if rows is not None and not isinstance(layer, ObservedLayer):
                    layer.reorder_cache(rows)
            mask = self.mask
            if mask is not None:
                mask = torch.cat([select_rows(mask, rows), torch.ones_like(tokens)], 1)
            positions = select_rows(self.lengths, rows)[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
            with torch.set_grad_enabled(gates is not None):
                output = self._forward(tokens, mask, positions, **kwargs)
            yield output
        finally:
            for layer, state in zip(self.cache.layers, before, strict=True):
                vars(layer).update(state)

    @contextmanager
    def weighing(
        self, tokens: Tensor, group: str, norms: Callable[[Noted], Tensor | None], **kwargs: Any
    ) -> Iterator[Any]:
        """Teacher-force `tokens` [1, K] as `following`, in layers that weigh entries by the attention they compute.

        See `weighed`; `norms` and `group` as for `importance_rows`.
        """
        for layer in self.observed:
            layer.weigh = norms, group
        try:
            with self.following(tokens, **kwargs) as output:
                yield output
        finally:
            for layer in self.observed:
                layer.weigh = layer.importance = None

    def weighed(self) -> dict[int, Tensor]:
        """Return the importance of entries, [1, Hkv, T] fp32 by model layer, for the tokens that layers are `weighing`.

        Where kernels attend, which hold no attention, it is computed here.
        """
        weighed = {}
        for layer, followed in zip(self.observed, self.continuations(), strict=True):
            norms, group = assert_present(layer.weigh, "importance is asked for while tokens are weighed")
            computed = layer.importance
            weighed[layer.index] = followed.importance(norms(layer.noted), group) if computed is None else computed
        return weighed

    def logits_seeing(self, tokens: Tensor, keep: Mapping[int, Tensor]) -> Tensor:
        """Return the logits [K, vocabulary] of tokens [1, K] that see only what `keep` leaves; see `following`."""
        with self.following(tokens, keep) as output:
            logits: Tensor = output.logits[0]
        return logits

    def logits_under(self, tokens: Tensor, keeps: Tensor, count: int) -> Iterator[Tensor]:
        """Yield the last `count` logits [count, V] of tokens [1, K] under each of the masks [n, L, Hkv, T] of a prompt.

        Several masks are rows of one batch.
        """
        for part in torch.split(keeps, max(1, MASKED_TOKENS // tokens.shape[1])):
            rows = torch.zeros(len(part), dtype=torch.long)
            keep = dict(enumerate(part.unbind(1)))
            with self.following(tokens.expand(len(part), -1), keep, rows=rows, logits_to_keep=count) as output:
                yield from output.logits

    def continuations(self) -> Iterator[LayerContinuation[Noted]]:
        """Yield the continuation of every observed layer while tokens follow, in ascending order.

        Each is a copy: what it computes and stores, keys and values of all tokens, is freed with it.
        """
        for layer in self.observed:
            if layer.continuation is not None:
                yield replace(layer.continuation)

    def _forward(self, ids: Tensor, mask: Tensor | None, positions: Tensor, **kwargs: Any) -> Any:
        return self.model(input_ids=ids, attention_mask=mask, position_ids=positions, **{CACHE: self.cache}, **kwargs)


@torch.no_grad()
def read_again(model: Any, needs: Iterable[Needs], prompts: Tensor, mask: Tensor | None = None) -> Rereads:
    """Read prompts [B, T] (`mask` 0 where padding, on the left) a second time for policies that need it.

    One sequence at a time, so that none depends on its neighbours. Takes two passes over each; the device is waited for
    once, for how long they are.

    Raises:
        UsageError: the model runs another attention implementation.
        IncompatibleError: a prompt leaves next to no room to read it again.
    """

    def norms(prompt: Observation) -> tuple[Tensor | None]:
        return (None if prompt.projection is None else prompt.projected_norms("l2"),)

    wanted = {need.reread for need in needs if need.reread is not None}
    if not wanted:
        return {}
    length = prompts.shape[1]
    full = describe(model).full_layers
    rows: list[dict[int, dict[SecondPass, Tensor]]] = []
    counts = [length] * len(prompts) if mask is None else (mask > 0).sum(-1).tolist()
    for ids, count in zip(prompts, counts, strict=True):
        real = ids[None, length - count :]
        # Norms behind the output projection are read by KVzip+ alone.
        needed = [Needs(projection=any(how.plus for how in wanted))]
        passed = DensePass(model, dict.fromkeys(full, needed), norms, real)
        again = score_second_passes(passed, real, wanted, itemgetter(0))
        rows.append(
            {
                layer: {how: nn.functional.pad(scores, (length - count, 0)) for how, scores in of_layer.items()}
                for layer, of_layer in again.items()
            }
        )
    return {layer: {how: torch.cat([row[layer][how] for row in rows]) for how in wanted} for layer in full}


def score_second_passes(
    passed: DensePass[Noted], ids: Tensor, hows: Iterable[SecondPass], norms: Callable[[Noted], Tensor | None]
) -> dict[int, dict[SecondPass, Tensor]]:
    """Return the scores of the entries of a prompt [1, T] in second passes, [1, Hkv, T] by layer and pass.

    `norms` returns those behind the output projection, of what was noted in a layer; they are read by KVzip+ alone.

    Raises:
        IncompatibleError: the prompt leaves next to no room to read it again.
    """
    by_pass = {how: _score_second_pass(passed, ids, how, norms) for how in hows}
    return {layer.index: {how: scores[layer.index] for how, scores in by_pass.items()} for layer in passed.observed}


def _score_second_pass(
    passed: DensePass[Noted], ids: Tensor, how: SecondPass, norms: Callable[[Noted], Tensor | None]
) -> dict[int, Tensor]:
    """Return the scores of the entries of a prompt [1, T] in one second pass, by layer [1, Hkv, T]."""
    length = ids.shape[1]
    limit = find_rotary_limit(passed.model, length)
    chunk = min(how.chunk, limit - length - LED_BY) if limit else how.chunk
    if chunk < min(how.chunk, MIN_PASS_CHUNK):
        raise IncompatibleError(
            f"a prompt of {length} tokens leaves no room to read it again after itself: it may come to {limit}; "
            "shorten it, or use another policy than kvzip"
        )
    best: dict[int, Tensor] = {}
    for first in range(0, length, chunk):
        # Some tokens before the chunk lead in to it: it does not follow the end of the prompt.
        tokens = ids[:, max(0, first - LED_BY) : first + chunk]
        if how.plus:
            weighed = {}
            with passed.following(tokens, output_hidden_states=True, logits_to_keep=1) as output:
                for layer in passed.continuations():
                    # a model on several devices leaves a layer's input on the one before
                    weights = residual_weights(output.hidden_states[layer.index].to(layer.query.device))
                    weighed[layer.index] = layer.importance(norms(layer.noted), "max", weights)
        else:
            with passed.weighing(tokens, "max", lambda _: None, logits_to_keep=1):
                weighed = passed.weighed()
        # The most that any later token gives: an entry counts if it is needed once.
        best = {index: torch.maximum(best[index], scores) if best else scores for index, scores in weighed.items()}
    return best

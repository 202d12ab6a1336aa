"""The cache layer that evicts: the dense prompt goes to the model's own attention, then what the plan says is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from kvsearch.core.errors import IncompatibleError, KvsearchError, UsageError
from kvsearch.kernels.dispatch import needs_gradients
from kvsearch.models.architecture import RotarySwitch, require_continuation
from kvsearch.policies.base import Needs, Observation, SecondPass
from kvsearch.policies.checks import DeferredCheck, read_lengths
from kvsearch.policies.scoring import sum_columns
from kvsearch.runtime.attention import (
    NO_SHARED_DRAFTS,
    Output,
    attend_dense,
    attend_ragged,
    make_causal_mask,
    require_attention,
    tag,
)
from kvsearch.runtime.collector import DensePrompt, Rotary, States, read_hidden_states
from kvsearch.runtime.decode.decoding import Decoding
from kvsearch.runtime.eviction import PhaseRule, collect_needs, evict
from kvsearch.runtime.logits import Logits
from kvsearch.runtime.read_mask import ReadMask
from kvsearch.runtime.sharing import Sharing
from kvsearch.runtime.store.storage import RaggedStore

MONITOR_ROWS = 16  # last queries of a prompt whose attention tells what has left
READS_PADDING = "padding was read again as part of a prompt (kvzip): give `generate` the attention_mask"


class EvictingLayer(CacheLayerMixin):  # type: ignore[misc]
    """Ragged per-sequence, per-kv-head storage of one full-attention layer.

    `prefill` is applied right after the layer's dense attention over the prompt, which ends when `prompt_length` tokens
    have been seen (default: with the first forward pass); `decode` after every token that follows. None: nothing is
    evicted in that phase. With `sharing`, budgets come from there. `implementation` tells which attention the model
    runs now, `read_mask` what masks say of the tokens that were read; all layers of a cache share it. `rotary_switch`
    is where the rotary factors of the model change (None: nowhere): no sequence may have both here. With `monitor` the
    attention at the end of the prompt is remembered, see `measure_evicted_mass`.
    """

    # transformers reads these of every cache layer. A layer that changes its size cannot be compiled by `generate`
    # itself.
    is_sliding = False
    is_compileable = False
    drafts = False  # whether tokens come that are to be taken back: prompt lookup and assisted decoding say so

    def __init__(
        self,
        index: int,
        prefill: PhaseRule | None,
        decode: PhaseRule | None,
        implementation: Callable[[], str],
        rotary: Rotary,
        read_mask: ReadMask,
        *,
        sharing: Sharing | None = None,
        prompt_length: int | None = None,
        rotary_switch: RotarySwitch | None = None,
        exact: bool = False,
        monitor: bool = False,
    ) -> None:
        super().__init__()
        self.index = index
        self.prefill = prefill
        self.decode = decode
        self.implementation = implementation
        self.rotary = rotary
        self.read_mask = read_mask
        self.sharing = sharing
        self.prompt_length = prompt_length
        self.rotary_switch = rotary_switch
        self.exact = exact
        self.monitor = monitor
        self._clear()

    def _clear(self) -> None:
        self.seen = 0
        self.foreseen_positions: Tensor | None = None  # rotary positions [B or 1, 1] of a token that was foreseen
        self.asked = False  # whether something asked for lengths while it came
        self.rereads: Mapping[SecondPass, Tensor] = {}  # what the prompt's entries got when it was read again
        self.received: Tensor | None = None  # [B, Hkv, T] by token: attention of the prompt's last queries
        self._holder: RaggedStore | Decoding | None = None
        self._prompt = self._new_prompt()
        if self.sharing is not None:
            self.sharing.forget(self.index)

    def _new_prompt(self) -> DensePrompt:
        return DensePrompt(self.needs(), self.rotary, self.index)

    @property
    def holder(self) -> RaggedStore | Decoding | None:
        """The entries, once the prompt has passed and, where layers share a pool, their budgets are known."""
        # Layers that share a pool know their budgets only after the last one has seen the prompt: each fetches its
        # entries when they are first asked for.
        if self._holder is None and self.sharing is not None:
            self._holder = self.sharing.take(self.index)
        return self._holder

    @holder.setter
    def holder(self, holder: RaggedStore | Decoding) -> None:
        self._holder = holder

    @property
    def evicted(self) -> RaggedStore | Decoding:
        """The entries; UsageError before the prompt ends."""
        if self.holder is None:
            raise UsageError("the cache holds no evicted prompt yet: run the model on the whole prompt first")
        return self.holder

    def needs(self) -> list[Needs]:
        """Return what eviction needs of the prompt."""
        needs = collect_needs(self.prefill, self.decode)
        if self.sharing is not None:
            needs += self.sharing.needs(self.index)
        return [*needs, Needs(query_rows=MONITOR_ROWS)] if self.monitor else needs

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be taken back; evicted ones cannot."""
        return self.decode is None

    # --- what transformers asks of a cache layer -----------------------------------------------------------------

    @property
    def keys(self) -> Tensor | None:
        """All keys [B, Hkv, T, D] in the order of the tokens, as stock layers have them: None before the first token.

        Raises:
            UsageError: entries were evicted, or padding was left out, so that there is no such tensor.
        """
        states = self._states()
        return None if states is None else states[0]

    @keys.setter
    def keys(self, states: None) -> None:
        """Ignore the assignment, which transformers makes in a new layer."""

    @property
    def values(self) -> Tensor | None:
        """All values [B, Hkv, T, Dv], as `keys`."""
        states = self._states()
        return None if states is None else states[1]

    @values.setter
    def values(self, states: None) -> None:
        """Ignore the assignment, as for `keys`."""

    def _states(self) -> tuple[Tensor, Tensor] | None:
        if self.holder is None:
            return self._prompt.states
        if (whole := self.holder.dense(self.seen)) is not None:
            return whole
        held = self.holder.entries()
        raise UsageError(
            f"layer {self.index} of the cache has no tensor of all keys and values: of {self.seen} tokens its heads "
            f"hold {int(held.min())} to {int(held.max())} entries, each its own; cache.entries() and "
            "cache.kept_positions(layer, row, head) say which"
        )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:  # noqa: ARG002
        self.dtype = key_states.dtype
        self.device = key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        # `prepare_step` has checked and counted a foreseen token; the device's part decides nothing.
        if self.foreseen_positions is None:
            require_attention("PlanCache", self.implementation())
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            self._require_same_rotary(key_states.shape[-2])
            self.seen += key_states.shape[-2]
        # The attention function is given tensors alone: the tag tells it whose keys these are.
        tag(key_states, self)
        return key_states, value_states

    def _require_same_rotary(self, tokens: int) -> None:
        """Refuse tokens with other rotary factors than the cached keys; callers check earlier where they can."""
        switch = self.rotary_switch
        if switch is None:
            return
        read = self.seen - self.read_mask.padding  # of the longest sequence
        if read and switch.parts(read, read + tokens):
            otherwise = f"go on to {switch.length:,}" if read < switch.length else "read the prompt anew"
            longer = ", or read a prompt of more than that at once" if switch.settles else ""
            raise IncompatibleError(
                f"the model has other rotary factors beyond {switch.length:,} tokens ({switch.kind}), and the keys of "
                f"the {read:,} that are cached do not fit {tokens:,} more: {otherwise}{longer}"
            )

    def get_seq_length(self) -> int:
        """Return the true length of the sequence, evicted entries included: positions and masks depend on it."""
        # A captured step would keep the length that it was captured at, so it must not be replayed if anything asks for
        # one.
        self.asked |= self.foreseen_positions is not None
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        self.asked |= self.foreseen_positions is not None
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.23

    def reset(self) -> None:
        """Forget everything, also how long the prompt was to be."""
        self._clear()
        self.prompt_length = None
        self.is_initialized = False

    def offload(self) -> None:
        raise UsageError("PlanCache cannot be offloaded: it is small already, drop the offloading option")

    def activate_past_recording(self) -> None:
        """Note that `crop` will be called; nothing is stored for it here."""
        self.drafts = True

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: a negative count, as in transformers 5.23, or the length to keep, as before."""
        count = self.croppable(tokens_to_remove)
        if count and isinstance(self.holder, RaggedStore):
            self.holder.crop(count)
            self.seen -= count

    def croppable(self, tokens_to_remove: int) -> int:
        """Count the tokens `crop` would forget; UsageError, before anything changes, if they are evicted already."""
        count = int(tokens_to_remove)
        # transformers 5.23 gives minus the number of tokens, versions before it the length to keep.
        count = -count if count <= 0 else max(0, self.seen - count)
        # Entries that a prompt has lost do not come back, so only tokens behind it can be taken back.
        held = self.holder.appended if isinstance(self.holder, RaggedStore) else 0
        if count and self.decode is not None:
            raise UsageError(
                "cannot take tokens back under a plan that evicts while decoding: what they displaced is gone (use "
                "cache.mark() and cache.rewind())"
            )
        if count > held:
            raise UsageError(
                f"cannot take back {count} tokens: only {held} came after the prompt, and the prompt is evicted as a "
                "whole (where drafted tokens follow the prompt at once, give PlanCache the prompt_length)"
            )
        return count

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(lambda _: beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(lambda batch: torch.arange(batch)[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select(lambda batch: [row for row in range(batch) for _ in range(repeats)])

    def _select(self, rows_of: Callable[[int], list[int]]) -> None:
        if self._prompt.states is not None:
            raise UsageError("sequences cannot be rearranged in the middle of a prompt: finish it first")
        if self.holder is not None:
            rows = rows_of(self.holder.batch)
            self.holder = self.holder.select_rows(rows)
            self.received = None if self.received is None else self.received[rows]

    def of_rows(self, rows: Sequence[int], read_mask: ReadMask) -> EvictingLayer:
        """Return an independent layer with copies of sequences `rows`, for a cache with this `read_mask`."""
        chosen = copy(self)
        chosen.holder = self.evicted.select_rows(rows)
        chosen.received = None if self.received is None else self.received[list(rows)]
        chosen.read_mask = read_mask
        return chosen

    def mark(self) -> Decoding | None:
        """Return a snapshot for `rewind` that later tokens leave alone; None if tokens are only appended."""
        saved = self.holder
        if not isinstance(saved, Decoding):
            return None
        # Decoding writes in place: the mark keeps the original, and the layer goes on in a copy.
        self.holder = saved.copy()
        return saved

    def rewind(self, seen: int, saved: Decoding | None) -> None:
        """Go back to `seen` tokens and the snapshot `saved` that `mark` returned, as often as wanted."""
        if isinstance(self.holder, RaggedStore):
            self.holder.crop(self.seen - seen)
            # The peak counts from the mark on.
            self.holder.most_tokens = self.holder.tokens.clone()
        # A copy again, so that one mark serves any number of questions.
        elif saved is not None:
            self.holder = saved.copy()
        self.seen = seen

    # --- one token in two parts: `prepare_step` and `finish_step` on the host, `attend` between them on the device ----

    def reserve(self, tokens: int) -> None:
        """Reserve room for `tokens` tokens ahead, again whenever it has run out; 0: none."""
        self.evicted.reserve(tokens)

    def prepare_step(self, positions: Tensor) -> None:
        """Prepare one decode step on the host, at rotary `positions` [B or 1, 1]; room is reserved for it.

        `attend` then changes tensors in place, binds none, and neither waits for the device nor decides anything.
        """
        self._require_same_rotary(1)
        self.evicted.prepare_step()
        self.foreseen_positions = positions

    def finish_step(self) -> None:
        """Finish the prepared step."""
        self.foreseen_positions = None
        self.asked = False
        self.seen += 1
        self.evicted.finish_step()

    def _step(
        self, ahead: Tensor, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any
    ) -> Output:
        logits = Logits.of_call(module, query, key, kwargs)
        holder = self.evicted
        if isinstance(holder, RaggedStore):
            # Stored before it attends: a token sees itself.
            holder.put(key, value)
            output = attend_ragged(holder, query, logits)
        else:
            hidden = self._of_hidden(holder, module, 1)
            states = None if hidden is None else hidden[:, :, 0]
            output = holder.step(query, key, value, ahead, logits, states)
        return output.transpose(1, 2).contiguous(), None

    # --- attention -----------------------------------------------------------------------------------------------

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Output:
        """Compute attention, and evict: dense for the prompt, over the ragged store for every later token."""
        # Four cases: a token whose host part is done, tokens behind the prompt, the prompt, and a prompt that ends
        # inside of this call.
        if self.foreseen_positions is not None:
            return self._step(self.foreseen_positions, module, query, key, value, **kwargs)
        if self.holder is not None:
            return self._continue(module, query, key, value, mask, **kwargs)
        length = self.seen if self.prompt_length is None else self.prompt_length
        if self.seen <= length:
            return self._prefill(module, query, key, value, mask, **kwargs)
        return self._prefill_and_continue(length, module, (query, key, value), mask, **kwargs)

    def _prefill_and_continue(
        self, length: int, module: nn.Module, states: States, mask: Tensor | None, **kwargs: Any
    ) -> Output:
        """Attend to a prompt with drafted tokens behind it, which must see what eviction leaves."""
        if self.sharing is not None and self.sharing.allocation.shares_layers:
            raise UsageError(NO_SHARED_DRAFTS)
        # `update` has counted the drafted tokens already; the prompt has to end before they attend.
        drafted = self.seen - length
        cut = states[0].shape[2] - drafted
        (query, new_query), (key, new_key), (value, new_value) = (
            (tensor[:, :, :cut], tensor[:, :, cut:]) for tensor in states
        )
        positions = kwargs.pop("position_ids", None)
        own_positions = None if positions is None else positions[:, :cut]
        new_positions = None if positions is None else positions[:, cut:]
        own_mask = None if mask is None else mask[:, :, :cut, :-drafted]
        self.seen = length
        prompt, _ = self._prefill(module, query, key, value, own_mask, position_ids=own_positions, **kwargs)
        self.seen = length + drafted
        new_mask = None if mask is None else mask[:, :, cut:]
        draft, _ = self._continue(module, new_query, new_key, new_value, new_mask, position_ids=new_positions, **kwargs)
        return torch.cat([prompt, draft], 1), None

    def _continue(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Output:
        count = query.shape[2]
        try:
            require_continuation(module, count)
            arrived, shown = self.read_mask.read(mask, key.shape[0], self.seen, count)
        except KvsearchError:
            self.seen -= count  # what is refused has not come
            raise
        logits = Logits.of_call(module, query, key, kwargs, learned=True)
        holder = self.evicted
        if isinstance(holder, Decoding):
            positions = kwargs.get("position_ids")
            if positions is None:
                positions = torch.arange(self.seen - count, self.seen, device=key.device)[None]
            hidden = self._of_hidden(holder, module, count)
            output = holder.attend(query, key, value, positions, logits, hidden, arrived, shown)
        else:
            # Appending writes in place, which would spoil what a backward pass reads.
            if needs_gradients(query, key, value):
                holder.separate()
            holder.append(key, value, arrived)
            output = attend_ragged(holder, query, logits, shown)
        # With nothing evicted the store is the dense cache, and transformers' own kernel gives transformers' own bits.
        if self.exact and (dense := holder.dense(self.seen)) is not None:
            # Without a mask SDPA lines its triangle up with the first key, not with the last one.
            if mask is None and count > 1:
                mask = make_causal_mask(count, self.seen, key.device)[None, None]
            return attend_dense(module, query, *dense, mask, **kwargs)
        return output.transpose(1, 2).contiguous(), None

    def _of_hidden(self, holder: Decoding, module: nn.Module, count: int) -> Tensor | None:
        """Return what the policy computes of the last hidden states, [B, Hkv, count], if it needs them."""
        of_hidden = holder.rule.needs.hidden
        return None if of_hidden is None else of_hidden(read_hidden_states(module, slice(-count, None)), self.index)

    def _prefill(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Output:
        self._prompt.length = self.prompt_length
        output = self._prompt.attend(module, query, key, value, mask, **kwargs)
        if self.prompt_length is None or self.seen >= self.prompt_length:
            self.evict_prompt(self._with_rereads(self._prompt.observation()))
            # The dense keys and values are freed here.
            self._prompt = self._new_prompt()
        return output

    def _with_rereads(self, observation: Observation) -> Observation:
        """Add the scores of prompts that were read a second time; padding that was read, too, is noted in `checks`."""
        valid = observation.valid
        rereads = {}
        for how, scores in self.rereads.items():
            rereads[how] = scores.repeat_interleave(len(valid) // len(scores), 0)  # beams are copies of a prompt
            if observation.checks is not None:
                wrong = rereads[how].masked_fill(valid[:, None], 0).flatten(1).any(-1)
                observation.checks.append(DeferredCheck(wrong, lambda _: UsageError(READS_PADDING)))
        return replace(observation, rereads=rereads)

    def evict_prompt(self, observation: Observation) -> None:
        """Evict after prefill, or state this layer's demand where layers share their budgets."""
        if self.monitor:
            queries = observation.last_queries[:, :, -MONITOR_ROWS:]
            how = (observation.scaling, observation.softcap, observation.sinks)
            received = sum_columns(queries, observation.keys, observation.valid, *how)
            width = received.shape[2]
            columns = torch.arange(width, device=received.device) + width - observation.lengths[:, None]
            self.received = received.gather(2, (columns % width)[:, None].expand_as(received))  # padding comes last
        if self.sharing is None:
            self.holder = evict(observation, self.prefill, self.decode)
        else:
            self.sharing.end(self.index, observation)
        # All layers share it; the first one to end its prompt fills it in.
        if not self.read_mask.begun:
            self.read_mask.begin(observation.valid, read_lengths(observation))

    def measure_evicted_mass(self) -> list[float]:
        """Measure the share of the attention at the end of each prompt [B] that is on entries no longer held.

        Raises:
            UsageError: the prompt is not complete, or the layer has no `monitor`.
        """
        holder = self.evicted
        if self.received is None:
            raise UsageError("the evicted mass is measured where it is wanted: PlanCache(model, plan, monitor=True)")
        masses = []
        for row, by_head in enumerate(self.received.cpu()):
            shares = [
                float(of_head[[place for place in holder.kept_positions(row, head) if place < len(of_head)]].sum())
                / float(of_head.sum())
                for head, of_head in enumerate(by_head)
            ]
            masses.append(min(max(1 - math.fsum(shares) / len(shares), 0.0), 1.0))
        return masses

    def nbytes(self) -> int:
        """Return the bytes held for this layer."""
        if self.holder is not None:
            return self.holder.nbytes()
        dense = sum(states.untyped_storage().nbytes() for states in self._prompt.states or ())
        return dense + (0 if self.sharing is None else self.sharing.nbytes(self.index))

"""One pass of the model: what follows the prompts of some samples, under several candidates at once.

Attention of many candidates over the same stored prompts: a candidate is how much of each head it sees. Keys and values
of a prompt are stored once, sorted by rank inside each head, so what a candidate keeps of a head is a prefix of what is
stored: a view, never a copy. The tokens that follow the prompts belong to their candidate.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from kvsearch.core.arrays import Ints
from kvsearch.runtime.attention import Output, make_causal_mask, tag
from kvsearch.runtime.decode.next_tokens import NextTokens
from kvsearch.runtime.decode.replies import GrowingReply, pad_left
from kvsearch.runtime.decode.steps import repeat_steps
from kvsearch.runtime.logits import Logits
from kvsearch.runtime.stock import CACHE
from kvsearch.search.bank.samples import BankSample

MAX_FILLED = 0.75  # share of the columns that heads fill together, above which they are not split
LayerStates = Sequence[Sequence[tuple[Tensor, Tensor]]]  # keys and values by layer and policy


class VisibleKV(NamedTuple):
    """Keys [S, Hkv, N, D], values [S, Hkv, N, Dv] and which of them are seen, [S, Hkv, G, q, N] or broadcastable bool.

    They are of prompts, which all candidates share, or of the tokens after them. None: all are seen.
    """

    keys: Tensor
    values: Tensor
    seen: Tensor | None


HeadParts = Sequence[tuple[slice, VisibleKV]]  # entries by kv heads, which follow each other


class SuffixTokens:
    """Positions and padding of the tokens that follow the prompts of S samples so far.

    A token sees itself and the earlier ones that are no padding. `lengths` are the tokens of the prompts. Once there is
    a `place` [1], the last token's column among columns that were all reserved, tokens come one by one and change
    tensors in place: such steps can be captured.
    """

    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths
        self.valid = lengths.new_zeros(len(lengths), 0, dtype=torch.bool)  # [S, n]
        self.positions = lengths.new_zeros(len(lengths), 0)  # [S, n]
        self.seen: Tensor | None = None  # [S or 1, 1, 1, q, n], by the last q tokens; None: all
        self.latest = self.positions  # of the last q tokens
        self.place: Tensor | None = None

    def reserve(self, tokens: int) -> None:
        """Reserve columns for `tokens` tokens, none of them padding."""
        self.place = self.lengths.new_full((1,), self.valid.shape[1] - 1)
        self.valid = nn.functional.pad(self.valid, (0, tokens))
        self.positions = nn.functional.pad(self.positions, (0, tokens))

    def extend(self, valid: Tensor) -> Tensor:
        """Append q tokens, `valid` [S, q] bool; return their positions [S, q], which padding does not advance."""
        # Padding has no position of its own, as at runtime.
        before = self.lengths + self.valid.sum(-1)
        positions = before[:, None] + (valid.cumsum(-1) - 1).clamp(min=0)
        self.latest = positions
        if self.place is not None:
            self.place.add_(1)
            self.valid.index_copy_(1, self.place, valid)
            self.positions.index_copy_(1, self.place, positions)
            self.seen = self.valid[:, None, None, None]
            return positions
        self.valid = torch.cat([self.valid, valid], 1)
        self.positions = torch.cat([self.positions, positions], 1)
        rows = valid.shape[1]
        count = self.valid.shape[1]
        causal = make_causal_mask(rows, count, self.valid.device)
        if bool(self.valid.all()):
            # A single token sees all that is there; without padding a mask would only cost time.
            self.seen = None if rows == 1 else causal[None, None, None]
        else:
            # Padding sees itself, as a softmax over nothing is NaN.
            own = torch.eye(count, dtype=torch.bool, device=causal.device)[count - rows :]
            self.seen = (causal & (self.valid[:, None] | own))[:, None, None]
        return positions

    def mask_window(self, positions: Tensor, window: int) -> Tensor:
        """Mask the `positions` [S, N] within the sliding `window` of each of the last q tokens, [S, 1, 1, q, N]."""
        ahead: Tensor = self.latest[:, :, None] - positions[:, None]
        return (ahead < window)[:, None, None]


class BankLayer(CacheLayerMixin):  # type: ignore[misc]
    """The cache of one layer for P candidates on S samples: row p * S + s of the batch is candidate p on sample s.

    `keys` and `values` [S, Hkv, N, D] of the prompts are shared by all candidates. To the model the cache
    looks empty: positions are passed in, and masks are made here.
    """

    def __init__(self, keys: Tensor, values: Tensor, suffix: SuffixTokens) -> None:
        super().__init__()
        self.keys = keys
        self.values = values
        self.suffix = suffix
        self.own: tuple[Tensor, Tensor] | None = None  # keys and values [P * S, Hkv, n, D] of the tokens that follow

    @abstractmethod
    def visible_prompt(self) -> Sequence[HeadParts]:
        """Return the visible prompt entries of each candidate."""

    def visible_suffix(self) -> Tensor | None:
        """Mask the suffix tokens that the last q tokens see, [S or 1, 1, 1, q, n]; None: all."""
        return self.suffix.seen

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,  # noqa: ARG002
        **kwargs: Any,
    ) -> Output:
        """Compute attention of queries [P * S, Hq, q, D], [P * S, q, Hq, Dv]; the model's mask is ignored."""
        logits = Logits.of_call(module, query, key, kwargs)
        parts = (torch.split(tensor, len(self.keys)) for tensor in (query, key, value))
        seen = self.visible_suffix()
        group = query.shape[1] // key.shape[1]
        outputs = []
        for queries, keys, values, heads_seen in zip(*parts, self.visible_prompt(), strict=True):
            of_heads = [
                attend_prefix(
                    queries[:, heads.start * group : heads.stop * group],
                    shared,
                    VisibleKV(keys[:, heads], values[:, heads], seen),
                    logits,
                    heads,
                )
                for heads, shared in heads_seen
            ]
            outputs.append(torch.cat(of_heads, 1))
        return torch.cat(outputs).transpose(1, 2).contiguous(), None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        place = self.suffix.place
        if self.own is None:
            self.own = (key_states, value_states)
        elif place is None:
            self.own = (torch.cat([self.own[0], key_states], 2), torch.cat([self.own[1], value_states], 2))
        else:
            self.own[0].index_copy_(2, place, key_states)
            self.own[1].index_copy_(2, place, value_states)
        # The model's attention function gets these keys, and finds the layer by their tag.
        tag(self.own[0], self)
        return self.own

    def reserve(self, tokens: int) -> None:
        """Reserve columns for `tokens` tokens, see `SuffixTokens`."""
        if self.own is not None:
            keys, values = (nn.functional.pad(states, (0, 0, 0, tokens)) for states in self.own)
            self.own = (keys, values)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: states are there already."""

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.23


class PrefixLayer(BankLayer):
    """A full-attention layer: candidates see the first `entries` [P, S, C, Hkv] of the stored entries of each head.

    `there` is a copy on the device of the model. `states` hold the entries once for each of C policies; a candidate has
    entries under one of them.
    """

    def __init__(
        self, states: Sequence[tuple[Tensor, Tensor]], suffix: SuffixTokens, entries: Tensor, there: Tensor
    ) -> None:
        super().__init__(*states[0], suffix)
        self.prefixes = [self._slice_prefix(states, *pair) for pair in zip(entries, there, strict=True)]

    def _slice_prefix(self, states: Sequence[tuple[Tensor, Tensor]], entries: Tensor, there: Tensor) -> HeadParts:
        # A candidate gives entries under one of a layer's policies only, so their sum says which.
        choice = int(entries.sum((0, 2)).argmax())
        keys, values = states[choice]
        entries, limits = entries[:, choice], there[:, choice].to(keys.device)
        largest = entries.amax(0)
        heads = len(largest)
        # A processor attends for one head after the other where a few large ones would make the others as wide. To a
        # GPU more and smaller products cost more than columns that are masked.
        is_split = keys.device.type == "cpu" and int(largest.sum()) <= MAX_FILLED * heads * int(largest.max())
        parts = [slice(head, head + 1) for head in range(heads)] if is_split else [slice(0, heads)]
        visible = []
        for part in parts:
            maximum = int(largest[part].max())
            seen = None
            # Where the heads of all samples have the same budget the view says it all, and no mask is made.
            if int(entries[:, part].min()) < maximum:
                columns = torch.arange(maximum, device=keys.device)
                seen = (columns < limits[:, part, None])[:, :, None, None]
            visible.append((part, VisibleKV(keys[:, part, :maximum], values[:, part, :maximum], seen)))
        return visible

    def visible_prompt(self) -> Sequence[HeadParts]:
        return self.prefixes


class WindowLayer(BankLayer):
    """A sliding-window layer of the model: all candidates see its whole window.

    The stored entries are the last tokens of the prompts, aligned on the right; `window` counts the token itself.
    """

    is_sliding = True

    def __init__(self, keys: Tensor, values: Tensor, suffix: SuffixTokens, window: int, candidates: int) -> None:
        super().__init__(keys, values, suffix)
        self.window = window
        self.candidates = candidates
        back = torch.arange(-keys.shape[2], 0, device=suffix.lengths.device)
        self.positions = suffix.lengths[:, None] + back  # below 0 where a prompt is shorter

    def visible_prompt(self) -> Sequence[HeadParts]:
        seen = self.suffix.mask_window(self.positions, self.window) & (self.positions >= 0)[:, None, None, None]
        heads = slice(0, self.keys.shape[1])
        return [[(heads, VisibleKV(self.keys, self.values, seen))]] * self.candidates

    def visible_suffix(self) -> Tensor | None:
        near = self.suffix.mask_window(self.suffix.positions, self.window)
        return near if self.suffix.seen is None else near & self.suffix.seen


def attend_prefix(query: Tensor, shared: VisibleKV, own: VisibleKV, logits: Logits, kv_heads: slice) -> Tensor:
    """Attend with queries [S, Hq, q, D] over shared prompt entries and own suffix entries, [S, Hq, q, Dv].

    One softmax over both; the query heads of a kv head are packed into one matrix. All are of `kv_heads` of the layer.
    """
    samples, query_heads, rows, _ = query.shape
    heads = own.keys.shape[1]
    packed = query.reshape(samples, heads, query_heads // heads * rows, -1)
    # Keys are not concatenated: prompts are shared, and copying them for each candidate is what the bank is to avoid.
    scores = torch.cat([_scores(packed, part, rows, logits) for part in (own, shared)], -1)
    grouped = scores.view(samples * heads, query_heads // heads, rows, -1)
    numbers = torch.arange(kv_heads.start, kv_heads.stop, device=query.device)
    weights = logits.softmax(grouped, numbers.repeat(samples)).view_as(scores)
    weights = weights.to(query.dtype)
    near = own.keys.shape[2]
    output = weights[..., :near] @ own.values + weights[..., near:] @ shared.values
    return output.view(samples, query_heads, rows, -1)


def _scores(packed: Tensor, part: VisibleKV, rows: int, logits: Logits) -> Tensor:
    """Return logits [S, Hkv, G * q, N] fp32 of packed queries [S, Hkv, G * q, D], -inf where nothing is seen."""
    scores = logits.of(packed, part.keys)
    if part.seen is None:
        return scores
    grouped = scores.view(*scores.shape[:2], scores.shape[2] // rows, rows, scores.shape[3])
    return grouped.masked_fill_(~part.seen.to(scores.device), float("-inf")).view_as(scores)


def stack_states(states: Sequence[Tensor], right: bool) -> Tensor:
    """Stack states [H, N, D] of samples to [S, H, longest, D], padded with zeros at the end, or in front if `right`."""
    if len(states) == 1:
        return states[0][None]
    heads, _, dim = states[0].shape
    width = max(state.shape[1] for state in states)
    stacked = states[0].new_zeros(len(states), heads, width, dim)
    for row, state in zip(stacked, states, strict=True):
        first = width - state.shape[1] if right else 0
        row[:, first : first + state.shape[1]] = state
    return stacked


def stack_answers(samples: Sequence[BankSample], device: Any) -> Tensor:
    """Stack the answer tokens that logits predict, [S, R], right-aligned and padded with -1."""
    # The first token may have been predicted by the prompt: only those that this pass predicts are wanted.
    predicted = [sample.answer[len(sample.answer) - sample.predicting :] for sample in samples]
    return pad_left(predicted, device, -1)[0]


class BankReply(GrowingReply):
    """A growing reply that fails where the model emits NaN or infinity."""

    failed = False

    def fail(self) -> None:
        """End the reply as failed: its logits are not finite."""
        self.failed = self.ended = True


class BankPass:
    """Forward passes of P candidates [P, choices * L, Hkv] (entries per kv head) after the prompts of S samples.

    `states` are keys and values [S, Hkv, N, D] of the prompts by model layer. Full-attention layers have their best
    entries, best first, once for each policy that they may have; sliding-window layers (`windows`, in tokens, by layer)
    their last ones, aligned on the right. The model must run the attention "kvsearch".
    """

    def __init__(
        self,
        model: Any,
        samples: Sequence[BankSample],
        states: LayerStates,
        windows: Mapping[int, int],
        candidates: Ints,
    ) -> None:
        self.model = model
        self.samples = samples
        self.count = len(candidates)
        lengths = np.array([len(sample.prompt) for sample in samples], dtype=np.int64)
        self.suffix = SuffixTokens(torch.from_numpy(lengths).to(model.device))
        # A prompt shorter than a budget has no more entries than tokens.
        seen = torch.from_numpy(np.minimum(candidates[:, None], lengths[:, None, None]))
        full = len(states) - len(windows)
        rows = seen.reshape(*seen.shape[:2], -1, full, seen.shape[-1])
        # of each layer [P, S, choices, Hkv], on the host and in one copy on the device
        planned = zip(rows.unbind(3), rows.to(model.device).unbind(3), strict=True)
        self.cache = Cache(
            layers=[
                WindowLayer(*of_layer[0], self.suffix, windows[index], self.count)
                if index in windows
                else PrefixLayer(of_layer, self.suffix, *next(planned))
                for index, of_layer in enumerate(states)
            ]
        )

    @torch.no_grad()
    def read(self, ids: Tensor, valid: Tensor, keep: int) -> Tensor:
        """Run q tokens [S, q] (equal for all candidates) or [P * S, q]; return the last `keep` logits [P, S, keep, V].

        `valid` [S, q] bool says which are no padding.
        """
        positions = self.suffix.extend(valid)
        # Answers are the same for all candidates; replies differ from the second token on.
        if len(ids) < self.count * len(valid):
            ids = ids.repeat(self.count, 1)
        output = self.model(
            input_ids=ids,
            position_ids=positions.repeat(self.count, 1),
            logits_to_keep=keep,
            **{CACHE: self.cache},
        )
        logits: Tensor = output.logits
        return logits.view(self.count, len(valid), *logits.shape[1:])

    def force_answers(self) -> Tensor | None:
        """Teacher-force answers; return right-aligned logits [P, S, R, V], None if prompts predict all tokens."""
        keep = max(sample.predicting for sample in self.samples)
        if keep == 0:
            return None
        ids, mask = pad_left([sample.following for sample in self.samples], self.model.device)
        return self.read(ids, mask.bool(), keep)

    def _make_step(self, ids: Tensor, every: Tensor, tokens: int) -> Callable[[], Tensor]:
        """Make a decode step that runs the current tokens in `ids` [P * S, 1] to logits [P, S, V].

        Where it pays the step is captured from the second token on, once the first has reserved the columns.
        """

        def step() -> Tensor:
            return self.read(ids, every, 1)[:, :, 0]

        repeated = repeat_steps(self.model, step, tokens)
        if repeated is None:
            return step

        def reserving() -> Tensor:
            # Columns are reserved after the first token, which shows their shapes; from then on steps write in place.
            if self.suffix.place is not None:
                logits: Tensor = repeated()
                return logits
            logits = step()
            for part in (self.suffix, *self.cache.layers):
                part.reserve(tokens)
            return logits

        return reserving

    @torch.no_grad()
    def generate_replies(self, first: Tensor | None, stops: Sequence[set[int]]) -> list[list[BankReply]]:
        """Generate greedy replies by candidate and sample: to the questions, or from the prompts' last logits.

        `first` [S, V] are these logits where there are no questions. A reply has at most as many tokens as its sample's
        `limit`, and ends before a token of its sample's `stops` or with one that makes its `finished` true.
        """
        samples = self.samples
        if first is None:
            ids, mask = pad_left([sample.question_ids for sample in samples], self.model.device)
            logits = self.read(ids, mask.bool(), 1)[:, :, 0]
        else:
            logits = first.expand(self.count, *first.shape)
        pairs = [(sample, stop) for _ in range(self.count) for sample, stop in zip(samples, stops, strict=True)]
        rows = [BankReply(sample.limit, stop, (sample.finished,)) for sample, stop in pairs]
        prompts = [torch.cat([sample.prompt, sample.question_ids]) for sample in samples] * self.count
        choose = NextTokens(self.model, prompts, [row.limit for row in rows])
        valid = torch.ones(len(samples), 1, dtype=torch.bool, device=self.model.device)
        ids = torch.empty(len(rows), 1, dtype=torch.int64, device=valid.device)
        step = self._make_step(ids, valid, max(sample.limit for sample in samples))
        while True:
            chosen = choose(logits.flatten(0, 1)).flatten()
            finite = logits.isfinite().all(-1).flatten()
            for row, token, is_finite in zip(rows, chosen.tolist(), finite.tolist(), strict=True):
                if not row.ended:
                    # Also where NaN has a largest number: what a model says then is no reply.
                    row.take(token) if is_finite else row.fail()
            if all(row.ended for row in rows):
                break
            ids.copy_(chosen[:, None])
            logits = step()
        size = len(samples)
        return [rows[start : start + size] for start in range(0, len(rows), size)]

"""Collect what policies need of a prompt besides keys and values while it passes a layer, whole or in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from kvsearch.core.errors import IncompatibleError, UsageError, assert_present
from kvsearch.kernels.dispatch import needs_gradients
from kvsearch.models.architecture import find_attention_modules, require_continuation, unrotate
from kvsearch.policies.base import Needs, Observation, OfHidden, QueryStatistics, References
from kvsearch.policies.checks import DeferredCheck, require_finite
from kvsearch.policies.fitted import spread_places
from kvsearch.policies.scoring import sum_columns
from kvsearch.runtime.attention import (
    Output,
    attend_dense,
    attend_flash,
    can_use_flash,
    find_valid_keys,
    make_rotary_positions,
)
from kvsearch.runtime.logits import Logits

Rotary = Callable[[Tensor], tuple[Tensor, Tensor]]
States = tuple[Tensor, Tensor, Tensor]  # queries, keys and values of some tokens

ENDS_PADDED = "a prompt ends with padding: pad batches on the left (padding_side='left')"
LEADING = 4  # tokens that are no reference where there are others
ROWS_PER_CHUNK = 4096  # query rows turned back at a time, which bounds the scratch memory


class DensePrompt:
    """The prefill of one layer, whole or in chunks: runs the model's own attention and collects what policies need.

    Keeps the last query rows, moments of the unrotated queries and attention column sums, as far as `needs` say. These
    are the needs of all policies that will look at the prompt: what several need is computed once. Where its `length`
    is known, chunks are put into memory for all of it.
    """

    def __init__(self, needs: Sequence[Needs], rotary: Rotary, layer: int, length: int | None = None) -> None:
        self.rotary = rotary
        self.layer = layer
        self.length = length
        self.states: tuple[Tensor, Tensor] | None = None  # keys [B, Hkv, T, D] and values [B, Hkv, T, Dv] so far
        self.rows: Tensor | None = None
        self._rows_wanted = max((need.query_rows for need in needs), default=0)
        starts = {need.query_statistics_from for need in needs}
        self._starts = sorted(start for start in starts if start is not None)
        self._references = max((need.references for need in needs), default=0)
        self._sampled: QuerySample | None = None
        self._wants_sums = any(need.column_sums for need in needs)
        self._wants_projection = any(need.projection for need in needs)
        self._hidden: dict[OfHidden, list[Tensor]] = {need.hidden: [] for need in needs if need.hidden is not None}
        self._seen: Tensor | None = None  # [B] real tokens so far
        self._moments: dict[int, Moments] = {}
        self._sums: Tensor | None = None
        self._masked = False

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Output:
        """Compute attention of the next chunk, which sees all chunks before it, and collect from it."""
        continues = self.states is not None
        if continues:
            require_continuation(module, query.shape[2])
        key, value = self._with(key, value)
        logits = Logits.of_call(module, query, key, kwargs)
        valid = find_valid_keys(mask, key.shape[0], key.shape[2], key.device)
        # A later chunk would need a mask, and with a mask SDPA makes a matrix of logits.
        if continues and logits.plain and can_use_flash(query, key, value) and bool(valid.all()):
            output: Output = attend_flash(query, key, value, logits.scaling), None
        else:
            output = attend_dense(module, query, key, value, mask, **kwargs)
        self._masked = mask is not None
        self.add(query, (key, value), make_rotary_positions(kwargs, valid, query.shape[2]), valid, logits)
        for what, parts in self._hidden.items():
            parts.append(what(read_hidden_states(module, slice(query.shape[2])), self.layer))
        return output

    def _with(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append a chunk's keys and values; return all so far."""
        length = key.shape[2] if self.length is None else self.length
        if self.states is None and key.shape[2] >= length:
            return key, value
        # Gradients do not pass writes in place, and without a length there is nothing to write into.
        if self.length is None or needs_gradients(key, value):
            before = self.states or (key[:, :, :0], value[:, :, :0])
            return torch.cat([before[0], key], 2), torch.cat([before[1], value], 2)
        first = 0
        if self.states is None:
            # Memory for the whole prompt at once: to concatenate would copy everything at every chunk.
            self._whole = [new.new_empty(*new.shape[:2], length, new.shape[3]) for new in (key, value)]
        else:
            first = self.states[0].shape[2]
        stop = first + key.shape[2]
        for whole, new in zip(self._whole, (key, value), strict=True):
            whole[:, :, first:stop] = new
        return self._whole[0][:, :, :stop], self._whole[1][:, :, :stop]

    def add(
        self, query: Tensor, states: tuple[Tensor, Tensor], positions: Tensor, valid: Tensor, logits: Logits
    ) -> None:
        """Collect from one chunk of the prompt.

        `query` [B, Hq, q, D] as attention sees it, `states` keys [B, Hkv, T, D] and values [B, Hkv, T, Dv] up to its
        last token, `positions` [B, q] (rotary), `valid` [B, T] bool.
        """
        self.states = states
        self._positions = positions
        self._valid = valid
        self._logits = logits
        count = query.shape[2]
        if self._rows_wanted:
            self.rows = query if self.rows is None else torch.cat([self.rows, query], 2)
            # a copy, so that the rest of the prompt's queries can be freed
            self.rows = self.rows[:, :, -self._rows_wanted :].clone()
        if self._wants_sums:
            sums = sum_columns(query, states[0], valid, logits.scaling, logits.softcap, logits.sinks)
            if self._sums is not None:
                # A chunk is read once, with all keys before it; what these got of earlier chunks is added.
                sums[..., :-count] += self._sums
            self._sums = sums
        if self._starts or self._references:
            own = valid[:, -count:]
            index = own.cumsum(-1) - 1 if self._seen is None else self._seen[:, None] + own.cumsum(-1) - 1
            self._seen = index[:, -1] + 1
            if self._references:
                sample = QuerySample.of(query, positions, index, own)
                self._sampled = sample.first(self._references, self._sampled)
            self._add_moments(query, positions, own, index)

    def _add_moments(self, query: Tensor, positions: Tensor, valid: Tensor, index: Tensor) -> None:
        for start in range(0, query.shape[2] if self._starts else 0, ROWS_PER_CHUNK):
            part = slice(start, start + ROWS_PER_CHUNK)
            plain = unrotate_queries(query[:, :, part], positions[:, part], self.rotary)
            for first in self._starts:
                moments = Moments.of(plain, valid[:, part] & (index[:, part] >= first))
                before = self._moments.get(first)
                self._moments[first] = moments if before is None else before.merged(moments)

    def observation(self) -> Observation:
        """Return the observation of the layer for policies, after all chunks.

        Whether a prompt ends with padding is noted, for `lengths_after` and `require_finite`; a CPU is asked at once.
        """
        states = assert_present(self.states, "a prompt was asked for before it passed")
        logits = self._logits
        seen = Observation(
            *states,
            self._valid,
            logits.scaling,
            queries=self.rows,
            softcap=logits.softcap,
            statistics={first: moments.statistics() for first, moments in self._moments.items()},
            references=None if self._sampled is None else self._sampled.references(self.rotary),
            rotary=self.rotary,
            next_position=self._positions[:, -1] + 1,
            column_sums=self._sums,
            projection=logits.projection if self._wants_projection else None,
            hidden={what: torch.cat(parts, -1) for what, parts in self._hidden.items()},
            layer=self.layer,
            sinks=logits.sinks,
        )
        if self._masked and seen.checks is not None:
            seen.checks.append(DeferredCheck(~self._valid[:, -1], lambda _: UsageError(ENDS_PADDED)))
            if seen.keys.device.type == "cpu":
                require_finite(seen.checks)
                seen.checks.clear()
        return seen


def unrotate_queries(query: Tensor, positions: Tensor, rotary: Rotary) -> Tensor:
    """Turn queries [B, Hq, q, D] back to position 0 from rotary `positions` [B, q], fp32."""
    # no size is left to be found out: there may be no query at all
    cos, sin = (table.view(*positions.shape, table.shape[-1]) for table in rotary(positions.flatten()))
    return unrotate(query.float(), cos, sin)


class QuerySample(NamedTuple):
    """Queries of some tokens, by an order in which the first ones lie evenly over a prompt, however long it is."""

    order: Tensor  # [B, n] fp32, ascending; infinite where padding
    positions: Tensor  # [B, n] rotary
    queries: Tensor  # [B, Hq, n, D] as attention saw them

    @classmethod
    def of(cls, query: Tensor, positions: Tensor, index: Tensor, valid: Tensor) -> QuerySample:
        """Take all queries [B, Hq, n, D] of tokens with this `index` [B, n] in their sequence."""
        order = spread_places(index)
        # Places are below 1, so that adding 1 puts these tokens behind all others.
        order = order + (index < LEADING)  # after all others: what they look at is like nothing that comes later
        return cls(order.masked_fill(~valid, float("inf")), positions, query)

    def first(self, count: int, before: QuerySample | None) -> QuerySample:
        """Return the first `count` in order, of these and of `before` together."""
        order, positions, queries = self
        if before is not None:
            order, positions, queries = (
                torch.cat([old, new], dim) for old, new, dim in zip(before, self, (1, 1, 2), strict=True)
            )
        order, chosen = torch.sort(order, dim=-1, stable=True)
        chosen = chosen[:, :count]
        taken = chosen[:, None, :, None].expand(-1, queries.shape[1], -1, queries.shape[3])
        return QuerySample(order[:, :count], positions.gather(1, chosen), queries.gather(2, taken))

    def references(self, rotary: Rotary) -> References:
        """Return the queries at position 0."""
        return References(unrotate_queries(self.queries, self.positions, rotary), self.order.isfinite())


class Moments(NamedTuple):
    """Sums of a set of vectors that stay accurate when the mean is large against the spread."""

    rows: Tensor  # [B] how many
    mean: Tensor  # [B, Hq, D]
    scatter: Tensor  # [B, Hq, D, D], the sum of the outer products of the centred vectors

    @classmethod
    def of(cls, vectors: Tensor, chosen: Tensor) -> Moments:
        """Return the moments of the `chosen` [B, q] bool of `vectors` [B, Hq, q, D] fp32."""
        weight = chosen[:, None, :, None].float()
        rows = chosen.sum(-1).float()
        mean = (vectors * weight).sum(2) / rows.clamp(min=1)[:, None, None]
        # Centred before squares are taken: in fp32, E[x^2] - E[x]^2 of a large mean loses all digits.
        centred = (vectors - mean[:, :, None]) * weight
        return cls(rows, mean, centred.transpose(-1, -2) @ centred)

    def merged(self, other: Moments) -> Moments:
        """Return the moments of both sets together (Chan et al. 1983)."""
        rows = self.rows + other.rows
        share = (other.rows / rows.clamp(min=1))[:, None, None]
        apart = other.mean - self.mean
        between = apart[..., :, None] * apart[..., None, :] * (self.rows[:, None, None] * share)[..., None]
        return Moments(rows, self.mean + apart * share, self.scatter + other.scatter + between)

    def statistics(self) -> QueryStatistics:
        """Return the mean and covariance (divided by N); zero where there is nothing."""
        return QueryStatistics(self.mean, self.scatter / self.rows.clamp(min=1)[:, None, None, None])


_watched: WeakSet[nn.Module] = WeakSet()
_entering: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()


def watch_hidden_states(model: nn.Module, needs: Iterable[Needs]) -> None:
    """Record the hidden states of `model` for `read_hidden_states` from now on, if a policy needs them."""
    if not any(need.hidden is not None for need in needs):
        return
    for module in find_attention_modules(model).values():
        if module not in _watched:
            _watched.add(module)
            module.register_forward_pre_hook(_enter, with_kwargs=True)
            module.register_forward_hook(_leave, always_call=True)


def read_hidden_states(module: nn.Module, tokens: slice) -> Tensor:
    """Return the hidden states of some of the tokens that `module`, which is computing now, was given, [B, q, d_model].

    Raises:
        IncompatibleError: it was given none, or is not watched.
    """
    if module not in _entering:
        raise IncompatibleError(
            f"{type(module).__name__} does not show the hidden states that a policy wants (kvzap): use another policy"
        )
    return _entering[module][:, tokens]


def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    states = kwargs.get("hidden_states", args[0] if args else None)
    if isinstance(states, Tensor):
        _entering[module] = states


def _leave(module: nn.Module, *_: Any) -> None:
    _entering.pop(module, None)

"""Replies of a compressed batch, greedy or drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvsearch.core.arrays import Ints
from kvsearch.core.errors import NonFiniteError, UsageError, present
from kvsearch.models.architecture import describe, require_same_rotary
from kvsearch.models.loading import LoadedModel
from kvsearch.runtime.cache import CacheMark, PlanCache
from kvsearch.runtime.decode.decoding import Decoding
from kvsearch.runtime.decode.steps import DecodeSteps, stepping
from kvsearch.runtime.stock import CACHE
from kvsearch.signals.predictions import token_losses
from kvsearch.tasks.base import Sampling

NO_LOGITS = "the model emits NaN or infinite logits: check its dtype and weights"
Finished = Callable[[list[int]], bool]
Chooser = Callable[[Tensor], Tensor]  # from logits [B, n, V] to the next tokens [B, 1], by the last of them


class GrowingReply:
    """One reply while it is made: up to `limit` tokens.

    It ends before a token of `stop`, or with the token that makes `finished` true of it (None: nothing does).
    """

    def __init__(self, limit: int, stop: set[int], finished: Finished | None = None) -> None:
        self.limit = limit
        self.stop = stop
        self.finished = finished
        self.generated: list[int] = []  # with the token of `stop`
        self.ended = False

    def take(self, token: int) -> None:
        """Go on with a token."""
        self.generated.append(token)
        self.ended = token in self.stop or len(self.generated) >= self.limit
        self.ended = self.ended or (self.finished is not None and self.finished(self.generated))

    @property
    def tokens(self) -> list[int]:
        """The token ids, without the one of `stop` that ended it."""
        return self.generated[:-1] if self.generated[-1] in self.stop else self.generated


@dataclass(eq=False)
class Replies:
    """Replies of one compressed batch: to questions that follow it, or as its own continuation.

    Prompts and questions of different lengths are padded on the left. A reply ends before a token of `stop`, or with
    the token that makes `finished` true of it (None: nothing does).

    The `cache` holds the prompts; `mask` [B, T] is 0 where they are padded, `logits` [b, 1, V] are those of their ends,
    which repeat in a batch of several methods (None: not known, so that it can be asked but does not go on by itself).
    `choose` takes the next tokens, the likeliest ones if it is left alone.

    Raises:
        NonFiniteError: from both kinds of reply.
    """

    model: Any
    cache: PlanCache
    mask: Tensor
    logits: Tensor | None
    stop: set[int]
    finished: Finished | None = None
    choose: Chooser = field(default_factory=lambda: next_tokens)
    _compressed: CacheMark | None = None
    _steps: list[DecodeSteps] = field(default_factory=list)  # captured for a question, for the next ones

    def __post_init__(self) -> None:
        self.lengths = self.mask.sum(-1, keepdim=True)
        self.most = [0] * len(self.mask)  # entries held at a time while the last replies were made: `PeakEntries`

    def ask(self, questions: Sequence[Tensor], max_new_tokens: Sequence[int]) -> list[list[int]]:
        """Ask one question per sequence, any number of times: no question sees another.

        Questions without a token are none: the prompts go on by themselves, see `reply`.

        Raises:
            UsageError: questions of different lengths, where padding between context and question would take the place
                of tokens in the model's sliding windows.
        """
        if not any(map(len, questions)):
            return self.reply(max_new_tokens)
        mark = self._mark()
        ids, seen, positions = self._following(questions, max(max_new_tokens) - 1)
        held = self._peak()
        logits = self._forward(self.model, ids, seen, positions)
        held.step(np.array([len(question) for question in questions]))
        replies = self._generate(logits, seen, positions[:, -1:], max_new_tokens, held)
        self.cache.rewind(mark)
        return replies

    def force(self, tokens: Sequence[Tensor], rows: int) -> Tensor:
        """Return the logits [B, rows, V] of the last `rows` of tokens that follow the sequences, a row of them each.

        They are forgotten again, as questions are; errors as for `ask`, but that logits may be NaN.
        """
        mark = self._mark()
        ids, seen, positions = self._following(tokens)
        logits = self._forward(self.model, ids, seen, positions, rows)
        self.cache.rewind(mark)
        return logits

    def predict(self, questions: Sequence[Tensor], answers: Sequence[Sequence[int]]) -> list[float]:
        """Return the mean loss of the tokens of an answer to one question per sequence, in nats per token.

        Answers, and questions, have at least one token. Questions and answers are forgotten again; errors as for `ask`.
        """
        rows = [torch.tensor(answer) for answer in answers]
        asked = [torch.cat([question, row[:-1]]) for question, row in zip(questions, rows, strict=True)]
        held = self._peak()
        logits = self.force(asked, max(map(len, rows)))
        self.cache.check_scores()
        held.step(np.array([len(tokens) for tokens in asked]))
        self.most = held.most.tolist()
        losses = [float(token_losses(logits[place, -len(row) :], row).mean()) for place, row in enumerate(rows)]
        for place, loss in enumerate(losses):
            if not math.isfinite(loss):
                raise NonFiniteError(NO_LOGITS, place)
        return losses

    def reply(self, max_new_tokens: Sequence[int]) -> list[list[int]]:
        """Continue the prompts themselves, once; their last logits give the first token."""
        logits = present(self.logits, "a cache whose last logits are not known was to go on by itself")
        require_same_rotary(self.model, self.lengths[:, 0], max(max_new_tokens) - 1)
        logits = logits.repeat(len(self.mask) // len(logits), 1, 1)
        return self._generate(logits, self.mask, self.lengths - 1, max_new_tokens, self._peak())

    def _mark(self) -> CacheMark:
        """Return where the prompts end."""
        if self._compressed is None:
            self.cache.activate_past_recording()  # sliding-window layers must be able to forget a question, too
            for layer in self.cache.planned.values():
                layer.drafts = False  # no token of a reply is ever taken back by itself, so its steps can be captured
            self._compressed = self.cache.mark()
        return self._compressed

    def _following(self, tokens: Sequence[Tensor], later: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens that follow the prompts, [B, n], the mask of all until then, and their positions.

        So many `later` ones follow them.
        """
        require_same_rotary(self.model, self.lengths[:, 0], max(map(len, tokens)) + later)
        if has_windows(self.model) and len({len(row) for row in tokens}) > 1:
            raise UsageError(
                "questions of different lengths cannot share a batch on a model with sliding windows or running states"
            )
        ids, mask = left_padded(tokens, self.model.device)
        return ids, torch.cat([self.mask, mask], 1), self.lengths + (mask.cumsum(-1) - 1).clamp(min=0)

    def _generate(
        self, logits: Tensor, seen: Tensor, positions: Tensor, max_new_tokens: Sequence[int], held: PeakEntries
    ) -> list[list[int]]:
        """Make replies that begin as `logits` [B, n, V] say; `positions` [B, 1] are those of the tokens before."""
        ids = self.choose(logits)
        replies = [GrowingReply(limit, self.stop, self.finished) for limit in max_new_tokens]
        with stepping(self.model, self.cache, max(max_new_tokens), kept=self._steps) as model:
            while True:
                tokens = ids[:, 0].tolist()
                for row, reply in enumerate(replies):
                    if not reply.ended:
                        reply.take(tokens[row])
                        if reply.ended:
                            self.most[row] = int(held.most[row])
                if all(reply.ended for reply in replies):
                    self.cache.check_scores()
                    return [reply.tokens for reply in replies]
                seen = torch.cat([seen, torch.ones_like(ids)], 1)
                positions = positions + 1
                ids = self.choose(self._forward(model, ids, seen, positions))
                held.step(np.ones(len(replies), dtype=np.int64))

    def _peak(self) -> PeakEntries:
        return PeakEntries(self.model, self.cache, self.lengths[:, 0])

    def _forward(self, model: Any, ids: Tensor, mask: Tensor, positions: Tensor, rows: int = 1) -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                logits_to_keep=rows,
                **{CACHE: self.cache},
            ).logits
        return logits


def next_tokens(logits: Tensor) -> Tensor:
    """Return the likeliest next tokens [B, 1] by logits [B, n, V]; errors as `check_logits`."""
    check_logits(logits)
    return logits[:, -1:].argmax(-1)


def check_logits(logits: Tensor) -> None:
    """Raise NonFiniteError if some of the last logits of [B, n, V] are no numbers."""
    finite = logits[:, -1].isfinite().all(-1)
    if not bool(finite.all()):
        raise NonFiniteError(NO_LOGITS, int((~finite).nonzero()[0]))


class Draws:
    """A `Chooser` that draws the next token of every sequence by a sequence of random numbers of its own."""

    def __init__(self, sampling: Sampling, seeds: Sequence[int]) -> None:
        self.sampling = sampling
        self._numbers = [np.random.default_rng(seed) for seed in seeds]

    def __call__(self, logits: Tensor) -> Tensor:
        """Return a token [B, 1] of each sequence by logits [B, n, V]; NonFiniteError if some are no numbers.

        The likeliest tokens whose chances first reach `top_p` share a number line by their chances, the likeliest
        first, and a random number points at one of them (Holtzman et al., arXiv 1904.09751).
        """
        check_logits(logits)
        last = logits[:, -1].double()
        warmed = (last - last.amax(-1, keepdim=True)) / self.sampling.temperature
        chances, tokens = warmed.softmax(-1).sort(stable=True, dim=-1, descending=True)
        ends = chances.cumsum(-1)
        final = ((ends - chances) < self.sampling.top_p).sum(-1, keepdim=True) - 1
        points = torch.tensor([[numbers.random()] for numbers in self._numbers], device=logits.device)
        places = (ends <= points * ends.gather(-1, final)).sum(-1, keepdim=True)
        drawn: Tensor = tokens.gather(-1, places.minimum(final))
        return drawn


def has_windows(model: Any) -> bool:
    """Tell whether some layers of a model see a sliding window only."""
    shape = describe(model)
    return len(shape.full_layers) < shape.layers


def left_padded(rows: Sequence[Tensor], device: Any, pad: int = 0) -> tuple[Tensor, Tensor]:
    """Stack rows of token ids, padded on the left: ids and attention mask, both [B, longest]; nothing sees `pad`."""
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, width - len(row) :] = row
        mask[index, width - len(row) :] = 1
    return ids.to(device), mask.to(device)


def stop_tokens(loaded: LoadedModel) -> set[int]:
    """Return the end-of-sequence tokens of the model's generation configuration and of the tokenizer."""
    configured = getattr(loaded.model.generation_config, "eos_token_id", None)
    several = configured if isinstance(configured, list) else [configured]
    return {int(token) for token in [*several, loaded.tokenizer.eos_token_id] if token is not None}


class PeakEntries:
    """The largest sum over all full-attention layers and kv heads at any token so far, per sequence.

    A head counts with the token that is coming in, as it evicts after that. What each head has held at most would add
    up to more: under two phases with different budgets some heads shrink while others grow. All is counted on the host,
    nothing waits for the device. Of several tokens that come in at once, as those of a question, the sum is exact at
    the first, and from the second on as if no head dropped more than it has to: never too low.

    Args:
        model: the model, for its layers outside the plan, which hold every token.
        cache: holds the prompts, and takes in the tokens of `step`.
        lengths: tokens of the prompts, [B].
    """

    def __init__(self, model: Any, cache: PlanCache, lengths: Tensor) -> None:
        shape = describe(model)
        planned = [layer.holder for layer in cache.planned.values()]
        self._deciding = [holder for holder in planned if isinstance(holder, Decoding)]
        growing = [holder for holder in planned if holder is not None and not isinstance(holder, Decoding)]
        self._heads = len(self._deciding) * shape.kv_heads
        self._growing_heads = len(shape.full_layers) * shape.kv_heads - self._heads
        unplanned = len(shape.full_layers) - len(planned)
        self._grown: Ints = unplanned * shape.kv_heads * lengths.cpu().numpy().astype(np.int64)
        for holder in growing:
            self._grown += holder.entries().sum(1).numpy()
        self._limits = _beside(
            [holder.rule.budgets.reshape(len(lengths), -1) for holder in self._deciding], len(lengths)
        )
        self._held = self._now(len(lengths))
        self.most: Ints = self._held.sum(axis=1) + self._grown

    def step(self, tokens: Ints) -> None:
        """Take note that so many tokens of each sequence, [B], came into the cache, padding not counted."""
        came = np.minimum(tokens, 1)
        later = np.maximum(tokens - 1, 0)
        first = self._held.sum(axis=1) + self._heads * came + self._grown + self._growing_heads * came
        lasting = np.minimum(self._held + later[:, None], self._limits).sum(axis=1) + self._heads * came
        self._grown = self._grown + self._growing_heads * tokens
        last = np.where(later > 0, lasting + self._grown, 0)
        self.most = np.maximum(self.most, np.maximum(first, last))
        self._held = self._now(len(tokens))

    def _now(self, batch: int) -> Ints:
        """Return the entries of the heads that evict while they decode, [B, heads]."""
        return _beside([holder.entries().numpy() for holder in self._deciding], batch)


def _beside(parts: list[Ints], batch: int) -> Ints:
    return np.concatenate([np.zeros((batch, 0), dtype=np.int64), *parts], axis=1)

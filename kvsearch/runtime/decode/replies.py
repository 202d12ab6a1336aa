"""Replies of a compressed batch, greedy or drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kvsearch.core.arrays import Ints
from kvsearch.core.errors import NonFiniteError, UsageError, assert_present, warn_once
from kvsearch.models.architecture import describe, require_same_rotary
from kvsearch.models.loading import LoadedModel
from kvsearch.runtime.cache import CacheMark, PlanCache
from kvsearch.runtime.decode.decoding import Decoding
from kvsearch.runtime.decode.next_tokens import Draws, NextTokens
from kvsearch.runtime.decode.steps import DecodeSteps, use_steps
from kvsearch.runtime.stock import CACHE
from kvsearch.signals.predictions import token_losses
from kvsearch.tasks.prompts import PromptFormat, list_added_tokens

LEFT = 0.5  # share of the rows of a batch that still reply, at which the others leave it
NO_LOGITS = "the model emits NaN or infinite logits: check its dtype and weights"
Finished = Callable[[list[int]], bool]


class GrowingReply:
    """One reply while it is made: up to `limit` tokens.

    It ends before a token of `stop`, or with the token that makes one of the `checks` true of it.
    """

    def __init__(self, limit: int, stop: set[int], checks: Sequence[Finished | None] = ()) -> None:
        self.limit = limit
        self.stop = stop
        self.checks = [check for check in checks if check is not None]
        self.generated: list[int] = []  # with the token of `stop`
        self.ended = False

    def take(self, token: int) -> None:
        """Add a token."""
        self.generated.append(token)
        self.ended = token in self.stop or len(self.generated) >= self.limit
        self.ended = self.ended or any(check(self.generated) for check in self.checks)

    @property
    def tokens(self) -> list[int]:
        """The token ids, without the one of `stop` that ended it."""
        return self.generated[:-1] if self.generated[-1] in self.stop else self.generated


@dataclass(eq=False)
class Replies:
    """Replies of one compressed batch: to questions that follow it, or as its own continuation.

    Prompts and questions of different lengths are padded on the left. A reply ends before a token of `stop`, or with
    the token that makes `finished` true of it (None: nothing does).

    The `cache` holds the `prompts`, token ids [T] each; `mask` [B, T] is 0 where they are padded, `logits` [b, 1, V]
    are from the ends of the prompts (None: not known, so that it can be asked but does not go on by itself). Prompts
    and logits repeat in a batch of several methods. Replies are greedy, or drawn as `draws` says, both as `NextTokens`
    has them.

    Raises:
        NonFiniteError: from both kinds of reply.
        IncompatibleError: from both: the model's generation config cannot be followed.
    """

    model: Any
    cache: PlanCache
    prompts: Sequence[Tensor]
    mask: Tensor
    logits: Tensor | None
    stop: set[int]
    finished: Finished | None = None
    draws: Draws | None = None
    _compressed: CacheMark | None = None
    _steps: list[DecodeSteps] = field(default_factory=list)  # captured for a question, for the next ones

    def __post_init__(self) -> None:
        self.lengths = self.mask.sum(-1, keepdim=True)
        self.most = [0] * len(self.mask)  # entries held at a time while the last replies were made: `PeakEntries`

    def ask(
        self,
        questions: Sequence[Tensor],
        max_new_tokens: Sequence[int],
        settled: Sequence[Finished | None] | None = None,
    ) -> list[list[int]]:
        """Ask one question per sequence, any number of times: no question sees another.

        Questions without a token are none: the prompts go on by themselves, see `reply`. A reply also ends with the
        token that makes the sequence's own check in `settled` true of it.

        Raises:
            UsageError: questions of different lengths, where padding between context and question would take the place
                of tokens in the model's sliding windows.
        """
        if not any(map(len, questions)):
            return self.reply(max_new_tokens, settled)
        mark = self._mark()
        ids, seen, positions = self._following(questions, max(max_new_tokens) - 1)
        held = self._peak()
        logits = self._forward(self.model, ids, seen, positions)
        held.step(np.array([len(question) for question in questions]))
        # Processors penalise what was said so far, prompt and question included.
        whole = [torch.cat(both) for both in zip(self._prompt_rows, questions, strict=True)]
        replies = self._generate(whole, logits, seen, positions[:, -1:], max_new_tokens, held, settled)
        self.cache.rewind(mark)
        return replies

    def of_rows(self, rows: Sequence[int]) -> Replies:
        """Return replies of some rows alone, on copies of their sequences; these here stay as they are."""
        prompts = [self._prompt_rows[row] for row in rows]
        logits = None if self.logits is None else self._prompt_logits()[rows]
        cache = self.cache.of_rows(rows)
        return Replies(self.model, cache, prompts, self.mask[rows], logits, self.stop, self.finished, self.draws)

    def force(self, tokens: Sequence[Tensor], rows: int) -> Tensor:
        """Teacher-force tokens after the sequences, a row each; return the logits [B, rows, V] of the last `rows`.

        They are forgotten again, as questions are; errors as for `ask`, but that logits may be NaN.
        """
        mark = self._mark()
        ids, seen, positions = self._following(tokens)
        logits = self._forward(self.model, ids, seen, positions, rows)
        self.cache.rewind(mark)
        return logits

    def predict(self, questions: Sequence[Tensor], answers: Sequence[Sequence[int]]) -> list[float]:
        """Return the mean loss of the tokens of an answer to one question per sequence, in nats per token.

        Answers have at least one token. Without a token in any question answers follow the prompts themselves, whose
        last logits predict the first token. Questions and answers are forgotten again; errors as for `ask`.
        """
        rows = [torch.tensor(answer) for answer in answers]
        # The last token of an answer predicts nothing that is scored.
        inputs = [torch.cat([question, row[:-1]]) for question, row in zip(questions, rows, strict=True)]
        lengths = np.array([len(tokens) for tokens in inputs])
        longest = max(map(len, rows))
        is_windowed = has_windows(self.model)
        if is_windowed:  # padding comes last there, where nothing sees it
            inputs = [nn.functional.pad(ids, (0, longest - len(row))) for ids, row in zip(inputs, rows, strict=True)]
        held = self._peak()
        last = None if any(map(len, questions)) else self._prompt_logits()
        ahead = 0 if last is None else 1  # tokens of an answer that the prompt's own logits predict
        width = longest - ahead
        # An answer of one token that follows the prompt at once needs no pass.
        forced = self.force(inputs, width) if width else self._prompt_logits()[:, :0]
        self.cache.check_scores()
        held.step(lengths)
        self.most = held.most.tolist()
        losses = []
        for place, row in enumerate(rows):
            later = len(row) - ahead
            begin = 0 if is_windowed else width - later
            predicting = forced[place, begin : begin + later]
            if last is not None:
                predicting = torch.cat([last[place], predicting])
            losses.append(float(token_losses(predicting, row).mean()))
        for place, loss in enumerate(losses):
            if not math.isfinite(loss):
                raise NonFiniteError(NO_LOGITS, place)
        return losses

    def reply(self, max_new_tokens: Sequence[int], settled: Sequence[Finished | None] | None = None) -> list[list[int]]:
        """Continue the prompts themselves, once; their last logits give the first token. `settled` as for `ask`."""
        logits = self._prompt_logits()
        require_same_rotary(self.model, self.lengths[:, 0], max(max_new_tokens) - 1)
        prompts = self._prompt_rows
        return self._generate(prompts, logits, self.mask, self.lengths - 1, max_new_tokens, self._peak(), settled)

    def _prompt_logits(self) -> Tensor:
        """Return the logits [B, 1, V] of the end of each row's prompt."""
        logits = assert_present(self.logits, "a cache whose last logits are not known was to go on by itself")
        return logits.repeat(len(self.mask) // len(logits), 1, 1)

    @property
    def _prompt_rows(self) -> list[Tensor]:
        """The prompt of each row."""
        return [*self.prompts] * (len(self.mask) // len(self.prompts))

    def _mark(self) -> CacheMark:
        """Return the mark of the cache at the end of the prompts, taken once."""
        if self._compressed is None:
            self.cache.activate_past_recording()  # sliding-window layers must be able to forget a question, too
            for layer in self.cache.planned.values():
                layer.drafts = False  # no token of a reply is ever taken back by itself, so its steps can be captured
            self._compressed = self.cache.mark()
        return self._compressed

    def _following(self, tokens: Sequence[Tensor], later: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Batch tokens that follow the prompts, [B, n]; return them, the mask of all until then, and their positions.

        `later` more tokens are to follow them.
        """
        require_same_rotary(self.model, self.lengths[:, 0], max(map(len, tokens)) + later)
        if has_windows(self.model) and len({len(row) for row in tokens}) > 1:
            raise UsageError(
                "questions of different lengths cannot share a batch on a model with sliding windows or running states"
            )
        ids, mask = pad_left(tokens, self.model.device)
        return ids, torch.cat([self.mask, mask], 1), self.lengths + (mask.cumsum(-1) - 1).clamp(min=0)

    def _generate(
        self,
        prompts: Sequence[Tensor],
        logits: Tensor,
        seen: Tensor,
        positions: Tensor,
        max_new_tokens: Sequence[int],
        held: PeakEntries,
        settled: Sequence[Finished | None] | None,
    ) -> list[list[int]]:
        """Generate replies to whole `prompts`, from the `logits` [B, n, V] and `positions` [B, 1] of their ends.

        Rows whose replies have ended leave, in a cache of copies of the others, once so many have that it pays.
        """
        choose = NextTokens(self.model, prompts, max_new_tokens, self.draws)
        ids = choose(select_last_logits(logits))
        checks = settled or [None] * len(max_new_tokens)
        replies = [
            GrowingReply(limit, self.stop, (self.finished, check))
            for limit, check in zip(max_new_tokens, checks, strict=True)
        ]
        rows = list(range(len(replies)))  # of the batch that is left
        cache = self.cache
        with use_steps(self.model, cache, max(max_new_tokens), kept=self._steps) as model, _name_rows_on_error(rows):
            while True:
                for place, (row, token) in enumerate(zip(rows, ids[:, 0].tolist(), strict=True)):
                    if not replies[row].ended:
                        replies[row].take(token)
                        self.most[row] = int(held.most[place])
                left = [place for place, row in enumerate(rows) if not replies[row].ended]
                if not left:
                    cache.check_scores()
                    return [reply.tokens for reply in replies]
                if model is self.model and len(left) <= LEFT * len(rows):  # captured steps are of all rows
                    cache.check_scores()
                    cache = cache.of_rows(left)
                    choose.keep_rows(left)
                    held = held.of_rows(cache, left)
                    ids, seen, positions = (tensor[left] for tensor in (ids, seen, positions))
                    rows[:] = [rows[place] for place in left]
                seen = torch.cat([seen, torch.ones_like(ids)], 1)
                positions = positions + 1
                ids = choose(select_last_logits(self._forward(model, ids, seen, positions, cache=cache)))
                held.step(np.ones(len(rows), dtype=np.int64))

    def _peak(self) -> PeakEntries:
        return PeakEntries(self.model, self.cache, self.lengths[:, 0])

    def _forward(
        self, model: Any, ids: Tensor, mask: Tensor, positions: Tensor, rows: int = 1, cache: PlanCache | None = None
    ) -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                logits_to_keep=rows,
                **{CACHE: self.cache if cache is None else cache},
            ).logits
        return logits


@contextmanager
def _name_rows_on_error(rows: Sequence[int]) -> Iterator[None]:
    """Translate the row of a NonFiniteError to the whole batch; `rows` are the rows still in it."""
    try:
        yield
    except NonFiniteError as error:
        error.row = rows[error.row]
        raise


def check_logits(logits: Tensor) -> None:
    """Raise NonFiniteError if the last token's logits [B, n, V] hold NaN."""
    last = logits[:, -1]
    if bool(last.sum(-1, dtype=torch.float32).isfinite().all()):  # NaN and infinity stay in a sum
        return
    finite = last.isfinite().all(-1)
    if not bool(finite.all()):  # else the sum alone is out of range
        raise NonFiniteError(NO_LOGITS, int((~finite).nonzero()[0]))


def select_last_logits(logits: Tensor) -> Tensor:
    """Return the last [B, V] of logits [B, n, V]; errors as for `check_logits`."""
    check_logits(logits)
    return logits[:, -1]


def has_windows(model: Any) -> bool:
    """Tell whether some layers of a model see a sliding window only."""
    shape = describe(model)
    return len(shape.full_layers) < shape.layers


def pad_left(rows: Sequence[Tensor], device: Any, pad: int = 0) -> tuple[Tensor, Tensor]:
    """Stack rows of token ids, padded on the left: ids and attention mask, both [B, longest]; nothing sees `pad`."""
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, width - len(row) :] = row
        mask[index, width - len(row) :] = 1
    return ids.to(device), mask.to(device)


def find_stop_tokens(loaded: LoadedModel, form: PromptFormat | None = None) -> set[int]:
    """Return the end-of-sequence tokens of the model's generation configuration and of the tokenizer.

    Stop strings of the configuration that are added tokens are ends, too; a warning names others, which are none.
    The token that ends a turn in the chat template of a `form` is one, too; a warning says so if nothing else does.
    """
    config = loaded.model.generation_config
    configured = getattr(config, "eos_token_id", None)
    several = configured if isinstance(configured, list) else [configured]
    stop = {int(token) for token in [*several, loaded.tokenizer.eos_token_id] if token is not None}
    strings = getattr(config, "stop_strings", None) or ()
    for text in [strings] if isinstance(strings, str) else strings:
        match loaded.tokenizer(text, add_special_tokens=False)["input_ids"]:
            case [token] if token in list_added_tokens(loaded.tokenizer):
                stop.add(token)
            case _:  # other tokens may have the string in them
                warn_once(f"the generation config has the stop string {text!r}, no added token: replies go on there")
    turn = None if form is None else form.end_of_turn
    if turn is not None and turn not in stop:
        warn_once(
            f"the chat template ends a turn with {loaded.tokenizer.convert_ids_to_tokens(turn)}, which neither the "
            "generation config nor the tokenizer names as an end: replies end there, too"
        )
        stop.add(turn)
    return stop


class PeakEntries:
    """Peak number of cache entries per sequence: the largest sum over all full-attention layers and kv heads so far.

    A head counts with the token that is coming in, as it evicts after that. What each head has held at most would add
    up to more: under two phases with different budgets some heads shrink while others grow. All is counted on the host,
    nothing waits for the device. Of several tokens that come in at once, as a question does, the sum is exact at the
    first, and from the second on as if no head dropped more than it has to: never too low.

    Args:
        model: the model, for its layers outside the plan, which hold every token.
        cache: holds the prompts, and takes in the tokens of `step`.
        lengths: tokens of the prompts, [B].
    """

    def __init__(self, model: Any, cache: PlanCache, lengths: Tensor) -> None:
        shape = describe(model)
        planned = [layer.holder for layer in cache.planned.values()]
        self._deciding = _deciding(cache)
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

    def of_rows(self, cache: PlanCache, rows: Sequence[int]) -> PeakEntries:
        """Return the counts of `rows` of the batch, which `cache` holds now."""
        chosen = copy(self)
        chosen._deciding = _deciding(cache)
        chosen._grown, chosen._limits, chosen._held, chosen.most = (
            numbers[rows] for numbers in (self._grown, self._limits, self._held, self.most)
        )
        return chosen

    def step(self, tokens: Ints) -> None:
        """Count `tokens` [B] that came into the cache of each sequence, padding left out."""
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


def _deciding(cache: PlanCache) -> list[Decoding]:
    """Return the planned layers that evict while they decode."""
    return [layer.holder for layer in cache.planned.values() if isinstance(layer.holder, Decoding)]


def _beside(parts: list[Ints], batch: int) -> Ints:
    return np.concatenate([np.zeros((batch, 0), dtype=np.int64), *parts], axis=1)

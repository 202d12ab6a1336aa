"""One pass of the model: what follows the prompts of some samples, under several candidates at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvsearch.core.arrays import Ints
from kvsearch.runtime.decode.replies import GreedyReply, left_padded, likeliest
from kvsearch.runtime.decode.steps import repeating
from kvsearch.runtime.stock import CACHE
from kvsearch.search.bank.layer import PrefixLayer, SuffixTokens, WindowLayer
from kvsearch.search.bank.samples import BankSample

PAD = 0  # any token will do: nothing sees it


@dataclass(frozen=True, eq=False)
class Portion:
    """Samples side by side: the lengths [S] of their prompts, keys and values [S, Hkv, N, D] of every model layer.

    Full-attention layers hold their best entries, best first, once for each policy that they may have; sliding-window
    layers (`windows`, in tokens, by layer) their last ones, aligned on the right.
    """

    samples: Sequence[BankSample]
    lengths: Ints
    layers: Sequence[Sequence[tuple[Tensor, Tensor]]]
    windows: Mapping[int, int]


def side_by_side(states: Sequence[Tensor], right: bool) -> Tensor:
    """Stack states [H, N, D] of samples as [S, H, longest, D], with zeros at the end, or in front if `right`."""
    if len(states) == 1:
        return states[0][None]
    heads, _, dim = states[0].shape
    width = max(state.shape[1] for state in states)
    made = states[0].new_zeros(len(states), heads, width, dim)
    for row, state in zip(made, states, strict=True):
        first = width - state.shape[1] if right else 0
        row[:, first : first + state.shape[1]] = state
    return made


def predicted_answers(samples: Sequence[BankSample], device: Any) -> Tensor:
    """Return the tokens [S, R] of the samples' answers that logits predict, right-aligned, -1 where there is none."""
    predicted = [sample.answer[len(sample.answer) - sample.predicting :] for sample in samples]
    return left_padded(predicted, -1, device)[0]


class BankReply(GreedyReply):
    """A reply that has none where the model emits NaN or infinity."""

    failed = False

    def fail(self) -> None:
        """End it: there are no logits to go on by."""
        self.failed = self.ended = True


class Pass:
    """P candidates, entries per kv head [P, choices * L, Hkv], that go on after the prompts of a portion.

    The model must run the attention "kvsearch".
    """

    def __init__(self, model: Any, portion: Portion, candidates: Ints) -> None:
        self.model = model
        self.portion = portion
        self.count = len(candidates)
        self.suffix = SuffixTokens(torch.from_numpy(portion.lengths).to(model.device))
        seen = torch.from_numpy(np.minimum(candidates[:, None], portion.lengths[:, None, None]))
        full = len(portion.layers) - len(portion.windows)
        rows = seen.reshape(*seen.shape[:2], -1, full, seen.shape[-1])
        # of each layer [P, S, choices, Hkv], on the host and in one copy on the device
        planned = zip(rows.unbind(3), rows.to(model.device).unbind(3), strict=True)
        self.cache = Cache(
            layers=[
                WindowLayer(*states[0], self.suffix, portion.windows[index], self.count)
                if index in portion.windows
                else PrefixLayer(states, self.suffix, *next(planned))
                for index, states in enumerate(portion.layers)
            ]
        )

    @torch.no_grad()
    def read(self, ids: Tensor, valid: Tensor, keep: int) -> Tensor:
        """Read q tokens [S, q], the same for all candidates, or [P * S, q]: logits [P, S, keep, V] of the last `keep`.

        `valid` [S, q] bool says which are no padding.
        """
        positions = self.suffix.extend(valid)
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

    def forced(self) -> Tensor | None:
        """Return logits [P, S, R, V] for the answers' tokens, aligned on the right; None if the prompts predict all."""
        samples = self.portion.samples
        keep = max(sample.predicting for sample in samples)
        if keep == 0:
            return None
        ids, mask = left_padded([sample.following for sample in samples], PAD, self.model.device)
        return self.read(ids, mask.bool(), keep)

    def _following(self, ids: Tensor, every: Tensor, tokens: int) -> Callable[[], Tensor]:
        """Return what reads tokens `ids` [P * S, 1], whatever they are by then, to logits [P, S, V].

        Where it pays that is captured, from the second token on: by then the first says what is made room for.
        """

        def step() -> Tensor:
            return self.read(ids, every, 1)[:, :, 0]

        repeated = repeating(self.model, step, tokens)
        if repeated is None:
            return step

        def reserving() -> Tensor:
            if self.suffix.place is not None:
                logits: Tensor = repeated()
                return logits
            logits = step()
            for held in (self.suffix, *self.cache.layers):
                held.reserve(tokens)
            return logits

        return reserving

    @torch.no_grad()
    def replies(self, first: Tensor | None, limits: Sequence[int], stop: set[int]) -> list[list[BankReply]]:
        """Reply greedily, by candidate and sample: to the questions, or as the prompts' last logits go on.

        `first` [S, V] are these logits where there are no questions, `limits` [S] say how long a reply may be. A reply
        ends before a token of `stop` or with one that makes its sample's `finished` true.
        """
        samples = self.portion.samples
        if first is None:
            ids, mask = left_padded([sample.asked for sample in samples], PAD, self.model.device)
            logits = self.read(ids, mask.bool(), 1)[:, :, 0]
        else:
            logits = first.expand(self.count, *first.shape)
        rows = [
            BankReply(limit, stop, sample.finished)
            for _ in range(self.count)
            for sample, limit in zip(samples, limits, strict=True)
        ]
        every = torch.ones(len(samples), 1, dtype=torch.bool, device=self.model.device)
        ids = torch.empty(len(rows), 1, dtype=torch.int64, device=every.device)
        step = self._following(ids, every, max(limits))
        while True:
            chosen, finite = (each.flatten() for each in likeliest(logits))
            for row, token, known in zip(rows, chosen.tolist(), finite.tolist(), strict=True):
                if not row.ended:
                    row.take(token) if known else row.fail()
            if all(row.ended for row in rows):
                break
            ids.copy_(chosen[:, None])
            logits = step()
        size = len(samples)
        return [rows[start : start + size] for start in range(0, len(rows), size)]

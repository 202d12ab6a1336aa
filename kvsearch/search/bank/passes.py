"""One pass of the model: what follows the prompts of some samples, under several candidates at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvsearch.budgets.allocator import Ints
from kvsearch.evaluation.replies import left_padded
from kvsearch.search.bank.layer import BankLayer, PrefixLayer, Trail, WindowLayer
from kvsearch.search.bank.samples import BankSample

PAD = 0  # any token will do: nothing sees it


@dataclass(frozen=True, eq=False)
class Portion:
    """Samples side by side: the lengths [S] of their prompts, keys and values [S, Hkv, N, D] of every model layer.

    Full-attention layers hold their best entries, best first; sliding-window layers (`windows`, in tokens, by layer)
    their last ones, aligned on the right.
    """

    samples: Sequence[BankSample]
    lengths: Ints
    layers: Sequence[tuple[Tensor, Tensor]]
    windows: Mapping[int, int]


def side_by_side(states: Sequence[Tensor], right: bool) -> Tensor:
    """States [H, N, D] of several samples as [S, H, longest, D], with zeros at the end, or in front if `right`."""
    if len(states) == 1:
        return states[0][None]
    heads, _, dim = states[0].shape
    width = max(state.shape[1] for state in states)
    made = states[0].new_zeros(len(states), heads, width, dim)
    for row, state in zip(made, states, strict=True):
        first = width - state.shape[1] if right else 0
        row[:, first : first + state.shape[1]] = state
    return made


class Pass:
    """P candidates, entries per kv head [P, L, Hkv], that go on after the prompts of a portion.

    The model must run the attention "kvsearch".
    """

    def __init__(self, model: Any, portion: Portion, candidates: Ints) -> None:
        self.model, self.portion, self.count = model, portion, len(candidates)
        self.trail = Trail(torch.from_numpy(portion.lengths).to(model.device))
        seen = torch.from_numpy(np.minimum(candidates[:, None], portion.lengths[:, None, None]))  # [P, S, L, Hkv]
        planned = iter(seen.unbind(2))
        self.cache = Cache(layers=[self._layer(index, planned) for index in range(len(portion.layers))])

    def _layer(self, index: int, planned: Any) -> BankLayer:
        keys, values = self.portion.layers[index]
        window = self.portion.windows.get(index)
        if window is not None:
            return WindowLayer(keys, values, self.trail, window, self.count)
        return PrefixLayer(keys, values, self.trail, next(planned))

    @torch.no_grad()
    def read(self, ids: Tensor, valid: Tensor, keep: int) -> Tensor:
        """Logits [P, S, keep, V] of the last `keep` of q tokens [S, q], the same for all candidates, or [P * S, q].

        `valid` [S, q] bool says which are no padding.
        """
        positions = self.trail.extend(valid)
        if len(ids) < self.count * len(valid):
            ids = ids.repeat(self.count, 1)
        output = self.model(
            input_ids=ids,
            position_ids=positions.repeat(self.count, 1),
            past_key_values=self.cache,
            logits_to_keep=keep,
        )
        logits: Tensor = output.logits
        return logits.view(self.count, len(valid), *logits.shape[1:])

    def forced(self) -> Tensor | None:
        """Logits [P, S, R, V] for the tokens of the answers, aligned on the right; None if the prompts predict all."""
        samples = self.portion.samples
        keep = max(sample.predicting for sample in samples)
        if keep == 0:
            return None
        ids, mask = left_padded([sample.following for sample in samples], PAD, self.model.device)
        return self.read(ids, mask.bool(), keep)

    def replies(self, first: Tensor | None, limits: Sequence[int], stop: set[int]) -> list[list[Reply]]:
        """Greedy replies, by candidate and sample: to the questions, or what follows the prompts' last logits.

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
            Reply(sample, limit, stop) for _ in range(self.count) for sample, limit in zip(samples, limits, strict=True)
        ]
        every = torch.ones(len(samples), 1, dtype=torch.bool, device=self.model.device)
        while True:
            chosen = logits.argmax(-1).flatten()
            finite = logits.isfinite().all(-1).flatten().tolist()
            for row, token, known in zip(rows, chosen.tolist(), finite, strict=True):
                row.take(token if known else None)
            if all(row.ended for row in rows):
                break
            logits = self.read(chosen[:, None].to(every.device), every, 1)[:, :, 0]
        size = len(samples)
        return [rows[start : start + size] for start in range(0, len(rows), size)]


class Reply:
    """One reply while it is made."""

    def __init__(self, sample: BankSample, limit: int, stop: set[int]) -> None:
        self.sample, self.limit, self.stop = sample, limit, stop
        self.generated: list[int] = []
        self.broken = False  # the logits were no numbers
        self.ended = False

    def take(self, token: int | None) -> None:
        """Go on with the likeliest token; None: there is none. Nothing happens once the reply has ended."""
        if self.ended:
            return
        if token is None:
            self.broken = self.ended = True
            return
        self.generated.append(token)
        self.ended = token in self.stop or len(self.generated) >= self.limit or self.sample.finished(self.generated)

    @property
    def tokens(self) -> list[int] | None:
        """Its token ids, without the one that ended it; None if the model emitted NaN or infinity."""
        if self.broken:
            return None
        return self.generated[:-1] if self.generated[-1] in self.stop else self.generated

    @property
    def read(self) -> int:
        """How many tokens the model has read for it: the question, and all of the reply but its last token."""
        return len(self.sample.asked) + max(0, len(self.generated) - 1)

"""Calibration prompts in batches: padded on the left, with the tokens that follow them padded on the right."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvsearch.calibration.prompts import CalibrationPrompt
from kvsearch.signals.perplexity import token_losses


@dataclass(frozen=True, eq=False)
class ContinuationBatch:
    """M continuations of the prompts of a batch; padding comes last, so no real token sees it."""

    tokens: Tensor  # [M, K]
    counts: Tensor  # [M] real tokens
    answers: Tensor  # [M] where the answer starts, whose tokens count for the loss
    rows: Tensor  # [M] the prompt of each, by its row in the batch, on the host

    @property
    def followed(self) -> Tensor:
        """Tokens that are no padding, [M, K] bool."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.counts[:, None]

    @property
    def predicting(self) -> Tensor:
        """Rows that predict a token of the answer, [M, K - 1] bool; the prompt itself predicts the first token of all.

        What the prompt predicts is left out: eviction after the prompt cannot change it.
        """
        row = torch.arange(self.tokens.shape[1] - 1, device=self.tokens.device)
        return (row >= (self.answers - 1).clamp(min=0)[:, None]) & (row < self.counts[:, None] - 1)

    def mean_over_tokens(self, values: Tensor) -> Tensor:
        """Average values [..., M, K] over the real tokens of each continuation, [..., M] float64."""
        kept = values.double().masked_fill(~self.followed.to(values.device), 0.0).sum(-1)
        return kept / self.counts.to(values.device)

    def losses(self, logits: Tensor) -> Tensor:
        """Average the losses of answers' tokens in nats, [..., M] float64, by logits [..., M, K, V]; 0 without any."""
        rows = self.predicting.to(logits.device)
        found = token_losses(logits[..., :-1, :], self.tokens[:, 1:]).double().masked_fill(~rows, 0.0).sum(-1)
        return found / rows.sum(-1).clamp(min=1)


class Sample(NamedTuple):
    """One continuation of a prompt: the row of the prompt in its batch, and the number among what follows it."""

    row: int
    number: int


@dataclass(frozen=True, eq=False)
class PromptBatch:
    """Some prompts of a calibration, and their places in it."""

    places: Sequence[int]
    prompts: Sequence[CalibrationPrompt]

    def padded(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return token ids [B, T] and their mask, padded on the left with token 0."""
        rows = [prompt.ids[0] for prompt in self.prompts]
        masks = [torch.ones_like(row) for row in rows]
        ids, mask = (pad_sequence(some, batch_first=True, padding_side="left").to(device) for some in (rows, masks))
        return ids, mask

    def passes(self, size: int, finished: Collection[tuple[int, int]]) -> list[list[Sample]]:
        """Put all continuations into passes of at most `size`, those of about as many tokens together.

        Left out are passes that have nothing but continuations that are `finished`, by place of the prompt and number.
        """
        samples = [
            Sample(row, number)
            for row, prompt in enumerate(self.prompts)
            for number in range(len(prompt.continuations))
        ]
        samples.sort(key=lambda sample: (self._tokens(sample), sample))
        made: list[list[Sample]] = []
        for sample in samples:
            if made and len(made[-1]) < size and 2 * self._tokens(sample) <= 3 * self._tokens(made[-1][0]):
                made[-1].append(sample)
            else:
                made.append([sample])
        return [sorted(some) for some in made if any((self.places[row], n) not in finished for row, n in some)]

    def continuations(self, samples: Sequence[Sample], device: torch.device) -> ContinuationBatch:
        """Return these continuations."""
        chosen = [self.prompts[row].continuations[number] for row, number in samples]
        tokens = pad_sequence([one.tokens[0] for one in chosen], batch_first=True)
        counts = torch.tensor([one.tokens.shape[1] for one in chosen])
        answers, rows = torch.tensor([one.answer for one in chosen]), torch.tensor([row for row, _ in samples])
        return ContinuationBatch(tokens.to(device), counts.to(device), answers.to(device), rows)

    def repeated(self, samples: Sequence[Sample]) -> PromptBatch:
        """Return the prompt of each of these continuations, as often as they need it."""
        return PromptBatch(*zip(*((self.places[row], self.prompts[row]) for row, _ in samples), strict=True))

    def _tokens(self, sample: Sample) -> int:
        return self.prompts[sample.row].continuations[sample.number].tokens.shape[1]


def batches_of(prompts: Sequence[CalibrationPrompt], size: int) -> list[PromptBatch]:
    """Put prompts into batches of at most `size`; those that are as long are together."""
    places = sorted(range(len(prompts)), key=lambda place: (prompts[place].length, place))
    parts = (places[first : first + size] for first in range(0, len(places), size))
    return [PromptBatch(part, [prompts[place] for place in part]) for part in parts]

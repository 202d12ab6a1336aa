"""Calibration prompts in batches: padded on the left, with the tokens that follow them padded on the right."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvsearch.calibration.prompts import CalibrationPrompt
from kvsearch.signals.perplexity import token_losses


@dataclass(frozen=True, eq=False)
class ContinuationBatch:
    """What follows the prompts of a batch, one continuation each; padding comes last, so no real token sees it."""

    tokens: Tensor  # [B, K]
    counts: Tensor  # [B] real tokens
    answers: Tensor  # [B] where the answer starts, whose tokens count for the loss
    real: Tensor  # [B] bool; False where a prompt has no continuation of this number and repeats its first one

    @property
    def followed(self) -> Tensor:
        """Tokens that are no padding, [B, K] bool."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.counts[:, None]

    @property
    def predicting(self) -> Tensor:
        """Rows that predict a token of the answer, [B, K - 1] bool; the prompt itself predicts the first token of all.

        What the prompt predicts is left out: eviction after the prompt cannot change it.
        """
        row = torch.arange(self.tokens.shape[1] - 1, device=self.tokens.device)
        return (row >= (self.answers - 1).clamp(min=0)[:, None]) & (row < self.counts[:, None] - 1)

    def mean_over_tokens(self, values: Tensor) -> Tensor:
        """Average values [..., B, K] over the real tokens of each continuation, [..., B] float64."""
        kept = values.double().masked_fill(~self.followed.to(values.device), 0.0).sum(-1)
        return kept / self.counts.to(values.device)

    def losses(self, logits: Tensor) -> Tensor:
        """Average the losses of answers' tokens in nats, [..., B] float64, by logits [..., B, K, V]; 0 without any."""
        rows = self.predicting.to(logits.device)
        found = token_losses(logits[..., :-1, :], self.tokens[:, 1:]).double().masked_fill(~rows, 0.0).sum(-1)
        return found / rows.sum(-1).clamp(min=1)


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

    def left(self, finished: Collection[tuple[int, int]]) -> list[int]:
        """List the numbers of continuations that some prompt has and that, by (place, number), are not `finished`."""
        most = max(len(prompt.continuations) for prompt in self.prompts)
        pairs = list(zip(self.places, self.prompts, strict=True))
        return [
            number
            for number in range(most)
            if any(number < len(prompt.continuations) and (place, number) not in finished for place, prompt in pairs)
        ]

    def continuations(self, number: int, device: torch.device) -> ContinuationBatch:
        """Return the continuation of that number of every prompt."""
        real = [number < len(prompt.continuations) for prompt in self.prompts]
        chosen = [prompt.continuations[number if has else 0] for prompt, has in zip(self.prompts, real, strict=True)]
        tokens = pad_sequence([one.tokens[0] for one in chosen], batch_first=True)
        counts, answers = [one.tokens.shape[1] for one in chosen], [one.answer for one in chosen]
        given = (torch.tensor(values).to(device) for values in (counts, answers, real))
        return ContinuationBatch(tokens.to(device), *given)

    def having(self, number: int) -> PromptBatch:
        """Return the prompts that have a continuation of that number, with that one alone."""
        rows = [row for row, prompt in enumerate(self.prompts) if number < len(prompt.continuations)]
        chosen = (self.prompts[row] for row in rows)
        alone = [CalibrationPrompt(one.ids, one.context, (one.continuations[number],)) for one in chosen]
        return PromptBatch([self.places[row] for row in rows], alone)


def batches_of(prompts: Sequence[CalibrationPrompt], size: int) -> list[PromptBatch]:
    """Put prompts into batches of at most `size`; those with as many continuations, and as long, are together."""
    places = sorted(
        range(len(prompts)), key=lambda place: (len(prompts[place].continuations), prompts[place].length, place)
    )
    parts = (places[first : first + size] for first in range(0, len(places), size))
    return [PromptBatch(part, [prompts[place] for place in part]) for part in parts]

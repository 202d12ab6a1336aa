"""What is tried in every layer, on which batches of prompts, and the arrays that hold what comes of it.

Prompts are padded on the left, the tokens that follow them on the right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvsearch.calibration.prompts import CalibrationPrompt
from kvsearch.plan import Phase
from kvsearch.policies import Policy
from kvsearch.policies.base import Needs
from kvsearch.runtime.decode.rule import decode_needs
from kvsearch.runtime.eviction import PhaseRule
from kvsearch.signals.predictions import token_losses

ROWS = "attention"  # [M, P, L, N] mean attention rows of continuations


def needs_of(policies: Sequence[Policy], phases: Sequence[Phase]) -> list[Needs]:
    """Return what a layer must be given of the prompt, to try `policies` in these phases."""
    found = [policy.needs() for policy in policies if "prefill" in phases]
    return found + [decode_needs(policy) for policy in policies if "decode" in phases]


def entropy_needs(phases: Sequence[str]) -> Needs:
    """Return what entropy needs of a prompt: for the mean row what every key received."""
    return Needs(column_sums="prefill" in phases)


class Ablation(NamedTuple):
    """One budget, phase and pattern, by their place in `Ablations`."""

    budget: int
    phase: int
    pattern: int


@dataclass(frozen=True, eq=False)
class Ablations:
    """Everything that is tried in every full-attention layer: each pattern at each budget in each phase."""

    policies: tuple[Policy, ...]
    budgets: tuple[int, ...]
    phases: tuple[Phase, ...]
    layers: tuple[int, ...]  # of the model
    kv_heads: int

    @property
    def of_layer(self) -> list[Ablation]:
        """All that happens to one layer."""
        return [
            Ablation(budget, phase, pattern)
            for budget in range(len(self.budgets))
            for phase in range(len(self.phases))
            for pattern in range(len(self.policies))
        ]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Budgets, phases, layers and patterns."""
        return len(self.budgets), len(self.phases), len(self.layers), len(self.policies)

    def rules(self, item: Ablation) -> tuple[PhaseRule | None, PhaseRule | None]:
        """Return the rules of the prefill and the decode phase."""
        entries = self.budgets[item.budget]

        def budgets(lengths: Sequence[int]) -> Tensor:
            return torch.full((len(lengths), self.kv_heads), entries, dtype=torch.int64)

        rule = PhaseRule(self.policies[item.pattern], budgets)
        return (rule, None) if self.phases[item.phase] == "prefill" else (None, rule)


class AblationResults:
    """Arrays of M continuations of prompts, [M, N, P, L, R]; what is not measured stays NaN.

    `attention` [M, P, L, N] fp32 is the mean attention row of the prompt and of what follows it by position, zeros
    behind the last; None where it is not measured.
    """

    def __init__(self, tried: Ablations, samples: int) -> None:
        shape = (samples, *tried.shape)
        self.cosine, self.error, self.loss = (np.full(shape, np.nan) for _ in range(3))
        self.full_loss = np.zeros(samples)
        self.attention: NDArray[np.float32] | None = None

    def note_outputs(self, row: int, items: Sequence[Ablation], agreement: tuple[Tensor, Tensor]) -> None:
        """Note cosine and relative error [items, M] of what layer `row` puts out."""
        for array, found in zip((self.cosine, self.error), agreement, strict=True):
            for item, values in zip(items, found.cpu().numpy(), strict=True):
                array[:, item.budget, item.phase, row, item.pattern] = values

    def note_losses(self, places: Sequence[tuple[int, Ablation]], losses: Tensor) -> None:
        """Note losses [groups, M] of ablations of layers."""
        for (row, item), values in zip(places, losses.cpu().numpy(), strict=True):
            self.loss[:, item.budget, item.phase, row, item.pattern] = values

    def arrays(self, signals: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Return what was measured for some of cosine, ppl and entropy, by its name in a profile or `ROWS`."""
        arrays: dict[str, NDArray[Any]] = {}
        if "cosine" in signals:
            arrays |= {"cosine": self.cosine.astype(np.float32), "relative_error": self.error.astype(np.float32)}
        if "ppl" in signals:
            arrays |= {"nll": self.loss, "full_nll": self.full_loss}
        if self.attention is not None:
            arrays[ROWS] = self.attention
        return arrays


# --- batches ----------------------------------------------------------------------------------------------------------


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


class TextContinuation(NamedTuple):
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

    def passes(self, size: int) -> list[list[TextContinuation]]:
        """Put all continuations into passes of at most `size`, those of about as many tokens together."""
        samples = [
            TextContinuation(row, number)
            for row, prompt in enumerate(self.prompts)
            for number in range(len(prompt.continuations))
        ]
        samples.sort(key=lambda sample: (self.tokens(sample), sample))
        passes: list[list[TextContinuation]] = []
        for sample in samples:
            if passes and len(passes[-1]) < size and 2 * self.tokens(sample) <= 3 * self.tokens(passes[-1][0]):
                passes[-1].append(sample)
            else:
                passes.append([sample])
        return [sorted(group) for group in passes]

    def continuations(self, samples: Sequence[TextContinuation], device: torch.device) -> ContinuationBatch:
        """Return these continuations."""
        chosen = [self.prompts[row].continuations[number] for row, number in samples]
        tokens = pad_sequence([one.tokens[0] for one in chosen], batch_first=True)
        counts = torch.tensor([one.tokens.shape[1] for one in chosen])
        answers = torch.tensor([one.answer for one in chosen])
        rows = torch.tensor([row for row, _ in samples])
        return ContinuationBatch(tokens.to(device), counts.to(device), answers.to(device), rows)

    def repeated(self, samples: Sequence[TextContinuation]) -> PromptBatch:
        """Return the prompt of each of these continuations, as often as they need it."""
        return PromptBatch(*zip(*((self.places[row], self.prompts[row]) for row, _ in samples), strict=True))

    def tokens(self, sample: TextContinuation) -> int:
        """Return how many tokens a continuation has."""
        return self.prompts[sample.row].continuations[sample.number].tokens.shape[1]


def batches_of(prompts: Sequence[CalibrationPrompt], size: int, device: torch.device) -> list[PromptBatch]:
    """Put prompts into batches of at most `size`; those that are as long are together, away from a CPU alone."""

    def length(place: int) -> int:
        return prompts[place].length

    places = sorted(range(len(prompts)), key=length)
    groups = [places] if device.type == "cpu" else [list(alike) for _, alike in groupby(places, length)]
    parts = [group[first : first + size] for group in groups for first in range(0, len(group), size)]
    return [PromptBatch(part, [prompts[place] for place in part]) for part in parts]

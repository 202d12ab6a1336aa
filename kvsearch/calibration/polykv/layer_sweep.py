"""Signals of one batch from one full-cache pass: local replays of every layer, and one sweep over the layers.

First what is tried in every layer, on which batches of prompts, and the arrays that hold what comes of it. Prompts are
padded on the left, the tokens that follow them on the right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvsearch.calibration.polykv.tree import Tree
from kvsearch.calibration.prompts import CalibrationPrompt
from kvsearch.models.architecture import find_output_projection, find_text_config
from kvsearch.plan import Phase
from kvsearch.policies import Policy
from kvsearch.policies.base import Needs
from kvsearch.runtime.decode.replies import pad_left
from kvsearch.runtime.decode.rule import decode_needs
from kvsearch.runtime.eviction import PhaseRule
from kvsearch.runtime.replay.replay import FollowedLayer, Replays, select_rows
from kvsearch.signals.attention_rows import average_attention, compare_outputs
from kvsearch.signals.predictions import token_losses

TextContinuation = tuple[int, int]  # row of its prompt in a batch, and its number among what follows that
# ablations in a sweep, and layers whose replays are side by side, so that they fit the memory
SweepSizes = tuple[int, int]
ROWS = "attention"  # [M, P, L, N] mean attention rows of continuations


def collect_needs(policies: Sequence[Policy], phases: Sequence[Phase], signals: Sequence[str]) -> list[Needs]:
    """Collect the needs of a layer to measure `signals` under `policies` in these phases."""
    tried = policies if {"cosine", "ppl"} & set(signals) else ()
    needs = [policy.needs() for policy in tried if "prefill" in phases]
    needs += [decode_needs(policy) for policy in tried if "decode" in phases]
    if "entropy" in signals:
        needs.append(Needs(column_sums="prefill" in phases))  # its mean row: what every key received
    return needs


class Ablation(NamedTuple):
    """One budget, phase and pattern, as indices into `Ablations`."""

    budget: int
    phase: int
    pattern: int


@dataclass(frozen=True, eq=False)
class Ablations:
    """All ablations of every full-attention layer: each pattern at each budget in each phase."""

    policies: tuple[Policy, ...]
    budgets: tuple[int, ...]
    phases: tuple[Phase, ...]
    layers: tuple[int, ...]  # of the model
    kv_heads: int

    @property
    def of_layer(self) -> list[Ablation]:
        """All ablations of one layer."""
        places = np.ndindex(len(self.budgets), len(self.phases), len(self.policies))
        return [Ablation(*place) for place in places]

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

    def note_outputs(self, row: int, items: Sequence[Ablation], agreement: Sequence[Tensor]) -> None:
        """Note cosine and relative error, each [items, M], of what layer `row` puts out."""
        for array, tensor in zip((self.cosine, self.error), agreement, strict=True):
            for item, values in zip(items, tensor.cpu().numpy(), strict=True):
                array[:, item.budget, item.phase, row, item.pattern] = values

    def note_losses(self, places: Sequence[tuple[int, Ablation]], losses: Tensor) -> None:
        """Note losses [groups, M] of ablations of layers."""
        for (row, item), values in zip(places, losses.cpu().numpy(), strict=True):
            self.loss[:, item.budget, item.phase, row, item.pattern] = values

    def arrays(self, signals: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Return the measured arrays for some of cosine, ppl and entropy, by their name in a profile or `ROWS`."""
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
        losses = token_losses(logits[..., :-1, :], self.tokens[:, 1:]).double().masked_fill(~rows, 0.0).sum(-1)
        return losses / rows.sum(-1).clamp(min=1)


@dataclass(frozen=True, eq=False)
class PromptBatch:
    """Some prompts of a calibration, and their places in it."""

    places: Sequence[int]
    prompts: Sequence[CalibrationPrompt]

    def padded(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return token ids [B, T] and their mask, padded on the left with token 0."""
        return pad_left([prompt.ids[0] for prompt in self.prompts], device)

    def split_passes(self, size: int) -> list[list[TextContinuation]]:
        """Split all continuations into passes of at most `size`, of similar lengths."""
        samples = [
            (row, number) for row, prompt in enumerate(self.prompts) for number in range(len(prompt.continuations))
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
        tokens = pad_sequence([continuation.tokens[0] for continuation in chosen], batch_first=True)
        counts = torch.tensor([continuation.tokens.shape[1] for continuation in chosen])
        answers = torch.tensor([continuation.answer for continuation in chosen])
        rows = torch.tensor([row for row, _ in samples])
        return ContinuationBatch(tokens.to(device), counts.to(device), answers.to(device), rows)

    def repeat_prompts(self, samples: Sequence[TextContinuation]) -> PromptBatch:
        """Repeat the prompt of each of these continuations."""
        return PromptBatch(*zip(*((self.places[row], self.prompts[row]) for row, _ in samples), strict=True))

    def tokens(self, sample: TextContinuation) -> int:
        """Return the number of tokens of a continuation."""
        row, number = sample
        return self.prompts[row].continuations[number].tokens.shape[1]


def make_batches(prompts: Sequence[CalibrationPrompt], size: int, device: torch.device) -> list[PromptBatch]:
    """Put prompts into batches of at most `size`; those that are as long are together, away from a CPU alone."""

    def length(place: int) -> int:
        return prompts[place].length

    places = sorted(range(len(prompts)), key=length)
    groups = [places] if device.type == "cpu" else [list(alike) for _, alike in groupby(places, length)]
    parts = [group[first : first + size] for group in groups for first in range(0, len(group), size)]
    return [PromptBatch(part, [prompts[place] for place in part]) for part in parts]


HEAD_BYTES = 64 * 2**20  # of logits over the vocabulary at a time


class LayerSweep:
    """The cheap exact procedure for one batch of prompts; the model must run the attention "kvsearch".

    Args:
        model: the model.
        tried: what is done to every layer.
        batch: the prompts, read once under the full cache.
        signals: which of cosine, ppl and entropy are wanted.
        at_once: how much is computed at a time.
    """

    def __init__(
        self, model: Any, tried: Ablations, batch: PromptBatch, signals: Sequence[str], at_once: SweepSizes
    ) -> None:
        self.model = model
        self.tried = tried
        self.signals = signals
        self.at_once = at_once
        wanted = collect_needs(tried.policies, tried.phases, signals)
        ids, mask = batch.padded(model.device)
        self.tree = Tree(model, dict.fromkeys(tried.layers, wanted), ids, mask)

    def measure(self, after: ContinuationBatch) -> AblationResults:
        """Measure cosine, relative error and loss under every ablation, and entropy, as far as they are wanted."""
        results = AblationResults(self.tried, len(after.tokens))
        groups, together = self.at_once
        with self.tree.baseline_pass(after.tokens, after.rows) as layers:
            noted = results if "cosine" in self.signals else None
            replays = _Replays(self.tried, layers, after, noted, together)
            if "ppl" in self.signals:
                self._sweep(after, replays, results, groups)
            elif "cosine" in self.signals:
                for index in self.tried.layers:
                    for item in self.tried.of_layer:
                        replays(index, [item])
            if "entropy" in self.signals:
                rows = [self._rows(layers[index], after) for index in self.tried.layers]
                results.attention = torch.stack(rows, 2).numpy()
        return results

    def _sweep(self, after: ContinuationBatch, replays: _Replays, results: AblationResults, groups: int) -> None:
        results.full_loss[:] = self._losses(self.tree.leaving[None], after)[0].cpu().numpy()
        places = [(row, item) for row in range(len(self.tried.layers)) for item in self.tried.of_layer]
        for first in range(0, len(places), groups):
            some = places[first : first + groups]
            ablated: dict[int, list[Ablation]] = {}
            for row, item in some:
                ablated.setdefault(self.tried.layers[row], []).append(item)
            results.note_losses(some, self._losses(self.tree.sweep(ablated, replays), after))

    def _losses(self, hidden: Tensor, after: ContinuationBatch) -> Tensor:
        """Compute losses [groups, M] from inputs of the final norm, [groups, M, K, d_model]."""
        vocabulary = find_text_config(self.model).vocab_size
        step = max(1, HEAD_BYTES // (4 * vocabulary * hidden[0, ..., 0].numel()))
        return torch.cat([after.losses(self.tree.logits(part)) for part in torch.split(hidden, step)])

    # --- entropy --------------------------------------------------------------------------------------------------

    @cached_property
    def _prompts(self) -> dict[int, Tensor]:
        """By layer the mean of all attention rows of the prompts, [B, T] fp32."""
        return {
            layer.index: layer.noted.received().mean(1) / layer.noted.lengths[:, None]
            for layer in self.tree.observed
            if layer.index in self.tried.layers
        }

    def _rows(self, layer: FollowedLayer, after: ContinuationBatch) -> Tensor:
        """Return mean attention rows by position, [M, P, T + K] fp32 on the CPU.

        Of the phase "prefill" the mean is over the rows of the prompt, of "decode" over the rows of the tokens that
        follow; over all query heads.
        """
        prompt = layer.noted
        how = layer.logits
        width = layer.keys.shape[2]
        means = []
        for phase in self.tried.phases:
            if phase == "prefill":
                mean = self._prompts[layer.index]
                means.append(torch.nn.functional.pad(select_rows(mean, after.rows), (0, width - mean.shape[1])))
            else:
                valid = torch.cat([select_rows(prompt.valid, after.rows), after.followed.to(prompt.valid.device)], 1)
                means.append(average_attention(layer.query, layer.keys, how.scaling, how.softcap, valid, how.sinks))
        pads = select_rows(prompt.valid.shape[1] - prompt.lengths, after.rows)[:, None]
        position = torch.arange(width, device=pads.device) + pads
        rows = torch.stack(means, 1)
        # padding in front goes behind, where it is 0
        return rows.gather(2, (position % width)[:, None].expand_as(rows)).cpu()


class _Replays:
    """Attention outputs of ablated layers; how they agree with the full cache's is noted in `results` on the way.

    `together` layers are replayed side by side, and what comes of those ahead is held until it is asked for.
    """

    def __init__(
        self,
        tried: Ablations,
        layers: Mapping[int, FollowedLayer],
        after: ContinuationBatch,
        results: AblationResults | None,
        together: int,
    ) -> None:
        self.tried = tried
        self.layers = layers
        self.after = after
        self.results = results
        self.together = together
        self._first = 0  # of the layers that are side by side
        self._layers: list[FollowedLayer] = []
        self._replays = Replays([])
        self._full: list[Tensor] = []  # what the blocks put out under the full cache, [M, K, d_model]
        self._ahead: dict[tuple[int, Ablation], Tensor] = {}

    @torch.no_grad()
    def __call__(self, index: int, items: Sequence[Ablation]) -> list[Tensor]:
        row = self.tried.layers.index(index)
        if not self._first <= row < self._first + len(self._layers):
            self._turn_to(row)
        for item in items:
            if (row, item) not in self._ahead:
                made = self._replays.under(*self.tried.rules(item))
                self._ahead.update({(self._first + place, item): layer.outputs for place, layer in enumerate(made)})
        outputs = [self._ahead.pop((row, item)) for item in items]
        if self.results is not None:
            here = row - self._first
            changed = project_block_output(self._layers[here], torch.stack(outputs))
            agreement = compare_outputs(self._full[here], changed)
            self.results.note_outputs(row, items, [self.after.mean_over_tokens(values) for values in agreement])
        return outputs

    def _turn_to(self, row: int) -> None:
        """Load the layers from `row` on."""
        self._first = row
        self._layers = [replace(self.layers[index]) for index in self.tried.layers[row:][: self.together]]
        self._replays = Replays(self._layers)
        if self.results is not None:
            outputs = [replay.outputs for replay in self._replays.under(None, None)]
            self._full = [project_block_output(*pair) for pair in zip(self._layers, outputs, strict=True)]


def project_block_output(layer: FollowedLayer, outputs: Tensor) -> Tensor:
    """Project head outputs [..., Hq, K, Dv] to the update of the residual stream, [..., K, d_model]."""
    projected: Tensor = find_output_projection(layer.module)(outputs.transpose(-2, -3).flatten(-2))
    return projected

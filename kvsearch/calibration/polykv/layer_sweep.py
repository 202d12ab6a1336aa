"""Signals of one batch from one full-cache pass: local replays of every layer, and one sweep over the layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsearch.calibration.polykv.ablations import (
    Ablation,
    AblationResults,
    Ablations,
    ContinuationBatch,
    PromptBatch,
    entropy_needs,
    needs_of,
)
from kvsearch.calibration.polykv.tree import BaselinePass, Tree
from kvsearch.models.architecture import output_projection
from kvsearch.runtime.replay.replay import FollowedLayer, Replays, at_rows
from kvsearch.signals.attention_rows import Agreement, mean_row, output_agreement

HEAD_BYTES = 64 * 2**20  # of logits over the vocabulary at a time


class AtOnce(NamedTuple):
    """How much is computed at a time, so that it fits the memory."""

    groups: int  # ablations in the sweep
    layers: int  # whose replays are side by side


@dataclass(eq=False)
class LayerSweep:
    """The cheap exact procedure for one batch of prompts; the model must run the attention "kvsearch".

    Args:
        model: the model.
        tried: what is done to every layer.
        batch: the prompts, read once under the full cache.
        signals: which of cosine, ppl and entropy are wanted.
        at_once: how much is computed at a time.
    """

    model: Any
    tried: Ablations
    batch: PromptBatch
    signals: Sequence[str]
    at_once: AtOnce

    def __post_init__(self) -> None:
        wanted = needs_of(self.tried.policies, self.tried.phases) if {"cosine", "ppl"} & set(self.signals) else []
        wanted += [entropy_needs(self.tried.phases)] if "entropy" in self.signals else []
        ids, mask = self.batch.padded(self.model.device)
        self.tree = Tree(self.model, dict.fromkeys(self.tried.layers, wanted), ids, mask)

    def measure(self, after: ContinuationBatch) -> AblationResults:
        """Measure cosine, relative error and loss under every ablation, and entropy, as far as they are wanted."""
        results = AblationResults(self.tried, len(after.tokens))
        with self.tree.baseline_pass(after.tokens, after.rows) as baseline:
            noted = results if "cosine" in self.signals else None
            replays = _Replays(self.tried, baseline, after, noted, self.at_once.layers)
            if "ppl" in self.signals:
                self._sweep(baseline, after, replays, results)
            elif "cosine" in self.signals:
                for index in self.tried.layers:
                    for item in self.tried.of_layer:
                        replays(index, [item])
            if "entropy" in self.signals:
                rows = [self._rows(baseline.layers[index], after) for index in self.tried.layers]
                results.attention = torch.stack(rows, 2).numpy()
        return results

    def _sweep(
        self, baseline: BaselinePass, after: ContinuationBatch, replays: _Replays, results: AblationResults
    ) -> None:
        results.full_loss[:] = self._losses(baseline.leaving[None], after)[0].cpu().numpy()
        places = [(row, item) for row in range(len(self.tried.layers)) for item in self.tried.of_layer]
        for first in range(0, len(places), self.at_once.groups):
            some = places[first : first + self.at_once.groups]
            ablated: dict[int, list[Ablation]] = {}
            for row, item in some:
                ablated.setdefault(self.tried.layers[row], []).append(item)
            results.note_losses(some, self._losses(self.tree.sweep(baseline, ablated, replays), after))

    def _losses(self, hidden: Tensor, after: ContinuationBatch) -> Tensor:
        """Return the losses [groups, M] of what enters the final norm, [groups, M, K, d_model]."""
        vocabulary = self.model.get_output_embeddings().weight.shape[0]
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

        Of the phase "prefill" the mean is over the rows of the prompt, of "decode" over those of the tokens that
        follow; over all query heads.
        """
        prompt = layer.noted
        how = layer.logits
        width = layer.keys.shape[2]
        means = []
        for phase in self.tried.phases:
            if phase == "prefill":
                mean = self._prompts[layer.index]
                means.append(torch.nn.functional.pad(at_rows(mean, after.rows), (0, width - mean.shape[1])))
            else:
                valid = torch.cat([at_rows(prompt.valid, after.rows), after.followed.to(prompt.valid.device)], 1)
                means.append(mean_row(layer.query, layer.keys, how.scaling, how.softcap, valid, how.sinks))
        pads = at_rows(prompt.valid.shape[1] - prompt.lengths, after.rows)[:, None]
        position = torch.arange(width, device=pads.device) + pads
        rows = torch.stack(means, 1)
        # padding in front goes behind, where it is 0
        return rows.gather(2, (position % width)[:, None].expand_as(rows)).cpu()


@dataclass(eq=False)
class _Replays:
    """Attention outputs of ablated layers; how they agree with the full cache's is noted in `results` on the way.

    `together` layers are replayed side by side, and what comes of those ahead is held until it is asked for.
    """

    tried: Ablations
    baseline: BaselinePass
    after: ContinuationBatch
    results: AblationResults | None
    together: int
    _first: int = 0  # of the layers that are side by side
    _layers: list[FollowedLayer] = field(default_factory=list)
    _replays: Replays = field(default_factory=lambda: Replays([]))
    _full: list[Tensor] = field(default_factory=list)  # what the blocks put out under the full cache, [M, K, d_model]
    _ahead: dict[tuple[int, Ablation], Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def __call__(self, index: int, items: Sequence[Ablation]) -> list[Tensor]:
        row = self.tried.layers.index(index)
        if not self._first <= row < self._first + len(self._layers):
            self._turn_to(row)
        for item in items:
            if (row, item) not in self._ahead:
                made = self._replays.under(*self.tried.rules(item))
                self._ahead.update({(self._first + place, item): one.outputs for place, one in enumerate(made)})
        outputs = [self._ahead.pop((row, item)) for item in items]
        if self.results is not None:
            here = row - self._first
            changed = block_output(self._layers[here], torch.stack(outputs))
            agreement = output_agreement(self._full[here], changed)
            means = Agreement(*(self.after.mean_over_tokens(values) for values in agreement))
            self.results.note_outputs(row, items, means)
        return outputs

    def _turn_to(self, row: int) -> None:
        """Take the layers from `row` on."""
        self._first = row
        self._layers = [replace(self.baseline.layers[index]) for index in self.tried.layers[row:][: self.together]]
        self._replays = Replays(self._layers)
        if self.results is not None:
            outputs = [one.outputs for one in self._replays.under(None, None)]
            self._full = [block_output(*pair) for pair in zip(self._layers, outputs, strict=True)]


def block_output(layer: FollowedLayer, outputs: Tensor) -> Tensor:
    """Return what an attention block adds to the residual stream, [..., K, d_model], of its heads' [..., Hq, K, Dv]."""
    projected: Tensor = output_projection(layer.module)(outputs.transpose(-2, -3).flatten(-2))
    return projected

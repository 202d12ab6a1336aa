"""Signals of one batch from one full-cache pass: local replays of every layer, and one sweep over the layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvsearch.calibration.polykv.ablations import Ablation, AblationResults, Ablations, entropy_needs, needs_of
from kvsearch.calibration.polykv.continuations import ContinuationBatch, PromptBatch
from kvsearch.calibration.polykv.tree import BaselinePass, Tree
from kvsearch.models.architecture import output_projection
from kvsearch.policies import Observation
from kvsearch.runtime.observe import LayerContinuation
from kvsearch.signals.cosine import Agreement, output_agreement
from kvsearch.signals.entropy import mean_row, row_entropy

HEAD_BYTES = 64 * 2**20  # of logits over the vocabulary at a time

Layer = LayerContinuation[Observation]
# queries, keys, scale, soft cap, which keys are real, and sinks
Rows = tuple[Tensor, Tensor, float, float | None, Tensor, Tensor | None]


class LayerSweep:
    """The cheap exact procedure for one batch of prompts; the model must run the attention "kvsearch".

    Args:
        model: the model.
        tried: what is done to every layer.
        batch: the prompts, read once under the full cache.
        signals: which of cosine, ppl and entropy are wanted.
        entropy_rows: query rows of the prompt whose entropy is taken.
        groups: the most ablations that are in the sweep at a time.
    """

    def __init__(
        self,
        model: Any,
        tried: Ablations,
        batch: PromptBatch,
        signals: Sequence[str],
        entropy_rows: int,
        groups: int,
    ) -> None:
        self.model, self.tried, self.signals = model, tried, signals
        self.entropy_rows, self.groups = entropy_rows, groups
        wanted = needs_of(tried.policies, tried.phases) if {"cosine", "ppl"} & set(signals) else []
        wanted += [entropy_needs(entropy_rows, tried.phases)] if "entropy" in signals else []
        ids, mask = batch.padded(model.device)
        self.tree = Tree(model, dict.fromkeys(tried.layers, wanted), ids, mask)

    def measure(self, after: ContinuationBatch) -> AblationResults:
        """Measure cosine, relative error and loss under every ablation, and entropy, as far as they are wanted."""
        results = AblationResults(self.tried, len(after.tokens))
        with self.tree.baseline_pass(after.tokens) as baseline:
            replays = _Replays(self.tried, baseline, after, results if "cosine" in self.signals else None)
            if "ppl" in self.signals:
                self._sweep(baseline, after, replays, results)
            elif "cosine" in self.signals:
                for index in self.tried.layers:
                    for item in self.tried.of_layer:
                        replays(index, item)
            if "entropy" in self.signals:
                given = self.tried.phases, self.entropy_rows, after
                # copies: what one computes and keeps is gone with it
                entropy = [_entropy(replace(baseline.layers[index]), *given) for index in self.tried.layers]
                results.entropy = torch.stack(entropy, -1).double().numpy()
                rows = [
                    _mean_rows(replace(baseline.layers[index]), self.tried.phases, after) for index in self.tried.layers
                ]
                results.attention = torch.stack(rows, 2).numpy()
        return results

    def _sweep(
        self, baseline: BaselinePass, after: ContinuationBatch, replays: _Replays, results: AblationResults
    ) -> None:
        results.full_loss[:] = self._losses(baseline.leaving[None], after)[0].cpu().numpy()
        places = [(row, item) for row in range(len(self.tried.layers)) for item in self.tried.of_layer]
        for first in range(0, len(places), self.groups):
            some = places[first : first + self.groups]
            ablated: dict[int, list[Ablation]] = {}
            for row, item in some:
                ablated.setdefault(self.tried.layers[row], []).append(item)
            results.note_losses(some, self._losses(self.tree.sweep(baseline, ablated, replays), after))

    def _losses(self, hidden: Tensor, after: ContinuationBatch) -> Tensor:
        """Return the losses [groups, B] of what enters the final norm, [groups, B, K, d_model]."""
        vocabulary = self.model.get_output_embeddings().weight.shape[0]
        step = max(1, HEAD_BYTES // (4 * vocabulary * hidden[0, ..., 0].numel()))
        return torch.cat([after.losses(self.tree.logits(part)) for part in torch.split(hidden, step)])


class _Replays:
    """Attention outputs of ablated layers; how they agree with the full cache's is noted in `results` on the way."""

    def __init__(
        self, tried: Ablations, baseline: BaselinePass, after: ContinuationBatch, results: AblationResults | None
    ) -> None:
        self.tried, self.baseline, self.after, self.results = tried, baseline, after, results
        self._layer: Layer | None = None  # the last one, with what its replays have in common

    @torch.no_grad()
    def __call__(self, index: int, item: Ablation) -> Tensor:
        layer = self._layer
        if layer is None or layer.index != index:
            layer = self._layer = replace(self.baseline.layers[index])
            if self.results is not None:
                self._full = block_output(layer, layer.full_outputs)
        outputs = layer.replay(*self.tried.rules(item)).outputs
        if self.results is not None:
            agreement = output_agreement(self._full, block_output(layer, outputs))
            means = Agreement(*(self.after.mean_over_tokens(values) for values in agreement))
            self.results.note_outputs(self.tried.layers.index(index), item, means)
        return outputs


def block_output(layer: Layer, outputs: Tensor) -> Tensor:
    """Return what an attention block adds to the residual stream, [B, K, d_model], from its heads' [B, Hq, K, Dv]."""
    projected: Tensor = output_projection(layer.module)(outputs.transpose(1, 2).flatten(2))
    return projected


def _entropy(layer: Layer, phases: Sequence[str], rows: int, after: ContinuationBatch) -> Tensor:
    """Return the entropy of the attention rows of every phase, [B, P], on the CPU."""
    return torch.stack([row_entropy(*_rows_of(layer, phase, rows, after)).cpu() for phase in phases], 1)


def _mean_rows(layer: Layer, phases: Sequence[str], after: ContinuationBatch) -> Tensor:
    """Return the mean attention row of every phase by position, [B, P, T + K] fp32, on the CPU.

    It is the mean over all query heads and all rows: those of the prompt ("prefill"), or of the tokens that follow.
    """
    prompt, width = layer.noted, layer.keys.shape[2]
    means = []
    for phase in phases:
        if phase == "prefill":
            mean = prompt.received().mean(1) / prompt.lengths[:, None]
        else:
            mean = mean_row(*_rows_of(layer, phase, 0, after))
        means.append(torch.nn.functional.pad(mean, (0, width - mean.shape[1])))
    pads = (prompt.valid.shape[1] - prompt.lengths)[:, None]
    position = torch.arange(width, device=pads.device) + pads
    rows = torch.stack(means, 1)
    moved = rows.gather(2, (position % width)[:, None].expand_as(rows))  # padding in front goes behind, where it is 0
    return moved.cpu()


def _rows_of(layer: Layer, phase: str, rows: int, after: ContinuationBatch) -> Rows:
    """Return the last `rows` of the prompt ("prefill"), or those of the tokens that follow, with what they see."""
    prompt, how = layer.noted, layer.logits
    if phase == "prefill":
        return prompt.last_queries[:, :, -rows:], prompt.keys, how.scaling, how.softcap, prompt.valid, how.sinks
    valid = torch.cat([prompt.valid, after.followed], 1)
    return layer.query, layer.keys, how.scaling, how.softcap, valid, how.sinks

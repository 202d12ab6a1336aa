"""Signals of one batch from one full-cache pass: local replays of every layer, and one sweep over the layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvsearch.calibration.polykv.ablations import Disturbance, Disturbances, Measured
from kvsearch.calibration.polykv.continuations import Continuations, PromptBatch
from kvsearch.calibration.polykv.tree import Tree, Trunk
from kvsearch.policies.base import Needs
from kvsearch.runtime.stream import Followed
from kvsearch.signals.cosine import Agreement, output_agreement
from kvsearch.signals.entropy import mean_row, row_entropy

HEAD_BYTES = 64 * 2**20  # of logits over the vocabulary at a time

Place = tuple[int, Disturbance]  # row of a layer, and what happens to it
Rows = tuple[Tensor, Tensor, float, float | None, Tensor]  # queries, keys, scale, soft cap and which keys are real


class Sweeping:
    """The cheap exact procedure for one batch of prompts; the model must run the attention "kvsearch".

    Args:
        model: the model.
        tried: what is done to every layer.
        batch: the prompts, read once under the full cache.
        signals: which of cosine, ppl and entropy are wanted.
        entropy_rows: query rows of the prompt whose entropy is taken.
        groups: the most disturbances that are in the sweep at a time.
        literal: whether mean attention rows are wanted beside the entropy.
    """

    def __init__(
        self,
        model: Any,
        tried: Disturbances,
        batch: PromptBatch,
        signals: Sequence[str],
        entropy_rows: int,
        groups: int,
        *,
        literal: bool = False,
    ) -> None:
        self.model, self.tried, self.signals, self.literal = model, tried, signals, literal
        self.entropy_rows, self.groups = entropy_rows, groups
        wanted = tried.needs() if {"cosine", "ppl"} & set(signals) else []
        wanted += [Needs(query_rows=entropy_rows)] if "entropy" in signals else []
        ids, mask = batch.padded(model.device)
        self.tree = Tree(model, dict.fromkeys(tried.layers, wanted), ids, mask)

    def measure(self, after: Continuations) -> Measured:
        """Cosine, relative error and loss under every disturbance, and entropy, as far as they are wanted."""
        measured = Measured(self.tried, len(after.tokens))
        with self.tree.trunk(after.tokens) as trunk:
            replays = _Replays(self.tried, trunk, after, measured if "cosine" in self.signals else None)
            if "ppl" in self.signals:
                self._sweep(trunk, after, replays, measured)
            elif "cosine" in self.signals:
                for layer in self.tried.layers:
                    for item in self.tried.of_layer:
                        replays(layer, item)
            if "entropy" in self.signals:
                # copies: what one computes and keeps is gone with it
                followed = [trunk.followed[layer] for layer in self.tried.layers]
                given = self.tried.phases, self.entropy_rows, after
                measured.entropy = (
                    torch.stack([_entropy(replace(one), *given) for one in followed], -1).double().numpy()
                )
                if self.literal:
                    rows = [_mean_rows(replace(one), *given) for one in followed]
                    measured.attention = torch.stack(rows, 2).double().numpy()
        return measured

    def _sweep(self, trunk: Trunk, after: Continuations, replays: _Replays, measured: Measured) -> None:
        measured.full_loss[:] = self._losses(trunk.leaving[None], after)[0].cpu().numpy()
        for places in self._chunks():
            disturbed: dict[int, list[Disturbance]] = {}
            for row, item in places:
                disturbed.setdefault(self.tried.layers[row], []).append(item)
            measured.note_losses(places, self._losses(self.tree.sweep(trunk, disturbed, replays), after))

    def _chunks(self) -> Iterator[list[Place]]:
        places = [(row, item) for row in range(len(self.tried.layers)) for item in self.tried.of_layer]
        for first in range(0, len(places), self.groups):
            yield places[first : first + self.groups]

    def _losses(self, hidden: Tensor, after: Continuations) -> Tensor:
        """Losses [groups, B] of what enters the final norm, [groups, B, K, d_model]."""
        vocabulary = self.model.get_output_embeddings().weight.shape[0]
        step = max(1, HEAD_BYTES // (4 * vocabulary * hidden[0, ..., 0].numel()))
        return torch.cat([after.losses(self.tree.logits(part)) for part in torch.split(hidden, step)])


class _Replays:
    """Attention outputs of disturbed layers; how they agree with the full cache's is noted on the way."""

    def __init__(self, tried: Disturbances, trunk: Trunk, after: Continuations, measured: Measured | None) -> None:
        self.tried, self.trunk, self.after, self.measured = tried, trunk, after, measured
        self._layer, self._followed, self._full = -1, next(iter(trunk.followed.values())), torch.empty(0)

    @torch.no_grad()
    def __call__(self, layer: int, item: Disturbance) -> Tensor:
        followed = self._of(layer)
        outputs = followed.replay(*self.tried.rules(item)).outputs
        if self.measured is not None:
            cosine, error = output_agreement(self._full, block_output(followed, outputs))
            means = Agreement(*(self.after.mean_over_tokens(values) for values in (cosine, error)))
            self.measured.note_outputs(self.tried.layers.index(layer), item, means)
        return outputs

    def _of(self, layer: int) -> Followed:
        """A layer with what its replays have in common, which is dropped with the next one."""
        if self._layer != layer:
            self._layer, self._followed = layer, replace(self.trunk.followed[layer])
            if self.measured is not None:
                self._full = block_output(self._followed, self._followed.undisturbed)
        return self._followed


def block_output(followed: Followed, outputs: Tensor) -> Tensor:
    """What an attention block adds to the residual stream, [B, K, d_model], from its heads' [B, Hq, K, Dv]."""
    projected: Tensor = followed.module.o_proj(outputs.transpose(1, 2).flatten(2))  # type: ignore[operator]
    return projected


def _entropy(followed: Followed, phases: Sequence[str], rows: int, after: Continuations) -> Tensor:
    """Entropy of the attention rows of every phase, [B, P], on the CPU."""
    return torch.stack([row_entropy(*_rows_of(followed, phase, rows, after)).cpu() for phase in phases], 1)


def _mean_rows(followed: Followed, phases: Sequence[str], rows: int, after: Continuations) -> Tensor:
    """The mean attention row of every phase, [B, P, T + K], on the CPU."""
    means = [mean_row(*_rows_of(followed, phase, rows, after)).cpu() for phase in phases]
    width = followed.keys.shape[2]
    return torch.stack([torch.nn.functional.pad(mean, (0, width - mean.shape[1])) for mean in means], 1)


def _rows_of(followed: Followed, phase: str, rows: int, after: Continuations) -> Rows:
    """The last `rows` of the prompt ("prefill"), or those of the tokens that follow, with what they see."""
    context, how = followed.context, followed.logits
    if phase == "prefill":
        return context.last_queries[:, :, -rows:], context.keys, how.scaling, how.softcap, context.valid
    valid = torch.cat([context.valid, after.followed], 1)
    return followed.query, followed.keys, how.scaling, how.softcap, valid

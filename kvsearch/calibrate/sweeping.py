"""Signals of one batch from one full-cache pass: local replays of every layer, and one sweep over the layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvsearch.calibrate.disturbances import Disturbance, Disturbances, Measured
from kvsearch.calibrate.following import Continuations, PromptBatch
from kvsearch.calibrate.tree import Tree, Trunk
from kvsearch.policies.base import Needs
from kvsearch.runtime.stream import Followed
from kvsearch.signals.cosine import Agreement, output_agreement
from kvsearch.signals.entropy import mean_row, row_entropy

HEAD_BYTES = 64 * 2**20  # of logits over the vocabulary at a time

Place = tuple[int, Disturbance]  # row of a layer, and what happens to it


class Sweeping:
    """The cheap exact procedure for one batch of prompts; the model must run the attention "kvsearch".

    Args:
        model: the model.
        tried: what is done to every layer.
        batch: the prompts, read once under the full cache.
        signals: which of cosine, ppl and entropy are wanted.
        entropy_rows: query rows of the prompt whose entropy is taken.
        groups: the most disturbances that are in the sweep at a time.
    """

    def __init__(
        self,
        model: Any,
        tried: Disturbances,
        batch: PromptBatch,
        signals: Sequence[str],
        entropy_rows: int,
        groups: int,
    ) -> None:
        self.model, self.tried, self.signals = model, tried, signals
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
                parts = [_scattered(trunk.followed[layer], self.tried.phases, self.entropy_rows, after)
                         for layer in self.tried.layers]  # fmt: skip
                measured.entropy = torch.stack([share for share, _ in parts], -1).double().numpy()
                measured.attention = torch.stack([row for _, row in parts], 2).double().numpy()
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
        self._layer, self._full = -1, torch.empty(0)

    @torch.no_grad()
    def __call__(self, layer: int, item: Disturbance) -> Tensor:
        followed = self.trunk.followed[layer]
        outputs = followed.replay(*self.tried.rules(item)).outputs
        if self.measured is not None:
            if self._layer != layer:
                self._layer, self._full = layer, block_output(followed, followed.undisturbed)
            cosine, error = output_agreement(self._full, block_output(followed, outputs))
            means = Agreement(*(self.after.mean_over_tokens(values) for values in (cosine, error)))
            self.measured.note_outputs(self.tried.layers.index(layer), item, means)
        return outputs


def block_output(followed: Followed, outputs: Tensor) -> Tensor:
    """What an attention block adds to the residual stream, [B, K, d_model], from its heads' [B, Hq, K, Dv]."""
    projected: Tensor = followed.module.o_proj(outputs.transpose(1, 2).flatten(2))  # type: ignore[operator]
    return projected


def _scattered(followed: Followed, phases: Sequence[str], rows: int, after: Continuations) -> tuple[Tensor, Tensor]:
    """Entropy [B, P] and mean rows [B, P, T + K] of one layer, on the CPU."""
    context, how = followed.context, followed.logits
    shares, means = [], []
    for phase in phases:
        if phase == "prefill":
            given = (context.last_queries[:, :, -rows:], context.keys, how.scaling, how.softcap, context.valid)
        else:
            valid = torch.cat([context.valid, after.followed], 1)
            given = (followed.query, followed.keys, how.scaling, how.softcap, valid)
        shares.append(row_entropy(*given).cpu())
        mean = mean_row(*given).cpu()
        means.append(torch.nn.functional.pad(mean, (0, followed.keys.shape[2] - mean.shape[1])))
    return torch.stack(shares, 1), torch.stack(means, 1)

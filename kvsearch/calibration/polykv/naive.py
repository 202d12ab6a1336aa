"""The papers' procedure for PolyKV's signals: one run of the model for every layer, phase, pattern and budget.

It goes through the runtime that deployment uses and shares nothing with the growing tree but the definition of what is
measured, so it checks the tree, and says what the tree saves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kvsearch.calibration.polykv.ablations import Ablation, AblationResults, Ablations, ContinuationBatch
from kvsearch.models.architecture import attention_modules
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.program import PhaseProgram
from kvsearch.signals.attention_rows import output_agreement


class Naive:
    """One batch of prompts, read anew for every ablation; the model must run the attention "kvsearch"."""

    def __init__(self, model: Any, tried: Ablations, ids: Tensor, mask: Tensor) -> None:
        self.model, self.tried, self.ids, self.mask = model, tried, ids, mask
        self.attention = attention_modules(model)

    def measure(self, after: ContinuationBatch) -> AblationResults:
        """Measure cosine, relative error and loss under every ablation."""
        measured = AblationResults(self.tried, len(after.tokens))
        logits, full = self._run(Program(), after, self.tried.layers)
        measured.full_loss[:] = after.losses(logits).cpu().numpy()
        for row, layer in enumerate(self.tried.layers):
            for item in self.tried.of_layer:
                logits, found = self._run(self._program(layer, item), after, (layer,))
                agreement = output_agreement(full[layer], found[layer])
                means = tuple(after.mean_over_tokens(values) for values in agreement)
                measured.note_outputs(row, [item], (means[0][None], means[1][None]))
                measured.note_losses([(row, item)], after.losses(logits)[None])
        return measured

    def _program(self, layer: int, item: Ablation) -> Program:
        size = (1, self.tried.kv_heads)
        budgets = np.full(size, self.tried.budgets[item.budget], dtype=np.int64)
        phase = PhaseProgram({layer: self.tried.policies[item.pattern]}, lambda _: budgets)
        prefill = self.tried.phases[item.phase] == "prefill"
        return Program(phase, None) if prefill else Program(None, phase)

    @torch.no_grad()
    def _run(
        self, program: Program, after: ContinuationBatch, layers: tuple[int, ...]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Return logits [B, K, V] of the tokens, and what attention blocks of `layers` put out, [B, K, d_model]."""
        cache, lengths = PlanCache(self.model, program), self.mask.sum(-1, keepdim=True)
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
        self.model(
            input_ids=self.ids, attention_mask=self.mask, position_ids=positions, past_key_values=cache,
            logits_to_keep=1,
        )  # fmt: skip
        mask = torch.cat([self.mask, torch.ones_like(after.tokens)], 1)
        positions = lengths + torch.arange(after.tokens.shape[1], device=lengths.device)
        with self._watched(layers) as outputs:
            logits: Tensor = self.model(
                input_ids=after.tokens, attention_mask=mask, position_ids=positions, past_key_values=cache
            ).logits
        return logits, outputs

    @contextmanager
    def _watched(self, layers: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
        found: dict[int, Tensor] = {}

        def note(layer: int) -> Any:
            def hook(_: nn.Module, __: tuple[Any, ...], output: tuple[Tensor, Any]) -> None:
                found[layer] = output[0]

            return hook

        hooks = [self.attention[layer].register_forward_hook(note(layer)) for layer in layers]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()

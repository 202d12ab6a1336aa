"""The papers' procedure for PolyKV's signals: one run of the model for every layer, phase, pattern and budget.

It goes through the runtime that deployment uses and shares nothing with the growing tree but the definition of what is
measured, so it checks the tree, and benchmarks say what the tree saves.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvsearch.calibration.polykv.layer_sweep import Ablation, AblationResults, Ablations, ContinuationBatch
from kvsearch.models.architecture import find_attention_modules
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.program import PhaseProgram
from kvsearch.runtime.stock import CACHE
from kvsearch.signals.attention_rows import compare_outputs


@torch.no_grad()
def measure_naively(
    model: Any, tried: Ablations, ids: Tensor, mask: Tensor, after: ContinuationBatch
) -> AblationResults:
    """Measure cosine, relative error and loss under every ablation; the model must run the attention "kvsearch".

    Prompts `ids` [M, T] with their `mask` are read anew for every ablation.
    """
    attention = find_attention_modules(model)
    whole_mask = torch.cat([mask, torch.ones_like(after.tokens)], 1)
    positions = (whole_mask.cumsum(-1) - 1).clamp(min=0)
    length = mask.shape[1]

    def note(outputs: dict[int, Tensor], layer: int, *call: Any) -> None:
        outputs[layer] = call[-1][0]

    def run(program: Program, *layers: int) -> tuple[Tensor, dict[int, Tensor]]:
        """Return logits [M, K, V] of the tokens, and what attention blocks of `layers` put out, [M, K, d_model]."""
        cache = PlanCache(model, program)
        read = {"attention_mask": mask, "position_ids": positions[:, :length]}
        model(input_ids=ids, logits_to_keep=1, **{CACHE: cache}, **read)
        outputs: dict[int, Tensor] = {}
        with ExitStack() as hooks:
            for layer in layers:
                hooks.enter_context(attention[layer].register_forward_hook(partial(note, outputs, layer)))
            logits: Tensor = model(
                input_ids=after.tokens,
                attention_mask=whole_mask,
                position_ids=positions[:, length:],
                **{CACHE: cache},
            ).logits
        return logits, outputs

    def ablate(layer: int, item: Ablation) -> Program:
        budgets = np.full((1, tried.kv_heads), tried.budgets[item.budget], dtype=np.int64)
        phase = PhaseProgram({layer: tried.policies[item.pattern]}, lambda _: budgets)
        return Program(prefill=phase) if tried.phases[item.phase] == "prefill" else Program(decode=phase)

    results = AblationResults(tried, len(after.tokens))
    logits, full = run(Program(), *tried.layers)
    results.full_loss[:] = after.losses(logits).cpu().numpy()
    for row, layer in enumerate(tried.layers):
        for item in tried.of_layer:
            logits, outputs = run(ablate(layer, item), layer)
            agreement = compare_outputs(full[layer], outputs[layer])
            results.note_outputs(row, [item], [after.mean_over_tokens(values)[None] for values in agreement])
            results.note_losses([(row, item)], after.losses(logits)[None])
    return results

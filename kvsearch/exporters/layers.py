"""Targets that are told a number for every layer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from kvsearch.arrays import Ints
from kvsearch.exporters.base import (
    SINGLE,
    Budgets,
    Exported,
    Inputs,
    Loss,
    PlanExporter,
    budget_loss,
    common_losses,
    heads_lost,
    ranks_as,
    same_for_heads,
)
from kvsearch.plan import ModelFingerprint, Plan, canonical_json
from kvsearch.plan.rounding import largest_remainder
from kvsearch.policies.registry import policy_of


class SparseVLLM(PlanExporter):
    """The engine's settings of method "pyramidkv", with a ratio per KV layer in (0, 1].

    Layer l keeps sink_keep_tokens + int(decode_keep_tokens * ratio_l / ratio_0) + recent_keep_tokens entries.
    """

    name: ClassVar[str] = "sparse-vllm"
    tool: ClassVar[str] = "Sparse-vLLM, sparse_method pyramidkv"
    keeps: ClassVar[str] = "one budget per layer, in entries; ranks as SnapKV"

    def export(self, plan: Plan, inputs: Inputs = Inputs()) -> Exported:  # noqa: B008 - frozen
        """Make the settings; a quarter of an entry keeps cut-off fractions from costing one."""
        budgets = Budgets.of(plan, inputs.length)
        policy = policy_of(budgets.policy)
        kept = budgets.per_layer
        sinks = min(policy.sink_count, *kept)
        recent = min(policy.recent_count, min(kept) - sinks)
        free = [entries - sinks - recent for entries in kept]
        base, most = max(free[0], 1), max(*free, 1) + 1
        ratios = [base / most, *((entries + 0.25) / most for entries in free[1:])]
        settings = {
            "sparse_method": "pyramidkv",
            "sink_keep_tokens": sinks,
            "recent_keep_tokens": recent,
            "decode_keep_tokens": base,
            "pyramid_layer_ratios": ratios,
        }
        files = {SINGLE: canonical_json(settings)}
        written = self.read(files, plan.model, int(budgets.entries.max()) + 1)
        losses = [
            *budget_loss(budgets.entries, written, "a layer has one budget for all heads"),
            *ranks_as(budgets, "snapkv", "pyramidkv"),
            *common_losses(budgets, proportional=False),
        ]
        usage = ("LLM(model, **json.load(open({path!r})))",)
        return Exported(files, tuple(losses), budgets.total, usage)

    def read(self, files: Mapping[str, bytes], model: ModelFingerprint, length: int) -> Ints:
        """Scale the kept entries of the first layer by the ratios, as the engine does."""
        settings = json.loads(files[SINGLE])
        ratios, keep = settings["pyramid_layer_ratios"], settings["decode_keep_tokens"]
        fixed = settings["sink_keep_tokens"] + settings["recent_keep_tokens"]
        kept = [min(length, fixed + int(keep * ratio / ratios[0])) for ratio in ratios]
        return same_for_heads(kept, model.kv_heads)


class SpectralKV(PlanExporter):
    """A profile of layer weights that add up to 1: the layers' shares of all entries."""

    name: ClassVar[str] = "spectralkv"
    tool: ClassVar[str] = "SpectralKV, profiles/*.json"
    keeps: ClassVar[str] = "how entries are shared out between layers; not their number, not the policy"
    needs_model: ClassVar[bool] = True

    def export(self, plan: Plan, inputs: Inputs = Inputs()) -> Exported:  # noqa: B008 - frozen
        """Make the profile."""
        budgets, shape = Budgets.of(plan, inputs.length), inputs.known_architecture
        origin = plan.provenance
        profile = {
            "name": f"{plan.model.name} by kvsearch, {origin.method}",
            "architecture": {
                "model_type": shape.model_type,
                "num_hidden_layers": shape.layers,
                "num_attention_heads": shape.query_heads,
                "num_key_value_heads": shape.kv_heads,
                "hidden_size": shape.hidden_size,
            },
            "weights": [int(row.sum()) / budgets.total for row in budgets.entries],
            "calibration": {"tool": "kvsearch", "method": origin.method, "seed": origin.seed},
        }
        losses = [
            *heads_lost(budgets),
            Loss("no policy: the tool ranks by a rule of its own", budgets.total),
            *common_losses(budgets, proportional=None),
        ]
        usage = (f"profile {{path}}, and a total of {budgets.total} entries",)
        return Exported({SINGLE: canonical_json(profile)}, tuple(losses), budgets.total, usage)

    def read(self, files: Mapping[str, bytes], model: ModelFingerprint, length: int) -> Ints:
        """Share out as many entries as the heads could hold of a prompt of `length` tokens."""
        weights = np.array(json.loads(files[SINGLE])["weights"])
        total = length * model.layers * model.kv_heads
        layers = largest_remainder(weights * total, total)
        return np.stack([largest_remainder(np.full(model.kv_heads, layer / model.kv_heads), layer) for layer in layers])

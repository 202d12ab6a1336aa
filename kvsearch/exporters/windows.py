"""Serving engines that hold a window per layer, or one for all: what is left of a plan there."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import yaml

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
    ranks_as,
    same_for_heads,
)
from kvsearch.plan import ModelFingerprint, Plan, canonical_json
from kvsearch.plan.yaml_document import parse_yaml
from kvsearch.policies.registry import policy_of

BLOCK = 32  # tokens of a cache block of OpenVINO on a CPU, of which its sizes are multiples


class Windows(PlanExporter):
    """A target whose layers see the most recent entries of a prompt only."""

    def export(self, plan: Plan, inputs: Inputs = Inputs()) -> Exported:  # noqa: B008 - frozen
        """Make the settings, and count what windows cannot hold."""
        budgets = Budgets.of(plan, inputs.length)
        data, usage = self.settings(budgets)
        files = {SINGLE: data}
        written = self.read(files, plan.model, budgets.known_length)
        losses = [
            *budget_loss(budgets.entries, written, "budgets are windows of whole layers"),
            *ranks_as(budgets, "streaming"),
            Loss("the prompt itself is read through the windows: a plan reads it whole and evicts afterwards"),
            *common_losses(budgets, proportional=False),
        ]
        return Exported(files, tuple(losses), budgets.total, usage)

    @abstractmethod
    def settings(self, budgets: Budgets) -> tuple[bytes, tuple[str, ...]]:
        """Return the file and the lines that use it."""


class TensorRTLLM(Windows):
    """TensorRT-LLM's `kv_cache_config` with a window per layer, as YAML."""

    name: ClassVar[str] = "trtllm-windows"
    tool: ClassVar[str] = "TensorRT-LLM, kv_cache_config.max_attention_window"
    keeps: ClassVar[str] = "one window per layer"

    def settings(self, budgets: Budgets) -> tuple[bytes, tuple[str, ...]]:
        """Give every layer the mean of its heads, and the sinks of its policy."""
        cache = {"max_attention_window": budgets.per_layer, "sink_token_length": policy_of(budgets.policy).sink_count}
        return yaml.safe_dump({"kv_cache_config": cache}).encode(), ("trtllm-serve MODEL --config {path}",)

    def read(self, files: Mapping[str, bytes], model: ModelFingerprint, length: int) -> Ints:
        """Hold as much of a prompt as the windows."""
        windows = parse_yaml(files[SINGLE], SINGLE).data["kv_cache_config"]["max_attention_window"]
        return same_for_heads([min(window, length) for window in windows], model.kv_heads)


class VLLM(Windows):
    """vLLM's overrides of a model's configuration: which layers have a sliding window, and the one size of it."""

    name: ClassVar[str] = "vllm-windows"
    tool: ClassVar[str] = "vLLM, --hf-overrides, for models whose code reads layer_types"
    keeps: ClassVar[str] = "which layers keep everything; one window for all others"

    def settings(self, budgets: Budgets) -> tuple[bytes, tuple[str, ...]]:
        """Choose the layers that keep everything so that the fewest entries are in the wrong place."""
        kept, at = np.array(budgets.per_layer), budgets.known_length
        order = np.argsort(-kept, kind="stable")

        def wrong(whole: int) -> int:
            return int((at - kept[order[:whole]]).sum() + np.abs(kept[order[whole:]] - window(whole)).sum())

        def window(whole: int) -> int:
            return max(1, int(np.median(kept[order[whole:]])))

        whole = min(range(len(order)), key=wrong)
        kinds = np.full(len(order), "sliding_attention", dtype=object)
        kinds[order[:whole]] = "full_attention"
        overrides = {"layer_types": kinds.tolist(), "sliding_window": window(whole)}
        return canonical_json(overrides), ('vllm serve MODEL --hf-overrides "$(cat {path})"',)

    def read(self, files: Mapping[str, bytes], model: ModelFingerprint, length: int) -> Ints:
        """Hold the whole prompt in full layers, the window in the others."""
        overrides = json.loads(files[SINGLE])
        window = min(overrides["sliding_window"], length)
        return same_for_heads(
            [length if kind == "full_attention" else window for kind in overrides["layer_types"]], model.kv_heads
        )


class OpenVINO(PlanExporter):
    """OpenVINO GenAI's `CacheEvictionConfig`: three sizes for all layers and heads, in whole blocks."""

    name: ClassVar[str] = "openvino"
    tool: ClassVar[str] = "OpenVINO GenAI, CacheEvictionConfig"
    keeps: ClassVar[str] = "the mean number of entries, and how many first and recent ones are protected"

    def export(self, plan: Plan, inputs: Inputs = Inputs()) -> Exported:  # noqa: B008 - frozen
        """Make the sizes: whole blocks, with at least one between the first and the recent entries."""
        budgets = Budgets.of(plan, inputs.length)
        policy = policy_of(budgets.policy)
        start, recent = (max(1, -(-count // BLOCK)) * BLOCK for count in (policy.sink_count, policy.recent_count))
        mean = budgets.total / budgets.entries.size
        sizes = {
            "start_size": start,
            "recent_size": recent,
            "max_cache_size": max(start + recent + BLOCK, round(mean / BLOCK) * BLOCK),
            "aggregation_mode": "NORM_SUM",
        }
        files = {SINGLE: canonical_json(sizes)}
        written = self.read(files, plan.model, budgets.known_length)
        losses = [
            *budget_loss(budgets.entries, written, f"one budget for all layers and heads, in blocks of {BLOCK}"),
            *ranks_as(budgets, "h2o"),
            *common_losses(budgets, proportional=False),
        ]
        usage = (
            "sizes = json.load(open({path!r})); mode = getattr(AggregationMode, sizes.pop('aggregation_mode'))",
            "SchedulerConfig: use_cache_eviction = True, "
            "cache_eviction_config = CacheEvictionConfig(**sizes, aggregation_mode=mode)",
        )
        return Exported(files, tuple(losses), budgets.total, usage)

    def read(self, files: Mapping[str, bytes], model: ModelFingerprint, length: int) -> Ints:
        """Hold the largest size in every head."""
        kept = min(length, json.loads(files[SINGLE])["max_cache_size"])
        return same_for_heads([kept] * model.layers, model.kv_heads)

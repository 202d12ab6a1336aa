"""Plans and profiles for other tools: one exporter per target, by name."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvsearch.core.naming import require_known

if TYPE_CHECKING:
    from kvsearch.exporters.base import Exporter

TARGETS = {
    "folder": "kvsearch.exporters.folder:Folder",
    "kvpress-lukv": "kvsearch.exporters.kvpress:KvpressLukv",
    "kvpress-layers": "kvsearch.exporters.kvpress:KvpressLayers",
    "kvpress-kvzap": "kvsearch.exporters.kvzap:KvpressKvzap",
    "kvpress-ea": "kvsearch.exporters.statistics:KvpressEA",
    "duo": "kvsearch.exporters.heads:DuoAttentionGates",
    "headkv": "kvsearch.exporters.heads:HeadKV",
    "attention-matching": "kvsearch.exporters.heads:AttentionMatching",
    "sparse-vllm": "kvsearch.exporters.layers:SparseVLLM",
    "spectralkv": "kvsearch.exporters.layers:SpectralKV",
    "triattention": "kvsearch.exporters.statistics:TriAttention",
    "trtllm-windows": "kvsearch.exporters.layers:TensorRTLLM",
    "vllm-windows": "kvsearch.exporters.layers:VLLM",
    "openvino": "kvsearch.exporters.layers:OpenVINO",
}


def exporter_of(target: str) -> Exporter:
    """Return the exporter of a target; UsageError if there is none of that name."""
    require_known("target", target, list(TARGETS))
    module, _, name = TARGETS[target].partition(":")
    found: Exporter = getattr(import_module(module), name)()
    return found

"""Plans and profiles for other tools: one exporter per target, by name."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING

from kvsearch.core.naming import require_known

if TYPE_CHECKING:
    from kvsearch.exporters.base import Exporter

TARGETS = {
    "folder": "kvsearch.exporters.folder:Folder",
    "custom-generate": "kvsearch.exporters.folder:CustomGenerate",
    "model": "kvsearch.exporters.folder:ModelFolder",
    "kvpress-lukv": "kvsearch.exporters.kvpress:KvpressLukv",
    "kvpress-layers": "kvsearch.exporters.kvpress:KvpressLayers",
    "kvpress-kvzap": "kvsearch.exporters.kvzap:KvpressKvzap",
    "kvpress-ea": "kvsearch.exporters.statistics:KvpressEA",
    "duo": "kvsearch.exporters.budget_tables:DuoAttentionGates",
    "headkv": "kvsearch.exporters.budget_tables:HeadKV",
    "attention-matching": "kvsearch.exporters.budget_tables:AttentionMatching",
    "sparse-vllm": "kvsearch.exporters.budget_tables:SparseVLLM",
    "spectralkv": "kvsearch.exporters.budget_tables:SpectralKV",
    "tangram": "kvsearch.exporters.budget_tables:Tangram",
    "triattention": "kvsearch.exporters.statistics:TriAttention",
    "trtllm-windows": "kvsearch.exporters.budget_tables:TensorRTLLM",
    "vllm-windows": "kvsearch.exporters.budget_tables:VLLM",
    "openvino": "kvsearch.exporters.budget_tables:OpenVINO",
}


def create_exporter(target: str) -> Exporter:
    """Create the exporter of a target; UsageError if there is none of that name."""
    require_known("target", target, list(TARGETS))
    exporter: Exporter = resolve_name(TARGETS[target])()
    return exporter

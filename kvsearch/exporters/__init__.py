"""Plans and profiles for other tools: one exporter per target, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvsearch.core.naming import require_known
from kvsearch.core.plugins import PluginRegistry

if TYPE_CHECKING:
    from kvsearch.exporters.base import Exporter

BUILT_IN_TARGETS = {
    "folder": "kvsearch.exporters.folder:Folder",
    "custom-generate": "kvsearch.exporters.folder:CustomGenerate",
    "model": "kvsearch.exporters.folder:ModelFolder",
    "kvpress-lukv": "kvsearch.exporters.kvpress:KvpressLukv",
    "kvpress-layers": "kvsearch.exporters.kvpress:KvpressLayers",
    "kvpress-kvzap": "kvsearch.exporters.kvzap:KvpressKvzap",
    "kvpress-ea": "kvsearch.exporters.statistics:KvpressEA",
    "triattention": "kvsearch.exporters.statistics:TriAttention",
    "duo": "kvsearch.exporters.budget_tables:DuoAttentionGates",
    "headkv": "kvsearch.exporters.budget_tables:HeadKV",
    "attention-matching": "kvsearch.exporters.budget_tables:AttentionMatching",
    "sparse-vllm": "kvsearch.exporters.budget_tables:SparseVLLM",
    "spectralkv": "kvsearch.exporters.budget_tables:SpectralKV",
    "tangram": "kvsearch.exporters.budget_tables:Tangram",
    "trtllm-windows": "kvsearch.exporters.budget_tables:TensorRTLLM",
    "vllm-windows": "kvsearch.exporters.budget_tables:VLLM",
    "openvino": "kvsearch.exporters.budget_tables:OpenVINO",
}
EXPORTERS: PluginRegistry[type[Exporter]] = PluginRegistry(
    "target", "kvsearch.exporters", BUILT_IN_TARGETS, "kvsearch.exporters.base:Exporter"
)


def list_targets() -> list[str]:
    """Return the names of all targets."""
    return EXPORTERS.list_names()


def create_exporter(target: str) -> Exporter:
    """Create the exporter of a target.

    Raises:
        UsageError: there is none of that name.
        EnvironmentFault: the package that brings it is broken.
    """
    require_known("target", target, EXPORTERS.list_names())
    return EXPORTERS.find(target)()

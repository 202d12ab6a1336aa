"""What other tools hold of a prompt, by their own arithmetic, written anew beside their code.

Each function takes what was exported, the shape of the model, and the tokens of a prompt, and returns the entries
[L, Hkv] that the tool holds once it has read the prompt. None of them calls the exporters. docs/export.md says which
version of each tool this follows.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable

import numpy as np
import yaml

from kvsearch.core.arrays import Ints
from kvsearch.exporters.base import SINGLE_FILE, ExportedFiles
from kvsearch.plan import ModelFingerprint

Simulation = Callable[[ExportedFiles, ModelFingerprint, int], Ints]


def option(usage: str, name: str) -> str:
    """The value of an option in a command."""
    found = re.search(rf"{name}[ =](\S+?)[,)]?(?:\s|$)", usage)
    assert found is not None, f"{usage} has no {name}"
    return found[1]


def table(rows: list[list[int]]) -> Ints:
    return np.array(rows, dtype=np.int64)


def alike(kept: list[int], model: ModelFingerprint) -> Ints:
    """Layers whose heads hold the same number."""
    return table([[entries] * model.kv_heads for entries in kept])


def headkv(found: ExportedFiles, model: ModelFingerprint, length: int) -> Ints:
    """run_longbench.py and HeadKVCluster.update_kv of KVCache-Factory, kv_head granularity."""
    capacity = int(option(found.usage[0], "--max_capacity_prompts"))
    beta = float(option(found.usage[0], "--head_beta"))
    window = 8
    scores = [sum(values) / len(values) for values in json.loads(found.files[SINGLE_FILE]).values()]
    pool = (capacity // beta) * len(scores)
    least = capacity - capacity // beta
    rows = [round(score / sum(scores) * pool + least) for score in scores]  # of each query head; halves to even
    if capacity - window > length - window:
        return alike([length] * model.layers, model)
    group = len(rows) // model.layers // model.kv_heads
    means = [round(sum(rows[at : at + group]) / group) for at in range(0, len(rows), group)]
    others = range(length - window)  # positions in front of the window, by score: a negative number cuts off the last
    held = [len(others[:mean]) + window for mean in means]
    return np.array(held, dtype=np.int64).reshape(model.layers, model.kv_heads)


def duo(found: ExportedFiles, model: ModelFingerprint, length: int) -> Ints:
    """load_attn_pattern and sparsify_attention_heads of DuoAttention, and its cache of first and recent entries."""
    lines = found.files["full_attention_heads.tsv"].decode().splitlines()
    gates = np.clip([[float(gate) for gate in line.split("\t")] for line in lines], 0, 1)
    config = json.loads(found.files["config.json"])
    sparsity = float(option(found.usage[0], "--sparsity"))
    noisy = gates + np.random.default_rng(0).uniform(0, 1e-6, gates.shape)
    cut = np.quantile(noisy, sparsity)
    cut = 2 if sparsity >= 1 else -1 if sparsity <= 0 else cut
    sink, recent = config["sink_size"], config["recent_size"]
    assert recent > 0, "a slice from -0 is everything"
    streaming = length if length <= sink + recent else sink + recent
    held = np.where(noisy >= cut, length, streaming)
    ordered = np.argsort(gates, axis=None)[: round(gates.size * sparsity)]  # the press of kvpress has no noise
    pressed = np.full(gates.size, length)
    pressed[ordered] = streaming
    assert (pressed.reshape(gates.shape) == held).all(), "DuoAttention and kvpress stream other heads"
    return held.reshape(model.layers, model.kv_heads)


def sparse_vllm(found: ExportedFiles, model: ModelFingerprint, length: int) -> Ints:
    """SparseController._sparse_layer_budget of Sparse-vLLM."""
    settings = json.loads(found.files[SINGLE_FILE])
    ratios = settings["pyramid_layer_ratios"]
    assert len(ratios) == model.layers
    assert all(0 < ratio <= 1 for ratio in ratios)
    budgets = [
        settings["sink_keep_tokens"]
        + int(settings["decode_keep_tokens"] * ratio / ratios[0])
        + settings["recent_keep_tokens"]
        for ratio in ratios
    ]
    return alike([min(budget, length) for budget in budgets], model)


def attention_matching(found: ExportedFiles, model: ModelFingerprint, length: int) -> Ints:
    """PerLayerHeadCompaction.compact_kv_cache."""
    target = int(option(found.usage[0], "target_size"))
    shares = json.loads(found.files[SINGLE_FILE])
    heads = model.layers * model.kv_heads
    return table(
        [
            [int(shares[f"L{layer}H{head}"] * target * heads) for head in range(model.kv_heads)]
            for layer in range(model.layers)
        ]
    )


def trtllm(found: ExportedFiles, model: ModelFingerprint, length: int) -> Ints:
    """KvCacheConfig of TensorRT-LLM: only the last tokens of a window are stored; fewer windows are repeated."""
    windows = yaml.safe_load(found.files[SINGLE_FILE])["kv_cache_config"]["max_attention_window"]
    repeated = [windows[layer % len(windows)] for layer in range(model.layers)]
    return alike([min(window, length) for window in repeated], model)


def vllm(found: ExportedFiles, model: ModelFingerprint, length: int) -> Ints:
    """Layer types and the one window of a model configuration, as vLLM reads it."""
    overrides = json.loads(found.files[SINGLE_FILE])
    kept = {"full_attention": length, "sliding_attention": min(overrides["sliding_window"], length)}
    return alike([kept[kind] for kind in overrides["layer_types"]], model)


def openvino(found: ExportedFiles, model: ModelFingerprint, length: int) -> Ints:
    """CacheEvictionAlgorithm of OpenVINO GenAI, on a CPU: blocks of 32 tokens."""
    sizes = json.loads(found.files[SINGLE_FILE])
    block = 32
    assert not any(sizes[name] % block for name in ("start_size", "recent_size", "max_cache_size"))
    evictable = sizes["max_cache_size"] - sizes["start_size"] - sizes["recent_size"]
    assert evictable > 0
    if length <= sizes["max_cache_size"] + block - 1:
        return alike([length] * model.layers, model)
    between = length // block - sizes["recent_size"] // block - sizes["start_size"] // block
    evicted = between - math.ceil(evictable / block)
    return alike([length - evicted * block] * model.layers, model)


def kvpress_layers(found: ExportedFiles, model: ModelFingerprint, length: int) -> Ints:
    """compute_n_kept of kvpress."""
    shares = json.loads(found.files[SINGLE_FILE])
    return alike([length if share == 0 else max(1, int(length * (1 - share))) for share in shares], model)


SIMULATIONS: dict[str, Simulation] = {
    "attention-matching": attention_matching, "duo": duo, "headkv": headkv, "kvpress-layers": kvpress_layers,
    "openvino": openvino, "sparse-vllm": sparse_vllm, "trtllm-windows": trtllm, "vllm-windows": vllm,
}  # fmt: skip

# options of the tools' own parsers, for those that are started by a command that we print
OPTIONS: dict[str, set[str]] = {
    "headkv": {
        "--method", "--head_path", "--head_beta", "--max_capacity_prompts", "--kv_cache_granularity", "--gqa_score_agg",
    },
    "duo": {"--attn_load_dir", "--sparsity"},
    "spectralkv": {"--model", "--layer-budget", "--profile", "--percentages"},
    "trtllm-windows": {"--config"},
    "vllm-windows": {"--hf-overrides"},
}  # fmt: skip


def options_of(usage: tuple[str, ...]) -> set[str]:
    """The options in commands."""
    return {name for line in usage for name in re.findall(r"(?<!\S)--[\w-]+", line)}

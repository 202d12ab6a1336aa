"""Exporters for tools that take a number for every head, or one for every layer."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import yaml

from kvsearch.core.arrays import Ints
from kvsearch.core.errors import IncompatibleError
from kvsearch.core.yaml_document import YamlDocument
from kvsearch.exporters.base import (
    SINGLE_FILE,
    BudgetExporter,
    ExportedFiles,
    ExportInputs,
    Losses,
    PrefillBudgets,
    measure_head_loss,
    repeat_for_heads,
)
from kvsearch.plan import ModelFingerprint, PolicySpec, canonical_json
from kvsearch.policies.registry import build_policy
from kvsearch.policies.snapkv import SnapKV

TRACE = 1e-9  # relative
NOISE = 1e-6  # most that DuoAttention adds to a gate, to break ties


class AttentionMatching(BudgetExporter):
    """The share of all entries that every kv head gets, `{"L0H0": share, ...}`, adding up to 1.

    Attention Matching makes its own entries; what it takes from a plan is how they are shared out. A head gets its
    share of target_size * L * Hkv entries, cut off, where the `target_size` of `compact_kv_cache` is a whole number.
    """

    coarser: ClassVar[str] = "the tool cuts shares of a whole mean of entries off"
    proportional: ClassVar[bool | None] = None
    matches: ClassVar[bool] = True

    def write(self, budgets: PrefillBudgets, inputs: ExportInputs) -> ExportedFiles:  # noqa: ARG002
        """Write the shares; where a rounding error would cost an entry, a trace above it."""
        mean = budgets.total // budgets.entries.size
        table = budgets.entries / budgets.total
        # The tool cuts off: 63.9999 would be 63 entries.
        table[(table * mean * table.size).astype(np.int64) < budgets.entries] *= 1 + TRACE
        shares = {f"L{layer}H{head}": float(share) for (layer, head), share in np.ndenumerate(table)}
        losses = {"no policy: the tool fits entries of its own": budgets.total}
        usage = (f"PerLayerHeadCompaction(..., precomputed_budget_path={{path!r}}), target_size={mean}",)
        return ExportedFiles({SINGLE_FILE: canonical_json(shares)}, usage, losses, at=mean)

    def read(self, files: Mapping[str, bytes], model: ModelFingerprint, length: int) -> Ints:
        """Cut every head's share of a mean of `length` entries off."""
        shares = json.loads(files[SINGLE_FILE])
        table = np.array(
            [[shares[f"L{layer}H{head}"] for head in range(model.kv_heads)] for layer in range(model.layers)]
        )
        held: Ints = (table * length * table.size).astype(np.int64)
        return held


class HeadKV(BudgetExporter):
    """A score of every query head on one line, `{"layer-head": [score]}`, for KVCache-Factory's `run_longbench.py`.

    With `--head_beta` 1, head h holds round(s_h / sum(s) * B * L * Hq) entries, where B is `--max_capacity_prompts`,
    and beside them its window of `WINDOW` entries; a prompt of fewer than B tokens is not evicted. So the scores are
    budgets without the window. B is whole: what their mean has beyond it is taken off all scores alike, which rounding
    undoes. With `--kv_cache_granularity kv_head` the query heads of a group share the mean of their budgets.
    """

    WINDOW: ClassVar[int] = 8  # `window_sizes` of method headkv
    RANKING: ClassVar[Mapping[str, Any]] = {"window": WINDOW, "kernel": 7, "pooling": "max", "sinks": 0}

    needs_model: ClassVar[bool] = True
    coarser: ClassVar[str] = f"a head holds a window of {WINDOW} and a rounded share of a whole mean"
    ranks: ClassVar[tuple[str, ...]] = ("snapkv", "pyramidkv")

    def write(self, budgets: PrefillBudgets, inputs: ExportInputs) -> ExportedFiles:
        """Write the line; the query heads of a group have the budget of their kv head."""
        group = inputs.known_architecture.group
        kept = np.maximum(budgets.entries - self.WINDOW, 0)
        if 2 * kept.sum() % (2 * kept.size) == kept.size:  # halves: one entry less, or half of all heads round wrongly
            kept.flat[kept.argmax()] -= 1
        mean = round(kept.mean())
        # The tool divides scores by their sum: with a sum of `mean` per head it multiplies back to what was planned.
        scores = kept + (mean - kept.mean() if mean else TRACE)  # their sum is a divisor
        line = {
            f"{layer}-{head * group + member}": [float(score)]
            for (layer, head), score in np.ndenumerate(scores)
            for member in range(group)
        }
        policy = build_policy(budgets.policy)
        shared = f"--kv_cache_granularity kv_head --gqa_score_agg {policy.group} " if isinstance(policy, SnapKV) else ""
        usage = (
            f"python run_longbench.py --method headkv {shared}--head_path {{path}} --head_beta 1 "
            f"--max_capacity_prompts {mean}",
        )
        at = inputs.length or budgets.plan.length or int(budgets.entries.max()) + self.WINDOW + 1
        return ExportedFiles(
            {SINGLE_FILE: json.dumps(line).encode() + b"\n"}, usage, self._find_ranking_loss(budgets), at=at
        )

    def _find_ranking_loss(self, budgets: PrefillBudgets) -> Losses:
        """Find the loss of layers that rank by SnapKV with other settings than the tool's."""

        def differs(spec: PolicySpec) -> bool:
            policy = build_policy(spec)
            return isinstance(policy, SnapKV) and (
                any(getattr(policy, name) != value for name, value in self.RANKING.items())
                or policy.recent_count != self.WINDOW
            )

        settings = ", ".join(f"{name} {value}" for name, value in self.RANKING.items())
        return budgets.measure_policy_loss(f"the tool ranks with {settings}, the policy with others", differs)

    def read(self, files: Mapping[str, bytes], model: ModelFingerprint, length: int) -> Ints:
        """Give heads their share and the window, of a prompt of `length` tokens."""
        scores = np.array([np.mean(score) for score in json.loads(files[SINGLE_FILE]).values()])
        mean = round(scores.mean())
        share = np.rint(scores / scores.sum() * mean * scores.size).reshape(model.layers, model.kv_heads, -1)
        held: Ints = np.minimum(np.rint(share.mean(-1)).astype(np.int64) + self.WINDOW, length)
        return held if mean <= length else np.full_like(held, length)


class DuoAttentionGates(BudgetExporter):
    """A folder of `full_attention_heads.tsv`, L lines of Hkv gates from 0 to 1, and `config.json` with two sizes.

    Heads with the highest gates keep everything, the others `sink_size` first and `recent_size` last entries. A gate is
    half the share of the prompt that the plan keeps, and a half more for heads that keep everything: the tool adds
    noise of up to 1e-6 and cuts at a quantile, and its other cut is at one half.
    """

    coarser: ClassVar[str] = "heads keep everything or first and recent entries only"
    ranks: ClassVar[tuple[str, ...]] = ("duo_attention", "streaming")

    def write(self, budgets: PrefillBudgets, inputs: ExportInputs) -> ExportedFiles:  # noqa: ARG002
        """Write the folder; as many heads keep everything as come nearest to the plan's total.

        The others hold one of the plan's budgets, that from which the fewest entries are in the wrong place.
        """
        policy = build_policy(budgets.policy)
        at = budgets.known_length
        sizes = np.unique(budgets.entries[budgets.entries < at]).tolist()
        if not sizes and policy.least < at:  # all heads keep everything, whatever a streaming head would
            sizes = [policy.least]
        if not sizes:
            raise IncompatibleError(f"all heads keep all of {at} tokens: nothing to evict")
        order = np.argsort(-budgets.entries, axis=None, kind="stable")

        def keeps_all(size: int) -> Ints:
            whole = round((budgets.total - size * order.size) / (at - size))
            chosen = np.zeros_like(budgets.entries)
            chosen.flat[order[: min(max(whole, 0), order.size)]] = 1
            return chosen

        def wrong(size: int) -> int:
            return int(np.abs(np.where(keeps_all(size), at, size) - budgets.entries).sum())

        streaming = min(sizes, key=wrong)
        whole = keeps_all(streaming)
        sinks = min(policy.sink_count, streaming - 1)
        gates = (budgets.entries / at + whole) / 2
        table = "\n".join("\t".join(f"{min(gate, 1):.12g}" for gate in row) for row in gates) + "\n"
        share = 1 - int(whole.sum()) / order.size
        usage = (
            f"DuoAttention: --attn_load_dir {{path}} --sparsity {share!r} (its streaming heads read the prompt itself "
            "through their windows; a plan reads it whole, as the press does)",
            f"kvpress: DuoAttentionPress(head_compression_ratio={share!r}) with the folder's pattern",
        )
        files = {
            "full_attention_heads.tsv": table.encode(),
            "config.json": canonical_json({"sink_size": sinks, "recent_size": streaming - sinks, "sparsity": share}),
        }
        return ExportedFiles(files, usage)

    def read(self, files: Mapping[str, bytes], model: ModelFingerprint, length: int) -> Ints:
        """Let heads stream whose gates are below the quantile that the folder names."""
        config = json.loads(files["config.json"])
        gates = np.loadtxt(io.BytesIO(files["full_attention_heads.tsv"]), delimiter="\t", ndmin=2)
        share = config["sparsity"]
        noisy = gates + np.linspace(0, NOISE, gates.size).reshape(gates.shape)  # the tool's is random
        cut = np.quantile(noisy, share) if 0 < share < 1 else 2 * share
        kept = min(length, config["sink_size"] + config["recent_size"])
        return np.where(noisy < cut, kept, length).reshape(model.layers, model.kv_heads)


class SparseVLLM(BudgetExporter):
    """The engine's settings of method "pyramidkv", with a ratio per KV layer in (0, 1].

    Layer l keeps sink_keep_tokens + int(decode_keep_tokens * ratio_l / ratio_0) + recent_keep_tokens entries, in slots
    that all its heads share.
    """

    coarser: ClassVar[str] = "a layer has one budget for all heads"
    ranks: ClassVar[tuple[str, ...]] = ("snapkv", "pyramidkv")

    def write(self, budgets: PrefillBudgets, inputs: ExportInputs) -> ExportedFiles:  # noqa: ARG002
        """Write the settings; a quarter of an entry keeps cut-off fractions from costing one."""
        policy = build_policy(budgets.policy)
        kept = budgets.per_layer
        sinks = min(policy.sink_count, *kept)
        recent = min(policy.recent_count, min(kept) - sinks)
        free = [entries - sinks - recent for entries in kept]
        base = max(free[0], 1)
        scale = 1 << max(*free, 1).bit_length()  # a power of two: base times its ratio, over it, is base again
        ratios = [base / scale, *((entries + 0.25) / scale for entries in free[1:])]
        settings = {
            "sparse_method": "pyramidkv",
            "sink_keep_tokens": sinks,
            "recent_keep_tokens": recent,
            "decode_keep_tokens": base,
            "pyramid_layer_ratios": ratios,
        }
        usage = ("LLM(model, **json.load(open({path!r})))",)
        at = int(budgets.entries.max()) + 1
        return ExportedFiles({SINGLE_FILE: canonical_json(settings)}, usage, describe_shared_heads(budgets), at=at)

    def read(self, files: Mapping[str, bytes], model: ModelFingerprint, length: int) -> Ints:
        """Scale the kept entries of the first layer by the ratios, as the engine does."""
        settings = json.loads(files[SINGLE_FILE])
        ratios = settings["pyramid_layer_ratios"]
        fixed = settings["sink_keep_tokens"] + settings["recent_keep_tokens"]
        kept = [min(length, fixed + int(settings["decode_keep_tokens"] * ratio / ratios[0])) for ratio in ratios]
        return repeat_for_heads(kept, model.kv_heads)


class SpectralKV(BudgetExporter):
    """A profile of layer weights that add up to 1: the layers' shares of all entries."""

    needs_model: ClassVar[bool] = True
    proportional: ClassVar[bool | None] = None

    def write(self, budgets: PrefillBudgets, inputs: ExportInputs) -> ExportedFiles:
        """Write the profile."""
        shape = inputs.known_architecture
        origin = budgets.plan.provenance
        profile = {
            "name": f"{budgets.plan.model.name} by kvsearch, {origin.method}",
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
        losses = {**measure_head_loss(budgets), "no policy: the tool ranks by a rule of its own": budgets.total}
        percent = "P, the percent of the prompt that is kept"
        if budgets.length is not None:
            percent = str(max(1, round(100 * budgets.total / (budgets.length * budgets.entries.size))))
        usage = (
            f"python -m spectralkv.cli --model MODEL --layer-budget fixed --profile {{path}} --percentages {percent}",
        )
        return ExportedFiles({SINGLE_FILE: canonical_json(profile)}, usage, losses)


class Tangram(BudgetExporter):
    """Tangram's offline files: a cluster map, which kv heads share pages, and a retention profile, what they keep.

    A page holds tokens of P heads, here as many as a layer has, which may be of several layers: heads that keep about
    as much share one, so that few of its slots stay empty. Source: arXiv 2606.06302 and its head_group_clustering.
    """

    ranks: ClassVar[tuple[str, ...]] = ("snapkv", "keydiff", "expected_attention")
    proportional: ClassVar[bool | None] = True
    scorers: ClassVar[Mapping[str, str]] = {"expected_attention": "ea"}

    def write(self, budgets: PrefillBudgets, inputs: ExportInputs) -> ExportedFiles:  # noqa: ARG002
        """Sort heads by their budgets, largest first, and cut that order into clusters of P."""
        model = budgets.plan.model
        page = model.kv_heads
        shares = (budgets.entries / budgets.known_length).astype(np.float32)
        order = np.argsort(-budgets.entries, axis=None, kind="stable").reshape(-1, page)
        order.sort(axis=1)  # heads of one layer lie side by side
        columns = np.empty(budgets.entries.size, dtype=np.int32)
        columns[order.ravel()] = np.tile(np.arange(page), len(order))
        clusters = np.empty_like(columns)
        clusters[order.ravel()] = np.repeat(np.arange(len(order)), page)
        kept = float(shares.mean())
        meta = {
            "cluster_scope": "global", "source_model": model.name, "page_group_size": page,
            "num_layers": model.layers, "num_kv_heads": model.kv_heads, "tool": "kvsearch",
        }  # fmt: skip
        header = np.frombuffer(canonical_json(meta), dtype=np.uint8)
        cluster_map = {
            "cluster_of": clusters.reshape(shares.shape),
            "column_of": columns.reshape(shares.shape),
            "cluster_members": np.stack(np.unravel_index(order, shares.shape), axis=-1).astype(np.int32),
            "rank_score": shares,
            "page_group_size": np.int32(page),
            "base_ratio": np.float32(kept),
            "meta": header,
        }
        profile = {
            "ratio_per_head": shares[None],
            "ratio_p90_per_head": shares[None],
            "ratio_std_per_head": np.zeros_like(shares[None]),
            "base_ratios": np.array([kept], dtype=np.float32),
            "static_layer_ids": np.array([], dtype=np.int32),
            "meta": header,
        }
        scorer = self.ranks[0] if budgets.policy.name not in self.ranks else budgets.policy.name
        folder = f"{self.scorers.get(scorer, scorer)}/{model.name.rstrip('/').rpartition('/')[2].lower()}"
        files = {
            f"{folder}/pg{page}_r{kept:.2f}.npz": pack_npz(cluster_map),
            f"{folder}/profile.npz": pack_npz(profile),
        }
        losses = {
            "budgets are not enforced: a head keeps what is above the engine's own threshold": budgets.total,
            "the spread over prompts is not in a plan: p90 is the mean, the deviation 0": None,
        }
        usage = (f"TANGRAM_CLUSTER_MAPS_DIR={{path}} in the engine's environment, with a page group of {page} heads",)
        return ExportedFiles(files, usage, losses)


OPENVINO_BLOCK = 32  # tokens of a cache block of OpenVINO on a CPU, of which its sizes are multiples


class WindowExporter(BudgetExporter):
    """Base of targets whose layers see only the most recent entries of a prompt."""

    coarser: ClassVar[str] = "budgets are windows of whole layers"
    ranks: ClassVar[tuple[str, ...]] = ("streaming",)
    through: ClassVar[dict[str, int | None]] = {
        "the prompt itself is read through the windows: a plan reads it whole and evicts afterwards": None,
        "windows move on while decoding, so entries of the prompt leave: a plan keeps them": None,
    }


class TensorRTLLM(WindowExporter):
    """TensorRT-LLM's `kv_cache_config` with a window per layer, as YAML.

    Its `sink_token_length` is for engines that were built: the PyTorch backend, the default one, has no sinks.
    """

    def write(self, budgets: PrefillBudgets, inputs: ExportInputs) -> ExportedFiles:  # noqa: ARG002
        """Give every layer the mean of its heads, and the sinks of its policy."""
        cache = {
            "max_attention_window": budgets.per_layer,
            "sink_token_length": build_policy(budgets.policy).sink_count,
        }
        config = yaml.safe_dump({"kv_cache_config": cache}).encode()
        losses = self.through | measure_sink_loss(budgets, budgets.per_layer)
        return ExportedFiles({SINGLE_FILE: config}, ("trtllm-serve MODEL --config {path}",), losses)

    def read(self, files: Mapping[str, bytes], model: ModelFingerprint, length: int) -> Ints:
        """Hold as much of a prompt as the windows."""
        windows = YamlDocument(files[SINGLE_FILE], SINGLE_FILE).data["kv_cache_config"]["max_attention_window"]
        return repeat_for_heads([min(window, length) for window in windows], model.kv_heads)


class VLLM(WindowExporter):
    """vLLM's overrides of a model's configuration: which layers have a sliding window, and the one size of it."""

    def write(self, budgets: PrefillBudgets, inputs: ExportInputs) -> ExportedFiles:  # noqa: ARG002
        """Choose the layers that keep everything so that the fewest entries are in the wrong place."""
        kept = np.array(budgets.per_layer)
        at = budgets.known_length
        order = np.argsort(-kept, kind="stable")

        def wrong(whole: int) -> int:
            return int((at - kept[order[:whole]]).sum() + np.abs(kept[order[whole:]] - window(whole)).sum())

        def window(whole: int) -> int:
            return max(1, int(np.median(kept[order[whole:]])))

        whole = min(range(len(order)), key=wrong)
        kinds = np.full(len(order), "sliding_attention", dtype=object)
        kinds[order[:whole]] = "full_attention"
        overrides = {"layer_types": kinds.tolist(), "sliding_window": window(whole)}
        usage = ('vllm serve MODEL --hf-overrides "$(cat {path})"',)
        windows = np.where(kinds == "full_attention", at, window(whole)).tolist()
        return ExportedFiles(
            {SINGLE_FILE: canonical_json(overrides)}, usage, self.through | measure_sink_loss(budgets, windows)
        )

    def read(self, files: Mapping[str, bytes], model: ModelFingerprint, length: int) -> Ints:
        """Hold the whole prompt in full layers, the window in the others."""
        overrides = json.loads(files[SINGLE_FILE])
        window = min(overrides["sliding_window"], length)
        return repeat_for_heads(
            [length if kind == "full_attention" else window for kind in overrides["layer_types"]], model.kv_heads
        )


class OpenVINO(BudgetExporter):
    """OpenVINO GenAI's `CacheEvictionConfig`: three sizes for all layers and heads, in whole blocks.

    Blocks between the first and the recent ones leave once a prompt has filled one more than `max_cache_size`; the
    tokens of the last block, which is not full, stay besides.
    """

    coarser: ClassVar[str] = f"one budget for all layers and heads, in blocks of {OPENVINO_BLOCK}"
    ranks: ClassVar[tuple[str, ...]] = ("h2o",)

    def write(self, budgets: PrefillBudgets, inputs: ExportInputs) -> ExportedFiles:  # noqa: ARG002
        """Write the sizes: whole blocks, with at least one between the first and the recent entries."""
        policy = build_policy(budgets.policy)
        start, recent = (
            max(1, -(-count // OPENVINO_BLOCK)) * OPENVINO_BLOCK for count in (policy.sink_count, policy.recent_count)
        )
        mean = budgets.total / budgets.entries.size
        sizes = {
            "start_size": start,
            "recent_size": recent,
            "max_cache_size": max(start + recent + OPENVINO_BLOCK, round(mean / OPENVINO_BLOCK) * OPENVINO_BLOCK),
            "aggregation_mode": "NORM_SUM",
        }
        usage = (
            "sizes = json.load(open({path!r})); mode = getattr(AggregationMode, sizes.pop('aggregation_mode'))",
            "SchedulerConfig: use_cache_eviction = True, "
            "cache_eviction_config = CacheEvictionConfig(**sizes, aggregation_mode=mode)",
        )
        what = f"entries leave in blocks of {OPENVINO_BLOCK}, which are ranked as a whole"
        return ExportedFiles(
            {SINGLE_FILE: canonical_json(sizes)}, usage, {what: None, **describe_shared_heads(budgets)}
        )

    def read(self, files: Mapping[str, bytes], model: ModelFingerprint, length: int) -> Ints:
        """Hold the largest size in every head, and what is in the last block."""
        largest = json.loads(files[SINGLE_FILE])["max_cache_size"]
        kept = length if length < largest + OPENVINO_BLOCK else largest + length % OPENVINO_BLOCK
        return repeat_for_heads([kept] * model.layers, model.kv_heads)


def measure_sink_loss(budgets: PrefillBudgets, windows: Sequence[int]) -> dict[str, int | None]:
    """Measure the loss of the first entries of every layer whose window is shorter than the prompt."""
    sinks = build_policy(budgets.policy).sink_count
    moving = [window for window in windows if budgets.length is None or window < budgets.length]
    lost = sum(min(sinks, window) for window in moving) * budgets.plan.model.kv_heads
    return {f"windows have no sinks: the first {sinks} entries of a head leave": lost} if lost else {}


def describe_shared_heads(budgets: PrefillBudgets) -> Losses:
    """Describe the loss of targets that keep the same tokens for all heads of a layer."""
    several = budgets.plan.model.kv_heads > 1
    return {"all heads of a layer keep the same tokens: a plan ranks them for each head": None} if several else {}


def pack_npz(arrays: Mapping[str, Any]) -> bytes:
    """Pack arrays by name into an .npz file; equal arrays give equal bytes."""
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()

"""Generate under the KV-cache plan that lies in a folder of its own, as `custom_generate/generate.py` there.

    model.generate(**inputs, custom_generate="FOLDER", trust_remote_code=True, max_new_tokens=64)

The prompt, or its first `context_length` tokens, passes through the model's own attention; then every kv head keeps the
entries that `plan.json` in FOLDER gives it, and the others leave memory. This file needs torch and transformers 5 alone
for the policies and models listed below; other plans are run by the package kvsearch, which made it.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, CacheLayerMixin, DynamicCache, DynamicLayer
from transformers.generation.utils import ALL_CACHE_NAMES
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import cached_file

# policies that this file knows, with the values of parameters that a plan does not state
POLICY_DEFAULTS: dict[str, dict[str, Any]] = {
    "streaming": {"sinks": 4},  # StreamingLLM, 2309.17453
    "snapkv": {"window": 32, "kernel": 7, "pooling": "max", "group": "mean", "sinks": 0, "protect": -1},  # 2404.14469
    "h2o": {"recent_share": 0.5, "recent": 0, "sinks": 0},  # 2306.14048
    "keydiff": {"sinks": 0, "window": 0},  # 2504.15364
    "expected_attention": {  # 2510.00636
        "future": 512, "sinks": 4, "epsilon": 0.0, "covariance": True, "value_norm": True, "window": 0,
    },
}  # fmt: skip
# architectures whose attention is the softmax of scaled products, with one rotary embedding for all planned layers
MODELS = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "granite", "olmo2", "arcee", "starcoder2", "mixtral",
    "qwen2_moe", "qwen3_moe", "seed_oss",
)  # fmt: skip
ATTENTION = "planned_generate"  # of the attention
LAYER_TAG = "_planned_layer"
PLAN_FILE = "plan.json"
CACHE_ARGUMENT = str(ALL_CACHE_NAMES[0])  # the argument that takes a cache
ALONE = ("assistant_model", "prompt_lookup_num_tokens", "prefill_chunk_size")  # options that a plan excludes
BYTES = 2**26  # of logits that are made at once
SHARE_GUARD = 1e-9  # shares are read to nine decimals


def generate(
    model: Any,
    inputs: Any = None,
    generation_config: Any = None,
    context_length: int | None = None,
    folder: str | None = None,
    **arguments: Any,
) -> Any:
    """Do what `model.generate` does with these arguments, under the plan in `folder`.

    With `context_length`, so many tokens of a prompt, padding included, are read and evicted first; those that follow,
    say a question about them, stay. Without it the prompt is evicted as a whole.

    Raises:
        ValueError: the plan is of another model or cannot be read, or there are options that it cannot honour.
        ImportError: the plan is one for kvsearch, which is not installed.
    """
    folder = folder or find_folder(model)
    plan = read_plan(folder)
    reason = needs_kvsearch(plan)
    adapted = any(".base_layer." in name for name in model.state_dict())
    if reason is None and (adapted or getattr(model, "is_quantized", False)):
        reason = "a model with quantised weights or adapters"
    arguments = {name: value for name, value in arguments.items() if value is not None}
    inputs = arguments.pop("input_ids", inputs)
    if generation_config is not None:
        arguments["generation_config"] = generation_config
    begin: dict[str, Tensor] | None = None
    if context_length is not None:
        if inputs is None or not 0 < context_length < inputs.shape[1]:
            raise ValueError(f"context_length={context_length}: give input_ids that have more tokens, and at least 1")
        settings = {**vars(generation_config or model.generation_config), **arguments}
        if any((settings.get(name) or 1) > 1 for name in ("num_beams", "num_return_sequences")):
            raise ValueError("context_length is for one reply to each prompt: drop num_beams and num_return_sequences")
        mask = arguments.setdefault("attention_mask", torch.ones_like(inputs))
        begin = {"input_ids": inputs[:, :context_length], "attention_mask": mask[:, :context_length]}
    with own_generate(model):
        if reason is None:
            return generate_planned(model, plan, inputs, begin, arguments)
        try:
            import kvsearch
        except ImportError:
            raise ImportError(
                f"this plan needs the package kvsearch ({reason}): pip install it, and call again"
            ) from None
        with kvsearch.attach(model, kvsearch.load_plan(folder)) as planned:
            if begin is not None:
                arguments[CACHE_ARGUMENT] = planned.read(begin["input_ids"], begin["attention_mask"])
            return planned.generate(inputs, **arguments)


def find_folder(model: Any) -> str:
    """Return the folder, or repository of the hub, that `generate` was given; transformers copies this file elsewhere.

    Raises:
        ValueError: this function was called by something else, and the model does not come from such a folder.
    """
    frame = inspect.currentframe()
    while frame is not None:
        named = frame.f_locals.get("custom_generate")
        if isinstance(named, str):
            return named
        frame = frame.f_back
    name = str(model.config.name_or_path)  # of a model that was loaded with the folder's code
    if not (Path(name) / PLAN_FILE).is_file():
        raise ValueError(f"where {PLAN_FILE} lies is not known here: give generate the folder=... of the plan, too")
    return name


def read_plan(folder: str) -> dict[str, Any]:
    """Return the plan in a folder or repository; ValueError if there is none that can be read."""
    try:
        plan: dict[str, Any] = json.loads(Path(cached_file(folder, PLAN_FILE)).read_text(encoding="utf-8"))
        if (plan["format"], plan["version"]) == ("kvsearch.plan", 1):
            return plan
        problem = f"format {plan['format']} {plan['version']} is unknown here"
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    raise ValueError(f"{folder}/{PLAN_FILE} is no plan that can be read ({problem}): export it again")


def needs_kvsearch(plan: dict[str, Any]) -> str | None:
    """Say why a plan is run by the package kvsearch; None: this file runs it."""
    layers = [layer for layer in (plan["prefill"] or {"layers": []})["layers"] if layer is not None]
    unknown = sorted({layer["policy"]["name"] for layer in layers} - {*POLICY_DEFAULTS})
    model = plan["model"]["model_type"]
    reasons = {
        "it evicts while decoding": plan["decode"] is not None,
        f"{plan['allocation']['name']} divides its budgets for each prompt": plan["allocation"]["name"] != "static",
        f"policy {', '.join(unknown)}": bool(unknown),
        "its entries carry what leaves": any(layer.get("carry", "none") != "none" for layer in layers),
        f"a model of type {model}": model not in MODELS,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


@contextmanager
def own_generate(model: Any) -> Iterator[None]:
    """Let `model.generate` be that of its class for a while: a model that was loaded with this file calls it."""
    replaced = vars(model).pop("generate", None)
    try:
        yield
    finally:
        if replaced is not None:
            model.generate = replaced


def generate_planned(
    model: Any, plan: dict[str, Any], inputs: Any, begin: dict[str, Tensor] | None, arguments: dict[str, Any]
) -> Any:
    """Generate with a cache of planned layers, which first reads what prompts `begin` with; errors as `generate`."""
    require_model(model, plan["model"])
    config = arguments.get("generation_config")
    for name in ALONE:
        if arguments.get(name, getattr(config, name, None)):
            raise ValueError(f"{name} and the plan of this folder exclude each other: drop the option")
    if arguments.pop("use_cache", True) is False or arguments.keys() & {*ALL_CACHE_NAMES, "cache_implementation"}:
        raise ValueError("the plan of this folder brings its own cache: drop use_cache=False, and caches of yours")
    config = config or model.generation_config
    if config.cache_implementation is not None or config.use_cache is False:  # what a checkpoint says of caches
        arguments["generation_config"] = config = deepcopy(config)
        config.cache_implementation = None
        config.use_cache = True
    cache = planned_cache(model, plan)
    before = model.config._attn_implementation
    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)  # without it padding would be seen
    model.set_attn_implementation(ATTENTION)
    try:
        if begin is not None:
            positions = (begin["attention_mask"].cumsum(-1) - 1).clamp(min=0)
            model(**begin, position_ids=positions, **{CACHE_ARGUMENT: cache}, use_cache=True, logits_to_keep=1)
        output = model.generate(inputs, **{CACHE_ARGUMENT: cache}, **arguments)
    finally:
        model.set_attn_implementation(before)
    if any(isinstance(layer, PlannedLayer) and not layer.blocks for layer in cache.layers):
        raise ValueError(f"{type(model).__name__} did without the cache that it was given: the plan did not run")
    return output


def require_model(model: Any, wanted: dict[str, Any]) -> None:
    """Refuse a model that is not the one of the plan, by its shape and 64 values of each of its weights.

    Raises:
        ValueError: it is another one, or its rotary embedding changes with the length of a prompt.
    """
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    shape = {
        "model_type": config.model_type,
        "layers": config.num_hidden_layers,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
    }
    differs = [f"{name} {wanted[name]}, here {value}" for name, value in shape.items() if wanted[name] != value]
    if not differs and (weights := weights_hash(model)) != wanted["weights_sha256"]:
        differs = [f"weights {wanted['weights_sha256'][:12]}, here {weights[:12]}"]
    if differs:
        raise ValueError(f"the plan of this folder is for another model, {wanted['name']!r}: {'; '.join(differs)}")
    kinds = getattr(getattr(model.get_decoder(), "rotary_emb", None), "rope_type", "default")
    if any(
        "longrope" in kind or "dynamic" in kind for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])
    ):
        raise ValueError("the rotary embedding of this model depends on the length of a prompt: use kvsearch.attach")


@torch.no_grad()
def weights_hash(model: torch.nn.Module) -> str:
    """Return the SHA-256 over names, shapes and 64 values of all weights, rounded to bfloat16, as kvsearch does."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.named_parameters(), key=lambda pair: pair[0]):
        flat = tensor.reshape(-1)
        count = min(64, flat.numel())
        values = flat[torch.arange(count, device=flat.device) * flat.numel() // max(1, count)]
        values = values.to(torch.bfloat16).float() if flat.is_floating_point() else values
        digest.update(f"{name}{tuple(tensor.shape)}".encode() + values.cpu().numpy().tobytes())
    return digest.hexdigest()


# --- budgets ----------------------------------------------------------------------------------------------------------


def compute_budgets(plan: dict[str, Any], length: int) -> dict[int, list[int]]:
    """Return the entries per kv head of each planned layer, for a prompt of `length` tokens."""
    layers = {place: layer["budget"] for place, layer in enumerate(plan["prefill"]["layers"]) if layer is not None}
    table = np.array(list(layers.values()), dtype=np.int64)
    if plan["scaling"] == "fixed":
        table = np.minimum(table, length)
    elif length != plan["length"]:
        low = min(max(plan["floor"], 1), length)
        total = (2 * plan["total"] * length + plan["length"]) // (2 * plan["length"])
        table = share_out(table, min(max(total, low * table.size), length * table.size), low, length)
    return dict(zip(layers, table.tolist(), strict=True))


def share_out(weights: Any, total: int, low: int, high: int) -> Any:
    """Divide `total` in proportion to `weights` above 0 within bounds, to whole numbers by their largest remainders."""
    high = min(high, total)
    ideal = fill_level(weights / weights.max(), total, low, high)
    kept = np.clip(np.floor(ideal + SHARE_GUARD), low, high).astype(np.int64)
    for _ in range(abs(missing := total - int(kept.sum()))):
        left = np.round(ideal - kept, 9) * np.sign(missing)
        left[kept == (high if missing > 0 else low)] = -np.inf
        kept.flat[left.argmax()] += int(np.sign(missing))
    return kept


def fill_level(weights: Any, total: int, low: int, high: int) -> Any:
    """Return clamp(level * weights, low, high), whose sum is `total`; weights are above 0."""
    bends = np.unique(np.concatenate([low / weights, high / weights]))
    sums = [np.clip(bend * weights, low, high).sum() for bend in bends]
    below = max((place for place, reached in enumerate(sums) if reached <= total), default=0)
    below = min(below, max(len(bends) - 2, 0))
    above = min(below + 1, len(bends) - 1)
    at_low = low / weights >= bends[above]
    at_high = high / weights <= bends[below]
    filled = np.where(at_high, float(high), float(low))
    free = ~(at_low | at_high)
    if free.any():
        level = (total - filled[~free].sum()) / weights[free].sum()
        filled[free] = np.clip(level * weights[free], low, high)
    return filled


# --- the cache --------------------------------------------------------------------------------------------------------


def planned_cache(model: Any, plan: dict[str, Any]) -> DynamicCache:
    """Return the cache that the model would use, with layers of the plan in place of its own."""
    config = model.config.get_text_config()
    cache = DynamicCache(config=config)
    cache.layers = cache.layers or [DynamicLayer() for _ in range(config.num_hidden_layers)]
    tables: dict[int, dict[int, list[int]]] = {}

    def entries(layer: int, length: int) -> list[int]:
        if length not in tables:
            tables[length] = compute_budgets(plan, length)
        return tables[length][layer]

    for place, layer in enumerate(plan["prefill"]["layers"]):
        if layer is None:
            continue
        if type(cache.layers[place]) is not DynamicLayer:
            raise ValueError(f"layer {place} of the model has no full cache that could be planned: use another plan")
        policy = PlannedPolicy(layer["policy"], getattr(model.get_decoder(), "rotary_emb", None))
        cache.layers[place] = PlannedLayer(policy, lambda length, place=place: entries(place, length))
    return cache


class PlannedLayer(CacheLayerMixin):  # type: ignore[misc]
    """What the heads of one layer keep of a prompt, and all that follows it."""

    is_sliding = False

    def __init__(self, policy: PlannedPolicy, budgets: Any) -> None:
        super().__init__()
        self.policy = policy
        self.budgets = budgets
        self.seen = 0
        self.blocks: list[PlannedBlock] = []

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:  # noqa: ARG002
        self.dtype = key_states.dtype
        self.device = key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Take note of tokens that come; `attend` finds this layer by their keys."""
        self.lazy_initialization(key_states, value_states)
        if self.seen and not self.blocks:
            raise ValueError("the model's attention does not look at the keys of its cache: the plan cannot run")
        self.seen += key_states.shape[2]
        setattr(key_states, LAYER_TAG, self)
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Return the true length, entries that left included: positions and masks depend on it."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in earlier versions

    def evict(self, keys: Tensor, values: Tensor, keep: Tensor) -> None:
        """Copy what stays, `keep` [B, Hkv, T] bool, in blocks of heads with nearly as many entries."""
        self.heads = keys.shape[1]
        flat = keep.flatten(0, 1)
        counts = flat.sum(-1).tolist()
        for members in groups(counts, 1 / 64 if keys.device.type == "cpu" else 1 / 4):
            segments = torch.tensor(members, device=keys.device)
            width = max(counts[member] for member in members)
            chosen = flat[segments]
            # the columns that are kept come last, in their order, behind others where there are fewer
            columns = torch.argsort(chosen.int(), dim=-1, stable=True)[:, -width:]
            empty = ~chosen.gather(1, columns)
            where = (segments // self.heads)[:, None], (segments % self.heads)[:, None], columns
            self.blocks.append(PlannedBlock(members, keys[where], values[where], empty if empty.any() else None))
        order = torch.tensor([member for block in self.blocks for member in block.segments], device=keys.device)
        self.back = torch.argsort(order)

    def append(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attend with the next tokens [B, Hq, q, D] to what is kept and to themselves, causally, [B, q, Hq, Dv]."""
        batch, heads, count, dim = query.shape
        packed = query.reshape(batch * self.heads, 1, -1, dim)  # the heads of a group are rows of one matrix
        keys = key.flatten(0, 1)
        values = value.flatten(0, 1)
        outputs = []
        for block in self.blocks:
            block.append(keys[block.segments], values[block.segments])
            outputs.append(block.attend(packed[block.segments], count, scaling))
        joined = torch.cat(outputs)[self.back]
        return joined.view(batch, heads, count, -1).transpose(1, 2).contiguous()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the sequences of other beams of the same prompts."""
        for block in self.blocks:
            block.reorder(
                [int(beam_idx[part // self.heads]) * self.heads + part % self.heads for part in block.segments]
            )


class PlannedBlock:
    """Entries of some kv heads (segments: sequence * heads + head) [S, columns, D]; `empty` [S, columns] have none."""

    def __init__(self, segments: list[int], keys: Tensor, values: Tensor, empty: Tensor | None) -> None:
        self.segments = segments
        self.end = keys.shape[1]
        self.keys = keys
        self.values = values
        self.bias = None
        if empty is not None:
            self.bias = keys.new_zeros(empty.shape).masked_fill(empty, float("-inf"))

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add columns [S, q, D], with room for more where there is none."""
        first = self.end
        self.end += keys.shape[1]
        if self.end > self.keys.shape[1]:
            room = (0, self.end + max(32, self.end // 8) - self.keys.shape[1])
            self.keys = F.pad(self.keys, (0, 0, *room))
            self.values = F.pad(self.values, (0, 0, *room))
            self.bias = None if self.bias is None else F.pad(self.bias, room)
        self.keys[:, first : self.end] = keys
        self.values[:, first : self.end] = values

    def attend(self, query: Tensor, count: int, scaling: float) -> Tensor:
        """Return attention of the last `count` tokens, queries of a group [S, 1, G * count, D], as they are shaped."""
        bias = None if self.bias is None else self.bias[:, None, None, : self.end]
        if count > 1:
            later = query.new_ones(count, self.end, dtype=torch.bool).triu(self.end - count + 1)
            bias = (query.new_zeros(1) if bias is None else bias).masked_fill(
                later.repeat(query.shape[2] // count, 1), float("-inf")
            )
        keys = self.keys[:, None, : self.end]
        values = self.values[:, None, : self.end]
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scaling)

    def reorder(self, sources: list[int]) -> None:
        """Take the entries of segments `sources`, which are all in this block."""
        rows = [self.segments.index(source) for source in sources]
        self.keys = self.keys[rows]
        self.values = self.values[rows]
        self.bias = None if self.bias is None else self.bias[rows]


def groups(counts: list[int], waste: float) -> list[list[int]]:
    """Group heads that keep as many entries, and neighbours while that adds no more than a share of empty columns."""
    made = [(count, [place for place, kept in enumerate(counts) if kept == count]) for count in sorted({*counts})]
    allowance = int(sum(counts) * waste)
    while len(made) > 1:
        costs = [(longer[0] - shorter[0]) * len(shorter[1]) for shorter, longer in pairwise(made)]
        cheapest = costs.index(min(costs))
        if costs[cheapest] > allowance:
            break
        allowance -= costs[cheapest]
        made[cheapest : cheapest + 2] = [(made[cheapest + 1][0], sorted(made[cheapest][1] + made[cheapest + 1][1]))]
    return [members for _, members in made]


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Serve as the attention of a model: SDPA where nothing is planned, and for prompts, which are then evicted."""
    layer: PlannedLayer | None = getattr(key, LAYER_TAG, None)
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ValueError("the model's attention is more than a softmax of products: use kvsearch.attach")
    scaling = kwargs.get("scaling")
    scaling = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    if layer is not None and layer.blocks:
        return layer.append(query, key, value, scaling), None
    output: Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)[0]
    if layer is not None:
        prompt = PlannedPrompt(query, key, value, attention_mask, scaling, kwargs.get("position_ids"))
        layer.evict(key, value, layer.policy.keep(prompt, layer.budgets))
    return output, None


# --- policies ---------------------------------------------------------------------------------------------------------


class PlannedPrompt:
    """A prompt in one layer: queries [B, Hq, T, D], keys and values [B, Hkv, T, D], and which columns are padding."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, positions: Tensor | None
    ) -> None:
        batch, heads, length, dim = key.shape
        self.key = key
        self.value = value
        self.query = query.reshape(batch, heads, -1, length, dim)  # by group
        self.scaling = scaling
        self.valid = torch.ones(batch, length, dtype=torch.bool, device=key.device)
        if mask is not None:
            row = mask[:, 0, -1, -length:]
            self.valid = (row if row.dtype == torch.bool else row >= 0).expand(batch, length)
        if not bool(self.valid[:, -1].all()):
            raise ValueError("a prompt ends with padding: pad batches on the left (padding_side='left')")
        self.lengths = self.valid.sum(-1)
        self.index = (self.valid.cumsum(-1) - 1).masked_fill(~self.valid, -1)
        self.positions = self.index.clamp(min=0) if positions is None else positions.expand(batch, length)

    def rows(self, count: int) -> Iterator[tuple[int, Tensor]]:
        """Yield a sequence and the attention [Hkv, G, rows, T] fp32 of some of its last `count` tokens; all come."""
        length = self.key.shape[2]
        count = min(count, length)
        step = max(1, BYTES // (4 * self.query.shape[1] * self.query.shape[2] * length))
        for sequence, first in (
            (row, at) for row in range(len(self.key)) for at in range(length - count, length, step)
        ):
            query = self.query[sequence, :, :, first : min(first + step, length)].float()
            logits = torch.einsum("hgqd,htd->hgqt", query, self.key[sequence].float()) * self.scaling
            at = torch.arange(first, first + query.shape[2], device=query.device)[:, None]
            columns = torch.arange(length, device=query.device)
            hidden = (columns > at) | ~self.valid[sequence]
            yield sequence, logits.masked_fill(hidden, float("-inf")).softmax(-1).nan_to_num(0.0)


class PlannedPolicy:
    """A policy by its name and parameters; `rotary` is the rotary embedding of the model."""

    def __init__(self, spec: dict[str, Any], rotary: Any) -> None:
        self.name = spec["name"]
        self.rotary = rotary
        self.params = {**POLICY_DEFAULTS[self.name], **spec["params"]}
        window = self.params.get("protect", -1)
        recent = {"streaming": 1, "h2o": self.params.get("recent") or 1}
        self.sinks = int(self.params["sinks"])
        self.recent = int(recent.get(self.name, self.params.get("window", 0) if window < 0 else window))

    def keep(self, prompt: PlannedPrompt, budgets: Any) -> Tensor:
        """Return which entries stay at budgets of a length, [B, Hkv, T] bool."""
        lengths = prompt.lengths.tolist()
        limits = torch.tensor([budgets(length) for length in lengths])
        limits = limits.minimum(torch.tensor(lengths)[:, None]).to(prompt.key.device)[..., None]
        scores = getattr(self, self.name)(prompt)
        if self.name == "h2o" and not self.params["recent"]:  # a share of the budget is for what is recent
            share = 1 - self.params["recent_share"]
            recent = [
                [limit - math.floor(limit * share + SHARE_GUARD) for limit in row] for row in limits[..., 0].tolist()
            ]
            first = (torch.tensor(recent, device=limits.device)[..., None] + self.sinks).minimum(limits)
            newest = self.ranks(prompt, prompt.index.float()[:, None].expand_as(scores))
            scores = scores.masked_fill(newest < first, float("inf"))
        return (self.ranks(prompt, scores) < limits) & prompt.valid[:, None]

    def ranks(self, prompt: PlannedPrompt, scores: Tensor) -> Tensor:
        """Return the place of each entry in its head: the newest, sinks, other recent ones, then by score; no padding.

        Equal scores are taken by position.
        """
        index = prompt.index
        age = prompt.lengths[:, None] - 1 - index
        is_recent = prompt.valid & (age < self.recent)
        order = torch.where(is_recent, torch.where(age == 0, 0, age + self.sinks), -1)
        is_sink = prompt.valid & (index < self.sinks) & ~(is_recent & (age == 0))
        order = torch.where(is_sink, index + int(self.recent > 0), order)[:, None]
        place = inverse(scores.masked_fill(~prompt.valid[:, None], float("-inf")), descending=True)
        key = torch.where(order >= 0, order, place + self.sinks + self.recent)
        return inverse(key.masked_fill(~prompt.valid[:, None], 2 * key.shape[-1] + self.sinks + self.recent))

    def streaming(self, prompt: PlannedPrompt) -> Tensor:
        """Return the position, [B, Hkv, T]."""
        return torch.arange(prompt.key.shape[2], device=prompt.key.device).float().expand(prompt.key.shape[:3])

    def keydiff(self, prompt: PlannedPrompt) -> Tensor:
        """Return the negative cosine to the mean direction of all keys."""
        keys = prompt.key.float().masked_fill(~prompt.valid[:, None, :, None], 0.0)
        mean = F.normalize(keys, dim=-1, eps=1e-8).sum(-2) / prompt.lengths[:, None, None]
        return -F.cosine_similarity(keys, mean[:, :, None], dim=-1, eps=1e-8)

    def h2o(self, prompt: PlannedPrompt) -> Tensor:
        """Return the attention received from all queries, mean over a group."""
        total = prompt.key.new_zeros(prompt.key.shape[:3], dtype=torch.float32)
        for sequence, probability in prompt.rows(prompt.key.shape[2]):
            total[sequence] += probability.sum((1, 2)) / probability.shape[1]
        return total

    def snapkv(self, prompt: PlannedPrompt) -> Tensor:
        """Return the pooled attention of the last window of queries."""
        window, kernel, pooling = (self.params[name] for name in ("window", "kernel", "pooling"))
        total = prompt.query.new_zeros(prompt.query.shape[:4], dtype=torch.float32)
        for sequence, probability in prompt.rows(window):
            total[sequence] += probability.sum(2)
        scores = total.amax(2) if self.params["group"] == "max" else total.mean(2)
        scores = scores / prompt.lengths.clamp(min=1, max=window)[:, None, None]
        if kernel <= 1 or pooling == "none":
            return scores
        inside = prompt.valid & (prompt.index < (prompt.lengths - self.recent)[:, None])
        scores = scores.masked_fill(~inside[:, None], float("-inf") if pooling == "max" else 0.0)
        return (F.max_pool1d if pooling == "max" else F.avg_pool1d)(scores, kernel, 1, kernel // 2)

    def expected_attention(self, prompt: PlannedPrompt) -> Tensor:
        """Return the attention expected of later queries, by the mean and covariance of this prompt's."""
        batch, heads, group, _, dim = prompt.query.shape
        cos, sin = self.tables(prompt.positions)
        scale = cos.square() + sin.square()
        plain = rotate(prompt.query.float().flatten(1, 2), (cos / scale)[:, None], (-sin / scale)[:, None])
        weight = (prompt.index >= self.sinks)[:, None, :, None].float()
        count = weight.sum(2, keepdim=True).clamp(min=1)
        mean = (plain * weight).sum(2, keepdim=True) / count
        centred = (plain - mean) * weight
        covariance = centred.transpose(-1, -2) @ centred / count
        later = prompt.positions[:, -1:] + 1 + torch.arange(self.params["future"], device=plain.device)
        turn = self.mean_rotation(later, dim)
        keys = prompt.key.float()
        turned = (turn @ mean.transpose(-1, -2)).view(batch, heads, group, dim)
        logits = torch.einsum("bhgd,bhtd->bhgt", turned, keys) * prompt.scaling
        if self.params["covariance"]:
            spread = (turn @ covariance @ turn.transpose(-1, -2)).view(batch, heads, group, dim, dim)
            for head, part in enumerate(spread.unbind(1)):
                logits[:, head] += ((keys[:, head, None] @ part) * keys[:, head, None]).sum(-1) * prompt.scaling**2 / 2
        hidden = (prompt.index < self.sinks)[:, None]
        expected = logits.masked_fill(hidden[:, None], float("-inf")).softmax(-1).nan_to_num(0.0).mean(2)
        scores: Tensor = expected + self.params["epsilon"]
        if self.params["value_norm"]:
            scores = scores * prompt.value.float().norm(dim=-1)
        return scores.masked_fill(hidden, 0.0)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of positions [B, T], [B, T, D] fp32."""
        by_type = {"layer_type": "full_attention"} if hasattr(self.rotary, "full_attention_inv_freq") else {}
        probe = torch.empty(0, dtype=torch.float32, device=positions.device)
        cos, sin = self.rotary(probe, position_ids=positions.reshape(1, -1), **by_type)
        return cos.view(*positions.shape, -1), sin.view(*positions.shape, -1)

    def mean_rotation(self, positions: Tensor, dim: int) -> Tensor:
        """Return the mean rotation at positions [B, N] as a matrix, [B, 1, D, D]."""
        cos, sin = (table.mean(1) for table in self.tables(positions))
        unit = torch.eye(dim, device=cos.device)
        turned = rotate(unit.expand(len(cos), dim, dim), cos[:, None], sin[:, None])  # rows: what a unit becomes
        return turned.transpose(-1, -2).unsqueeze(1)


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first numbers of states [..., T, D] by tables [..., T, rotary dims]."""
    turned = states[..., : cos.shape[-1]]
    left, right = turned.chunk(2, dim=-1)
    return torch.cat((turned * cos + torch.cat((-right, left), dim=-1) * sin, states[..., cos.shape[-1] :]), dim=-1)


def inverse(values: Tensor, descending: bool = False) -> Tensor:
    """Return the place of each of `values` when they are sorted along the last dimension, equal ones as they come."""
    order = torch.argsort(values, dim=-1, stable=True, descending=descending)
    places = torch.arange(values.shape[-1], device=values.device).expand_as(order)
    inverted: Tensor = torch.empty_like(order).scatter_(-1, order, places)
    return inverted

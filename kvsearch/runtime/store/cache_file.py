"""A compressed cache on disk: safetensors, with the plan it was made under and the model it is of.

Per planned layer `layers.I.`: blocks of kv heads that hold (nearly) as many entries, each with `segments` [S] (sequence
times kv heads plus kv head), `keys` [S, N, D], `values` [S, N, Dv] and `positions` [S, N] (the index of the token, -1
where no entry), where the plan lets entries carry what left `log_weights` [S, N] (none: all 0), and under a decode
phase what its rule goes on with. Other layers have the attributes of transformers'
own cache layers. `tokens` [B, T] are what was read, where that was said; `mask` [B, T] is 0 where it was padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from kvsearch.budgets.plan_checks import check_plan
from kvsearch.core.canonical import canonical_json, hash_json
from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.core.fields import Count, Record, Text, is_none
from kvsearch.core.files import check_target
from kvsearch.core.parsing import parse_json, require_header, validate_content
from kvsearch.core.resources import read_version
from kvsearch.kernels.dispatch import serves
from kvsearch.models.architecture import describe, find_decoder
from kvsearch.models.fingerprint import compute_fingerprint
from kvsearch.plan import Plan
from kvsearch.plan.saved import find_weights, write_weights
from kvsearch.policies import Policy
from kvsearch.policies.decoding import LOG_WEIGHTS, Cached, State, widen_marks
from kvsearch.runtime.collector import Rotary
from kvsearch.runtime.decode.decoding import Decoding
from kvsearch.runtime.decode.rule import StepRule, decode_needs
from kvsearch.runtime.layer import EvictingLayer
from kvsearch.runtime.read_mask import ReadMask
from kvsearch.runtime.store.blocks import GROWTH_SHARE, MAX_ROOM, MIN_SPARE, Block
from kvsearch.runtime.store.flat import FlatBlock
from kvsearch.runtime.store.slots import SlotBlock
from kvsearch.runtime.store.storage import RaggedStore
from kvsearch.runtime.store.tensor_file import read_about, read_tensors, write_tensors

Tensors = dict[str, Tensor]

CACHE_FORMAT = "kvsearch.cache"
CACHE_VERSION = 1
READ_TENSORS = ("tokens", "mask")


class CacheHeader(Record):
    """Header of a cache file: plan (which names the model), dtype of the entries, sequences, and tokens of each.

    `length` counts padding, `rest` is text behind the tokens, to be read with what follows. The versions are those it
    was written with.
    """

    format: Literal["kvsearch.cache"] = "kvsearch.cache"
    version: Literal[1] = 1
    plan: Plan
    dtype: Text
    sequences: Count
    length: Count
    rest: Annotated[Text | None, Field(exclude_if=is_none)] = None
    kvsearch: Text
    torch: Text
    transformers: Text

    def require(self, path: str | Path, model: Any, plan: Plan | None) -> None:
        """Raise an IncompatibleError unless a file with this header is of `plan` (None: of any) and fits `model`."""
        if plan is not None and (own := hash_json(self.plan)) != (other := hash_json(plan)):
            raise IncompatibleError(
                f"{path} was compressed under another plan ({own[:12]}, not {other[:12]}): compress the context under "
                "this one, or leave the plan out"
            )
        self.plan.model.require(compute_fingerprint(model), str(path))
        if self.dtype != (runs := _name_dtype(model.dtype)):
            raise IncompatibleError(
                f"{path} holds {self.dtype} and the model runs in {runs}: load it with --dtype {self.dtype}, or "
                "compress the context again"
            )


def write_cache(
    path: str | Path,
    plan: Plan,
    layers: Sequence[Any],
    read_mask: ReadMask,
    read: Sequence[Tensor | None],
    overwrite: bool,
    rest: str = "",
) -> int:
    """Write the layers of a cache whose prompt has passed, and what was `read`; return the size of the file in bytes.

    Raises:
        UsageError: there is nothing to write yet, `read` is not what was read, or no such file can be written.
        EnvironmentFault: the disk is full, permissions are missing; an existing file is left as it was.
    """
    tensors = {name: tensor for name, tensor in zip(READ_TENSORS, read, strict=True) if tensor is not None}
    batch = 0
    length = 0
    dtype = torch.float32
    for index, layer in enumerate(layers):
        if isinstance(layer, EvictingLayer):
            holder = layer.evicted
            held = _dump_ragged(holder) if isinstance(holder, RaggedStore) else _dump_decoding(holder)
            batch = holder.batch
            length = layer.seen
            dtype = layer.dtype
        else:
            held = _dump_stock(layer)
        tensors |= {f"layers.{index}.{name}": tensor for name, tensor in held.items()}
    if "mask" not in tensors and (real := read_mask.columns(length)) is not None:
        tensors["mask"] = real
    for name in READ_TENSORS:
        if name in tensors and tuple(tensors[name].shape) != (batch, length):
            given = list(tensors[name].shape)
            raise UsageError(f"{name} is {given} and the cache has read {[batch, length]}: give what it read")
    if "mask" in tensors and not read_mask.shows_all(tensors["mask"].bool()):
        raise UsageError("mask does not say which tokens were padding when the cache read them: leave it out")
    header = CacheHeader(
        plan=plan,
        dtype=_name_dtype(dtype),
        sequences=batch,
        length=length,
        rest=rest or None,
        kvsearch=read_version("kvsearch"),
        torch=read_version("torch"),
        transformers=read_version("transformers"),
    )
    check_target(path)
    # Weights first: a cache that is there can be loaded, whatever stops this command in between.
    write_weights(plan.policies, path)
    return write_tensors(path, tensors, canonical_json(header).decode(), overwrite)


def read_cache(path: str | Path) -> tuple[CacheHeader, Tensors]:
    """Read and check a cache file, and make the weights known that its plan names; tensors are on the CPU.

    Raises:
        UsageError: there is no such file, or it is damaged, of another kind or version, or weights are missing.
        EnvironmentFault: it cannot be read.
    """
    about, tensors = read_tensors(path)
    header = _read_header(about, path)
    find_weights(header.plan.policies, path)
    return header, tensors


def read_header(path: str | Path) -> CacheHeader:
    """Read the header of a cache file alone, without its tensors; errors as `read_cache`."""
    return _read_header(read_about(path), path)


def _read_header(about: str, path: str | Path) -> CacheHeader:
    data = require_header(parse_json(about.encode(), f"the metadata of {path}"), CACHE_FORMAT, CACHE_VERSION, str(path))
    header = validate_content(CacheHeader.model_validate, data, str(path))
    check_plan(header.plan, f"the plan in {path}")
    return header


def _name_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dump_ragged(store: RaggedStore) -> Tensors:
    tensors = {"tokens": store.tokens, "longest": store.longest, "appended": torch.tensor(store.appended)}
    tensors["even"] = torch.tensor(store.even)
    for number, block in enumerate(block for joint in store.blocks for block in joint.grouped()):
        positions = block.positions[:, : block.end]
        entries = {"keys": block.keys[:, : block.end], "values": block.values[:, : block.end]}
        # Written where some entry may carry something; a missing array stands for zeros.
        if block.log_weights is not None:
            entries["log_weights"] = block.log_weights[:, : block.end]
        part = {name: _make_blank(states, positions) for name, states in entries.items()}
        part |= {"segments": block.segments, "positions": positions, "padded": torch.tensor(block.padded)}
        tensors |= _add_prefix(f"blocks.{number}", part)
    return tensors


def _dump_decoding(decoding: Decoding) -> Tensors:
    rule = decoding.rule
    tensors = {"budgets": torch.from_numpy(rule.budgets), "scored": torch.from_numpy(rule.scored)}
    tensors |= {"next_position": rule.next_position, "peak": torch.from_numpy(decoding.peak)}
    if rule.queries is not None:
        tensors["queries"] = rule.queries
    for number, block in enumerate(decoding.blocks):
        # Slots that were never in use are left out; how many there are is written as `capacity`.
        cached = block.first(block.width)
        part = {"segments": torch.from_numpy(block.names), "seen": block.seen, "slot": block.slot}
        part |= {"positions": cached.positions, "capacity": torch.tensor(block.cached.positions.shape[1])}
        part |= {name: _make_blank(getattr(cached, name), cached.positions) for name in ("keys", "values")}
        for kind in ("entries", "heads"):
            part |= _add_prefix(f"state.{kind}", getattr(cached.state, kind))
        tensors |= _add_prefix(f"blocks.{number}", part)
    return tensors


def _dump_stock(layer: Any) -> Tensors:
    """Return the attributes of a layer of transformers' own; a dtype is an empty tensor of it."""
    tensors: Tensors = {}
    for name, value in vars(layer).items():
        for key, item in value.items() if isinstance(value, dict) else ((None, value),):
            place = name if key is None else f"{name}.{key}"
            if isinstance(item, Tensor):
                tensors[place] = item
            elif isinstance(item, bool | int):
                tensors[place] = torch.tensor(item)
            elif isinstance(item, torch.dtype):
                tensors[place] = torch.empty(0, dtype=item)
            elif isinstance(item, torch.device):
                tensors[place] = torch.tensor(True)
            elif item is not None:
                raise UsageError(f"a cache with a {type(layer).__name__} cannot be saved: {place} is no tensor")
    return tensors


class TensorReader:
    """Takes tensors out of a part of a file one by one; ValueError where one is missing or not what it must be."""

    def __init__(self, tensors: Tensors, prefix: str, device: torch.device) -> None:
        self.tensors = tensors  # of the whole file
        self.prefix = prefix
        self.device = device

    def take(
        self, name: str, dtype: torch.dtype | None = None, *shape: int | None, within: tuple[int, int] | None = None
    ) -> Tensor:
        """Return a tensor [*shape] (None: any size) of numbers `within` two, these included, on the device."""
        place = self.prefix + name
        if place not in self.tensors:
            raise ValueError(f"{place} is missing")
        # Taken out, so that whatever is left at the end is known to be nothing of ours.
        tensor = self.tensors.pop(place)
        fits = len(tensor.shape) == len(shape) and all(n in (None, m) for n, m in zip(shape, tensor.shape, strict=True))
        if not fits or dtype not in (None, tensor.dtype):
            raise ValueError(f"{place} is {tensor.dtype} {list(tensor.shape)}, not {dtype} {list(shape)}")
        if within and tensor.numel() and not within[0] <= int(tensor.min()) <= int(tensor.max()) <= within[1]:
            raise ValueError(f"{place} is not between {within[0]} and {within[1]} throughout")
        return tensor.to(self.device)

    def names(self) -> list[str]:
        """Return the names of all tensors that are left."""
        return [place.removeprefix(self.prefix) for place in self.tensors if place.startswith(self.prefix)]

    def under(self, prefix: str) -> TensorReader:
        """Return a reader of the tensors below a prefix."""
        return TensorReader(self.tensors, f"{self.prefix}{prefix}.", self.device)

    def blocks(self) -> list[TensorReader]:
        """Return the readers of a layer's blocks, at least one."""
        count = len({name.split(".")[1] for name in self.names() if name.startswith("blocks.")})
        return [self.under(f"blocks.{number}") for number in range(max(count, 1))]


class CacheShape(NamedTuple):
    """Sizes that all planned layers of a cache share; `seen` tokens have come, padding counted."""

    batch: int
    heads: int
    query_heads: int
    seen: int
    fewest: int  # tokens that a sequence has without padding: as many where the file does not say what is padding
    dtype: torch.dtype


def fill_layers(path: str | Path, header: CacheHeader, tensors: Tensors, model: Any, layers: Sequence[Any]) -> None:
    """Fill the empty layers of a cache with the tensors of a file, on the devices of the model's layers.

    Raises:
        UsageError: the file does not hold what its header says.
    """
    shape = describe(model)
    fewest = 0 if "mask" in tensors else header.length
    of = CacheShape(header.sequences, shape.kv_heads, shape.query_heads, header.length, fewest, model.dtype)
    rest = {name: tensor for name, tensor in tensors.items() if name not in READ_TENSORS}
    try:
        for name in READ_TENSORS:
            if name in tensors and tuple(tensors[name].shape) != (header.sequences, header.length):
                raise ValueError(f"{name} is not {[header.sequences, header.length]}")
        modules: Any = find_decoder(model).layers
        for index, layer in enumerate(layers):
            # A model may be spread over devices: each layer's entries go to its own.
            device: torch.device = next(modules[index].parameters()).device  # where the layer computes
            reader = TensorReader(rest, f"layers.{index}.", model.device if device.type == "meta" else device)
            if isinstance(layer, EvictingLayer):
                _fill_planned(layer, reader, of)
            else:
                _fill_stock(layer, reader)
        if rest:
            raise ValueError(f"{min(rest)} is not known")
    except (ValueError, IndexError, UsageError) as error:
        raise UsageError(f"{path} does not hold what it should: {error}") from error


def _fill_planned(layer: EvictingLayer, reader: TensorReader, of: CacheShape) -> None:
    """Fill an empty planned layer from a file."""
    if layer.decode is None:
        store = _load_ragged(reader, of)
        keys = store.blocks[0].keys
        weights = [block.log_weights for block in store.blocks]
        layer.holder = store
    else:
        decoding = _load_decoding(reader, layer.decode.policy, layer.rotary, layer.index, of)
        keys = decoding.blocks[0].cached.keys
        weights = [block.cached.log_weights for block in decoding.blocks]
        layer.holder = decoding
    carries = layer.prefill is not None and layer.prefill.carries
    if any((held is not None) != carries for held in weights):
        wrong = f"lacks {LOG_WEIGHTS}, which" if carries else f"has {LOG_WEIGHTS}, which nothing in"
        raise ValueError(f"layers.{layer.index} {wrong} the plan asks for")
    # Only their dtype and device are read.
    layer.lazy_initialization(keys, keys)
    layer.seen = of.seen


def _load_ragged(reader: TensorReader, of: CacheShape) -> RaggedStore:
    tokens = reader.take("tokens", torch.int32, of.batch, within=(of.fewest, of.seen))
    longest = reader.take("longest", torch.int32, of.batch)  # before some were taken back: may be more than `seen`
    even = bool(reader.take("even", torch.bool))
    appended = int(reader.take("appended", torch.int64, within=(0, of.seen)))
    blocks = []
    for part in reader.blocks():
        segments = part.take("segments", torch.int64, None)
        positions = part.take("positions", torch.int32, len(segments), None, within=(-1, of.seen - 1))
        keys, values = (part.take(name, of.dtype, *positions.shape, None) for name in ("keys", "values"))
        padded = bool(part.take("padded", torch.bool))
        weights = None
        if LOG_WEIGHTS in part.names():
            weights = _require_finite(part.take(LOG_WEIGHTS, of.dtype, *positions.shape), part.prefix)
        blocks.append(Block(segments, keys, values, positions, positions.shape[1], padded, weights))
    _require_all((block.segments for block in blocks), of.batch * of.heads)
    if appended > min(block.end for block in blocks):
        raise ValueError(f"{appended} tokens came after the prompt, and some heads hold fewer")
    flat = serves(blocks[0].keys, blocks[0].values)
    held = [FlatBlock.of_blocks(blocks, appended)] if flat else blocks
    return RaggedStore(held, of.heads, tokens, even, appended, longest)


def _load_decoding(reader: TensorReader, policy: Policy, rotary: Rotary, layer: int, of: CacheShape) -> Decoding:
    segments = of.batch * of.heads
    budgets, peak = (reader.take(name, torch.int64, segments).cpu().numpy() for name in ("budgets", "peak"))
    scored = reader.take("scored", torch.int64, of.batch).cpu().numpy()
    position = reader.take("next_position", None, of.batch)
    queries = None
    if "queries" in reader.names():
        queries = reader.take("queries", None, of.batch, of.query_heads, decode_needs(policy).query_rows, None)
    rule = StepRule(policy, budgets, rotary, layer, of.heads, queries, position, scored)
    blocks = [_load_slots(part, rule, of) for part in reader.blocks()]
    _require_all((torch.from_numpy(block.names) for block in blocks), segments)
    return Decoding(blocks, rule, of.seen, peak)


def _load_slots(part: TensorReader, rule: StepRule, of: CacheShape) -> SlotBlock:
    names = part.take("segments", torch.int64, None, within=(0, len(rule.budgets) - 1))
    positions = part.take("positions", torch.int64, len(names), None, within=(-1, of.seen - 1))
    size = positions.shape
    width = size[1]
    # The capacity is a number in a file: without a bound it could ask for any amount of memory.
    max_width = width + max(MIN_SPARE, MAX_ROOM, int(width * GROWTH_SHARE)) + 1
    capacity = int(part.take("capacity", torch.int64, within=(width, max_width)))

    def roomy(tensor: Tensor, empty: int = 0) -> Tensor:
        filled = tensor.new_full((size[0], capacity, *tensor.shape[2:]), empty)
        filled[:, :width] = tensor
        return filled

    keys, values = (roomy(part.take(name, of.dtype, *size, None)) for name in ("keys", "values"))
    entries = {name: roomy(tensor) for name, tensor in _state(part.under("state.entries"), size).items()}
    if LOG_WEIGHTS in entries:
        _require_finite(entries[LOG_WEIGHTS], part.prefix)
    state = State(entries, _state(part.under("state.heads"), size[:1]))
    cached = Cached(keys, values, roomy(positions, -1), state, rule.layer, names % rule.heads)
    slot = part.take("slot", torch.int64, len(names), within=(0, capacity - 1))
    tokens = part.take("seen", None, len(names), within=(of.fewest, of.seen))
    used = (positions >= 0).sum(-1).cpu().numpy()
    host = names.cpu().numpy()
    limits = rule.limits(host, names.device)
    # Which slots are free is not written, so holes are to be expected anywhere.
    return SlotBlock(host, names // rule.heads, cached, limits, used, tokens, slot, width, holes=True)


def _state(reader: TensorReader, size: Sequence[int]) -> Tensors:
    state = {name: reader.tensors.pop(reader.prefix + name).to(reader.device) for name in reader.names()}
    for name, tensor in state.items():
        if tuple(tensor.shape[: len(size)]) != tuple(size):
            raise ValueError(f"state {name} is {list(tensor.shape)}, and does not begin with {list(size)}")
    return state


def _require_finite(log_weights: Tensor, place: str) -> Tensor:
    if not bool(log_weights.isfinite().all()):
        raise ValueError(f"{place}{LOG_WEIGHTS} has a log weight that is not finite")
    return log_weights


def _fill_stock(layer: Any, reader: TensorReader) -> None:
    """Fill an empty layer of transformers' own from a file."""
    fresh = vars(layer)
    for place in reader.names():
        name, _, key = place.partition(".")
        tensor = reader.tensors.pop(reader.prefix + place)
        value: Any = tensor.to(reader.device)
        if name not in fresh and name not in ("dtype", "device"):
            raise ValueError(f"{place} is not known to a {type(layer).__name__} of this transformers")
        if name == "dtype":
            value = tensor.dtype
        elif name == "device":
            value = reader.device
        elif tensor.dim() == 0 and not isinstance(fresh.get(name), Tensor):
            value = tensor.item()
        if key and isinstance(fresh[name], dict) and key.isdecimal() and int(key) in fresh[name]:
            fresh[name][int(key)] = value
        elif not key and not isinstance(fresh.get(name), dict):
            fresh[name] = value
        else:
            raise ValueError(f"{place} is not known to a {type(layer).__name__} of this transformers")


def _require_all(names: Iterable[Tensor], count: int) -> None:
    """Raise a ValueError unless every one of `count` segments is in one block, in ascending order there."""
    parts = [part.cpu().numpy() for part in names]
    ascending = all((np.diff(part) > 0).all() for part in parts)
    if not ascending or sorted(np.concatenate(parts).tolist()) != list(range(count)):
        raise ValueError(f"its blocks do not hold {count} heads, each once")


def _make_blank(states: Tensor, positions: Tensor) -> Tensor:
    # Empty slots still have the numbers of what left them. Zeros make equal caches equal files, and show no evicted
    # text.
    return states.masked_fill(widen_marks(positions < 0, states), 0)


def _add_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}

"""What a layer of a cache holds, as named tensors, and the same layer made of them again.

Places without an entry are zeros, so that equal caches have equal tensors and nothing of what was evicted is in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvsearch.errors import UsageError
from kvsearch.policies import Policy
from kvsearch.policies.decoding import Cached, State
from kvsearch.runtime.blocks import GROWTH, MIN_SPARE, Block
from kvsearch.runtime.collector import Rotary
from kvsearch.runtime.decoding import Decoding
from kvsearch.runtime.layer import EvictingLayer
from kvsearch.runtime.rule import StepRule
from kvsearch.runtime.slots import SlotBlock, SlotStore
from kvsearch.runtime.storage import RaggedStore

Tensors = dict[str, Tensor]
KINDS = (("entries", 2), ("heads", 1))  # of running state, and how many dimensions of it are those of a block


def of_holder(holder: RaggedStore | Decoding) -> Tensors:
    """Return what a planned layer holds once its prompt has passed."""
    return _of_ragged(holder) if isinstance(holder, RaggedStore) else _of_decoding(holder)


def _of_ragged(store: RaggedStore) -> Tensors:
    tensors = {"tokens": store.tokens, "longest": store.longest, "appended": torch.tensor(store.appended)}
    tensors["even"] = torch.tensor(store.even)
    for number, block in enumerate(block for one in store.blocks for block in one.grouped()):
        positions = block.positions[:, : block.end]
        entries = {"keys": block.keys[:, : block.end], "values": block.values[:, : block.end]}
        part = {name: _blank(states, positions) for name, states in entries.items()}
        part |= {"segments": block.segments, "positions": positions, "padded": torch.tensor(block.padded)}
        tensors |= _under(f"blocks.{number}", part)
    return tensors


def _of_decoding(decoding: Decoding) -> Tensors:
    rule, store = decoding.rule, decoding.store
    tensors = {"budgets": torch.from_numpy(rule.budgets), "scored": torch.from_numpy(rule.scored)}
    tensors |= {"next_position": rule.next_position, "peak": torch.from_numpy(decoding.peak)}
    if rule.queries is not None:
        tensors["queries"] = rule.queries
    for number, block in enumerate(store.blocks):
        cached = block.in_use()
        part = {"segments": torch.from_numpy(block.names), "seen": block.seen, "slot": block.slot}
        part |= {"positions": cached.positions, "capacity": torch.tensor(block.cached.positions.shape[1])}
        part |= {name: _blank(getattr(cached, name), cached.positions) for name in ("keys", "values")}
        for kind, _ in KINDS:
            part |= _under(f"state.{kind}", getattr(cached.state, kind))
        tensors |= _under(f"blocks.{number}", part)
    return tensors


def of_stock(layer: Any) -> Tensors:
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


class Given:
    """The tensors of one layer, taken one by one; ValueError where one is missing or not what it must be."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self.tensors, self.device = dict(tensors), device

    def take(self, name: str, dtype: torch.dtype | None = None, *shape: int | None) -> Tensor:
        """Return a tensor [*shape], None for any size, on the device of the layer."""
        if name not in self.tensors:
            raise ValueError(f"{name} is missing")
        found = self.tensors.pop(name)
        fits = len(found.shape) == len(shape) and all(n in (None, m) for n, m in zip(shape, found.shape, strict=True))
        if not fits or dtype not in (None, found.dtype):
            raise ValueError(f"{name} is {found.dtype} {list(found.shape)}, not {dtype} {list(shape)}")
        return found.to(self.device)

    def number(self, name: str, most: int) -> int:
        """Return a whole number between 0 and `most`."""
        found = int(self.take(name, torch.int64))
        if not 0 <= found <= most:
            raise ValueError(f"{name} is {found}, not between 0 and {most}")
        return found

    def under(self, prefix: str) -> Given:
        """Take out the tensors whose names begin so, without that."""
        begin = f"{prefix}."
        mine = {name: self.tensors.pop(name) for name in list(self.tensors) if name.startswith(begin)}
        return Given({name[len(begin) :]: tensor for name, tensor in mine.items()}, self.device)

    def done(self) -> None:
        """Raise a ValueError if something was not taken."""
        if self.tensors:
            raise ValueError(f"{min(self.tensors)} is not known")


class Whole(NamedTuple):
    """What holds for all planned layers of a cache; `seen` tokens have come, padding counted."""

    batch: int
    heads: int
    query_heads: int
    seen: int
    dtype: torch.dtype


def fill_planned(layer: EvictingLayer, given: Given, of: Whole) -> None:
    """Let an empty planned layer hold what was written of one."""
    if layer.decode is None:
        store = _ragged(given, of)
        layer.holder, first = store, store.blocks[0].keys
    else:
        decoding = _decoding(given, layer.decode.policy, layer.rotary, layer.index, of)
        layer.holder, first = decoding, decoding.store.blocks[0].cached.keys
    given.done()
    layer.lazy_initialization(first, first)
    layer.seen = of.seen


def _ragged(given: Given, of: Whole) -> RaggedStore:
    batch, heads, seen, dtype = of.batch, of.heads, of.seen, of.dtype
    tokens, longest = (_between(name, given.take(name, torch.int32, batch), 0, seen) for name in ("tokens", "longest"))
    even, appended = bool(given.take("even", torch.bool)), given.number("appended", seen)
    blocks = []
    for part in _blocks(given):
        segments = part.take("segments", torch.int64, None)
        positions = _between("positions", part.take("positions", torch.int32, len(segments), None), -1, seen - 1)
        size = positions.shape
        keys, values = (part.take(name, dtype, *size, None) for name in ("keys", "values"))
        blocks.append(Block(segments, keys, values, positions, size[1], bool(part.take("padded", torch.bool))))
        part.done()
    _require_all((block.segments for block in blocks), batch * heads)
    if appended > min(block.end for block in blocks):
        raise ValueError(f"{appended} tokens came after the prompt, and some heads hold fewer")
    return RaggedStore.of_blocks(blocks, heads, tokens, even, appended, longest)


def _decoding(given: Given, policy: Policy, rotary: Rotary, layer: int, of: Whole) -> Decoding:
    batch, heads = of.batch, of.heads
    budgets, peak = (given.take(name, torch.int64, batch * heads).cpu().numpy() for name in ("budgets", "peak"))
    scored, position = given.take("scored", torch.int64, batch).cpu().numpy(), given.take("next_position", None, batch)
    queries = given.take("queries", None, batch, of.query_heads, None, None) if "queries" in given.tensors else None
    rule = StepRule(policy, budgets, rotary, layer, heads, queries, position, scored)
    if queries is not None and queries.shape[2] != rule.needs.query_rows:
        raise ValueError(f"queries are {queries.shape[2]} rows, not {rule.needs.query_rows}")
    blocks = [_slots(part, rule, of) for part in _blocks(given)]
    _require_all((torch.from_numpy(block.names) for block in blocks), batch * heads)
    return Decoding(SlotStore(blocks, batch, heads), rule, peak, of.seen)


def _slots(part: Given, rule: StepRule, of: Whole) -> SlotBlock:
    seen = of.seen
    names = part.take("segments", torch.int64, None)
    names = _between("segments", names, 0, len(rule.budgets) - 1)
    positions = _between("positions", part.take("positions", torch.int64, len(names), None), -1, seen - 1)
    size = positions.shape
    width = size[1]
    capacity = part.number("capacity", width + max(MIN_SPARE, int(width * GROWTH)) + 1)
    if capacity < width:
        raise ValueError(f"capacity is {capacity}, below the {width} slots in use")

    def roomy(tensor: Tensor, empty: int = 0) -> Tensor:
        made = tensor.new_full((size[0], capacity, *tensor.shape[2:]), empty)
        made[:, :width] = tensor
        return made

    keys, values = (roomy(part.take(name, of.dtype, *size, None)) for name in ("keys", "values"))
    state = {kind: _state(part.under(f"state.{kind}"), size[:dimensions]) for kind, dimensions in KINDS}
    entries = {name: roomy(tensor) for name, tensor in state["entries"].items()}
    heads = names % rule.heads
    cached = Cached(keys, values, roomy(positions, -1), State(entries, state["heads"]), rule.layer, heads)
    host = names.cpu().numpy()
    slot = _between("slot", part.take("slot", torch.int64, len(names)), 0, capacity - 1)
    tokens = _between("seen", part.take("seen", None, len(names)), 0, seen)
    part.done()
    used = (positions >= 0).sum(-1).cpu().numpy()
    limits = rule.limits(host, names.device)
    return SlotBlock(host, names // rule.heads, cached, limits, used, tokens, slot, width, holes=True)


def fill_stock(layer: Any, given: Given) -> None:
    """Let an empty layer of transformers' own hold what was written of one."""
    fresh = vars(layer)
    for place in list(given.tensors):
        name, _, key = place.partition(".")
        tensor = given.tensors.pop(place)
        value: Any = tensor.to(given.device)
        if name not in fresh and name not in ("dtype", "device"):
            raise ValueError(f"{place} is not known to a {type(layer).__name__} of this transformers")
        if name == "dtype":
            value = tensor.dtype
        elif name == "device":
            value = given.device
        elif tensor.dim() == 0 and not isinstance(fresh.get(name), Tensor):
            value = tensor.item()
        if key and isinstance(fresh[name], dict) and key.isdecimal() and int(key) in fresh[name]:
            fresh[name][int(key)] = value
        elif not key and not isinstance(fresh.get(name), dict):
            fresh[name] = value
        else:
            raise ValueError(f"{place} is not known to a {type(layer).__name__} of this transformers")


def _blocks(given: Given) -> list[Given]:
    """Take the blocks of a layer, of which there is at least one."""
    found: list[Given] = []
    while any(name.startswith(f"blocks.{len(found)}.") for name in given.tensors):
        found.append(given.under(f"blocks.{len(found)}"))
    if not found:
        raise ValueError("blocks are missing")
    return found


def _state(given: Given, size: Iterable[int]) -> Tensors:
    wanted = tuple(size)
    for name, tensor in given.tensors.items():
        if tuple(tensor.shape[: len(wanted)]) != wanted:
            raise ValueError(f"state {name} is {list(tensor.shape)}, and does not begin with {list(wanted)}")
    return {name: tensor.to(given.device) for name, tensor in given.tensors.items()}


def _require_all(names: Iterable[Tensor], count: int) -> None:
    """Raise a ValueError unless every one of `count` segments is in one block, in ascending order there."""
    parts = [part.cpu().numpy() for part in names]
    ascending = all((np.diff(part) > 0).all() for part in parts)
    if not ascending or sorted(np.concatenate(parts).tolist()) != list(range(count)):
        raise ValueError(f"its blocks do not hold {count} heads, each once")


def _between(name: str, tensor: Tensor, low: int, high: int) -> Tensor:
    if tensor.numel() and not low <= int(tensor.min()) <= int(tensor.max()) <= high:
        raise ValueError(f"{name} are not all between {low} and {high}")
    return tensor


def _blank(states: Tensor, positions: Tensor) -> Tensor:
    return states.masked_fill((positions < 0)[..., None], 0)


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}

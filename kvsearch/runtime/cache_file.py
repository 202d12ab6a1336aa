"""A compressed cache on disk: safetensors, with the plan it was made under and the model it is of.

Per planned layer `layers.I.`: blocks of kv heads that hold (nearly) as many entries, each with `segments` [S] (sequence
times kv heads plus kv head), `keys` [S, N, D], `values` [S, N, Dv] and `positions` [S, N] (the index of the token, -1
where no entry), and under a decode phase what its rule goes on with. Other layers have the attributes of transformers'
own cache layers. `tokens` and `mask` [B, T] are what was read, where that was said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch import Tensor

from kvsearch.budgets.plan_checks import check_plan
from kvsearch.errors import IncompatibleError, UsageError
from kvsearch.models.architecture import decoder, describe
from kvsearch.plan import Plan
from kvsearch.plan.canonical import canonical_json, sha256_of
from kvsearch.plan.fields import Count, Record, Text
from kvsearch.plan.files import check_target
from kvsearch.plan.parsing import describe_validation_error, parse_json, require_header
from kvsearch.plan.weights import find_weights, put_weights
from kvsearch.resources import version
from kvsearch.runtime.layer import EvictingLayer
from kvsearch.runtime.layer_state import Given, Whole, fill_planned, fill_stock, of_holder, of_stock
from kvsearch.runtime.tensor_file import read_about, read_tensors, write_tensors

CACHE_FORMAT = "kvsearch.cache"
CACHE_VERSION = 1
READ = ("tokens", "mask")


class CacheHeader(Record):
    """What a cache is of: the plan (which names its model), the dtype of its entries, sequences, tokens of each.

    `length` counts padding. The versions are those it was written with.
    """

    format: Literal["kvsearch.cache"] = "kvsearch.cache"
    version: Literal[1] = 1
    plan: Plan
    dtype: Text
    sequences: Count
    length: Count
    kvsearch: Text
    torch: Text
    transformers: Text


@dataclass(frozen=True)
class CacheFile:
    """A cache file that was read and is whole; its tensors are on the CPU."""

    path: Path
    header: CacheHeader
    tensors: dict[str, Tensor]

    def require_plan(self, plan: Plan) -> None:
        """Raise an IncompatibleError unless the file is of this plan."""
        mine, other = sha256_of(self.header.plan), sha256_of(plan)
        if mine != other:
            raise IncompatibleError(
                f"{self.path} was compressed under another plan ({mine[:12]}, not {other[:12]}): compress the context "
                "under this one, or leave the plan out"
            )

    def require_dtype(self, model: Any) -> None:
        """Raise an IncompatibleError unless the model computes with numbers of the same kind."""
        runs = _dtype_name(model.dtype)
        if self.header.dtype != runs:
            raise IncompatibleError(
                f"{self.path} holds {self.header.dtype} and the model runs in {runs}: load it with --dtype "
                f"{self.header.dtype}, or compress the context again"
            )

    def fill(self, model: Any, layers: Sequence[Any]) -> None:
        """Let the empty layers of a cache of `model` hold what is in the file, on the devices of the model's layers.

        Raises:
            UsageError: the file does not hold what its header says.
        """
        shape, header, rest = describe(model), self.header, Given(self.tensors, torch.device("cpu"))
        of = Whole(header.sequences, shape.kv_heads, shape.query_heads, header.length, model.dtype)
        for name in READ:
            rest.tensors.pop(name, None)
        try:
            for index, layer in enumerate(layers):
                given = rest.under(f"layers.{index}")
                given.device = _device(model, index)
                if isinstance(layer, EvictingLayer):
                    fill_planned(layer, given, of)
                else:
                    fill_stock(layer, given)
            rest.done()
        except (ValueError, UsageError) as error:
            raise UsageError(f"{self.path} does not hold what it should, layer {index}: {error}") from error

    @property
    def read(self) -> tuple[Tensor | None, Tensor | None]:
        """Token ids [B, T] and their mask, as they were given."""
        tokens, mask = (self.tensors.get(name) for name in READ)
        return tokens, mask


def write_cache(
    path: str | Path, plan: Plan, layers: Sequence[Any], read: Sequence[Tensor | None], overwrite: bool
) -> int:
    """Write the layers of a cache whose prompt has passed, and what was `read`; return the size of the file in bytes.

    Raises:
        UsageError: there is nothing to write yet, or no such file can be written.
        EnvironmentFault: the disk is full, permissions are missing; an existing file is left as it was.
    """
    tensors = {name: tensor for name, tensor in zip(READ, read, strict=True) if tensor is not None}
    batch, length, dtype = 0, 0, torch.float32
    for index, layer in enumerate(layers):
        if isinstance(layer, EvictingLayer):
            holder = layer.holder
            if holder is None:
                raise UsageError("the cache holds no evicted prompt yet: run the model on the whole prompt first")
            held, batch, length, dtype = of_holder(holder), holder.batch, layer.seen, layer.dtype
        else:
            held = of_stock(layer)
        tensors |= {f"layers.{index}.{name}": tensor for name, tensor in held.items()}
    for name in READ:
        if name in tensors and tuple(tensors[name].shape) != (batch, length):
            given = list(tensors[name].shape)
            raise UsageError(f"{name} is {given} and the cache has read {[batch, length]}: give what it read")
    header = CacheHeader(
        plan=plan,
        dtype=_dtype_name(dtype),
        sequences=batch,
        length=length,
        kvsearch=version("kvsearch"),
        torch=version("torch"),
        transformers=version("transformers"),
    )
    check_target(path)
    put_weights(plan.policies, path)
    return write_tensors(path, tensors, canonical_json(header).decode(), overwrite)


def read_cache(path: str | Path) -> CacheFile:
    """Read and check a cache file, and make the weights known that its plan names.

    Raises:
        UsageError: there is no such file, or it is damaged, of another kind or version, or weights are missing.
        EnvironmentFault: it cannot be read.
    """
    about, tensors = read_tensors(path)
    header = _header(about, path)
    find_weights(header.plan.policies, path)
    return CacheFile(Path(path), header, tensors)


def read_header(path: str | Path) -> CacheHeader:
    """Read what a cache file says of itself, which costs little; errors as `read_cache`, as far as that shows."""
    return _header(read_about(path), path)


def _header(about: str, path: str | Path) -> CacheHeader:
    data = require_header(parse_json(about.encode(), f"the metadata of {path}"), CACHE_FORMAT, CACHE_VERSION, str(path))
    try:
        header = CacheHeader.model_validate(data)
    except ValidationError as error:
        raise UsageError(describe_validation_error(error, str(path))) from error
    check_plan(header.plan, f"the plan in {path}")
    return header


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device(model: Any, index: int) -> torch.device:
    """Return where a layer of the model computes."""
    layers: Any = decoder(model).layers
    device: torch.device = next(layers[index].parameters()).device
    return model.device if device.type == "meta" else device

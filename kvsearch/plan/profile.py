"""What a calibration measured: arrays in a safetensors file, with checked metadata in its header."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, ValidationInfo, field_validator
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from kvsearch.core.canonical import canonical_json
from kvsearch.core.errors import UsageError
from kvsearch.core.fields import Count, End, Entries, Floor, Index, Record, Text, is_none, refuse
from kvsearch.core.files import read_bytes, write_atomically
from kvsearch.core.limits import MOST_ARRAYS, MOST_LAYERS
from kvsearch.core.parsing import format_value, list_problems, list_validation_problems, parse_json, require_header
from kvsearch.plan.methods import name_methods_with
from kvsearch.plan.origin import Provenance
from kvsearch.plan.profile_arrays import (
    ARRAY_DTYPES,
    EVICTED_RATIO,
    GRID_SIZE,
    SignalAxes,
    find_array_problems,
    find_value_problems,
)
from kvsearch.plan.saved import find_weights, write_weights
from kvsearch.plan.schema import ModelFingerprint, PolicySpec

Array = NDArray[Any]

PROFILE_FORMAT = "kvsearch.profile"
PROFILE_VERSION = 1
_HEADER_KEY = "kvsearch"


class TableCheck(Record):
    """A table of local ratios beside even budgets at one eviction ratio, on contexts that it was not made of.

    `table` and `even` are the shares of answers before the first token predicted otherwise than under the full cache;
    `low` and `high` bound the difference of the two, a 95% interval over `contexts` (NaN: these are too few). The
    table is the share `mix` of what was calibrated, and even for the rest.
    """

    ratio: float = Field(gt=0, lt=1)
    contexts: Count
    table: float = Field(ge=0, le=1)
    even: float = Field(ge=0, le=1)
    low: End
    high: End
    verdict: Literal["useful", "unproven", "harmful"]
    mix: float = Field(default=1.0, ge=0, le=1)

    @property
    def words(self) -> str:
        """What was found, for people."""
        mixed = "" if self.mix == 1 else f"; {100 * self.mix:.0f}% of the table, even for the rest"
        bounds = f"[{100 * self.low:+.1f}, {100 * self.high:+.1f}] points"
        bounds = "points, no interval" if math.isnan(self.low) else bounds
        return (
            f"at ratio {self.ratio:g} {100 * self.table:.1f}% of the answers stay what they are, "
            f"{100 * self.even:.1f}% with even budgets ({100 * (self.table - self.even):+.1f} "
            f"{bounds}, {self.contexts} contexts that the table was not made of{mixed})"
        )


class ProfileMetadata(Record):
    """What the arrays of a profile mean and where they come from.

    `length` is the calibration context in tokens; `layers` holds the model layer of each profile row, ascending.
    `signals` names the dimensions of signals by pattern; `policy` is then the one that strategies without a route use.
    `policies` are the rows of the array "kept", if several were measured on the same contexts; `policy` is the first.
    `checks` say how the table does on held-out contexts; None: that was not asked.
    """

    format: Literal["kvsearch.profile"] = "kvsearch.profile"
    version: Literal[1] = 1
    model: ModelFingerprint
    method: Text
    policy: PolicySpec
    length: Entries
    questions: Count
    layers: tuple[Index, ...] = Field(min_length=1, max_length=MOST_LAYERS)
    floor: Floor
    signals: SignalAxes | None = None
    policies: tuple[PolicySpec, ...] | None = Field(default=None, min_length=2, exclude_if=is_none)
    checks: tuple[TableCheck, ...] | None = Field(default=None, min_length=1, exclude_if=is_none)
    provenance: Provenance

    @property
    def measured_policies(self) -> tuple[PolicySpec, ...]:
        """The policies that were measured, `policy` first."""
        return (self.policy,) if self.policies is None else self.policies

    @field_validator("policies")
    @classmethod
    def _begins_with_the_policy(
        cls, policies: tuple[PolicySpec, ...] | None, info: ValidationInfo
    ) -> tuple[PolicySpec, ...] | None:
        if policies is not None and info.data.get("policy", policies[0]) != policies[0]:
            refuse([((), "must begin with the policy of the profile")])
        return policies

    @property
    def shape(self) -> tuple[int, int]:
        """(profile layers, kv heads)."""
        return len(self.layers), self.model.kv_heads

    @field_validator("layers")
    @classmethod
    def _layers_of_the_model(cls, layers: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        if sorted(set(layers)) != list(layers):
            refuse([((), "must be ascending model layers, each once")])
        model: ModelFingerprint | None = info.data.get("model")
        if model is not None and max(layers) >= model.layers:
            refuse([((), f"names layer {max(layers)}, but the model has layers 0 to {model.layers - 1}")])
        return layers


@dataclass(frozen=True, eq=False)
class Profile:
    """Calibration results; the arrays are read-only copies, checked against the metadata.

    Tables of budgets have "evicted_ratio", float32 [99, L, Hkv]: row i belongs to the global eviction ratio
    (i + 1) / 100, its entries are the local eviction ratios in [0, 1] of each layer and kv head (arXiv 2602.08585).
    Where several policies were measured, "kept" [P, L, Hkv, K + 1] is what each head keeps of the importance, in units
    that compare, at budgets of 0, 1/K, ... 1 of a context.

    The axes and ranges of all arrays are in `kvsearch.plan.profile_arrays`; which of them a profile has its method
    says, see `kvsearch.methods`.

    Raises:
        UsageError: arrays of a wrong type, shape or value; all problems in one message.
    """

    metadata: ProfileMetadata
    arrays: dict[str, Array]

    def __post_init__(self) -> None:
        problems = list(find_value_problems(self.arrays)) or list(find_array_problems(self.arrays, self.metadata))
        if problems:
            raise UsageError(list_problems(problems, "the profile"))
        frozen = {}
        for name, array in sorted(self.arrays.items()):
            frozen[name] = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
            frozen[name].setflags(write=False)
        object.__setattr__(self, "arrays", frozen)

    def to_bytes(self) -> bytes:
        """Render the safetensors file; equal profiles give equal bytes."""
        return bytes(save(self.arrays, {_HEADER_KEY: canonical_json(self.metadata).decode()}))

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the file."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def local_ratios(self, ratio: float) -> NDArray[np.float64]:
        """Look up local eviction ratios [L, Hkv] for a global `ratio`, linear between grid rows.

        Below 0.01 the way leads from all zeros to the first row; above 0.99 the last row holds.

        Raises:
            UsageError: `ratio` is outside (0, 1) or the profile has no such table.
        """
        if isinstance(ratio, bool) or not 0 < ratio < 1:
            raise UsageError(f"a global eviction ratio lies between 0 and 1, got {ratio}: say 0.8 to keep a fifth")
        if EVICTED_RATIO not in self.arrays:
            known = name_methods_with(EVICTED_RATIO)
            raise UsageError(
                f"this {format_value(self.metadata.method)} profile has no {EVICTED_RATIO!r} table: calibrate {known}"
            )
        measured = self.arrays[EVICTED_RATIO].astype(np.float64)
        table = np.concatenate([np.zeros_like(measured[:1]), measured])  # by percent: at zero nothing is evicted
        position = min(ratio * (GRID_SIZE + 1), float(GRID_SIZE))
        nearest = round(position)
        if abs(position - nearest) < 1e-9 and nearest > 0:  # 0.29 * 100 is not 29, but means that row
            return np.asarray(table[nearest])
        below = math.floor(position)
        share = position - below
        return np.asarray((1.0 - share) * table[below] + share * table[below + 1])


def save_profile(profile: Profile, path: str | Path, overwrite: bool = False) -> None:
    """Write a profile file in one step.

    Raises:
        UsageError: `path` exists and `overwrite` is off, or is no regular file.
        EnvironmentFault: the disk is full, permissions are missing; an existing file is left as it was.
    """
    write_weights(profile.metadata.measured_policies, path)
    write_atomically(path, profile.to_bytes(), overwrite)


def load_profile(path: str | Path) -> Profile:
    """Read and check a profile file.

    Raises:
        UsageError: there is no such file, or it is not a valid profile; the message lists all that is wrong with it.
        EnvironmentFault: the file cannot be read.
    """
    profile = read_profile(read_bytes(path, MOST_ARRAYS), str(path))
    find_weights(profile.metadata.measured_policies, path)
    return profile


def read_profile(data: bytes, name: str) -> Profile:
    """Read and check the bytes of a profile file, called `name`; UsageError as `load_profile`."""
    header, arrays, problems = _read(data, name)
    problems += find_value_problems(arrays)
    try:
        metadata = ProfileMetadata.model_validate(header)
    except ValidationError as error:
        raise UsageError(list_problems([*list_validation_problems(error), *problems], name)) from error
    problems = problems or list(find_array_problems(arrays, metadata))
    if problems:
        raise UsageError(list_problems(problems, name))
    return Profile(metadata, arrays)


def split_tensors(data: bytes, name: str) -> dict[str, dict[str, Any]]:
    """Return what a safetensors file says of its tensors, and their bytes; UsageError if it is not a whole one."""
    try:
        return dict(deserialize(data))  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise UsageError(f"{name} is no complete safetensors file: {error}") from error


def _read(data: bytes, name: str) -> tuple[dict[str, Any], dict[str, Array], list[str]]:
    """Split a file into metadata, the arrays of types we use, and what is wrong with the rest."""
    tensors = split_tensors(data, name)
    size = int.from_bytes(data[:8], "little")  # deserialize has checked it
    header = json.loads(data[8 : 8 + size]).get("__metadata__") or {}
    if _HEADER_KEY not in header:
        raise UsageError(f"{name} is a safetensors file without {_HEADER_KEY} metadata: not a {PROFILE_FORMAT} file")
    metadata = parse_json(header[_HEADER_KEY].encode(), f"the metadata of {name}")
    problems = [f"header.{key}: unknown key: remove it" for key in sorted(header.keys() - {_HEADER_KEY})]
    arrays: dict[str, Array] = {}
    for key, tensor in sorted(tensors.items()):
        if tensor["dtype"] in ARRAY_DTYPES:
            arrays[key] = np.frombuffer(tensor["data"], ARRAY_DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
        else:
            problems.append(f"arrays.{key}: has type {tensor['dtype']}, must be one of {', '.join(ARRAY_DTYPES)}")
    return require_header(metadata, PROFILE_FORMAT, PROFILE_VERSION, name), arrays, problems

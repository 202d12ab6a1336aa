"""What a calibration measured: arrays in a safetensors file, with checked metadata in its header."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
)
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from kvsearch.errors import UsageError
from kvsearch.plan.canonical import canonical_json
from kvsearch.plan.fields import Count, Entries, Floor, Index, Record, Text, refuse
from kvsearch.plan.files import atomic_write, read_bytes
from kvsearch.plan.fingerprint import ModelFingerprint
from kvsearch.plan.limits import MOST_ARRAYS, MOST_DIMENSIONS, MOST_LAYERS, MOST_MEASURED
from kvsearch.plan.measured import measured_problems
from kvsearch.plan.origin import Provenance
from kvsearch.plan.parsing import list_problems, parse_json, problems_of, require_header, shown
from kvsearch.plan.schema import PolicySpec
from kvsearch.plan.signals import SignalAxes, signal_problems
from kvsearch.plan.weights import find_weights, put_weights

Array = NDArray[Any]

PROFILE_FORMAT = "kvsearch.profile"
PROFILE_VERSION = 1
# Row i of a table of local ratios is the global eviction ratio (i + 1) / 100.
GRID = 99
TABLED = ("lukv", "lava", "cake", "adakv")  # methods whose profiles have such a table
EVICTED_RATIO = "evicted_ratio"
KEPT = "kept"  # importance kept by policy, see `Profile`
QUERY_MEAN, QUERY_COVARIANCE, QUERY_ABS = "query_mean", "query_cov", "query_abs"  # by query head, see `Profile`
QUERIES = "query_statistics"  # the method whose profiles have them
SIGNALLED = "polykv"  # the method whose profiles have signals by pattern

_HEADER_KEY = "kvsearch"
_DTYPES: dict[str, Any] = {"F32": np.float32, "F64": np.float64, "I32": np.int32, "I64": np.int64}
_SLACK = 1e-3


class TableCheck(Record):
    """A table of local ratios beside even budgets at one eviction ratio, on contexts that it was not made of.

    `table` and `even` are the shares of answers before the first token predicted otherwise than under the full cache;
    `low` and `high` bound the difference of the two, a 95% interval over `contexts`. The table is the share `mix` of
    what was calibrated, and even for the rest.
    """

    ratio: float = Field(gt=0, lt=1)
    contexts: Count
    table: float = Field(ge=0, le=1)
    even: float = Field(ge=0, le=1)
    low: float
    high: float
    verdict: Literal["useful", "unproven", "harmful"]
    mix: float = Field(default=1.0, ge=0, le=1)

    @property
    def words(self) -> str:
        """What was found, for people."""
        mixed = "" if self.mix == 1 else f"; {100 * self.mix:.0f}% of the table, even for the rest"
        return (
            f"at ratio {self.ratio:g} {100 * self.table:.1f}% of the answers stay what they are, "
            f"{100 * self.even:.1f}% with even budgets ({100 * (self.table - self.even):+.1f} "
            f"[{100 * self.low:+.1f}, {100 * self.high:+.1f}] points, {self.contexts} contexts that the table was not "
            f"made of{mixed})"
        )


class ProfileMetadata(Record):
    """What the arrays of a profile mean and where they come from.

    `length` is the calibration context in tokens; `layers` holds the model layer of each profile row, ascending.
    `signals` names the dimensions of signals by pattern; `policy` is then the one that strategies without a route use.
    `policies` are those of the array "kept", where several were measured on the same contexts; `policy` is the first.
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
    policies: tuple[PolicySpec, ...] | None = Field(default=None, min_length=2)
    checks: tuple[TableCheck, ...] | None = Field(default=None, min_length=1)
    provenance: Provenance

    @model_serializer(mode="wrap")
    def _without_unknown(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the policies where one was measured, and checks that were not made: such files keep their bytes."""
        written: dict[str, Any] = handler(self)
        if self.policies is None:
            written.pop("policies", None)
        if self.checks is None:
            written.pop("checks", None)
        return written

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
    def seed(self) -> int:
        """The seed of the calibration, as kept in `provenance`."""
        return self.provenance.seed

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

    LU-KV (method "lukv") and static tables of dynamic rules ("lava", "cake", "adakv") have "evicted_ratio", float32
    [99, L, Hkv]: row i belongs to the global eviction ratio (i + 1) / 100, its entries are the local eviction ratios in
    [0, 1] of each layer and kv head (arXiv 2602.08585). Where several policies were measured, "kept" [P, L, Hkv, K + 1]
    is what each head keeps of the importance, in units that compare, at budgets of 0, 1/K, ... 1 of a context.

    PolyKV (method "polykv") has the arrays of `kvsearch.plan.signals`, which `kvsearch.signals.table.SignalTable`
    reads.

    Raises:
        UsageError: arrays of a wrong type, shape or value; all problems in one message.
    """

    metadata: ProfileMetadata
    arrays: dict[str, Array]

    def __post_init__(self) -> None:
        problems = list(_array_problems(self.arrays, self.metadata))
        if problems:
            raise UsageError(list_problems(problems, "the profile"))
        frozen = {name: _read_only(array) for name, array in sorted(self.arrays.items())}
        object.__setattr__(self, "arrays", frozen)

    def to_bytes(self) -> bytes:
        """Render the safetensors file; equal profiles give equal bytes."""
        return bytes(save(self.arrays, {_HEADER_KEY: canonical_json(self.metadata).decode()}))

    def local_ratios(self, ratio: float) -> NDArray[np.float64]:
        """Look up local eviction ratios [L, Hkv] for a global `ratio`, linear between grid rows.

        Below 0.01 the way leads from all zeros to the first row; above 0.99 the last row holds.

        Raises:
            UsageError: `ratio` is outside (0, 1) or the profile has no such table.
        """
        if isinstance(ratio, bool) or not 0 < ratio < 1:
            raise UsageError(f"a global eviction ratio lies between 0 and 1, got {ratio}: say 0.8 to keep a fifth")
        if EVICTED_RATIO not in self.arrays:
            known = ", ".join(TABLED)
            raise UsageError(
                f"this {shown(self.metadata.method)} profile has no {EVICTED_RATIO!r} table: calibrate {known}"
            )
        table = self.arrays[EVICTED_RATIO].astype(np.float64)
        position = min(ratio * (GRID + 1), float(GRID))
        nearest = round(position)
        if abs(position - nearest) < 1e-9 and nearest > 0:  # 0.29 * 100 is not 29, but means that row
            return _row(table, nearest)
        below = math.floor(position)
        share = position - below
        return (1.0 - share) * _row(table, below) + share * _row(table, below + 1)


def save_profile(profile: Profile, path: str | Path, overwrite: bool = False) -> None:
    """Write a profile file in one step.

    Raises:
        UsageError: `path` exists and `overwrite` is off, or is no regular file.
        EnvironmentFault: the disk is full, permissions are missing; an existing file is left as it was.
    """
    put_weights(profile.metadata.measured_policies, path)
    atomic_write(path, profile.to_bytes(), overwrite)


def load_profile(path: str | Path) -> Profile:
    """Read and check a profile file.

    Raises:
        UsageError: there is no such file, or it is not a valid profile; the message lists all that is wrong with it.
        EnvironmentFault: the file cannot be read.
    """
    found = read_profile(read_bytes(path, MOST_ARRAYS), str(path))
    find_weights(found.metadata.measured_policies, path)
    return found


def read_profile(data: bytes, name: str) -> Profile:
    """Read and check the bytes of a profile file, called `name`; UsageError as `load_profile`."""
    header, arrays, problems = _read(data, name)
    metadata: ProfileMetadata | None = None
    try:
        metadata = ProfileMetadata.model_validate(header)
    except ValidationError as error:
        problems = [*problems_of(error), *problems]
    problems += _array_problems(arrays, metadata)
    if metadata is None or problems:
        raise UsageError(list_problems(problems, name))
    return Profile(metadata, arrays)


def _read(data: bytes, name: str) -> tuple[dict[str, Any], dict[str, Array], list[str]]:
    """Split a file into metadata, the arrays of types we use, and what is wrong with the rest."""
    try:
        tensors = dict(deserialize(data))  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise UsageError(f"{name} is no complete safetensors file: {error}") from error
    size = int.from_bytes(data[:8], "little")  # deserialize has checked it
    header = json.loads(data[8 : 8 + size]).get("__metadata__") or {}
    if _HEADER_KEY not in header:
        raise UsageError(f"{name} is a safetensors file without {_HEADER_KEY} metadata: not a {PROFILE_FORMAT} file")
    metadata = parse_json(header[_HEADER_KEY].encode(), f"the metadata of {name}")
    problems = [f"header.{key}: unknown key: remove it" for key in sorted(header.keys() - {_HEADER_KEY})]
    arrays: dict[str, Array] = {}
    for key, tensor in sorted(tensors.items()):
        if len(tensor["shape"]) > MOST_DIMENSIONS:
            problems.append(f"arrays.{key}: has {len(tensor['shape'])} dimensions, {MOST_DIMENSIONS} are the most")
        elif tensor["dtype"] in _DTYPES:
            arrays[key] = np.frombuffer(tensor["data"], _DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
        else:
            problems.append(f"arrays.{key}: has type {tensor['dtype']}, must be one of {', '.join(_DTYPES)}")
    return require_header(metadata, PROFILE_FORMAT, PROFILE_VERSION, name), arrays, problems


def _array_problems(arrays: Mapping[str, Array], metadata: ProfileMetadata | None) -> Iterator[str]:
    """Find what is wrong with the arrays, as far as it can be told without valid metadata."""
    for name, array in sorted(arrays.items()):
        if array.dtype.newbyteorder("=") not in list(_DTYPES.values()):
            yield f"arrays.{name}: has type {array.dtype}, must be float32, float64, int32 or int64"
        elif not np.isfinite(array).all():
            yield f"arrays.{name}: {np.count_nonzero(~np.isfinite(array))} of {array.size} values are not finite"
        elif array.dtype.kind == "f" and array.size and max(array.max(), -array.min()) > MOST_MEASURED:
            yield f"arrays.{name}: has values beyond {MOST_MEASURED:g}, which nothing measures"
    if EVICTED_RATIO in arrays:
        yield from (f"arrays.{EVICTED_RATIO}: {what}" for what in _table_problems(arrays[EVICTED_RATIO], metadata))
    elif metadata is not None and metadata.method in TABLED:
        yield f"arrays.{EVICTED_RATIO}: is missing, a {metadata.method} profile needs it"
    if metadata is not None and (metadata.method in TABLED or EVICTED_RATIO in arrays):
        yield from measured_problems(arrays, metadata.questions, metadata.shape)
    if metadata is not None and (metadata.policies is not None or KEPT in arrays):
        yield from _kept_problems(arrays, metadata)
    if metadata is not None and metadata.method == QUERIES:
        yield from _query_problems(arrays, metadata)
    if metadata is not None and metadata.method == SIGNALLED:
        yield from signal_problems(arrays, metadata.signals, len(metadata.layers))
    elif metadata is not None and metadata.signals is not None:
        yield f"signals: only a {SIGNALLED} profile has them, and this is one of method {shown(metadata.method)}"


def _kept_problems(arrays: Mapping[str, Array], metadata: ProfileMetadata) -> Iterator[str]:
    """Find where what is kept under several policies does not fit to them."""
    if metadata.policies is None or KEPT not in arrays:
        yield f"arrays.{KEPT}: goes together with the policies of the header: restore the file"
        return
    shape, wanted = arrays[KEPT].shape, (len(metadata.policies), *metadata.shape)
    if len(shape) != 4 or shape[:3] != wanted or shape[3] < 2:
        yield f"arrays.{KEPT}: has shape {list(shape)}, must be {[*wanted, 'budgets']}"
    elif (arrays[KEPT] < 0).any() or (arrays[KEPT] > 1.01 * arrays[KEPT][..., -1:]).any():
        yield f"arrays.{KEPT}: a part of the context has more importance than the whole, or less than none"


def _query_problems(arrays: Mapping[str, Array], metadata: ProfileMetadata) -> Iterator[str]:
    """Find where statistics of queries are missing, or do not fit each other."""
    mean = arrays.get(QUERY_MEAN)
    if mean is None or mean.ndim != 3 or len(mean) != len(metadata.layers):
        yield f"arrays.{QUERY_MEAN}: is missing, or is not [layers, query heads, head dimension]"
        return
    heads, size = mean.shape[:2], mean.shape[2]
    for name, ends in ((QUERY_COVARIANCE, [(size, size)]), (QUERY_ABS, [(n,) for n in range(1, size // 2 + 1)])):
        shape = arrays[name].shape if name in arrays else ()
        if shape not in [(*heads, *end) for end in ends]:
            yield f"arrays.{name}: has shape {list(shape)}, which does not fit {QUERY_MEAN} of {list(mean.shape)}"
        elif (np.diagonal(arrays[name], axis1=-2, axis2=-1) if len(ends[0]) == 2 else arrays[name]).min(initial=0) < 0:
            yield f"arrays.{name}: has a {'variance' if len(ends[0]) == 2 else 'value'} below 0"


def _table_problems(table: Array, metadata: ProfileMetadata | None) -> Iterator[str]:
    if table.dtype.newbyteorder("=") != np.float32:
        yield f"has type {table.dtype}, must be float32"
    if table.dtype.kind not in "fiu":
        return
    expected = (GRID, *metadata.shape) if metadata is not None else (GRID, *table.shape[1:])
    if table.ndim != 3 or table.shape != expected:
        shape = list(expected) if metadata is not None else f"[{GRID}, layers, kv heads]"
        yield f"has shape {list(table.shape)}, must be {shape}"
    outside = np.count_nonzero((table < 0) | (table > 1))
    if outside:
        yield f"{outside} of {table.size} ratios are outside [0, 1]"
    elif metadata is not None and table.shape == expected:
        yield from _mean_problems(table, metadata.length, metadata.floor)


def _mean_problems(table: Array, length: int, floor: int) -> Iterator[str]:
    """Check that the mean of each row is its global ratio, up to one entry per head and rounding.

    Ratios that would leave heads less than the floor stay at what the floor allows.
    """
    wanted = np.minimum(np.arange(1, GRID + 1) / (GRID + 1), 1 - min(floor, length) / length)
    means = table.mean(axis=(1, 2), dtype=np.float64)
    wrong = np.flatnonzero(np.abs(means - wanted) > 1 / length + _SLACK)  # a row with NaN is reported as not finite
    if wrong.size:
        row = int(wrong[0])
        example = f"row {row} ({wanted[row]:.2f}) to {means[row]:.4f}"
        yield f"{wrong.size} of {GRID} rows do not average to their global ratio, e.g. {example}"


def _row(table: NDArray[np.float64], position: int) -> NDArray[np.float64]:
    """Look up the row of a global ratio of `position` percent; nothing is evicted at zero."""
    return table[position - 1] if position else np.zeros_like(table[0])


def _read_only(array: Array) -> Array:
    copy = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    copy.setflags(write=False)
    return copy

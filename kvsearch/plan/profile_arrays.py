"""The arrays of profiles, with the axes and the range of each; which of them a method writes it says itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, field_validator

from kvsearch.core.fields import Entries, Record, refuse, require_ascending
from kvsearch.core.limits import MOST_MEASURED
from kvsearch.core.parsing import format_value
from kvsearch.plan.methods import find_writer, list_methods
from kvsearch.plan.schema import Phase, PolicySpec, Protocol

if TYPE_CHECKING:
    from kvsearch.plan.profile import ProfileMetadata

Arrays = Mapping[str, NDArray[Any]]

# Row i of a table of local ratios is the global eviction ratio (i + 1) / 100.
GRID_SIZE = 99
EVICTED_RATIO = "evicted_ratio"
KEPT = "kept"  # importance kept by policy, see `Profile`
QUERY_MEAN = "query_mean"  # by query head, as the two below
QUERY_COVARIANCE = "query_cov"
QUERY_ABS = "query_abs"
FULL_NLL = "full_nll"  # mean nats per token under the full cache
MEAN_ENTROPY = "mean_entropy"  # nats, of the mean attention row over all samples (PolyKV, Eq. 4)
TOKENS = "sample_tokens"  # tokens whose loss counts
LENGTH = "sample_length"  # tokens of the prompt
CONTEXT = "sample_context"  # number of the context
MOST_NATS = 500  # per token: perplexities, their exponentials, have room in float64

ARRAY_DTYPES: dict[str, Any] = {"F32": np.float32, "F64": np.float64, "I32": np.int32, "I64": np.int64}
_RATIO_SLACK = 1e-5  # of ratios in fp32
_MEAN_SLACK = 1e-3


class SignalAxes(Record):
    """What the dimensions N, P and R of signal arrays stand for, in their order; L are the layers of the profile.

    `budgets` are entries per kv head, ascending; `protocol` says whether prompts held their question.
    """

    patterns: tuple[PolicySpec, ...] = Field(min_length=1)
    phases: tuple[Phase, ...] = Field(min_length=1)
    budgets: Annotated[tuple[Entries, ...], Field(min_length=1), AfterValidator(require_ascending)]
    protocol: Protocol

    @field_validator("patterns")
    @classmethod
    def _named_once(cls, patterns: tuple[PolicySpec, ...]) -> tuple[PolicySpec, ...]:
        if len({pattern.name for pattern in patterns}) < len(patterns):
            refuse([((), "names a pattern twice")])
        return patterns


class ArraySpec(NamedTuple):
    """The shape of an array of a profile, and the range of its values; `whole`: they are whole numbers.

    A letter is a size that is the same wherever it stands: L layers, H kv heads, A query heads, D dimensions of a head,
    Q questions, C compared policies; M samples, N budgets, P phases, R patterns. An array that is `needed` is in every
    profile of the methods that write it; `may_be_empty`: one of its sizes may be 0.
    """

    shape: tuple[int | str, ...]
    minimum: float = -np.inf
    maximum: float = np.inf
    whole: bool = False
    needed: bool = False
    may_be_empty: bool = False


TABLE = {EVICTED_RATIO: ArraySpec((GRID_SIZE, "L", "H"), 0, 1, needed=True)}
BESIDE_TABLE = {
    "question_ratio": ArraySpec(("Q", 9, "L", "H"), 0, 1),  # local ratios at 0.1 ... 0.9
    "question_context": ArraySpec(("Q",), 0, whole=True),
    "question_length": ArraySpec(("Q",), 1, whole=True),
    "ratio_deviation": ArraySpec((99, "L", "H"), 0),
    "recall": ArraySpec(("L", "H", 101)),
    "oracle_recall": ArraySpec(("L", "H", 101)),
    "mass": ArraySpec(("L", "H", 101)),
    "held_out_ratio": ArraySpec(("F", "K", "L", "H"), 0, 1),
}
COMPARED_ARRAYS = {KEPT: ArraySpec(("C", "L", "H", "K1"), 0, needed=True)}
STATISTICS_ARRAYS = {
    QUERY_MEAN: ArraySpec(("L", "A", "D"), needed=True),
    QUERY_COVARIANCE: ArraySpec(("L", "A", "D", "D"), needed=True),
    QUERY_ABS: ArraySpec(("L", "A", "D/2"), 0, needed=True),
}
SIGNAL_ARRAYS = {
    TOKENS: ArraySpec(("M",), 0, whole=True, needed=True),
    LENGTH: ArraySpec(("M",), 0, whole=True, needed=True),
    CONTEXT: ArraySpec(("M",), 0, whole=True, needed=True),
    **dict.fromkeys(("cosine", "relative_error"), ArraySpec(("M", "N", "P", "L", "R"))),
    "nll": ArraySpec(("M", "N", "P", "L", "R"), -MOST_NATS, MOST_NATS),
    FULL_NLL: ArraySpec(("M",), -MOST_NATS, MOST_NATS),
    MEAN_ENTROPY: ArraySpec(("P", "L")),
}
PAIRED_ARRAYS = (("nll", FULL_NLL),)


def find_value_problems(arrays: Arrays) -> Iterator[str]:
    """Find arrays of another type than profiles have, or with values that nothing measures, a line each."""
    for name, array in sorted(arrays.items()):
        if array.dtype.newbyteorder("=") not in list(ARRAY_DTYPES.values()):
            yield f"arrays.{name}: has type {array.dtype}, must be float32, float64, int32 or int64"
        elif not np.isfinite(array).all():
            yield f"arrays.{name}: {np.count_nonzero(~np.isfinite(array))} of {array.size} values are not finite"
        elif array.dtype.kind == "f" and array.size and max(array.max(), -array.min()) > MOST_MEASURED:
            yield f"arrays.{name}: has values beyond {MOST_MEASURED:g}, which nothing measures"


def find_array_problems(arrays: Arrays, metadata: ProfileMetadata) -> Iterator[str]:
    """Find what is wrong with the arrays of a profile, a line each; its values have been looked at."""
    method = find_writer(metadata.method)
    axes = metadata.signals
    if method.has_signals and axes is None:
        yield f"signals: is missing, a {method.name} profile needs it"
    elif axes is not None and not method.has_signals:
        others = ", ".join(known.name for known in list_methods() if known.has_signals)
        yield f"signals: only a {others} profile has them, and this is one of method {format_value(metadata.method)}"
    # the weights of a fitted policy are checked by that policy, which knows their version
    specs = {} if method.fits_policy or (method.has_signals and axes is None) else dict(method.arrays)
    if EVICTED_RATIO in arrays:
        specs |= {**TABLE, **BESIDE_TABLE}
    if metadata.policies is not None or KEPT in arrays:
        specs |= COMPARED_ARRAYS
    problems = list(find_misfits(arrays, specs, metadata))
    yield from problems or _find_contradictions(arrays, metadata, specs)


def find_misfits(arrays: Arrays, specs: Mapping[str, ArraySpec], metadata: ProfileMetadata) -> Iterator[str]:
    """Find arrays that are missing, or have another shape, type or range than their `specs`, a line each."""
    sizes: dict[int | str, int] = {"L": len(metadata.layers), "H": metadata.model.kv_heads, "Q": metadata.questions}
    if metadata.policies is not None or KEPT in arrays:
        sizes["C"] = len(metadata.policies or ())
    if (axes := metadata.signals) is not None:
        sizes |= {"N": len(axes.budgets), "P": len(axes.phases), "R": len(axes.patterns)}
    for name, spec in specs.items():
        array = arrays.get(name)
        if array is None:
            if spec.needed:
                yield f"arrays.{name}: is missing, a {metadata.method} profile needs it"
            continue
        expected = [sizes.get(size, size) for size in spec.shape]
        pairs = zip(expected, array.shape, strict=False)
        differs = any(isinstance(size, int) and size != actual for size, actual in pairs)
        if differs or array.ndim != len(expected) or not (array.size or spec.may_be_empty):
            yield f"arrays.{name}: has shape {list(array.shape)}, must be [{', '.join(map(str, expected))}]"
            continue
        sizes |= dict(zip(spec.shape, array.shape, strict=True))
        if spec.whole and array.dtype.kind != "i":
            yield f"arrays.{name}: has type {array.dtype}, must be int32"
        if array.size and (array.min() < spec.minimum - _RATIO_SLACK or array.max() > spec.maximum + _RATIO_SLACK):
            yield f"arrays.{name}: has values outside [{spec.minimum:g}, {spec.maximum:g}]"
    for pair in PAIRED_ARRAYS:
        if len(arrays.keys() & set(pair)) == 1 and specs.keys() & set(pair):
            yield f"arrays: {' and '.join(pair)} go together"


def _find_contradictions(arrays: Arrays, metadata: ProfileMetadata, specs: Mapping[str, ArraySpec]) -> Iterator[str]:
    """Find arrays of the right shapes whose values cannot have been measured."""
    if EVICTED_RATIO in arrays:
        yield from _find_mean_problems(arrays[EVICTED_RATIO], metadata.length, metadata.floor)
    if KEPT in arrays and (arrays[KEPT] > 1.01 * arrays[KEPT][..., -1:]).any():
        yield f"arrays.{KEPT}: a part of the context has more importance than the whole"
    if QUERY_COVARIANCE in specs:
        if np.diagonal(arrays[QUERY_COVARIANCE], axis1=-2, axis2=-1).min() < 0:
            yield f"arrays.{QUERY_COVARIANCE}: has a variance below 0"
        if arrays[QUERY_ABS].shape[2] > arrays[QUERY_MEAN].shape[2] // 2:
            yield f"arrays.{QUERY_ABS}: has more than half of the dimensions of {QUERY_MEAN}"
    if TOKENS in specs and not arrays[TOKENS].any():
        yield f"arrays.{TOKENS}: no sample has a token whose loss counts"


def _find_mean_problems(table: NDArray[Any], length: int, floor: int) -> Iterator[str]:
    """Check that the mean of each row is its global ratio, up to one entry per head and rounding.

    Ratios that would leave heads less than the floor stay at what the floor allows.
    """
    if table.dtype.newbyteorder("=") != np.float32:
        yield f"arrays.{EVICTED_RATIO}: has type {table.dtype}, must be float32"
        return
    expected = np.minimum(np.arange(1, GRID_SIZE + 1) / (GRID_SIZE + 1), 1 - min(floor, length) / length)
    means = table.mean(axis=(1, 2), dtype=np.float64)
    wrong = np.flatnonzero(np.abs(means - expected) > 1 / length + _MEAN_SLACK)
    if wrong.size:
        row = int(wrong[0])
        example = f"row {row} ({expected[row]:.2f}) to {means[row]:.4f}"
        yield (
            f"arrays.{EVICTED_RATIO}: {wrong.size} of {GRID_SIZE} rows do not average to their global ratio, "
            f"e.g. {example}"
        )

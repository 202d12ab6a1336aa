"""The axes of calibration signals in a profile: which patterns were tried, in which phases, at which budgets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from kvsearch.plan.fields import Entries, Record, Text, refuse
from kvsearch.plan.schema import Phase, PolicySpec

# [M, N, P, L, R]: samples, budgets, phases, layers, patterns
BY_PATTERN = ("cosine", "relative_error", "nll")
FULL_NLL = "full_nll"  # [M] mean nats per token under the full cache
MEAN_ENTROPY = "mean_entropy"  # [P, L] nats, of the mean attention row over all samples (PolyKV, Eq. 4)
ROWS_ENTROPY = "entropy"  # [M, P, L] mean over rows, as a share of the largest possible; the name is of old files
LITERAL_ENTROPY = "literal_entropy"  # [P, L] of old files: nats, of the mean of the last rows of a prompt
TOKENS = "sample_tokens"  # [M] tokens whose loss counts
LENGTH, CONTEXT = "sample_length", "sample_context"  # [M] tokens of the prompt, number of the context
MOST_NATS = 500  # per token: perplexities, their exponentials, have room in float64
ALWAYS = (TOKENS, LENGTH, CONTEXT)


class SignalAxes(Record):
    """What the dimensions N, P and R of signal arrays stand for, in their order; L are the layers of the profile.

    `budgets` are entries per kv head, ascending; `protocol` says whether prompts held their question.
    """

    patterns: tuple[PolicySpec, ...] = Field(min_length=1)
    phases: tuple[Phase, ...] = Field(min_length=1)
    budgets: tuple[Entries, ...] = Field(min_length=1)
    protocol: Text

    @field_validator("budgets")
    @classmethod
    def _ascending(cls, budgets: tuple[int, ...]) -> tuple[int, ...]:
        if sorted(set(budgets)) != list(budgets):
            refuse([((), "must be ascending, each once")])
        return budgets

    @field_validator("patterns")
    @classmethod
    def _named_once(cls, patterns: tuple[PolicySpec, ...]) -> tuple[PolicySpec, ...]:
        names = [pattern.name for pattern in patterns]
        if len(set(names)) < len(names):
            refuse([((), "names a pattern twice")])
        return patterns


def signal_problems(arrays: Mapping[str, NDArray[Any]], axes: SignalAxes | None, layers: int) -> Iterator[str]:
    """Find what is wrong with the arrays of a profile of signals, a line each."""
    if axes is None:
        yield "signals: is missing, a polykv profile needs it"
        return
    for name in ALWAYS:
        if name not in arrays:
            yield f"arrays.{name}: is missing, a polykv profile needs it"
    if ("nll" in arrays) != (FULL_NLL in arrays):
        yield f"arrays: nll and {FULL_NLL} go together"
    for name, shape in _shapes(arrays, axes, layers).items():
        found = arrays[name].shape if name in arrays else shape
        if found != shape:
            yield f"arrays.{name}: has shape {list(found)}, must be {list(shape)}"
    for name in ALWAYS:
        if name in arrays and (arrays[name].dtype.kind != "i" or not arrays[name].size or arrays[name].min() < 0):
            yield f"arrays.{name}: must be whole numbers of 0 or more, one of every sample"
    for name in ("nll", FULL_NLL):
        if name in arrays and (np.abs(arrays[name][np.isfinite(arrays[name])]) > MOST_NATS).any():
            yield f"arrays.{name}: has values beyond {MOST_NATS} nats per token"
    if TOKENS in arrays and not arrays[TOKENS].any():
        yield f"arrays.{TOKENS}: no sample has a token whose loss counts"


def _shapes(arrays: Mapping[str, NDArray[Any]], axes: SignalAxes, layers: int) -> dict[str, tuple[int, ...]]:
    samples = int(np.size(arrays[TOKENS])) if TOKENS in arrays else 0
    phases = len(axes.phases)
    whole = (samples, len(axes.budgets), phases, layers, len(axes.patterns))
    return {
        **dict.fromkeys(BY_PATTERN, whole),
        **dict.fromkeys((FULL_NLL, *ALWAYS), (samples,)),
        ROWS_ENTROPY: (samples, phases, layers),
        **dict.fromkeys((MEAN_ENTROPY, LITERAL_ENTROPY), (phases, layers)),
    }

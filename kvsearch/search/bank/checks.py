"""What can be wrong with what a candidate bank is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvsearch.budgets.allocator import Ints
from kvsearch.errors import UsageError
from kvsearch.evaluation.replies import check_length
from kvsearch.search.bank.samples import BankSample
from kvsearch.search.objectives import Objective


def check_samples(model: Any, samples: Sequence[BankSample]) -> None:
    """Check samples before anything is computed.

    Raises:
        UsageError: there are none, or they are of two protocols.
        IncompatibleError: one is longer than the model takes.
    """
    if not samples:
        raise UsageError("there are no samples to search on: raise --samples, or choose a task that has questions")
    protocols = sorted({sample.reading.protocol for sample in samples})
    if len(protocols) > 1:
        raise UsageError(f"samples of {' and '.join(protocols)} cannot share a bank: make one for each protocol")
    for sample in samples:
        check_length(model, len(sample.prompt) + len(sample.following))


def check_cap(cap: int) -> None:
    """UsageError if a bank would keep nothing."""
    if cap < 1:
        raise UsageError(f"a bank keeps at least 1 entry per kv head, not {cap}")


def check_objective(objective: Objective, samples: Sequence[BankSample], full: bool) -> None:
    """UsageError if this is no loss of teacher-forced answers, or a sample or the bank lacks what it needs."""
    if objective.free_running:
        raise UsageError(f"{objective.name} is judged by replies, not by teacher-forced answers: use scores()")
    if objective.needs_full and not full:
        raise UsageError(f"{objective.name} compares with the full cache: build the bank with full=True")
    for sample in samples:
        if not len(sample.answer):
            raise UsageError(
                f"{sample.place}: {objective.name} needs a right answer, and there is none: search by the metric"
            )


def sample_indices(samples: Sequence[int] | None, count: int) -> list[int]:
    """Indices of samples, all `count` for None; UsageError if one is out of range."""
    chosen = list(range(count)) if samples is None else [int(index) for index in samples]
    wrong = [index for index in chosen if not 0 <= index < count]
    if wrong:
        raise UsageError(f"there is no sample {wrong[0]}: the bank has {count}, numbered from 0")
    return chosen


def candidate_table(candidates: Sequence[Ints], shape: tuple[int, int], cap: int, longest: int) -> Ints:
    """Candidates as int64 [P, L, Hkv].

    Raises:
        UsageError: a candidate of another shape, that is no integers, negative, or above the `cap` of a bank whose
            `longest` prompt has more tokens than that.
    """
    for number, candidate in enumerate(candidates):
        table = np.asarray(candidate)
        if table.shape != shape:
            raise UsageError(f"candidate {number} has the shape {table.shape}, not [layers, kv heads] = {shape}")
        if not np.issubdtype(table.dtype, np.integer) or table.min() < 0:
            raise UsageError(f"candidate {number}: budgets are whole numbers of entries, 0 or more")
        if table.max() > cap < longest:
            raise UsageError(
                f"candidate {number} wants {table.max()} entries of a head, the bank keeps the best {cap}: build it "
                "with a larger cap"
            )
    return np.array(candidates, dtype=np.int64).reshape(len(candidates), *shape)

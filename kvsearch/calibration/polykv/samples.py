"""What is finished of a calibration by signals: a file for every pass over some continuations, so that it can go on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsearch.calibration.polykv.measurement import Measurement
from kvsearch.calibration.sample_files import SAMPLES, sample_files
from kvsearch.calibration.steps import Arrays, damaged, read_arrays, require_same, write_arrays
from kvsearch.plan.signals import CONTEXT, LENGTH, TOKENS

PROMPT, QUESTION = "prompt", "question"  # the place of a sample: number of the prompt and of its continuation
ROWS = "attention"  # [M, P, L, N] mean attention rows of samples, which a file holds summed:
ROW_SUM = "attention_sum"  # [P, L, N]
PLACES = (PROMPT, QUESTION, CONTEXT, LENGTH, TOKENS)  # [M] whole numbers


class SampleFiles:
    """Finished batches of a measurement, in memory and (if `folder` is given) on disk.

    Raises:
        UsageError: a file in the folder is damaged, holds a sample that another one has, or is of something else than
            `measurement`.
    """

    def __init__(self, folder: Path | None, measurement: Measurement) -> None:
        self.folder, self.measurement, self.parts = folder, measurement, list[Arrays]()
        for path in sample_files(folder) if folder is not None else ():
            part = _read(path, measurement)
            if again := sorted(self.finished & _pairs(part)):
                raise damaged(path, f"prompt {again[0][0]} with question {again[0][1]} is in another file, too")
            self.parts.append(part)

    @property
    def finished(self) -> set[tuple[int, int]]:
        """What is done: numbers of prompts, each with that of a continuation."""
        return {pair for part in self.parts for pair in _pairs(part)}

    def add(self, part: Arrays) -> None:
        """Take in continuations of some prompts, none of them finished; they are on the disk when this returns."""
        part = {name: array for name, array in part.items() if name != ROWS} | (
            {ROW_SUM: part[ROWS].sum(0, dtype=np.float64)} if ROWS in part else {}
        )
        self.parts.append(part)
        if self.folder is not None:
            prompt, question = min(_pairs(part))
            name = f"{prompt:06d}-{question:04d}.safetensors"
            write_arrays(self.folder / name, part, self.measurement.identity)

    def gathered(self) -> dict[str, NDArray[Any]]:
        """Return all arrays, in the order of prompts and their continuations."""
        whole = joined(self.parts)
        order = np.lexsort((whole[QUESTION], whole[PROMPT]))
        return {name: array if name == ROW_SUM else array[order] for name, array in whole.items()}


def kept_samples(directory: Path) -> int:
    """Count the samples of a calibration that is not finished in `directory`; UsageError if a file is damaged."""
    return sum(len(_loaded(path)[0][PROMPT]) for path in sample_files(directory / SAMPLES))


def unfinished(part: Arrays, finished: Collection[tuple[int, int]]) -> dict[str, NDArray[Any]]:
    """The samples of a part that are not `finished`: one that goes on with other batches has both kinds in a part."""
    pairs = zip(part[PROMPT].tolist(), part[QUESTION].tolist(), strict=True)
    rows = np.array([pair not in finished for pair in pairs])
    return {name: array[rows] for name, array in part.items()}


def joined(parts: Sequence[Arrays]) -> dict[str, NDArray[Any]]:
    """Join the samples of all parts, and add up what is summed over samples."""
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0] if name != ROW_SUM}
    if ROW_SUM in parts[0]:
        sums = [part[ROW_SUM] for part in parts]
        whole[ROW_SUM] = np.zeros((*sums[0].shape[:2], max(array.shape[2] for array in sums)))
        for array in sums:
            whole[ROW_SUM][..., : array.shape[2]] += array
    return whole


def places(
    prompts: Iterable[int], questions: Iterable[int], contexts: Iterable[int], lengths: Iterable[int]
) -> dict[str, Any]:
    """Return the arrays that say which samples these are."""
    numbers = zip((PROMPT, QUESTION, CONTEXT, LENGTH), (prompts, questions, contexts, lengths), strict=True)
    return {name: np.array(list(values), dtype=np.int32) for name, values in numbers}


def _pairs(part: Arrays) -> set[tuple[int, int]]:
    return set(zip(part[PROMPT].tolist(), part[QUESTION].tolist(), strict=True))


def _read(path: Path, measurement: Measurement) -> Arrays:
    """Read the samples of a file; UsageError if it is damaged or of another measurement."""
    arrays, identity = _loaded(path)
    require_same(path, identity, measurement.identity)
    if problem := _problem(arrays, measurement):
        raise damaged(path, problem)
    return arrays


def _loaded(path: Path) -> tuple[Arrays, dict[str, str]]:
    """Read the arrays of a file, those of `PLACES` among them, and what it was measured of."""
    arrays, identity = read_arrays(path)
    for name in PLACES:
        if name not in arrays or arrays[name].ndim != 1 or arrays[name].dtype.kind != "i":
            raise damaged(path, f"it has no {name}" if name not in arrays else f"{name} is no list of whole numbers")
    return arrays, identity


def _problem(arrays: Arrays, measurement: Measurement) -> str | None:
    """Say the first thing that is wrong with the arrays of a file, if anything."""
    count, rest = len(arrays[PROMPT]), dict(arrays)
    for name, shape in {**dict.fromkeys(PLACES, ()), **measurement.shapes}.items():
        found = rest.pop(name, None)
        if found is None:
            return f"it has no {name}"
        if found.shape != (count, *shape):
            return f"{name} has shape {list(found.shape)}, not {[count, *shape]}"
        if name not in PLACES and (found.dtype.kind != "f" or not np.isfinite(found).all()):
            return f"{name} holds something else than finite numbers"
    summed = rest.pop(ROW_SUM, None)
    if (None if summed is None else summed.shape[:-1]) != measurement.summed:
        return f"it has no {ROW_SUM} of the right shape" if measurement.summed else f"{ROW_SUM} was not asked for"
    if rest:
        return f"{min(rest)} is unknown"
    return "a sample is in it twice" if len(_pairs(arrays)) < count else None

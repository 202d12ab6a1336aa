"""What is finished of a calibration by signals: a file per batch, so that it can go on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from kvsearch.calibrate.options import SAMPLES
from kvsearch.errors import UsageError
from kvsearch.plan.files import atomic_write, read_bytes
from kvsearch.plan.signals import CONTEXT, LENGTH, TOKENS

PROMPT, QUESTION = "prompt", "question"  # the place of a sample: number of the prompt and of its continuation
ROW_SUM = "attention_sum"  # [P, L, N] over the samples of the batch, not an array by sample

Arrays = Mapping[str, NDArray[Any]]


class SampleFiles:
    """Finished batches, in memory and (if `folder` is given) on disk.

    Raises:
        UsageError: a file in the folder is damaged.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder, self.parts = folder, list[Arrays]()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.parts = [_read(path) for path in sorted(folder.glob("*.safetensors"))]

    @property
    def finished(self) -> set[int]:
        """Numbers of the prompts that are done."""
        return {int(number) for part in self.parts for number in part[PROMPT]}

    def add(self, parts: Sequence[Arrays]) -> None:
        """Take in a batch, its continuations one after the other; it is on the disk when this returns."""
        whole = joined(parts)
        self.parts.append(whole)
        if self.folder is not None:
            atomic_write(self.folder / f"{int(whole[PROMPT].min()):06d}.safetensors", save(whole))

    def gathered(self) -> dict[str, NDArray[Any]]:
        """All arrays, in the order of prompts and their continuations."""
        whole = joined(self.parts)
        order = np.lexsort((whole[QUESTION], whole[PROMPT]))
        return {name: array if name == ROW_SUM else array[order] for name, array in whole.items()}


def forget_samples(directory: Path) -> None:
    """Remove the files of a calibration in `directory` whose profile is written."""
    folder = directory / SAMPLES
    for path in folder.glob("*.safetensors"):
        path.unlink()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def joined(parts: Sequence[Arrays]) -> dict[str, NDArray[Any]]:
    """The samples of all parts, and the sum of what is summed over samples."""
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0] if name != ROW_SUM}
    if ROW_SUM in parts[0]:
        sums = [part[ROW_SUM] for part in parts]
        whole[ROW_SUM] = np.zeros((*sums[0].shape[:2], max(array.shape[2] for array in sums)))
        for array in sums:
            whole[ROW_SUM][..., : array.shape[2]] += array
    return whole


def places(prompts: Iterable[int], question: int, contexts: Iterable[int], lengths: Iterable[int]) -> dict[str, Any]:
    """The arrays that say which samples these are."""
    numbers = list(prompts)
    return {
        PROMPT: np.array(numbers, dtype=np.int32),
        QUESTION: np.full(len(numbers), question, dtype=np.int32),
        CONTEXT: np.array(list(contexts), dtype=np.int32),
        LENGTH: np.array(list(lengths), dtype=np.int32),
    }


def _read(path: Path) -> Arrays:
    try:
        arrays: dict[str, NDArray[Any]] = load(read_bytes(path))
    except SafetensorError as error:
        raise _damaged(path, str(error)) from error
    if missing := [name for name in (PROMPT, QUESTION, CONTEXT, LENGTH, TOKENS) if name not in arrays]:
        raise _damaged(path, f"it has no {missing[0]}")
    return arrays


def _damaged(path: Path, problem: str) -> UsageError:
    return UsageError(f"{path} is damaged ({problem}): remove it, and its batch is measured again")

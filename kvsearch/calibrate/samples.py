"""What is finished of a calibration by signals: a file per batch and continuation, so that it can go on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
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
    def finished(self) -> set[tuple[int, int]]:
        """What is done: numbers of prompts, each with that of a continuation."""
        return {
            (int(prompt), int(question))
            for part in self.parts
            for prompt, question in zip(part[PROMPT], part[QUESTION], strict=True)
        }

    def add(self, part: Arrays) -> None:
        """Take in a continuation of some prompts, none of them finished; it is on the disk when this returns."""
        self.parts.append(part)
        if self.folder is not None:
            name = f"{int(part[PROMPT].min()):06d}-{int(part[QUESTION][0]):04d}.safetensors"
            whole = {key: np.ascontiguousarray(array) for key, array in part.items()}
            atomic_write(self.folder / name, save(whole))

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


def unfinished(part: Arrays, finished: Collection[tuple[int, int]]) -> dict[str, NDArray[Any]]:
    """The samples of a part that are not `finished`; with literal entropy a part is finished as a whole or not at all.

    Only a calibration that goes on with other batches has both kinds in one part.
    """
    pairs = zip(part[PROMPT].tolist(), part[QUESTION].tolist(), strict=True)
    rows = np.array([pair not in finished for pair in pairs])
    if rows.all():
        return dict(part)
    if ROW_SUM in part:
        raise UsageError("attention was added up over other batches: go on with the --batch that it began with")
    return {name: array[rows] for name, array in part.items()}


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
    return UsageError(f"{path} is damaged ({problem}): remove it, and what it held is measured again")

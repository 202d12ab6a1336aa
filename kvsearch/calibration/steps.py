"""What a calibration has finished, a file of arrays for each of its steps, so that it goes on where it was stopped.

A file says what it was measured of. Steps are made in one order and depend on nothing but that and the steps before
them, so a calibration that goes on ends as one that was never stopped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.prompts import CalibrationPrompt, parted_own_replies
from kvsearch.calibration.sample_files import SAMPLES
from kvsearch.errors import UsageError
from kvsearch.models.loading import LoadedModel
from kvsearch.plan.files import atomic_write, read_bytes
from kvsearch.resources import version
from kvsearch.runtime.forced_answers import TOGETHER

T = TypeVar("T")
Arrays = Mapping[str, NDArray[Any]]
CONTENT = "content"  # of a file beside what it was measured of: the digest of its arrays


def identity_of(
    loaded: LoadedModel, data: CalibrationData, prompts: Sequence[CalibrationPrompt], options: Mapping[str, Any]
) -> dict[str, str]:
    """Return all that results depend on, by what to call it: the model, the texts, and `options`."""
    # the texts, as the tokenizer and the options cut them
    tokens = [
        [one.ids[0].tolist(), [[after.answer, *after.tokens[0].tolist()] for after in one.continuations]]
        for one in prompts
    ]
    kinds = [[after.kind for after in one.continuations] for one in prompts]  # `data.sha256` is of what is asked alone
    return {
        "model weights": loaded.fingerprint.weights_sha256,
        "model configuration": loaded.fingerprint.config_sha256,
        "dtype": str(loaded.model.dtype),
        "device": loaded.device.type,
        "data": data.sha256,
        "prompts": hashlib.sha256(json.dumps(tokens).encode()).hexdigest(),
        "kinds of questions": hashlib.sha256(json.dumps(kinds).encode()).hexdigest(),
        **{name: json.dumps(value) for name, value in options.items()},
    }


def read_arrays(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Read the arrays of a file, and what it was measured of; UsageError if it is damaged."""
    data = read_bytes(path)
    try:
        arrays: dict[str, NDArray[Any]] = load(data)
    except (SafetensorError, KeyError, ValueError) as error:  # a type that numpy does not have, too many dimensions
        raise damaged(path, " ".join(str(error).split())) from error
    size = int.from_bytes(data[:8], "little")  # `load` has checked it
    return arrays, json.loads(data[8 : 8 + size]).get("__metadata__") or {}


def require_same(path: Path, there: Mapping[str, str], identity: Mapping[str, str]) -> None:
    """Raise UsageError if what a file was measured of, `there`, is not `identity`."""
    other = next((name for name, value in identity.items() if there.get(name) != value), None)
    if other is not None:
        raise UsageError(
            f"{path} was measured with other {other}: give another directory, or start anew (--force) without the "
            "samples that are there"
        )


def write_arrays(path: Path, arrays: Arrays, identity: Mapping[str, str]) -> None:
    """Write what was measured of `identity`; it is on the disk when this returns."""
    path.parent.mkdir(exist_ok=True)  # and none above it: a directory that was removed is not made again
    atomic_write(path, save({name: np.ascontiguousarray(array) for name, array in arrays.items()}, dict(identity)))


def damaged(path: Path, problem: str) -> UsageError:
    """Return what to say of a file that somebody changed."""
    return UsageError(f"{path} is damaged ({problem}): remove it, and what it held is measured again")


def kept_replies(
    loaded: LoadedModel, prompts: Sequence[CalibrationPrompt], most: int, done: Steps
) -> list[CalibrationPrompt]:
    """Return what `with_own_replies` does, a few contexts a step."""
    parts = [prompts[first : first + TOGETHER] for first in range(0, len(prompts), TOGETHER)]

    def make(some: Sequence[Sequence[CalibrationPrompt]]) -> Iterator[Arrays]:
        for told in parted_own_replies(loaded, some, most):
            yield {
                f"{number}.{place}": after.tokens.numpy()
                for number, prompt in enumerate(told)
                for place, after in enumerate(prompt.continuations)
            }

    found = list[CalibrationPrompt]()
    for part, made in zip(parts, done.stage(parts, make), strict=True):
        for number, prompt in enumerate(part):
            after = (
                replace(one, tokens=torch.from_numpy(made[f"{number}.{place}"]))
                for place, one in enumerate(prompt.continuations)
            )
            found.append(replace(prompt, continuations=tuple(after)))
    return found


class Steps:
    """The steps of a calibration in `directory`; without one they are held in memory, and made anew every time."""

    def __init__(self, directory: Path | None, identity: Mapping[str, str]) -> None:
        self.folder = None if directory is None else directory / SAMPLES
        self.identity = {**identity, "version of kvsearch": version("kvsearch")}
        self._stage = -1

    def stage(self, items: Sequence[T], make: Callable[[Sequence[T]], Iterator[Arrays]]) -> Iterator[Arrays]:
        """Do the next stage, a step for each of its items in turn: one that is there is read.

        `make` yields what becomes of the items of the other steps, in their order.

        Raises:
            UsageError: the file of a step is damaged, or of something else.
        """
        self._stage += 1
        paths = [self._path(self._stage, number) for number in range(len(items))]
        there = [path is not None and path.exists() for path in paths]
        made = make([item for item, known in zip(items, there, strict=True) if not known])
        for path, known in zip(paths, there, strict=True):
            if path is None:
                yield next(made)
                continue
            if known:
                self._check(path)
            else:
                arrays = next(made)
                write_arrays(path, arrays, {**self.identity, CONTENT: _digest(arrays)})
            yield _FileArrays(path)

    def _path(self, stage: int, number: int) -> Path | None:
        return None if self.folder is None else self.folder / f"{stage:06d}-{number:04d}.safetensors"

    def _check(self, path: Path) -> None:
        """Raise UsageError if the file of a step is damaged, or of something else."""
        arrays, there = read_arrays(path)
        require_same(path, there, self.identity)
        if there.get(CONTENT) != _digest(arrays):
            raise damaged(path, "its arrays are not those that were written")


def _digest(arrays: Arrays) -> str:
    """Return the SHA-256 of arrays, by their names, shapes and types."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        found.update(f"{name} {array.dtype} {array.shape}\n".encode())
        found.update(array.tobytes())
    return found.hexdigest()


class _FileArrays(Mapping[str, NDArray[Any]]):
    """The arrays of a file, each read when it is asked for: all of all files may be more than memory holds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with safe_open(path, "numpy") as file:
            self._names = tuple(sorted(file.keys()))

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._names:
            raise KeyError(name)
        with safe_open(self.path, "numpy") as file:
            found: NDArray[Any] = file.get_tensor(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

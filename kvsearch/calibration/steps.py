"""What a calibration has finished, a file of arrays for each of its steps, so that it goes on where it was stopped.

A file says what it was measured of. Steps are made in one order and depend on nothing but that and the steps before
them, so a calibration that goes on ends as one that was never stopped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.prompts import CalibrationPrompt, with_own_replies
from kvsearch.calibration.sample_files import SAMPLES
from kvsearch.errors import UsageError
from kvsearch.models.loading import LoadedModel
from kvsearch.plan.files import atomic_write, read_bytes
from kvsearch.runtime.forced_answers import TOGETHER

Arrays = Mapping[str, NDArray[Any]]
Step = Callable[[Callable[[], Arrays]], Arrays]  # makes arrays, or reads them if they were made before
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
    found, step = list[CalibrationPrompt](), done.stage()
    for first in range(0, len(prompts), TOGETHER):
        part = prompts[first : first + TOGETHER]

        def reply(part: Sequence[CalibrationPrompt] = part) -> Arrays:
            told = with_own_replies(loaded, part, most)
            return {
                f"{number}.{place}": after.tokens.numpy()
                for number, prompt in enumerate(told)
                for place, after in enumerate(prompt.continuations)
            }

        made = step(reply)
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

    def stage(self) -> Step:
        """Begin the next stage; what is returned does its steps in turn: it makes one, or reads it if it is there.

        Raises:
            UsageError: the file of a step is damaged, or of something else.
        """
        self._stage += 1
        stage, number = self._stage, -1

        def step(make: Callable[[], Arrays]) -> Arrays:
            nonlocal number
            number += 1
            if self.folder is None:
                return make()
            path = self.folder / f"{stage:06d}-{number:04d}.safetensors"
            if not path.exists():
                made = make()
                write_arrays(path, made, {**self.identity, CONTENT: _digest(made)})
            else:
                self._check(path)
            return _FileArrays(path)

        return step

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

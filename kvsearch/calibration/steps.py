"""Finished steps of a calibration, one file of arrays each, so that it can resume.

A file says what it was measured of. A step depends on nothing but that and the steps before it, so a calibration that
goes on ends as one that was never stopped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from kvsearch.core.errors import UsageError
from kvsearch.core.parsing import read_json
from kvsearch.core.resources import read_version
from kvsearch.plan.profile_arrays import Arrays
from kvsearch.plan.saved import PROFILE
from kvsearch.runs.identity import CONFIG

if TYPE_CHECKING:
    from kvsearch.calibration.data import CalibrationData
    from kvsearch.calibration.prompts import CalibrationPrompt
    from kvsearch.models.loading import LoadedModel

T = TypeVar("T")
STEPS_FOLDER = "samples"  # folder of a calibration: its finished steps


class StepCache:
    """The finished steps of a calibration in `directory`; without one nothing is stored.

    Args:
        directory: of the calibration.
        identity: hash of all inputs of the steps, see `hash_step_inputs`.
    """

    def __init__(self, directory: Path | None = None, identity: str = "") -> None:
        self.folder = None if directory is None else directory / STEPS_FOLDER
        self.identity = identity
        self._stage = -1

    def stage(self, items: Sequence[T], make: Callable[[Sequence[T]], Iterator[Arrays]]) -> Iterator[Arrays]:
        """Run the next stage, one step per item in order; stored steps are read.

        `make` yields the arrays of the items without a stored step, in order.

        Raises:
            UsageError: the file of a step is damaged, or of something else.
        """
        if self.folder is None:
            yield from make(items)
            return
        self._stage += 1
        paths = [self.folder / f"{self._stage:06d}-{number:04d}.safetensors" for number in range(len(items))]
        exist = [path.exists() for path in paths]
        missing_arrays = make([item for item, is_known in zip(items, exist, strict=True) if not is_known])
        for path, is_known in zip(paths, exist, strict=True):
            if is_known:
                yield self._read(path)
            else:
                arrays = next(missing_arrays)
                self.store(path, arrays)
                yield arrays

    def store(self, path: Path, arrays: Arrays) -> None:
        """Write a step; it is on the disk when this returns."""
        import torch

        from kvsearch.runtime.store.tensor_file import write_tensors

        path.parent.mkdir(exist_ok=True)  # and none above it: a directory that was removed is not made again
        tensors = {name: torch.tensor(np.ascontiguousarray(array)) for name, array in arrays.items()}
        write_tensors(path, tensors, f"{path.name} {self.identity}", overwrite=True)

    def _read(self, path: Path) -> Arrays:
        """Return the arrays of a step; UsageError if its file is damaged, or of something else."""
        from kvsearch.runtime.store.tensor_file import read_tensors

        damaged = UsageError(f"{path} is damaged: remove it, and what it held is measured again")
        try:
            about, tensors = read_tensors(path)
        except UsageError as error:
            raise damaged from error
        name, _, identity = about.partition(" ")
        if identity != self.identity:
            raise UsageError(
                f"{path} was measured of another model or other texts, or by another version of kvsearch: choose "
                "another --output, or --force to start anew"
            )
        if name != path.name or not tensors:
            raise damaged
        return {name: tensor.numpy() for name, tensor in tensors.items()}


def hash_step_inputs(
    loaded: LoadedModel, data: CalibrationData, prompts: Sequence[CalibrationPrompt], settings: Mapping[str, Any]
) -> str:
    """Hash all inputs of steps, SHA-256: the model, the texts, and `settings`."""
    from kvsearch.runtime.decode.next_tokens import record_generation_settings

    # the texts, as the tokenizer and the options cut them; `data.sha256` is of what is asked alone
    texts = [
        [
            prompt.ids[0].tolist(),
            [[after.answer, *after.tokens[0].tolist()] for after in prompt.continuations],
        ]
        for prompt in prompts
    ]
    weights = [loaded.fingerprint.weights_sha256, loaded.fingerprint.config_sha256]
    device = [str(loaded.model.dtype), loaded.device.type]
    content = [read_version("kvsearch"), weights, device, data.sha256, texts, dict(settings)]
    if generation := record_generation_settings(loaded.model):  # the model's own replies follow it
        content.append(generation)
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def count_steps(directory: Path) -> int:
    """Count the stored steps of an unfinished calibration in `directory`."""
    return len(list((directory / STEPS_FOLDER).glob("*.safetensors")))


def read_calibration_content(directory: Path) -> dict[str, Any]:
    """Read the calibration settings from the configuration in `directory`; empty if there are none."""
    path = directory / CONFIG
    config: Any = read_json(path) if path.is_file() else {}
    content = config.get("content", config) if isinstance(config, dict) else {}
    return content if isinstance(content, dict) else {}


def find_profile_file(path: Path) -> Path:
    """Find the profile file of a directory or file; UsageError if the calibration is unfinished."""
    if path.is_file() and path.suffix == ".json":
        raise UsageError(f"{path} is no profile: the size of a plan is changed by `kvsearch plan scale {path}`")
    if not path.is_dir() or (path / PROFILE).exists():
        return path / PROFILE if path.is_dir() else path
    content = read_calibration_content(path)
    recipe = content.get("recipe")
    if isinstance(recipe, dict) and "method" in recipe:  # a config.json may be of anything
        raise UsageError(
            f"the calibration in {path} is not finished: repeat its command, kvsearch calibrate "
            f"{content.get('model') or 'MODEL'} ... -o {path}, to go on"
        )
    if plans := sorted(path.glob("plan*.json")):
        raise UsageError(f"{path} has no profile but a plan: change its size with `kvsearch plan scale {plans[0]}`")
    return path / PROFILE

"""Steps that are stored belong to one calibration: those of another one, and damaged ones, are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load, save

from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.prompts import encode_prompts
from kvsearch.calibration.steps import STEPS_FOLDER, StepCache, count_steps, hash_step_inputs
from kvsearch.core.errors import UsageError
from kvsearch.models.loading import LoadedModel
from tests import tiny

DATA = tiny.calibration_data(40, 60)


def doubled(items: Sequence[int]) -> Iterator[dict[str, Any]]:
    return ({"twice": np.full(3, 2.0 * item)} for item in items)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two stages of a calibration."""
    steps = StepCache(tmp_path, "this")
    assert [found["twice"].tolist() for found in steps.stage([1, 2], doubled)] == [[2.0] * 3, [4.0] * 3]
    assert len(list(steps.stage([5], doubled))) == count_steps(tmp_path) - 2 == 1
    return tmp_path


def test_what_is_stored_is_not_made_again(directory: Path) -> None:
    sorted((directory / STEPS_FOLDER).iterdir())[1].unlink()
    made: list[int] = []

    def make(items: Sequence[int]) -> Iterator[dict[str, Any]]:
        made.extend(items)
        return doubled(items)

    steps = StepCache(directory, "this")
    found = [*steps.stage([1, 2], make), *steps.stage([5], make)]
    assert [arrays["twice"][0] for arrays in found] == [2.0, 4.0, 10.0]
    assert made == [2]
    assert next(StepCache().stage([7], doubled))["twice"][0] == 14.0  # without a directory


def test_steps_of_another_calibration_are_refused(directory: Path) -> None:
    with pytest.raises(UsageError, match=r"0000\.safetensors was measured of another model or other texts"):
        list(StepCache(directory, "other").stage([1, 2], doubled))


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays: arrays.pop("twice"),
        lambda arrays: arrays.update(twice=np.nextafter(arrays["twice"], 9)),
    ],
)
def test_damaged_steps_are_told(change: Callable[[dict[str, Any]], object], directory: Path) -> None:
    path = min((directory / STEPS_FOLDER).iterdir())
    with safe_open(path, "np") as file:
        metadata = file.metadata()
    arrays = load(path.read_bytes())
    change(arrays)
    path.write_bytes(save(arrays, metadata))
    with pytest.raises(UsageError, match=rf"{path.name} is damaged: remove it, and what it held is measured again"):
        list(StepCache(directory, "this").stage([1, 2], doubled))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UsageError, match=rf"{path.name} is damaged"):
        list(StepCache(directory, "this").stage([1, 2], doubled))


def test_all_that_steps_depend_on_is_in_their_identity() -> None:
    def identity(model: LoadedModel, data: CalibrationData = DATA, seed: int = 0) -> str:
        return hash_step_inputs(model, data, encode_prompts(model, data), {"seed": seed})

    model = tiny.loaded()
    other = tiny.loaded()
    other.model.model.layers[1].mlp.down_proj.weight.data.mul_(1.5)
    half = tiny.loaded()
    found = [
        identity(model),
        identity(model, seed=1),
        identity(model, tiny.calibration_data(40, 70)),
        identity(tiny.wrap(other.model)),
        identity(tiny.loaded(rms_norm_eps=1e-3)),
        identity(replace(half, model=half.model.bfloat16())),
    ]
    assert len(set(found)) == len(found)
    assert identity(tiny.loaded()) == found[0]

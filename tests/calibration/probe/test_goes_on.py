"""A fit that was stopped goes on where it was, and ends as one that never was."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load, save

from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.options import ProbeOptions, QueryBankOptions
from kvsearch.calibration.probe.bank import calibrate_query_bank
from kvsearch.calibration.probe.measure import calibrate_probe
from kvsearch.calibration.sample_files import SAMPLES, forget_samples, has_samples, sample_files
from kvsearch.errors import UsageError
from kvsearch.models.loading import LoadedModel
from kvsearch.plan.temporary import TEMPORARY
from kvsearch.runtime.observe import DensePass
from tests import tiny
from tests.calibration.probe.test_kinds import of_kinds

FITS = {
    "probe": ProbeOptions(entries=100, form="linear", features=("value_norm", "spread"), answer_tokens=2),
    "query_bank": QueryBankOptions(bank=3, answer_tokens=2),
}
DATA = of_kinds(tiny.calibration_data(80, 82, 84, 86, 88, questions=1), "codes", "chains")


def fitted(
    model: LoadedModel, name: str, directory: Path | None, data: CalibrationData = DATA, **changes: Any
) -> bytes:
    options = FITS[name].model_copy(update=changes)
    if isinstance(options, ProbeOptions):
        return calibrate_probe(model, data, options, None, directory).to_bytes()
    assert isinstance(options, QueryBankOptions)
    return calibrate_query_bank(model, data, options, None, directory).to_bytes()


class Killed(BaseException):
    """What no code expects."""


class Passes:
    """Counts passes over contexts, and ends the process, as it were, before the one after `left` others."""

    def __init__(self) -> None:
        self.made, self.left, self.plain = 0, 999, DensePass.__init__

    def __call__(self, *given: Any, **named: Any) -> None:
        if not self.left:
            raise Killed
        self.made, self.left = self.made + 1, self.left - 1
        self.plain(*given, **named)


class Whole(NamedTuple):
    """A fit that was not stopped: its profile, how many passes it took, and where what it had finished is."""

    name: str
    profile: bytes
    passes: int
    directory: Path


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny.loaded()


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    found = Passes()
    monkeypatch.setattr(DensePass, "__init__", lambda *given, **named: found(*given, **named))
    return found


@pytest.fixture(scope="module", params=FITS)
def whole(
    model: LoadedModel, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Whole]:
    directory, found = tmp_path_factory.mktemp(request.param), Passes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DensePass, "__init__", lambda *given, **named: found(*given, **named))
        profile = fitted(model, request.param, directory)
    yield Whole(request.param, profile, found.made, directory)


@pytest.fixture
def half(whole: Whole, tmp_path: Path) -> Path:
    """A directory with the first half of what was finished."""
    (tmp_path / SAMPLES).mkdir()
    files = sample_files(whole.directory / SAMPLES)
    for path in files[: len(files) // 2]:
        shutil.copy(path, tmp_path / SAMPLES)
    return tmp_path


def test_it_ends_as_one_that_was_never_stopped(
    whole: Whole, model: LoadedModel, passes: Passes, tmp_path: Path
) -> None:
    """Stopped again and again; what was finished before is not measured again."""
    for passes.left in (2, 1, whole.passes // 2, 1):
        with suppress(Killed):
            fitted(model, whole.name, tmp_path)
    passes.left = 999
    assert fitted(model, whole.name, tmp_path) == whole.profile
    assert passes.made == whole.passes


def test_the_same_bytes_without_a_directory(whole: Whole, model: LoadedModel) -> None:
    assert fitted(model, whole.name, None) == whole.profile


def test_all_that_is_left_of_it_is_removed(half: Path) -> None:
    """With files that were being written when the process was killed."""
    (half / SAMPLES / f"{TEMPORARY}0123.tmp").write_bytes(b"half")
    assert has_samples(half)
    forget_samples(half)
    assert not (half / SAMPLES).exists()


def test_steps_of_another_fit_are_refused(half: Path, whole: Whole, model: LoadedModel) -> None:
    with pytest.raises(UsageError, match="safetensors was measured with other seed: give another directory, or start"):
        fitted(model, whole.name, half, seed=5)
    other = tiny.loaded(rms_norm_eps=1e-3)
    with pytest.raises(UsageError, match="was measured with other model configuration"):
        fitted(other, whole.name, half)
    with pytest.raises(UsageError, match="was measured with other kinds of questions"):
        fitted(model, whole.name, half, of_kinds(DATA, "codes", "codes", "chains"))


def test_damaged_steps_are_told(half: Path, whole: Whole, model: LoadedModel) -> None:
    path = sample_files(half / SAMPLES)[-1]
    with safe_open(path, "np") as file:
        identity = file.metadata()
    arrays = load(path.read_bytes())
    name = max(arrays, key=lambda name: arrays[name].size)
    path.write_bytes(save({**arrays, name: np.nextafter(arrays[name], np.float32(9))}, identity))
    with pytest.raises(UsageError, match=rf"{path.name} is damaged \(its arrays are not those that were written\)"):
        fitted(model, whole.name, half)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UsageError, match=rf"{path.name} is damaged .*: remove it, and what it held is measured again"):
        fitted(model, whole.name, half)

"""A fit that was stopped goes on where it was, and ends as one that never was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.options import ProbeOptions, QueryBankOptions
from kvsearch.models.loading import LoadedModel
from kvsearch.runtime.observe import DensePass
from tests import tiny
from tests.calibration.probe.test_kinds import of_kinds
from tests.calibrations import calibrate_probe, calibrate_query_bank

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
    """A fit that was not stopped: its profile, and how many passes it took."""

    name: str
    profile: bytes
    passes: int


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
    yield Whole(request.param, profile, found.made)


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

"""A fit that was stopped goes on where it was, and ends as one that never was."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvsearch.calibration.options import ProbeOptions, QueryBankOptions
from kvsearch.models.loading import LoadedModel
from kvsearch.runtime.observe import DensePass
from tests import tiny
from tests.calibrations import calibrate

FITS = {
    "probe": ProbeOptions(entries=100, form="linear", features=("value_norm", "spread"), answer_tokens=2),
    "query_bank": QueryBankOptions(bank=3, answer_tokens=2),
}
DATA = tiny.calibration_data(80, 82, 84, 86, 88, questions=1)


def fitted(model: LoadedModel, name: str, directory: Path | None) -> bytes:
    options = FITS[name]
    return calibrate(model, DATA, options.policies(), options, None, directory).to_bytes()


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


@pytest.mark.parametrize("name", FITS)
def test_it_ends_as_one_that_was_never_stopped(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Stopped again and again; what was finished before is not measured again."""
    model = tiny.loaded()
    whole = Passes()
    passes = whole
    monkeypatch.setattr(DensePass, "__init__", lambda *given, **named: passes(*given, **named))
    profile = fitted(model, name, None)
    passes = Passes()
    passes.plain = whole.plain
    for passes.left in (2, 1, whole.made // 2, 1):
        with suppress(Killed):
            fitted(model, name, tmp_path)
    passes.left = 999
    assert fitted(model, name, tmp_path) == profile
    assert passes.made == whole.made

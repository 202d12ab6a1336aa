"""What commands on a PolyKV calibration take from it: model, dtype and revision, unless they are typed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import kvsearch.models.loading
from kvsearch.calibration.steps import find_profile_file
from kvsearch.commands.model_loader import ModelLoader
from kvsearch.commands.validate import SignalOptions
from kvsearch.core.errors import UsageError
from kvsearch.models.loading import LoadOptions
from kvsearch.plan.saved import PROFILE

RECIPE = {"recipe": {"method": "polykv"}}


class Asked(Exception):
    """What was to be loaded, and how."""

    def __init__(self, model: str, **loading: Any) -> None:
        super().__init__(model)
        self.model, self.loading = model, loading


@pytest.fixture(autouse=True)
def loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, options: LoadOptions) -> None:
        raise Asked(name, **asdict(options))

    monkeypatch.setattr(kvsearch.models.loading, "load", load)


def asked_for(directory: Path, typed: str | None = None, **options: Any) -> tuple[str, str, str | None]:
    with pytest.raises(Asked) as found:
        signals = SignalOptions(directory=directory, model=typed, **options)
        signals.load_calibrated(ModelLoader(options=signals.loading()))
    return found.value.model, found.value.loading["dtype"], found.value.loading["revision"]


def test_a_calibration_is_gone_on_with_as_it_was_made(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**RECIPE, "model": "a/b", "dtype": "bfloat16", "revision": "v1"}))
    assert asked_for(tmp_path) == ("a/b", "bfloat16", "v1")
    assert asked_for(tmp_path, dtype="float32", revision="v2") == ("a/b", "float32", "v2")
    assert asked_for(tmp_path, "c/d") == ("c/d", "bfloat16", None)


def test_a_calibration_without_a_profile_is_unfinished_and_nothing_else_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model": "a/b"}))
    assert find_profile_file(tmp_path) == tmp_path / PROFILE
    (tmp_path / "config.json").write_text(json.dumps({**RECIPE, "model": "a/b"}))
    with pytest.raises(UsageError, match=r"is not finished: .* kvsearch calibrate a/b \.\.\."):
        find_profile_file(tmp_path)
    with pytest.raises(UsageError, match="is no profile: the size of a plan is changed by `kvsearch plan scale"):
        find_profile_file(tmp_path / "config.json")

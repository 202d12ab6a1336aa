"""Shipped files are found in a wheel and in a source checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsearch.core import resources
from kvsearch.core.errors import EnvironmentFault
from kvsearch.core.resources import resource


def test_in_this_installation() -> None:
    assert resource("data/calibration/novel.json").is_file()
    assert resource("data/calibration").is_dir()


def test_where_they_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside the package first, as a wheel has them, then beside it."""
    package = tmp_path / "kvsearch"
    monkeypatch.setattr(resources, "_PACKAGE", package)
    beside, inside = tmp_path / "data" / "x.json", package / "_resources" / "data" / "x.json"
    with pytest.raises(EnvironmentFault, match=r"data/x\.json is missing from this installation of kvsearch"):
        resource("data/x.json")
    for path in (beside, inside):
        path.parent.mkdir(parents=True)
        path.write_text("{}")
        assert resource("data/x.json") == path

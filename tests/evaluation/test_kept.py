"""What is gone on with and what begins anew, and where replies cannot be kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvsearch.errors import UsageError
from kvsearch.evaluation.identity import CONFIG_SCHEMA
from kvsearch.evaluation.kept import begins_anew, check_place, without_rounding

CONFIG: dict[str, Any] = {"schema": CONFIG_SCHEMA, "seed": 1}


def there(place: Path, config: dict[str, Any] | None = None, ledger: str | None = "") -> Path:
    place.mkdir()
    if config is not None:
        (place / "config.json").write_text(json.dumps(config))
    if ledger is not None:
        (place / "ledger.jsonl").write_text(ledger)
    return place


def test_force_throws_away_only_what_cannot_be_gone_on_with(tmp_path: Path) -> None:
    same = there(tmp_path / "same", CONFIG)
    other = there(tmp_path / "other", {**CONFIG, "seed": 2})
    damaged = there(tmp_path / "damaged", CONFIG, "nonsense\n{}\n")
    early = there(tmp_path / "early", CONFIG, None)  # interrupted before the first reply
    found = {place.name: begins_anew(place, CONFIG, True) for place in (same, other, damaged, early, tmp_path / "new")}
    assert found == {"same": False, "other": True, "damaged": True, "early": False, "new": False}
    assert not any(begins_anew(place, CONFIG, False) for place in (same, other, damaged, early, tmp_path / "new"))


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("content", ["{", "[]", '{"schema": "another"}'])
def test_a_damaged_configuration_has_to_be_deleted(tmp_path: Path, content: str, force: bool) -> None:
    place = there(tmp_path / "run")
    (place / "config.json").write_text(content)
    with pytest.raises(UsageError, match=r"run is where replies are kept, but has something else in it: delete it$"):
        begins_anew(place, CONFIG, force)


def test_places_that_are_no_directories(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    check_place(tmp_path)
    check_place(tmp_path / "new" / "deeper")
    for place in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(UsageError, match=r"cannot keep replies in .*: .*file is a file, name a directory$"):
            check_place(place)


def test_what_changes_replies_by_rounding_alone() -> None:
    assert without_rounding({**CONFIG, "batch": 3, "max_memory": None}) == CONFIG

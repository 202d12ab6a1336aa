"""Two runs are the same if their content is, and of others the first difference is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvsearch.runs.identity import CONFIG, SCHEMA, RunConfig, difference, read_config

CONTENT: dict[str, Any] = {"settings": {"seed": 0, "layers": (0, 1)}, "rows": "a" * 64}


def config(**changes: Any) -> RunConfig:
    return RunConfig(**{"job": "evaluate", "content": CONTENT, **changes})


def test_the_file_is_read_again(tmp_path: Path) -> None:
    one = config(command=["kvsearch", "evaluate"], options={"budget": 8}, execution={"workers": None})
    (tmp_path / CONFIG).write_bytes(one.to_bytes())
    assert json.loads(one.to_bytes()) == {
        "schema": SCHEMA, "job": "evaluate", "command": ["kvsearch", "evaluate"], "options": {"budget": 8},
        "content": {"settings": {"seed": 0, "layers": [0, 1]}, "rows": "a" * 64}, "execution": {"workers": None},
    }  # fmt: skip
    found = read_config(tmp_path)
    assert found.to_bytes() == one.to_bytes()
    assert one.difference(found) is None


def test_only_the_content_is_compared() -> None:
    one = config(command=["kvsearch"], options={"a": 1}, execution={"limits": 3})
    other = config(command=["kvsearch", "evaluate"], options={"a": 2}, execution={"limits": 4})
    assert one.difference(other) is None
    changed = config(content={**CONTENT, "settings": {"seed": 1, "layers": [0, 1]}})
    assert config().difference(changed) == "settings.seed is 1 there, 0 here"


@pytest.mark.parametrize("content", [None, "[]", "{}", '{"schema": "kvsearch.evaluation.config/1", "seed": 1}'])
def test_what_is_none(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / CONFIG).write_text(content)
    assert read_config(tmp_path) is None


def test_differences_are_named_by_place() -> None:
    assert difference({"a": 1, "b": {"c": [1]}}, {"a": 1, "b": {"c": [1]}}) is None
    assert difference({"b": {"c": 1}}, {"b": {"c": 2}}) == "b.c is 1 there, 2 here"
    assert difference({"b": "x" * 60}, {"b": None}) == f"b is '{'x' * 39}... there, None here"


def test_the_first_item_that_differs_is_shown() -> None:
    """Never two values that look the same because they are cut."""
    many = [{"name": name, "params": {"window": 32}} for name in ("snapkv", "tova", "h2o")]
    other = [*many[:2], {"name": "h2o", "params": {"window": 8}}]
    assert difference({"patterns": many}, {"patterns": other}) == "patterns.2.params.window is 32 there, 8 here"
    assert difference({"a": [64]}, {"a": [64, 128]}) == "a is [64] there, [64, 128] here"

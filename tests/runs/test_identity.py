"""What a run is known by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvsearch.runs.identity import CONFIG, RunConfig, find_difference, read_config

CONTENT: dict[str, Any] = {"settings": {"seed": 0, "layers": (0, 1)}, "rows": "a" * 64}


def config(**changes: Any) -> RunConfig:
    return RunConfig(**{"job": "evaluate", "content": CONTENT, **changes})


def test_only_the_content_is_compared() -> None:
    one = config(command=["kvsearch"], options={"a": 1}, execution={"limits": 3})
    other = config(command=["kvsearch", "evaluate"], options={"a": 2}, execution={"limits": 4})
    assert one.difference(other) is None
    changed = config(content={**CONTENT, "settings": {"seed": 1, "layers": [0, 1]}})
    assert config().difference(changed) == "settings.seed is 1 there, 0 here"


def test_what_is_none(tmp_path: Path) -> None:
    assert read_config(tmp_path) is None
    for content in ("[]", "{}", '{"schema": "kvsearch.evaluation.config/1", "seed": 1}'):
        (tmp_path / CONFIG).write_text(content)
        assert read_config(tmp_path) is None


def test_the_first_item_that_differs_is_shown() -> None:
    """Never two values that look the same because they are cut."""
    many = [{"name": name, "params": {"window": 32}} for name in ("snapkv", "tova", "h2o")]
    other = [*many[:2], {"name": "h2o", "params": {"window": 8}}]
    assert find_difference({"patterns": many}, {"patterns": other}) == "patterns.2.params.window is 32 there, 8 here"
    assert find_difference({"a": [64]}, {"a": [64, 128]}) == "a is [64] there, [64, 128] here"


def test_values_that_are_written_alike_are_no_difference() -> None:
    values = [1, 1.0, True, [1], [1.0], [[1]], None, 0.0, -0.0, "1"]
    runs = [RunConfig(job="evolve", content=content) for content in ({}, *({"a": value} for value in values))]
    for one in runs:
        for other in runs:
            assert (one.difference(other) is None) == (one.to_bytes() == other.to_bytes())

"""A compressed cache of a tiny model: written, and read again by that model."""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvsearch.runtime import PlanCache
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.shared_prefill import prefill_all
from tests.families import build, prompts
from tests.runtime.helpers import plan_for, running


@cache
def model() -> Any:
    """The model."""
    return build("llama", num_hidden_layers=2)


def written() -> bytes:
    """Return the file of a cache of two sequences, under budgets that differ between heads, in both phases."""
    given = plan_for(model(), [[9, 12], [10, 11]])
    policy = {"name": "snapkv", "params": {"window": 4}}
    phase = {"layers": [{"policy": policy, "budget": budget} for budget in ([9, 12], [10, 11])]}
    plan = type(given).model_validate({**given.model_dump(), "prefill": phase, "decode": phase})
    ids, mask = prompts(2, 24, pads=5)
    with TemporaryDirectory() as folder, running(model(), NAME):
        made = PlanCache(model(), plan)
        prefill_all(model(), [made], ids, mask)
        made.save(Path(folder) / "cache.kv", ids, mask)
        return (Path(folder) / "cache.kv").read_bytes()


def load(path: Path) -> None:
    """Let the model hold what is in a file, and ask what it holds."""
    with running(model(), NAME):
        found = PlanCache.load(path, model())
    assert found.entries().sum() >= 0
    assert found.nbytes() >= 0


@lru_cache
def caches() -> list[bytes]:
    """Return compressed caches of the model."""
    return [written()]

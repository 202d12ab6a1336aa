"""Plans, and a compressed cache of a tiny model: written, and read again by that model."""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvsearch.core.canonical import canonical_json
from kvsearch.plan import Plan
from kvsearch.plan.arithmetic import add_carry
from kvsearch.plan.origin import ContextRecord, ContextSet, hash_context
from kvsearch.plan.yaml import plan_to_yaml
from kvsearch.runtime import PlanCache
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.shared_prefill import prefill_all
from tests.families import build, prompts
from tests.plan.builders import PROVENANCE, make_plan
from tests.runtime.helpers import plan_for, running


@lru_cache
def plans() -> list[Plan]:
    """Plans with one phase and with both, of fixed and proportional budgets, static and dynamic."""
    few = ContextSet.of([hash_context(f"context {number}") for number in range(3)])
    many = ContextSet.of([hash_context(f"context {number}") for number in range(300)])
    known = ContextRecord(fitted=few, reported=few).model_dump(mode="json")
    partly = ContextRecord(fitted=few, chosen=few.union(many), complete=False).model_dump(mode="json")
    return [
        add_carry(_plan("snapkv", [[10, 6], None, [4, 12]], {"window": 4, "pooling": "max"}), "match"),
        _plan("knorm", [[40, 12], [20, 30]], provenance={**PROVENANCE, "contexts": known}),
        _plan("pyramidkv", [[12, 10]] * 4, {"window": 3}, length=None, scaling="fixed"),
        _plan("snapkv", [[12, 10]] * 2, {"window": 4}, allocation={"name": "adakv", "params": {"floor_share": 0.2}}),
        _plan("snapkv", [[16, 24]] * 3, {"window": 4}, decode={"layers": [
            _layer(name, [16, 24]) for name in ("h2o", "streaming", "tova")
        ]}),
        _plan("streaming", [[10, 6], [4, 12]], {"sinks": 2}, provenance={**PROVENANCE, "contexts": partly}),
    ]  # fmt: skip


def _plan(policy: str, budgets: list[list[int] | None], params: dict[str, Any] | None = None, **changes: Any) -> Plan:
    layers = [None if budget is None else _layer(policy, budget, params) for budget in budgets]
    return make_plan(budgets, prefill={"layers": layers}, **changes)


def _layer(policy: str, budget: list[int], params: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"policy": {"name": policy, "params": params or {}}, "budget": budget}


@lru_cache
def plan_files() -> list[bytes]:
    """Plans as files."""
    return [canonical_json(plan) for plan in plans()]


@lru_cache
def plan_texts() -> list[bytes]:
    """Plans as YAML."""
    return [plan_to_yaml(plan).encode() for plan in plans()[:-1]]


@cache
def model() -> Any:
    """The model."""
    return build("llama", num_hidden_layers=2)


def written() -> bytes:
    """Return the file of a cache of two sequences, under budgets that differ between heads, in both phases."""
    given = plan_for(model(), [[9, 12], [10, 11]])
    policy = {"name": "snapkv", "params": {"window": 4}}
    phase = {"layers": [{"policy": policy, "budget": budget} for budget in ([9, 12], [10, 11])]}
    plan = add_carry(Plan.model_validate({**given.model_dump(), "prefill": phase, "decode": phase}), "match")
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

"""The examples in docstrings run as they are printed."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kvsearch.budgets.allocator import Uniform
from kvsearch.evaluation.methods import make_direct_plan
from kvsearch.plan import Size, save_plan
from kvsearch.policies import create_policy

MODULES = (
    "budgets.allocator", "budgets.dynamic", "budgets.loss_curves", "budgets.lukv", "budgets.polykv",
    "budgets.pyramidkv", "models.architecture", "models.loading", "plan.arithmetic", "plan.rounding", "policies.base",
    "policies.ranking", "policies.registry", "runtime.attach", "runtime.cache", "runtime.program",
    "search.optimisers", "selection.race", "signals.predictions",
)  # fmt: skip


def run_examples(name: str) -> int:
    """Run the examples of a module, which must not fail; return how many there are."""
    failed, count = doctest.testmod(import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert not failed
    return count


@pytest.mark.parametrize("module", MODULES)
def test_examples_of_modules(module: str, loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_direct_plan(loaded, create_policy("snapkv"), Size(budget=64), ("prefill",), Uniform())
    save_plan(plan, tmp_path / "plan.json")
    monkeypatch.chdir(tmp_path)
    assert run_examples(f"kvsearch.{module}")


def test_examples_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_examples("kvsearch")

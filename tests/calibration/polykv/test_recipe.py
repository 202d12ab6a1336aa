"""What a user writes and types about a PolyKV calibration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvsearch.calibration.polykv.options import PAPER_PATTERNS, PolykvOptions
from kvsearch.core.errors import UsageError
from kvsearch.policies import create_policy
from tests.calibration.test_recipe import resolve_recipe


def typed(
    *settings: str, options: tuple[str, ...] = (), path: Path | str | None = None, **values: Any
) -> PolykvOptions:
    """What the command line says, over a recipe file."""
    return resolve_recipe(path, {"method": "polykv", **values}, list(settings), options)


def written(folder: Path, text: str) -> PolykvOptions:
    path = folder / "recipe.yaml"
    path.write_text(f"method: polykv\n{text}")
    return typed(path=path)


def names_of(recipe: PolykvOptions) -> list[str]:
    return [policy.name for policy in recipe.policies()]


def test_patterns_of_a_file(tmp_path: Path) -> None:
    text = "patterns: [paper, {name: h2o, params: {recent: 8}}, {name: keydiff}]\nparams: {window: 16}\n"
    recipe = written(tmp_path, text)
    assert names_of(recipe) == [*PAPER_PATTERNS, "keydiff"]
    h2o, *_, keydiff = recipe.policies()
    assert (h2o, keydiff) == (create_policy("h2o", {"recent": 8}), create_policy("keydiff", {"window": 16}))
    over = typed("recent=4", "keydiff.window=2", path=tmp_path / "recipe.yaml")
    h2o, *_, keydiff = over.policies()
    assert (h2o, keydiff) == (create_policy("h2o", {"recent": 4}), create_policy("keydiff", {"window": 2}))
    assert over.make_policy() == create_policy("snapkv", {"window": 16})


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"patterns": "tova,tova", "policy": "tova"}, "patterns: must have at least one item, and each once"),
        ({"patterns": "tova,h2o"}, "policy 'snapkv', for .* is none of the patterns: name one of tova, h2o with --pol"),
        (
            {"budgets": "16"},
            r"patterns \(snapkv is left out: it always keeps 32 .* a budget of 16: .*\): name one of h2o",
        ),
        ({"budgets": "64,x"}, r"budgets\.1: .*, not 'x'"),
        ({"phases": "prefil"}, r"unknown phases 'prefil'; did you mean 'prefill'\?"),
    ],
)
def test_what_cannot_be_typed(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        typed(**values).make_policy()

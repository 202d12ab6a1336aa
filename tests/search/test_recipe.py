"""Recipes of searches: shipped ones, files, and what was typed on top."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvsearch.errors import UsageError
from kvsearch.policies import create_policy
from kvsearch.search.recipe import EvolveRecipe, recipe_path, resolve_recipe
from kvsearch.tasks.catalog import TaskOptions, find_tasks

SHIPPED = sorted((Path(__file__).parents[2] / "recipes" / "evolve").glob("*.yaml"))


def write(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_shipped_recipes(path: Path) -> None:
    assert recipe_path(path.stem) == path
    recipe = resolve_recipe(path.stem, {}, {})
    assert recipe.settings(0).budget >= create_policy(str(recipe.policy), recipe.params).window_count
    if not recipe.tasks.startswith("longbench"):  # which is not on this machine
        assert find_tasks(recipe.tasks, TaskOptions(split="train"))


def test_the_settings_of_the_paper() -> None:
    recipe = resolve_recipe("paper-8b", {}, {})
    how = recipe.settings(0)
    assert (how.budget, how.group_size, how.parity) == (128, 8, True)
    assert (how.sigma, how.lam, how.gamma, how.population) == (0.3, 0.3, 0.2, None)
    assert create_policy(str(recipe.policy), recipe.params).window_count == 32


def test_defaults_then_the_file_then_what_is_typed(tmp_path: Path) -> None:
    path = write(tmp_path, "budget: 32\ngroup_size: 4\nparams: {window: 8, kernel: 5}\npolicy: snapkv")
    recipe = resolve_recipe(path, {"group_size": 2, "budget": None}, {"window": 16})
    assert (recipe.budget, recipe.group_size, recipe.generations) == (32, 2, 10)
    assert recipe.params == {"window": 16, "kernel": 5}
    other = resolve_recipe(path, {"policy": "tova"}, {})
    assert other.params == {}


def test_several_budgets_in_place_of_one(tmp_path: Path) -> None:
    one, many = write(tmp_path, "budget: 32"), "bundled-front"
    assert resolve_recipe(one, {"budgets": (64, 16)}, {}).settings(3).budget == 16
    assert resolve_recipe(many, {"budget": 48}, {}).budgets is None
    with pytest.raises(UsageError, match="budgets: is in place of budget: give one of them"):
        resolve_recipe(None, {"budget": 48, "budgets": (16, 32)}, {})


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("budjet: 32", ["budjet"]),
        ("budget: -1\nspace: group", ["budget", "'groups', 'layers', 'heads' or 'basis'"]),
        ("method: lukv\nbudget: 3", ["'evolkv'"]),
        ("[1, 2]", ["should be a mapping such as `budget: 128`"]),
        ("a: [", ["is not valid YAML"]),
    ],
)
def test_files_of_no_use(text: str, messages: list[str], tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        resolve_recipe(write(tmp_path, text), {}, {})
    assert all(message in str(error.value) for message in messages)


def test_names_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"unknown recipe 'bundle'; did you mean 'bundled'\?"):
        recipe_path("bundle")
    with pytest.raises(UsageError, match=r"missing\.yaml"):
        resolve_recipe(str(tmp_path / "missing.yaml"), {}, {})


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ({}, "Give --budget, or several with --budgets"),
        ({"budget": 16, "optimiser": "cmaes"}, "'cmaes' is unknown"),
        ({"budget": 16, "optimiser": "golden"}, "needs space groups and group_size 1"),
        ({"budget": 16, "parity": True, "space": "layers"}, "the paper's procedure"),
        ({"budget": 16, "sigma": 0.0}, "sigma"),
    ],
)
def test_settings_that_do_not_fit(typed: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve_recipe(None, typed, {}).settings(0)


def test_every_setting_of_a_search_can_be_in_a_recipe() -> None:
    from kvsearch.search.settings import EvolveSettings

    assert set(EvolveSettings.model_fields) - {"seed"} <= set(EvolveRecipe.model_fields)
    made, own = EvolveRecipe(budget=16).settings(0), EvolveSettings(budget=16)
    assert made == own  # with the same defaults

"""What a user writes and types about a calibration, and how mistakes are answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvsearch.calibrate.options import LukvOptions
from kvsearch.calibrate.recipe import CalibrationRecipe, parse_setting, resolve_recipe
from kvsearch.errors import UsageError
from kvsearch.policies import Policy, policy_names

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("lukv-*.yaml"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("window=16", ("window", 16)),
        (" window = 16 ", ("window", 16)),
        ("x=-3", ("x", -3)),
        ("x=0.5", ("x", 0.5)),
        ("x=1e-3", ("x", 0.001)),
        ("x=true", ("x", True)),
        ("x=False", ("x", False)),
        ("pooling=avg", ("pooling", "avg")),
        ("x=", ("x", "")),
        ("x=a=b", ("x", "a=b")),
    ],
)
def test_settings(text: str, expected: tuple[str, Any]) -> None:
    key, value = parse_setting(text)
    assert (key, value) == expected
    assert type(value) is type(expected[1])


@pytest.mark.parametrize("text", ["window", "", "=3", "  =3"])
def test_settings_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="not of the form key=value"):
        parse_setting(text)


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def typed(*settings: str, **values: Any) -> CalibrationRecipe:
    """What the command line alone says."""
    return resolve_recipe(None, values, settings)


def policy(name: str, *settings: str) -> Policy:
    return typed(*settings, policy=name).make_policy()


def test_defaults() -> None:
    recipe = typed(method=None, policy=None, normalization=None, aggregate=None)
    assert recipe == CalibrationRecipe()
    assert recipe.options(3) == LukvOptions(seed=3)
    assert recipe.make_policy().name == "snapkv"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("snapkv", {"sinks": 4, "window": 32, "kernel": 7}),
        ("keydiff", {"sinks": 4, "window": 1}),
        ("expected_attention", {"sinks": 4, "window": 1, "epsilon": 0.02}),
        ("streaming", {"sinks": 4}),
    ],
)
def test_protection_of_the_method(name: str, expected: dict[str, Any]) -> None:
    """LU-KV keeps four sinks and 32 (SnapKV) or 1 (policies that score every key) recent tokens."""
    parameters = policy(name).parameters()
    assert {key: parameters[key] for key in expected} == expected


def test_every_policy_that_evicts_can_be_calibrated() -> None:
    for name in policy_names():
        if name != "full":
            assert policy(name).name == name


def test_settings_come_before_the_method() -> None:
    made = policy("snapkv", "window=8", "sinks=0", "pooling=avg", "window=9")
    assert made.parameters() == {"window": 9, "kernel": 7, "pooling": "avg", "group": "mean", "sinks": 0, "refresh": 0}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_shipped_recipes(path: Path) -> None:
    recipe = resolve_recipe(path, {}, [])
    made = recipe.make_policy()
    assert made.sink_count == 4
    assert made.window_count == (32 if recipe.policy == "snapkv" else 1)
    assert recipe.options(0).normalization == recipe.normalization


def test_there_are_recipes() -> None:
    assert "lukv-paper" in [path.stem for path in RECIPES]


def test_a_recipe_under_what_is_typed(tmp_path: Path) -> None:
    path = write(
        tmp_path, "policy: snapkv\nparams: {window: 8, sinks: 2}\nnormalization: layer\nminimum: 0.05\ngap: no\n"
    )
    plain = resolve_recipe(path, {"policy": None}, [])
    assert plain.options(0) == LukvOptions("layer", gap=False, minimum=0.05)
    assert plain.make_policy().parameters()["window"] == 8
    over = resolve_recipe(path, {"policy": "snapkv", "normalization": "none"}, ["window=16"])
    assert over.options(0) == LukvOptions("none", gap=False, minimum=0.05)
    assert over.params == {"window": 16, "sinks": 2}


def test_the_ablation_is_typed_without_a_value(tmp_path: Path) -> None:
    path = write(tmp_path, "gap: true")
    assert resolve_recipe(path, {}, []).gap
    assert not resolve_recipe(path, {}, [], no_gap=True).gap
    assert not resolve_recipe(None, {}, [], no_gap=True).gap


def test_parameters_belong_to_the_policy_of_the_recipe(tmp_path: Path) -> None:
    path = write(tmp_path, "policy: snapkv\nparams: {window: 8}\n")
    assert resolve_recipe(path, {"policy": "keydiff"}, []).params == {}
    assert resolve_recipe(path, {"policy": "keydiff"}, ["sinks=2"]).params == {"sinks": 2}
    assert resolve_recipe(path, {"policy": "snapkv"}, []).params == {"window": 8}
    unnamed = write(tmp_path, "params: {window: 8}\n")  # those of the default policy
    assert resolve_recipe(unnamed, {"policy": "snapkv"}, []).params == {"window": 8}
    assert resolve_recipe(unnamed, {"policy": "keydiff"}, []).params == {}


def test_values_keep_their_types(tmp_path: Path) -> None:
    path = write(tmp_path, "policy: expected_attention\nparams: {sinks: 2, epsilon: 0.5, covariance: false}\n")
    made = resolve_recipe(path, {}, []).make_policy().parameters()
    assert (made["sinks"], made["epsilon"], made["covariance"]) == (2, 0.5, False)
    assert [type(made[key]) for key in ("sinks", "epsilon", "covariance")] == [int, float, bool]


@pytest.mark.parametrize(
    ("values", "settings", "problem"),
    [
        ({"method": "lukf"}, [], r"unknown method 'lukf'; did you mean 'lukv'\? \(known: lukv\)"),
        ({"normalization": "layers"}, [], r"unknown normalization 'layers'; did you mean 'layer'\? \(known: effect, "),
        ({"aggregate": "mean"}, [], r"unknown aggregate 'mean'.*\(known: ratios, importance\)"),
        ({}, ["window"], "'window' is not of the form key=value"),
        ({"policy": "full"}, [], "evicts nothing, so it has no budgets to calibrate"),
        ({"policy": "snapvk"}, [], "unknown policy 'snapvk'; did you mean 'snapkv'"),
        ({}, ["windows=8"], "no parameter 'windows'; did you mean 'window'"),
        ({}, ["window=8.0"], "window must be int, got 8.0"),
        ({}, ["window=true"], "window must be int, got True"),
        ({}, ["window="], "window must be int, got ''"),
        ({}, ["window=0"], "window must be 1 or more"),
        ({"policy": "expected_attention"}, ["epsilon=nan"], "params.epsilon: must be a finite number"),
        ({"policy": "expected_attention"}, ["epsilon=inf"], "params.epsilon: must be a finite number"),
    ],
)
def test_what_cannot_be_typed(values: dict[str, Any], settings: list[str], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        typed(*settings, **values).make_policy()


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("polcy: snapkv", ["polcy: unknown key"]),
        ("policy: [snapkv]", ["policy: "]),
        ("normalization: layers\naggregate: mean\ngroup: mean", ["normalization: ", "aggregate: ", "group: "]),
        ("method: evolkv", ["method: "]),
        ("minimum: 1.0\nanswer_tokens: 0", ["minimum: ", "answer_tokens: "]),
        ("minimum: .nan", ["minimum: "]),
        ("gap: maybe", ["gap: "]),
        ("params: {sinks: [8]}", ["1 problem:", "params.sinks: must be a finite number, true, false or a text"]),
        ("params:", ["params: "]),
        ("params: [window, 8]", ["params: "]),
        ("a: {b", ["is not valid YAML"]),
        ("- policy", ["is not a recipe: it should be a mapping"]),
        ("", ["is not a recipe"]),
        ("snapkv", ["is not a recipe"]),
        ("1: 2", ["1"]),
    ],
)
@pytest.mark.parametrize("settings", [[], ["window=8"]])
def test_recipes_of_no_use(text: str, problems: list[str], settings: list[str], tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        resolve_recipe(path, {}, settings)
    assert str(path) in str(caught.value)
    assert all(problem in str(caught.value) for problem in problems)


def test_a_missing_recipe(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no file"):
        resolve_recipe(tmp_path / "nothing.yaml", {}, [])


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"normalization": "layers"}, r"normalization 'layers' is unknown; did you mean 'layer'\? \(known: effect, "),
        ({"aggregate": "mean"}, r"aggregate 'mean' is unknown.*\(known: ratios, importance\)"),
        ({"group": "mean"}, r"group 'mean' is unknown.*\(known: sum, max\)"),
        ({"minimum": 1.0}, r"minimum 1.0 is outside \[0, 1\)"),
        ({"minimum": float("nan")}, "minimum nan is outside"),
        ({"answer_tokens": 0}, "answer_tokens must be 1 or more"),
    ],
)
def test_options_that_do_not_exist(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        LukvOptions(**values)

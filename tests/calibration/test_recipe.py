"""What a user writes and types about a calibration, and how mistakes are answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvsearch.budgets.adakv import AdaKVAllocation
from kvsearch.budgets.cake import CAKEAllocation
from kvsearch.budgets.lava import LAVaAllocation
from kvsearch.calibration.options import DynamicOptions, LukvOptions
from kvsearch.commands.calibrate import (
    CalibrateOptions,
)
from kvsearch.config.options import parse_setting
from kvsearch.core.errors import UsageError

SHIPPED = sorted((Path(__file__).parents[2] / "recipes" / "calibrate").glob("*.yaml"))


def test_settings() -> None:
    values = {" x = 16 ": 16, "x=-3": -3, "x=1e-3": 0.001, "x=true": True, "x=avg": "avg", "x=": "", "x=a=b": "a=b"}
    for text, value in values.items():
        assert repr(parse_setting(text)) == repr(("x", value))


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def resolve_recipe(
    path: Path | str | None, values: dict[str, Any], settings: list[str], options: tuple[str, ...] | list[str] = ()
) -> CalibrateOptions:
    """What a recipe says, with what was typed over it."""
    given = {"params": settings or None, "model": "bundled", "output": Path("runs/x")}
    return CalibrateOptions.of(path, **given, **values, **dict(map(parse_setting, options)))


def typed(*settings: str, options: tuple[str, ...] = (), **values: Any) -> CalibrateOptions:
    """What the command line alone says."""
    return resolve_recipe(None, values, list(settings), options)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_shipped_recipes(path: Path) -> None:
    recipe = resolve_recipe(path, {}, [])
    assert recipe.method == path.stem.partition("-")[0]
    made = recipe.make_policy()
    if isinstance(recipe, LukvOptions):
        assert made.sink_count == 4
        snapkv = 16 if path.stem == "lukv-snapkv" else 32
        assert made.recent_count == (snapkv if recipe.policy == "snapkv" else 1)
        if recipe.policy == "snapkv":
            stated = made.parameters()
            assert (stated["window"], stated["kernel"], stated["pooling"]) == (32, 7, "avg")
    elif isinstance(recipe, DynamicOptions):
        assert (made.observed, made.recent_count) == (32, 8)
        assert recipe.make_allocation().name == recipe.method


def test_parameters_belong_to_the_policy_of_the_recipe(tmp_path: Path) -> None:
    path = write(tmp_path, "policy: snapkv\nparams: {window: 8}\n")
    assert resolve_recipe(path, {"policy": "keydiff"}, []).params == {}
    assert resolve_recipe(path, {"policy": "keydiff"}, ["sinks=2"]).params == {"sinks": 2}
    shared = write(tmp_path, "method: polykv\nparams: {window: 8}\n")  # those of all patterns
    assert resolve_recipe(shared, {"policy": "tova"}, []).params == {"window": 8}
    unnamed = write(tmp_path, "params: {window: 8}\n")  # those of the default policy
    assert resolve_recipe(unnamed, {"policy": "snapkv"}, []).params == {"window": 8}


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("normalization: layers\ngroup: mean", ["normalization: ", "group: "]),
        ("method: lava\nnormalization: layer\ngap: true", ["2 problems:", "normalization: unknown key", "gap: "]),
        ("method: cake\ntau1: 0\ntau2: .inf", ["a number in it is NaN or infinite"]),
        ("params: {sinks: [8]}", ["1 problem:", "params.sinks: must be a finite number, true, false or a text"]),
    ],
)
def test_recipes_of_no_use(text: str, problems: list[str], tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        resolve_recipe(path, {}, [])
    assert str(path) in str(caught.value)
    assert all(problem in str(caught.value) for problem in problems)


def test_options_make_allocations() -> None:
    lava = typed(method="lava", options=("floor_share=0", "layers=planned", "minimum=0.05"), protocol="question-aware")
    assert lava.make_allocation() == LAVaAllocation(0.0, layers="planned")
    assert (lava.protocol, lava.minimum) == ("question-aware", 0.05)
    adakv = typed(method="adakv", options=("variant=kvpress", "floor_share=0.5"))
    assert adakv.make_allocation() == AdaKVAllocation(0.5, "kvpress")
    cake = typed(method="cake", options=("tau1=1.7", "window=16"))
    assert cake.make_allocation("llama-3.1-8b") == CAKEAllocation(1.7, 0.4, 16)


@pytest.mark.parametrize(
    ("method", "options", "problem"),
    [
        ("lava", ["floor_shar=0.1"], "method lava has no option 'floor_shar'; did you mean 'floor_share'?"),
        ("lava", ["floor_share=1.5"], "--floor-share: "),
        ("lukv", ["protocol=question-aware"], "method lukv has no option 'protocol'"),
    ],
)
def test_options_that_cannot_be_typed(method: str, options: list[str], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        typed(method=method, options=tuple(options)).make_policy()

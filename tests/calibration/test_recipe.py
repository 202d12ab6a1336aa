"""What a user writes and types about a calibration, and how mistakes are answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvsearch.budgets.adakv import AdaKVAllocation
from kvsearch.budgets.cake import CAKEAllocation
from kvsearch.budgets.lava import LAVaAllocation
from kvsearch.calibration.options import DynamicOptions, LukvOptions
from kvsearch.calibration.polykv.options import PAPER_PATTERNS
from kvsearch.commands.calibrate import CalibrateOptions
from kvsearch.config.options import parse_setting
from kvsearch.core.errors import UsageError
from kvsearch.policies import create_policy

SHIPPED = sorted((Path(__file__).parents[2] / "recipes" / "calibrate").glob("*.yaml"))


def test_settings() -> None:
    values = {" x = 16 ": 16, "x=-3": -3, "x=1e-3": 0.001, "x=true": True, "x=avg": "avg", "x=": "", "x=a=b": "a=b"}
    for text, value in values.items():
        assert repr(parse_setting(text)) == repr(("x", value))


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def typed(*settings: str, path: Path | None = None, **values: Any) -> CalibrateOptions:
    """What a recipe says, with what was typed over it: `settings` of policies, and options."""
    given = {"params": list(settings) or None, "model": "bundled", "output": Path("runs/x")}
    return CalibrateOptions.of(path, **given, **values)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_shipped_recipes(path: Path) -> None:
    recipe = typed(path=path)
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
    assert typed(path=path, policy="keydiff").params == {}
    assert typed("sinks=2", path=path, policy="keydiff").params == {"sinks": 2}
    shared = write(tmp_path, "method: polykv\nparams: {window: 8}\n")  # those of all patterns
    assert typed(path=shared, policy="tova").params == {"window": 8}
    unnamed = write(tmp_path, "params: {window: 8}\n")  # those of the default policy
    assert typed(path=unnamed, policy="snapkv").params == {"window": 8}


def test_patterns_of_a_file(tmp_path: Path) -> None:
    patterns = "patterns: [paper, {name: h2o, params: {recent: 8}}, {name: keydiff}]"
    path = write(tmp_path, f"method: polykv\n{patterns}\nparams: {{window: 16}}\n")
    h2o, *_, keydiff = found = typed(path=path).policies()
    assert [policy.name for policy in found] == [*PAPER_PATTERNS, "keydiff"]
    assert (h2o, keydiff) == (create_policy("h2o", {"recent": 8}), create_policy("keydiff", {"window": 16}))
    over = typed("recent=4", "keydiff.window=2", path=path)
    h2o, *_, keydiff = over.policies()
    assert (h2o, keydiff) == (create_policy("h2o", {"recent": 4}), create_policy("keydiff", {"window": 2}))
    assert over.make_policy() == create_policy("snapkv", {"window": 16})


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
        typed(path=path)
    assert str(path) in str(caught.value)
    assert all(problem in str(caught.value) for problem in problems)


def test_options_make_allocations() -> None:
    lava = typed(method="lava", floor_share=0, layers="planned", minimum=0.05, protocol="question-aware")
    assert lava.make_allocation() == LAVaAllocation(0.0, layers="planned")
    assert (lava.protocol, lava.minimum) == ("question-aware", 0.05)
    adakv = typed(method="adakv", variant="kvpress", floor_share=0.5)
    assert adakv.make_allocation() == AdaKVAllocation(0.5, "kvpress")
    cake = typed(method="cake", tau1=1.7, window=16)
    assert cake.make_allocation("llama-3.1-8b") == CAKEAllocation(1.7, 0.4, 16)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (
            {"method": "lava", "floor_shar": 0.1},
            "method lava has no option 'floor_shar'; did you mean 'floor_share'?",
        ),
        ({"method": "lava", "floor_share": 1.5}, "--floor-share: "),
        ({"method": "lukv", "protocol": "question-aware"}, "method lukv has no option 'protocol'"),
        ({"method": "polykv", "patterns": "tova,tova", "policy": "tova"}, "must have at least one item, and each once"),
        (
            {"method": "polykv", "patterns": "tova,h2o"},
            "policy 'snapkv', for .* is none of the patterns: name one",
        ),
        (
            {"method": "polykv", "budgets": "16"},
            r"patterns \(snapkv is left out: it always keeps 32 .*: name one of",
        ),
        ({"method": "polykv", "budgets": "64,x"}, r"budgets\.1: .*, not 'x'"),
        ({"method": "polykv", "phases": "prefil"}, r"unknown phases 'prefil'; did you mean 'prefill'\?"),
    ],
)
def test_options_that_cannot_be_typed(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        typed(**values).make_policy()

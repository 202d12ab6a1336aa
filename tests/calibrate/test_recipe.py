"""What a user types about a calibration, and how typing errors are answered."""

from __future__ import annotations

from typing import Any

import pytest

from kvsearch.calibrate.options import LukvOptions
from kvsearch.calibrate.recipe import calibration_policy, lukv_options, parse_setting, require_method
from kvsearch.errors import UsageError
from kvsearch.policies import policy_names


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


def test_methods() -> None:
    require_method("lukv")
    with pytest.raises(UsageError, match=r"unknown calibration method 'lukf'; did you mean 'lukv'\? \(known: lukv\)"):
        require_method("lukf")


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
    parameters = calibration_policy(name, []).parameters()
    assert {key: parameters[key] for key in expected} == expected


def test_every_policy_that_evicts_can_be_calibrated() -> None:
    for name in policy_names():
        if name != "full":
            assert calibration_policy(name, []).name == name


def test_settings_come_before_the_method() -> None:
    policy = calibration_policy("snapkv", ["window=8", "sinks=0", "pooling=avg", "window=9"])
    assert policy.parameters() == {"window": 9, "kernel": 7, "pooling": "avg", "group": "mean", "sinks": 0}


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        ("full", [], "evicts nothing, so it has no budgets to calibrate"),
        ("snapvk", [], "unknown policy 'snapvk'; did you mean 'snapkv'"),
        ("snapkv", ["windows=8"], "no parameter 'windows'; did you mean 'window'"),
        ("snapkv", ["window=8.0"], "window must be int, got 8.0"),
        ("snapkv", ["window=true"], "window must be int, got True"),
        ("snapkv", ["window="], "window must be int, got ''"),
        ("snapkv", ["window=0"], "window must be 1 or more"),
        ("snapkv", ["window"], "not of the form key=value"),
        ("expected_attention", ["epsilon=nan"], "epsilon must be finite"),
        ("expected_attention", ["epsilon=inf"], "epsilon must be finite"),
    ],
)
def test_policies_that_cannot_be_calibrated(name: str, settings: list[str], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        calibration_policy(name, settings)


def test_options() -> None:
    assert lukv_options() == LukvOptions()
    assert lukv_options(normalization="layer", gap=False, seed=3) == LukvOptions("layer", gap=False, seed=3)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"normalization": "layers"}, r"normalization 'layers' is unknown; did you mean 'layer'\? \(known: effect, "),
        ({"aggregate": "mean"}, r"aggregate 'mean' is unknown.*\(known: ratios, importance\)"),
        ({"group": "mean"}, r"group 'mean' is unknown.*\(known: sum, max\)"),
        ({"normalisation": "layer"}, "no option 'normalisation'; did you mean 'normalization'"),
        ({"minimum": 1.0}, r"minimum 1.0 is outside \[0, 1\)"),
        ({"minimum": float("nan")}, "minimum nan is outside"),
        ({"answer_tokens": 0}, "answer_tokens must be 1 or more"),
    ],
)
def test_options_that_do_not_exist(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        lukv_options(**values)

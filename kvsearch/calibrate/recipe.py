"""Turn what a user types into calibration settings; every problem is found before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from kvsearch.calibrate.options import LukvOptions
from kvsearch.errors import UsageError
from kvsearch.naming import suggest
from kvsearch.policies import Policy, create_policy, policy_class

METHODS = ("lukv",)
# LU-KV's protection (App. E): four sinks; 32 recent tokens under SnapKV, one under policies that score every key
DEFAULTS: dict[str, dict[str, Any]] = {
    "snapkv": {"sinks": 4},
    "keydiff": {"sinks": 4, "window": 1},
    "expected_attention": {"sinks": 4, "window": 1, "epsilon": 0.02},
}
UNRANKED = ("full",)


def require_method(name: str) -> None:
    """UsageError unless `name` is a calibration method."""
    if name not in METHODS:
        raise UsageError(f"unknown calibration method {name!r}{suggest(name, METHODS)}")


def calibration_policy(name: str, settings: Sequence[str]) -> Policy:
    """The policy to calibrate for, with LU-KV's protected entries unless `settings` ("key=value") differ."""
    if name in UNRANKED:
        raise UsageError(f"policy {name!r} evicts nothing, so it has no budgets to calibrate")
    policy_class(name)
    return create_policy(name, {**DEFAULTS.get(name, {}), **dict(parse_setting(item) for item in settings)})


def lukv_options(**values: Any) -> LukvOptions:
    """Options of the calibration; UsageError names an option or a choice that does not exist."""
    known = [field.name for field in fields(LukvOptions)]
    for key in values:
        if key not in known:
            raise UsageError(f"LU-KV has no option {key!r}{suggest(key, known)}")
    return LukvOptions(**values)


def parse_setting(text: str) -> tuple[str, bool | int | float | str]:
    """Split "key=value" and read the value as true/false, a number, or a word."""
    key, found, value = text.partition("=")
    if not found or not key.strip():
        raise UsageError(f"--set {text!r} is not of the form key=value")
    value = value.strip()
    if value.lower() in ("true", "false"):
        return key.strip(), value.lower() == "true"
    for read in (int, float):
        try:
            return key.strip(), read(value)
        except ValueError:
            continue
    return key.strip(), value

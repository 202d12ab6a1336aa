"""Policies by name: the built-in ones, and third-party ones through the entry point group `kvsearch.policies`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points

from kvsearch.errors import UsageError
from kvsearch.naming import suggest
from kvsearch.policies.base import Policy

GROUP = "kvsearch.policies"
BUILT_IN = {
    "full": "kvsearch.policies.full:FullKV",
    "streaming": "kvsearch.policies.streaming:StreamingLLM",
    "snapkv": "kvsearch.policies.snapkv:SnapKV",
    "keydiff": "kvsearch.policies.keydiff:KeyDiff",
    "expected_attention": "kvsearch.policies.expected_attention:ExpectedAttention",
}


def policy_names() -> list[str]:
    """All names that `create_policy` knows, sorted."""
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=GROUP))})


def policy_class(name: str) -> type[Policy]:
    """The class registered under `name`; UsageError with the nearest names otherwise."""
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        found: type[Policy] = getattr(import_module(module), attribute)
        return found
    for point in entry_points(group=GROUP):
        if point.name == name:
            loaded: type[Policy] = point.load()
            return loaded
    raise UsageError(f"unknown policy {name!r}{suggest(name, policy_names())}")


def create_policy(name: str, params: Mapping[str, object] | None = None) -> Policy:
    """Build a policy from its name and hyper-parameters; UsageError names what is unknown or out of range."""
    found = policy_class(name)
    fields = {field.name: field for field in dataclasses.fields(found)}
    values = dict(params or {})
    for key, value in values.items():
        if key not in fields:
            raise UsageError(f"policy {name} has no parameter {key!r}{suggest(key, list(fields))}")
        if fields[key].default is dataclasses.MISSING:
            continue  # a third-party parameter without a default: its own __post_init__ judges it
        wanted = type(fields[key].default)
        if wanted is float and isinstance(value, int) and not isinstance(value, bool):
            values[key] = float(value)
        elif type(value) is not wanted:
            raise UsageError(f"policy {name}: {key} must be {wanted.__name__}, got {value!r}")
    return found(**values)

"""Every built-in policy with settings that a prompt of a dozen tokens can exercise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import pytest

from kvsearch.policies import Policy, create_policy, find_policy_class
from kvsearch.policies.registry import BUILT_IN, list_fitted
from tests.policies.probes import bank, fitted

SMALL = {
    f"{name}{params or ''}": create_policy(name, params)
    for name, params in [
        ("full", {}),
        ("streaming", {"sinks": 2}),
        ("h2o", {}),
        ("h2o", {"recent": 2}),
        ("h2o", {"sinks": 2, "recent_share": 0.25}),
        ("tova", {}),
        ("tova", {"protect_last": True}),
        ("snapkv", {"window": 4, "kernel": 3, "sinks": 1}),
        ("snapkv", {"window": 2, "kernel": 3, "pooling": "avg", "group": "max", "refresh": 1}),
        ("pyramidkv", {"window": 3}),
        ("snapkv", {"window": 6, "kernel": 3, "protect": 2}),
        ("cake", {"window": 5, "kernel": 3, "protect": 1}),
        ("scissorhands", {"history": 5, "window": 2}),
        ("scissorhands", {"history": 11, "window": 1, "drop": 0}),
        ("cam", {"sinks": 1, "merge_next": 2}),
        ("cam", {"base": "h2o", "expectation": True}),
        ("d2o", {"sinks": 1}),
        ("cake", {"window": 3, "kernel": 3}),
        ("vatp", {"sinks": 1}),
        ("vatp", {"base": "snapkv", "window": 3, "sinks": 1}),
        ("lava", {"window": 3, "kernel": 3}),
        ("keydiff", {}),
        ("keydiff", {"sinks": 1, "window": 2}),
        ("expected_attention", {"sinks": 1, "future": 4, "refresh": 2}),
        ("criticalkv", {"window": 2, "kernel": 3}),
        ("defensivekv", {"window": 3, "kernel": 3}),
        ("knorm", {}),
        ("duo_attention", {"sinks": 1, "window": 3}),
    ]
} | {
    "probe": fitted(sinks=1, protect=2),
    "probe, anew": fitted(sinks=1, protect=2, refresh=3),
    "query_bank": bank(sinks=1, protect=2),
    "query_bank, anew": bank(sinks=1, protect=2, refresh=3),
}

# a policy without settings of its own: its defaults, its parameters of these names small
_FEW = {"sinks": 1, "window": 3, "recent": 2, "protect": 2, "history": 5, "refresh": 2, "kernel": 3}
_UNFIT = {*list_fitted(), "kvzip"}  # their weights, or what they need of the prompt, are not there
for _name in BUILT_IN:
    if _name not in _UNFIT and _name not in {policy.name for policy in SMALL.values()}:
        _fields = {field.name for field in fields(find_policy_class(_name))}
        SMALL[_name] = create_policy(_name, {key: value for key, value in _FEW.items() if key in _fields})

FIRST = {policy.name: name for name, policy in reversed(SMALL.items())}  # settings of every policy


# by positions alone, scores of one step, scores that add up or stay, merges, keys, scored anew
KINDS = ("streaming", "tova", "h2o", "scissorhands", "cake", "d2o", "probe", "keydiff", "snapkv")


def kinds_of_rules() -> list[Any]:
    """Parameters of a test, by name: one policy of every kind of decode rule; others are nightly."""
    usual = {FIRST[name] for name in KINDS}
    return [pytest.param(name, marks=[] if name in usual else [pytest.mark.nightly]) for name in SMALL]


def policies_of(names: Iterable[str] = SMALL) -> list[Any]:
    """Parameters of a test, by name: the first settings of every policy; others are nightly."""
    first = FIRST.values()
    return [pytest.param(name, marks=[] if name in first else [pytest.mark.nightly]) for name in names]


def for_model(policy: Policy) -> Policy:
    """The same policy, its weights for the states of the tiny models."""
    if policy.name == "query_bank":
        return bank(dim=16, **{key: value for key, value in policy.parameters().items() if key != "weights"})
    return policy

"""What there is to know about every registered policy, without a model: for listings and documentation."""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys

from kvsearch.policies.base import Policy
from kvsearch.policies.facts import DecodeRule, Parameter, PolicyFacts, PolicyFault
from kvsearch.policies.plugins import package_of
from kvsearch.policies.registry import BUILT_IN, is_required, policy_class, policy_names, third_party

HOME = "kvsearch"
ROWS = {"group": "mean over the query group", "layer": "mean over the layer's heads"}
LONG = 2**20  # tokens, for what does not depend on the length
BUDGET = 1000  # entries, for what depends on the budget


def catalog() -> tuple[list[PolicyFacts], list[PolicyFault]]:
    """Return all registered policies by name, and those that cannot be used."""
    facts, faults = [], []
    for name in policy_names():
        try:
            facts.append(describe_policy(name))
        except Exception as error:  # noqa: BLE001 - one broken package must not hide the other policies
            faults.append(PolicyFault(name, _package(name), " ".join(str(error).split()) or type(error).__name__))
    return facts, sorted([*faults, *_hidden()], key=lambda fault: fault.name)


def describe_policy(name: str) -> PolicyFacts:
    """Return what is known about one policy; the errors are those of `policy_class`."""
    found = policy_class(name)
    fields = dataclasses.fields(found)
    policy = None if any(map(is_required, fields)) else found()
    module = sys.modules[found.__module__]
    title = " ".join((inspect.getdoc(module) or "").partition("\n\n")[0].split())
    return PolicyFacts(
        name=name,
        package=_package(name),
        implementation=f"{found.__module__}:{found.__qualname__}",
        source=found.source,
        title=title,
        formula=_docstring(found),
        parameters=tuple(_parameter(field) for field in fields),
        phases=_phases(policy),
        stages=None if policy is None else 1 + bool(policy.quota(BUDGET)),
        needs=None if policy is None else tuple(policy.needs().describe()),
        sinks=None if policy is None else policy.sink_count,
        window=None if policy is None else policy.recent_count,
        decode=None if policy is None else _decode_rule(policy),
    )


def _phases(policy: Policy | None) -> tuple[str, ...]:
    if policy is None:
        return ("prefill", "decode")
    return () if _evicts_nothing(policy) else ("prefill",) if policy.no_decode_rule() else ("prefill", "decode")


def _decode_rule(policy: Policy) -> DecodeRule:
    recent, leave = policy.recent_at(BUDGET), policy.drop_at(BUDGET)
    if policy.no_decode_rule():
        return DecodeRule("none: it is for prefill alone", online=False, every=None, row=None, recent_of_1000=recent,
                          leave_of_1000=leave, merges=False)  # fmt: skip
    if _evicts_nothing(policy):
        return DecodeRule("keeps everything", policy.online, None, None, recent, leave, merges=False)
    every = None if policy.online else policy.refresh_interval
    if policy.online:
        reads = f"reads one attention row, {ROWS.get(policy.row, policy.row)}" if policy.row else "reads no attention"
        rule = f"own rule every step, {reads}"
    else:
        rule = "scored anew every step" if every == 1 else f"scored anew every {every} steps"
    rule += f"; the most recent {recent} of {BUDGET} stay" if recent != policy.recent_count else ""
    rule += f"; {leave} of {BUDGET} leave at once" if leave > 1 else ""
    rule += "; what leaves is merged" if policy.merges else ""
    return DecodeRule(rule, policy.online, every, policy.row, recent, leave, policy.merges)


def _evicts_nothing(policy: Policy) -> bool:
    """Return whether even a head with the smallest budget is exempt in the longest prompt."""
    return policy.exempt(1, LONG)


def _parameter(field: dataclasses.Field[object]) -> Parameter:
    if is_required(field):
        return Parameter(field.name, str(field.type), None)
    factory = field.default_factory
    default = field.default if factory is dataclasses.MISSING else factory()
    finite = isinstance(default, float) and math.isfinite(default)
    shown = default if finite or isinstance(default, bool | int | str) else repr(default)
    return Parameter(field.name, type(default).__name__, shown)  # type: ignore[arg-type]


def _docstring(found: type[Policy]) -> str:
    """Return the docstring of a class; empty where there is none but the signature that dataclasses put there."""
    text = inspect.cleandoc(found.__dict__.get("__doc__") or "")
    return "" if text.startswith(f"{found.__name__}(") else text


def _package(name: str) -> str:
    if name in BUILT_IN:
        return HOME
    return next(package_of(point) for point in third_party() if point.name == name)


def _hidden() -> list[PolicyFault]:
    """Return the entry points whose name is taken."""
    taken = dict.fromkeys(BUILT_IN, HOME)
    hidden = []
    for point in third_party():
        if point.name in taken:
            hidden.append(
                PolicyFault(point.name, package_of(point), f"not used: {taken[point.name]} has a policy of that name")
            )
        taken.setdefault(point.name, package_of(point))
    return hidden

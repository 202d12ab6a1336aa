"""What there is to know about every registered policy, without a model: for listings and documentation."""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
from dataclasses import dataclass

from kvsearch.policies.base import Policy
from kvsearch.policies.registry import BUILT_IN, is_required, package_of, policy_class, policy_names, third_party

HOME = "kvsearch"
ROWS = {"group": "mean over the query group", "layer": "mean over the layer's heads"}
LONG = 2**20  # tokens, for what does not depend on the length
BUDGET = 1000  # entries, for what depends on the budget


@dataclass(frozen=True)
class PolicyFacts:
    """A policy under its default parameters.

    `phases` are those in which it evicts, `stages` how many scores choose what stays of the prompt. `needs`, `sinks`,
    `window`, `stages` and `decode` are None where parameters without a default decide them.
    """

    name: str
    package: str  # "kvsearch", or the distribution that brings the policy
    implementation: str  # module:Class
    source: str
    title: str
    formula: str
    parameters: dict[str, bool | int | float | str | None]  # defaults; None where a value must be given
    phases: tuple[str, ...]
    stages: int | None
    needs: tuple[str, ...] | None  # besides keys and values
    sinks: int | None
    window: int | None
    decode: str | None  # how entries are chosen while decoding


def catalog() -> tuple[list[PolicyFacts], list[dict[str, str]]]:
    """Return all registered policies by name, and name, package and error of those that cannot be used."""
    facts = []
    faults = []
    for name in policy_names():
        try:
            facts.append(describe_policy(name))
        except Exception as error:  # noqa: BLE001 - one broken package must not hide the other policies
            problem = " ".join(str(error).split()) or type(error).__name__
            faults.append({"name": name, "package": _package(name), "error": problem})
    return facts, faults


def describe_policy(name: str) -> PolicyFacts:
    """Return what is known about one policy; the errors are those of `policy_class`."""
    found = policy_class(name)
    fields = dataclasses.fields(found)
    policy = None if any(map(is_required, fields)) else found()
    phases: tuple[str, ...] = ("prefill", "decode")
    if policy is not None and _evicts_nothing(policy):
        phases = ()
    elif policy is not None and policy.no_decode_rule():
        phases = ("prefill",)
    module = sys.modules[found.__module__]
    described = inspect.cleandoc(found.__dict__.get("__doc__") or "")
    title = " ".join((inspect.getdoc(module) or "").partition("\n\n")[0].split())
    return PolicyFacts(
        name=name,
        package=_package(name),
        implementation=f"{found.__module__}:{found.__qualname__}",
        source=found.source,
        title=title,
        # dataclasses put a signature where there is no docstring
        formula="" if described.startswith(f"{found.__name__}(") else described,
        parameters={field.name: _default(field) for field in fields},
        phases=phases,
        stages=None if policy is None else 1 + bool(policy.quota(BUDGET)),
        needs=None if policy is None else tuple(policy.needs().describe()),
        sinks=None if policy is None else policy.sink_count,
        window=None if policy is None else policy.recent_count,
        decode=None if policy is None else _decode_rule(policy),
    )


def _decode_rule(policy: Policy) -> str:
    if policy.no_decode_rule():
        return "none: it is for prefill alone"
    if _evicts_nothing(policy):
        return "keeps everything"
    if policy.online:
        reads = f"reads one attention row, {ROWS.get(policy.row, policy.row)}" if policy.row else "reads no attention"
        rule = f"own rule every step, {reads}"
    else:
        every = policy.refresh_interval
        rule = "scored anew every step" if every == 1 else f"scored anew every {every} steps"
    recent = policy.recent_at(BUDGET)
    leaving = policy.drop_at(BUDGET)
    if recent != policy.recent_count:
        rule += f"; the most recent {recent} of {BUDGET} stay"
    if leaving > 1:
        rule += f"; {leaving} of {BUDGET} leave at once"
    return rule + ("; what leaves is merged" if policy.merges else "")


def _evicts_nothing(policy: Policy) -> bool:
    """Return whether even a head with the smallest budget is exempt in the longest prompt."""
    return policy.exempt(1, LONG)


def _default(field: dataclasses.Field[object]) -> bool | int | float | str | None:
    if is_required(field):
        return None
    factory = field.default_factory
    default = field.default if factory is dataclasses.MISSING else factory()
    finite = isinstance(default, float) and math.isfinite(default)
    return default if finite or isinstance(default, bool | int | str) else repr(default)  # type: ignore[return-value]


def _package(name: str) -> str:
    if name in BUILT_IN:
        return HOME
    return next(package_of(point) for point in third_party() if point.name == name)

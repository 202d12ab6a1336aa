"""Policies by name: the built-in ones, and third-party ones through the entry point group `kvsearch.policies`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from kvsearch.errors import EnvironmentFault, UsageError
from kvsearch.naming import unknown
from kvsearch.plan.limits import MOST_ROWS
from kvsearch.plan.parameters import typed_values
from kvsearch.plan.schema import PolicySpec
from kvsearch.policies.base import Policy
from kvsearch.policies.plugins import GROUP, package_of

FITTED = ("probe", "query_bank", "kvzap")  # whose weights lie in a file; they are given as NAME=DIR
BUILT_IN = {
    "full": "kvsearch.policies.full:FullKV",
    "streaming": "kvsearch.policies.streaming:StreamingLLM",
    "h2o": "kvsearch.policies.h2o:H2O",
    "tova": "kvsearch.policies.tova:TOVA",
    "snapkv": "kvsearch.policies.snapkv:SnapKV",
    "pyramidkv": "kvsearch.policies.pyramidkv:PyramidKV",
    "scissorhands": "kvsearch.policies.scissorhands:Scissorhands",
    "cam": "kvsearch.policies.cam:CaM",
    "d2o": "kvsearch.policies.d2o:D2O",
    "cake": "kvsearch.policies.cake:CAKE",
    "vatp": "kvsearch.policies.vatp:VATP",
    "lava": "kvsearch.policies.lava:LAVa",
    "keydiff": "kvsearch.policies.keydiff:KeyDiff",
    "expected_attention": "kvsearch.policies.expected_attention:ExpectedAttention",
    "criticalkv": "kvsearch.policies.criticalkv:CriticalKV",
    "knorm": "kvsearch.policies.knorm:Knorm",
    "probe": "kvsearch.policies.probe:Probe",
    "query_bank": "kvsearch.policies.query_bank:QueryBank",
    "kvzap": "kvsearch.policies.kvzap:KVzap",
    "kvzip": "kvsearch.policies.kvzip:KVzip",
    "duo_attention": "kvsearch.policies.duo_attention:DuoAttention",
}


def policy_names() -> list[str]:
    """Return all names that `create_policy` knows, sorted."""
    return sorted({*BUILT_IN, *(point.name for point in third_party())})


def third_party() -> list[EntryPoint]:
    """Return the entry points of packages that add a policy, by name; of one name, the first is the one in use."""
    return sorted(entry_points(group=GROUP), key=lambda point: point.name)


def policy_class(name: str) -> type[Policy]:
    """Return the class registered under `name`.

    Raises:
        UsageError: there is none; the message has the nearest names.
        EnvironmentFault: a third-party package is broken.
    """
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        found: type[Policy] = getattr(import_module(module), attribute)
        return found
    for point in third_party():
        if point.name == name:
            return _load(point)
    raise UsageError(unknown("policy", name, policy_names()))


def create_policy(name: str, params: Mapping[str, object] | None = None) -> Policy:
    """Build a policy from its name and hyper-parameters; UsageError names what is unknown or out of range."""
    found = policy_class(name)
    fields = dataclasses.fields(found)
    # a third-party parameter without a default: its own __post_init__ judges it
    values = typed_values(params or {}, {field.name: field.default for field in fields}, f"policy {name}", "parameter")
    required = (field.name for field in fields if is_required(field) and field.name not in values)
    if missing := ", ".join(required):
        raise UsageError(f"policy {name} has no default for {missing}: give a value")
    made = found(**values)
    if made.needs().query_rows > MOST_ROWS:
        raise UsageError(f"policy {name}: looks at {made.needs().query_rows} query rows, {MOST_ROWS} are the most")
    return made


def policy_of(spec: PolicySpec) -> Policy:
    """Build the policy that a plan or profile states; UsageError as `create_policy`."""
    return create_policy(spec.name, spec.params)


def is_required(parameter: dataclasses.Field[object]) -> bool:
    """Return whether a parameter has no default."""
    return parameter.default is parameter.default_factory is dataclasses.MISSING


def _load(point: EntryPoint) -> type[Policy]:
    try:
        found = point.load()
    except (Exception, SystemExit) as error:
        raise _broken(point, f"cannot be imported ({type(error).__name__}: {' '.join(str(error).split())})") from error
    if not (inspect.isclass(found) and issubclass(found, Policy)):
        raise _broken(point, f"is no Policy: {point.value}")
    if inspect.isabstract(found):
        raise _broken(point, f"does not define {', '.join(sorted(found.__abstractmethods__))}: {point.value}")
    if getattr(found, "name", None) != point.name:
        raise _broken(point, f"calls itself {getattr(found, 'name', None)!r}: {point.value}")
    return found


def _broken(point: EntryPoint, problem: str) -> EnvironmentFault:
    advice = "repair or uninstall that package"
    return EnvironmentFault(f"policy {point.name} of {package_of(point)} {problem}: {advice}")

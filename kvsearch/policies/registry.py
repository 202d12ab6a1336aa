"""Policies by name: the built-in ones, and third-party ones through the entry point group `kvsearch.policies`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from kvsearch.core.errors import EnvironmentFault, InternalError, KvsearchError, UsageError
from kvsearch.core.limits import MOST_ROWS
from kvsearch.core.naming import require_known
from kvsearch.plan.schema import PolicySpec, typed_values
from kvsearch.policies.base import Policy

GROUP = "kvsearch.policies"
FITTED = ("probe", "query_bank", "kvzap")  # whose weights lie in a file; they are given as NAME=DIR
BUILT_IN = (
    "full", "streaming", "h2o", "tova", "snapkv", "pyramidkv", "scissorhands", "cam", "d2o", "cake", "vatp", "lava",
    "keydiff", "expected_attention", "criticalkv", "defensivekv", "knorm", "probe", "query_bank", "kvzap", "kvzip",
    "duo_attention",
)  # fmt: skip  # each is the module of its class
# parameters that policies had, with the values at which they changed nothing: plans of then state them
NO_SHARE = {"share": (0,), "generic": ("spread", "snapkv", "expected_attention", "keydiff")}
FORMER: dict[str, Mapping[str, tuple[object, ...]]] = {
    "cam": {"merge_prompt": (False,)},
    **dict.fromkeys(FITTED, NO_SHARE),
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
        module = import_module(f"kvsearch.policies.{name}")
        members = (member for member in vars(module).values() if inspect.isclass(member) and issubclass(member, Policy))
        return next(policy for policy in members if getattr(policy, "name", None) == name)
    require_known("policy", name, policy_names())
    return _load(next(point for point in third_party() if point.name == name))


def create_policy(name: str, params: Mapping[str, object] | None = None) -> Policy:
    """Build a policy from its name and hyper-parameters; UsageError names what is unknown or out of range."""
    found = policy_class(name)
    fields = dataclasses.fields(found)
    former = FORMER.get(name, {})
    params = {key: value for key, value in (params or {}).items() if key not in former or value not in former[key]}
    # a third-party parameter without a default: its own __post_init__ judges it
    values = typed_values(params, {field.name: field.default for field in fields}, f"policy {name}", "parameter")
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


def package_of(point: EntryPoint) -> str:
    """Return the distribution an entry point comes from, with its version, or else its module."""
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.module


def is_ours(policy: type[Policy]) -> bool:
    """Return whether a policy is a part of kvsearch."""
    return policy.__module__.partition(".")[0] == "kvsearch"


def fault(policy: type[Policy], problem: str) -> KvsearchError:
    """Return the error that says what is wrong with a policy, and whose it is."""
    if is_ours(policy):
        return InternalError(f"policy {policy.name} {problem}: a bug in kvsearch, please report it")
    packages = (
        package_of(point)
        for point in third_party()
        if (point.module, point.attr) == (policy.__module__, policy.__qualname__)
    )
    package = next(packages, policy.__module__)
    return EnvironmentFault(f"policy {policy.name} of {package} {problem}: repair it, or use another policy")


def protecting_like(policy: Policy, other: Policy) -> Policy:
    """Return a policy that protects as many sinks and recent entries as another one; UsageError if it cannot."""
    known = {field.name for field in dataclasses.fields(policy)}
    recent = next((name for name in ("protect", "recent", "window") if name in known), "")
    wanted = {"sinks": other.sink_count, recent: other.recent_count}
    alike = {name: value for name, value in wanted.items() if name in known}
    matched = create_policy(policy.name, {**policy.parameters(), **alike})
    if (matched.sink_count, matched.recent_count) != (other.sink_count, other.recent_count):
        raise UsageError(
            f"policy {policy.name} cannot keep the {other.sink_count} first and {other.recent_count} last entries that "
            f"{other.name} always keeps, so the two cannot be compared: leave one out"
        )
    return matched

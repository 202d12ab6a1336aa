"""The registry of policies: built-in ones and ones from the entry point group `kvsearch.policies`."""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module

from kvsearch.core.errors import EnvironmentFault, InternalError, KvsearchError, UsageError
from kvsearch.core.plugins import PluginRegistry, name_package
from kvsearch.plan.schema import PolicySpec, check_values
from kvsearch.policies.base import Policy

GROUP = "kvsearch.policies"
# Each is the module of its class. Policies are compared in this order, see `list_baselines` and `list_rivals`.
BUILT_IN = (
    "snapkv", "expected_attention", "keydiff", "h2o", "tova", "cake", "lava", "vatp", "knorm", "streaming",
    "criticalkv", "defensivekv", "scissorhands", "cam", "d2o", "full", "pyramidkv", "probe", "query_bank", "kvzap",
    "kvzip", "duo_attention",
)  # fmt: skip
POLICIES: PluginRegistry[type[Policy]] = PluginRegistry(
    "policy", GROUP, {name: f"kvsearch.policies.{name}" for name in BUILT_IN}, "kvsearch.policies.base:Policy"
)
ROW_NAMES = {"group": "mean over the query group", "layer": "mean over the layer's heads"}
SAMPLE_LENGTH = 2**20  # tokens, for what does not depend on the length
SAMPLE_BUDGET = 1000  # entries, for what depends on the budget


def list_policy_names() -> list[str]:
    """Return all names that `create_policy` knows, sorted."""
    return sorted(POLICIES.list_names())


def find_policy_class(name: str) -> type[Policy]:
    """Return the class registered under `name`.

    Raises:
        UsageError: there is none; the message has the nearest names.
        EnvironmentFault: a third-party package is broken.
    """
    if name not in BUILT_IN:
        return POLICIES.find(name)
    module = import_module(f"kvsearch.policies.{name}")
    members = (member for member in vars(module).values() if inspect.isclass(member) and issubclass(member, Policy))
    return next(policy for policy in members if getattr(policy, "name", None) == name)


def list_baselines() -> tuple[str, ...]:
    """Return the policies that `run` compares its plans with, under even budgets, in the order of the registry."""
    return _select_policies(lambda policy: vars(policy).get("is_baseline", False))


def list_rivals() -> tuple[str, ...]:
    """Return the policies that fitted rankings are compared with, in the order of the registry."""
    return _select_policies(lambda policy: vars(policy).get("is_rival", False))


def list_fitted() -> tuple[str, ...]:
    """Return the policies whose weights lie in a file, in the order of the registry."""
    return _select_policies(lambda policy: policy.is_fitted)


def _select_policies(holds: Callable[[type[Policy]], bool]) -> tuple[str, ...]:
    """Select policies by their class; those of broken packages, which say so when they are named, are left out."""
    selected = []
    for name in POLICIES.list_names():
        with suppress(EnvironmentFault):
            if holds(find_policy_class(name)):
                selected.append(name)
    return tuple(selected)


def is_fitted(name: str) -> bool:
    """Return whether there is a policy of this name whose weights lie in a file; errors as `find_policy_class`."""
    return name in POLICIES.list_names() and find_policy_class(name).is_fitted


def has_parameters(name: str, *parameters: str) -> bool:
    """Return whether a policy has all of these parameters; errors as `find_policy_class`."""
    return set(parameters) <= {field.name for field in dataclasses.fields(find_policy_class(name))}


def create_policy(name: str, params: Mapping[str, object] | None = None) -> Policy:
    """Build a policy from its name and hyper-parameters; UsageError names what is unknown or out of range.

    Examples:
        >>> create_policy("snapkv", {"window": 16}).parameters()
        {'window': 16, 'kernel': 7, 'pooling': 'max', 'group': 'mean', 'sinks': 0, 'refresh': 0}
        >>> create_policy("streaming", {"sinks": 8}).sink_count
        8
    """
    policy_type = find_policy_class(name)
    fields = dataclasses.fields(policy_type)
    # a third-party parameter without a default: its own __post_init__ judges it
    values = check_values(params or {}, {field.name: field.default for field in fields}, f"policy {name}", "parameter")
    required = (field.name for field in fields if is_required(field) and field.name not in values)
    if missing := ", ".join(required):
        raise UsageError(f"policy {name} has no default for {missing}: give a value")
    return policy_type(**values)


def build_policy(spec: PolicySpec) -> Policy:
    """Build the policy that a plan or profile states; UsageError as `create_policy`."""
    return create_policy(spec.name, spec.params)


def is_required(parameter: dataclasses.Field[object]) -> bool:
    """Return whether a parameter has no default."""
    return parameter.default is parameter.default_factory is dataclasses.MISSING


def is_ours(policy: type[Policy]) -> bool:
    """Return whether a policy is a part of kvsearch."""
    return policy.__module__.partition(".")[0] == "kvsearch"


def policy_error(policy: type[Policy], problem: str) -> KvsearchError:
    """Return the error that says what is wrong with a policy, and whose it is."""
    if is_ours(policy):
        return InternalError(f"policy {policy.name} {problem}: a bug in kvsearch, please report it")
    packages = (
        name_package(point)
        for point in POLICIES.find_third_party()
        if (point.module, point.attr) == (policy.__module__, policy.__qualname__)
    )
    package = next(packages, policy.__module__)
    return EnvironmentFault(f"policy {policy.name} of {package} {problem}: repair it, or use another policy")


def protect_like(policy: Policy, other: Policy) -> Policy:
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


def load_catalog() -> tuple[list[PolicyFacts], list[dict[str, str]]]:
    """Return all registered policies by name, and name, package and error of those that cannot be used."""
    facts = []
    faults = []
    for name in list_policy_names():
        try:
            facts.append(describe_policy(name))
        except Exception as error:  # noqa: BLE001 - one broken package must not hide the other policies
            problem = " ".join(str(error).split()) or type(error).__name__
            faults.append({"name": name, "package": POLICIES.find_package(name), "error": problem})
    return facts, faults


def describe_policy(name: str) -> PolicyFacts:
    """Describe a policy: parameters, source, needs and decode rule; errors as `find_policy_class`."""
    policy_type = find_policy_class(name)
    fields = dataclasses.fields(policy_type)
    policy = None if any(map(is_required, fields)) else policy_type()
    phases: tuple[str, ...] = ("prefill", "decode")
    if policy is not None and _evicts_nothing(policy):
        phases = ()
    elif policy is not None and policy.no_decode_rule():
        phases = ("prefill",)
    module = sys.modules[policy_type.__module__]
    described = inspect.cleandoc(policy_type.__dict__.get("__doc__") or "")
    title = " ".join((inspect.getdoc(module) or "").partition("\n\n")[0].split())
    return PolicyFacts(
        name=name,
        package=POLICIES.find_package(name),
        implementation=f"{policy_type.__module__}:{policy_type.__qualname__}",
        source=policy_type.source,
        title=title,
        # dataclasses put a signature where there is no docstring
        formula="" if described.startswith(f"{policy_type.__name__}(") else described,
        parameters={field.name: _read_default(field) for field in fields},
        phases=phases,
        stages=None if policy is None else 1 + bool(policy.first_stage_budget(SAMPLE_BUDGET)),
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
    if policy.has_decode_rule:
        reads = (
            f"reads one attention row, {ROW_NAMES.get(policy.row, policy.row)}" if policy.row else "reads no attention"
        )
        rule = f"own rule every step, {reads}"
    else:
        every = policy.refresh_interval
        rule = "scored anew every step" if every == 1 else f"scored anew every {every} steps"
    recent = policy.recent_at(SAMPLE_BUDGET)
    leaving = policy.drop_at(SAMPLE_BUDGET)
    if recent != policy.recent_count:
        rule += f"; the most recent {recent} of {SAMPLE_BUDGET} stay"
    if leaving > 1:
        rule += f"; {leaving} of {SAMPLE_BUDGET} leave at once"
    return rule + ("; what leaves is merged" if policy.merges else "")


def _evicts_nothing(policy: Policy) -> bool:
    """Return whether even a head with the smallest budget is exempt in the longest prompt."""
    return policy.keeps_all(1, SAMPLE_LENGTH)


def _read_default(field: dataclasses.Field[object]) -> bool | int | float | str | None:
    if is_required(field):
        return None
    factory = field.default_factory
    default = field.default if factory is dataclasses.MISSING else factory()
    finite = isinstance(default, float) and math.isfinite(default)
    return default if finite or isinstance(default, bool | int | str) else repr(default)  # type: ignore[return-value]

"""The registry of policies: built-in ones and ones from the entry point group `kvsearch.policies`."""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from kvsearch.core.errors import EnvironmentFault, InternalError, KvsearchError, UsageError
from kvsearch.core.naming import require_known
from kvsearch.core.parsing import format_error
from kvsearch.plan.schema import PolicySpec, check_values
from kvsearch.policies.base import Policy

GROUP = "kvsearch.policies"
FITTED = ("probe", "query_bank", "kvzap")  # whose weights lie in a file; they are given as NAME=DIR
BUILT_IN = (
    "full", "streaming", "h2o", "tova", "snapkv", "pyramidkv", "scissorhands", "cam", "d2o", "cake", "vatp", "lava",
    "keydiff", "expected_attention", "criticalkv", "defensivekv", "knorm", "probe", "query_bank", "kvzap", "kvzip",
    "duo_attention",
)  # fmt: skip  # each is the module of its class
OWN_PACKAGE = "kvsearch"
ROW_NAMES = {"group": "mean over the query group", "layer": "mean over the layer's heads"}
SAMPLE_LENGTH = 2**20  # tokens, for what does not depend on the length
SAMPLE_BUDGET = 1000  # entries, for what depends on the budget


def list_policy_names() -> list[str]:
    """Return all names that `create_policy` knows, sorted."""
    return sorted({*BUILT_IN, *(point.name for point in find_third_party())})


def find_third_party() -> list[EntryPoint]:
    """Return the entry points of packages that add a policy, by name; of one name, the first is the one in use."""
    return sorted(entry_points(group=GROUP), key=lambda point: point.name)


def find_policy_class(name: str) -> type[Policy]:
    """Return the class registered under `name`.

    Raises:
        UsageError: there is none; the message has the nearest names.
        EnvironmentFault: a third-party package is broken.
    """
    if name in BUILT_IN:
        module = import_module(f"kvsearch.policies.{name}")
        members = (member for member in vars(module).values() if inspect.isclass(member) and issubclass(member, Policy))
        return next(policy for policy in members if getattr(policy, "name", None) == name)
    require_known("policy", name, list_policy_names())
    return _load(next(point for point in find_third_party() if point.name == name))


def create_policy(name: str, params: Mapping[str, object] | None = None) -> Policy:
    """Build a policy from its name and hyper-parameters; UsageError names what is unknown or out of range."""
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


def _load(point: EntryPoint) -> type[Policy]:
    try:
        loaded = point.load()
    except (Exception, SystemExit) as error:
        raise _broken_policy_error(point, f"cannot be imported ({format_error(error)})") from error
    if not (inspect.isclass(loaded) and issubclass(loaded, Policy)):
        raise _broken_policy_error(point, f"is no Policy: {point.value}")
    if inspect.isabstract(loaded):
        raise _broken_policy_error(
            point, f"does not define {', '.join(sorted(loaded.__abstractmethods__))}: {point.value}"
        )
    if getattr(loaded, "name", None) != point.name:
        raise _broken_policy_error(point, f"calls itself {getattr(loaded, 'name', None)!r}: {point.value}")
    return loaded


def _broken_policy_error(point: EntryPoint, problem: str) -> EnvironmentFault:
    advice = "repair or uninstall that package"
    return EnvironmentFault(f"policy {point.name} of {find_package(point)} {problem}: {advice}")


def find_package(point: EntryPoint) -> str:
    """Return the distribution an entry point comes from, with its version, or else its module."""
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.module


def is_ours(policy: type[Policy]) -> bool:
    """Return whether a policy is a part of kvsearch."""
    return policy.__module__.partition(".")[0] == "kvsearch"


def policy_error(policy: type[Policy], problem: str) -> KvsearchError:
    """Return the error that says what is wrong with a policy, and whose it is."""
    if is_ours(policy):
        return InternalError(f"policy {policy.name} {problem}: a bug in kvsearch, please report it")
    packages = (
        find_package(point)
        for point in find_third_party()
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
            faults.append({"name": name, "package": _find_package(name), "error": problem})
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
        package=_find_package(name),
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


def _find_package(name: str) -> str:
    if name in BUILT_IN:
        return OWN_PACKAGE
    return next(find_package(point) for point in find_third_party() if point.name == name)

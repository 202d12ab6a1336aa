"""The patterns that PolyKV chooses from: names and settings as typed, and which of them can be tried at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvsearch.errors import KvsearchError, UsageError
from kvsearch.naming import suggest, unknown
from kvsearch.plan import Phase, PolicySpec
from kvsearch.plan.fields import Scalar
from kvsearch.policies import Policy, create_policy, policy_class, policy_names

PAPER = ("h2o", "tova", "cam", "pyramidkv", "snapkv", "d2o", "cake", "scissorhands", "streaming")
SETS = ("paper", "all")
FULL = "full"
LONG = 2**20  # a budget that is the whole prompt


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """A pattern that is asked for, by its own name or with a set of them."""

    spec: PolicySpec
    named: bool


def candidates(
    patterns: str | Sequence[str | PolicySpec],
    settings: Mapping[str, Scalar],
    phases: Sequence[Phase],
    budgets: Sequence[int],
) -> tuple[list[Policy], list[str]]:
    """Return the policies that are tried, in the order they are asked for, and remarks on them.

    `patterns` are names, or names with parameters. "paper" stands for the nine of PolyKV (arXiv 2606.15157), "all" for
    every registered policy. `settings` are parameters of all patterns that have them (window), or of one
    (snapkv.window); they win over parameters that come with a name, those of one pattern over those of all.

    Of a set, a pattern is left out with a remark if it cannot be tried: it always keeps more than the smallest of
    `budgets`, it has no rule for one of `phases`, or its budget does not say what it keeps.

    Raises:
        UsageError: a pattern or parameter is unknown or given twice, a pattern that is named cannot be tried, or none
            of a set can.
        EnvironmentFault: a pattern that is named comes from a broken package.
    """
    wanted = _wanted([patterns] if isinstance(patterns, str) else patterns)
    params = _params([one.spec for one in wanted], settings)
    found: list[Policy] = []
    remarks: list[str] = []
    for one in wanted:
        name, given = one.spec.name, params[one.spec.name]
        wrong = one.named or bool(given)  # what the user said about it cannot be right
        try:
            policy = create_policy(name, given)
            wrong = one.named
            check_pattern(policy, phases, min(budgets))
        except KvsearchError as error:
            if wrong:
                raise
            remarks.append(f"{name} is left out: {str(error).removeprefix(f'policy {name}: ')}")
        else:
            found.append(policy)
    if not found:
        raise UsageError(f"no pattern is left to try; {remarks[0]}" if remarks else "there are no patterns: name some")
    return found, [*remarks, *_alike(found)]


def _wanted(patterns: Sequence[str | PolicySpec]) -> list[_Wanted]:
    """List every pattern once; one that is named takes the place that a set has for it."""
    found: dict[str, _Wanted] = {}
    for item in patterns:
        if item in SETS:
            for name in PAPER if item == "paper" else [name for name in policy_names() if name != FULL]:
                found.setdefault(name, _Wanted(PolicySpec(name=name), named=False))
            continue
        spec = PolicySpec(name=item) if isinstance(item, str) else item
        if spec.name not in policy_names():
            raise UsageError(unknown("pattern", spec.name, [*SETS, *policy_names()]))
        if spec.name in found and found[spec.name].named:
            raise UsageError(f"the pattern {spec.name} is given twice: a pattern is tried with one setting")
        found[spec.name] = _Wanted(spec, named=True)
    return list(found.values())


def _params(specs: Iterable[PolicySpec], settings: Mapping[str, Scalar]) -> dict[str, dict[str, Scalar]]:
    """Return the parameters of every pattern by its name."""
    params = {spec.name: dict(spec.params) for spec in specs}
    known = {name: _parameter_names(name) for name in params}
    common = {key: value for key, value in settings.items() if "." not in key}
    for key, value in common.items():
        takers = [name for name in params if key in known[name]]
        if not takers:
            others = sorted({parameter for names in known.values() for parameter in names})
            raise UsageError(f"setting {key!r}: none of the patterns has such a parameter{suggest(key, others)}")
        for name in takers:
            params[name][key] = value
    for key in settings:
        name, dot, parameter = key.partition(".")
        if not dot:
            continue
        if name not in params:
            raise UsageError(f"setting {key!r}: {name!r} is none of the patterns{suggest(name, list(params))}")
        params[name][parameter] = settings[key]
    return params


def _parameter_names(name: str) -> list[str]:
    try:
        return [field.name for field in dataclasses.fields(policy_class(name))]
    except KvsearchError:
        return []  # a broken package: its error shows when the policy is made


def check_pattern(policy: Policy, phases: Sequence[Phase], smallest: int) -> None:
    """Raise a UsageError if nothing can be learnt about `policy` in these phases at this budget."""
    from kvsearch.runtime.rule import decode_needs  # takes seconds to import, and most mistakes show before

    name = policy.name
    if name == FULL:
        raise UsageError(f"policy {name}: it agrees with itself, so no signal can judge it: leave it out")
    if policy.exempt(LONG, LONG):
        raise UsageError(f"policy {name}: some of its heads are never evicted, so budgets do not say what it keeps")
    if policy.floor > smallest:
        raise UsageError(
            f"policy {name}: it always keeps {policy.floor} entries ({policy.sink_count} sinks, {policy.recent_count} "
            f"recent), more than a budget of {smallest}: lower them with --set, or raise the budget"
        )
    if "decode" in phases:
        decode_needs(policy)


def _alike(policies: Sequence[Policy]) -> Iterator[str]:
    """Yield remarks on policies that are the same under two names."""
    for number, policy in enumerate(policies):
        for other in policies[:number]:
            if policy.parameters() == other.parameters() and _behaviour(policy) == _behaviour(other):
                yield (
                    f"{other.name} and {policy.name} are the same pattern at these settings: no signal can tell them "
                    f"apart, and {other.name} is taken"
                )


def _behaviour(policy: Policy) -> list[object]:
    """List what a policy does, as the functions of its class; a subclass that only has other defaults has the same."""
    names = [name for name in dir(Policy) if not name.startswith("_") and name not in ("name", "source")]
    return [getattr(type(policy), name) for name in names]

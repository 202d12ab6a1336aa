"""Read what was typed: a list of methods with their settings, and the sizes to compare them at."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from kvsearch.budgets.allocator import Uniform
from kvsearch.budgets.dynamic import create_allocation
from kvsearch.budgets.pyramidkv import Pyramid
from kvsearch.config.options import parse_setting
from kvsearch.core.errors import KvsearchWarning, UsageError
from kvsearch.core.naming import check_unique, require_known, suggest
from kvsearch.plan import Size
from kvsearch.plan.profile import load_profile
from kvsearch.plan.profile_arrays import EVICTED_RATIO
from kvsearch.plan.saved import PROFILE, WEIGHTS
from kvsearch.policies import create_policy
from kvsearch.policies.fitted import parse_policy, split_settings
from kvsearch.policies.random import RandomEviction
from kvsearch.policies.registry import FITTED, policy_class, policy_names, policy_of
from kvsearch.strategies.methods import Calibrated, Formula, Method
from kvsearch.strategies.names import FULL, METHODS, RANDOM, Recipe, method_names

BETA = "beta"  # the option of the pyramid
Settings = Mapping[str, Any]


class MethodSpec(NamedTuple):
    """A method of a list, as it was typed: what its name stands for, or the place of a profile.

    `settings` are those in its name, `fitted` those of its fit.
    """

    name: str
    recipe: Recipe | Path
    settings: Settings
    fitted: Settings


def find_methods(text: str, settings: Sequence[str] = ()) -> list[Method]:
    """Return the methods of a list such as `uniform,pyramid:keydiff,h2o,lukv=runs/snapkv`.

    METHOD:POLICY puts another policy under the budgets of a method, METHOD:KEY=VALUE sets one of its parameters or
    options, so that a method can be there twice (`pyramid:beta=5,pyramid:beta=20`). A fitted policy is given with the
    directory of its weights: `probe=DIR`, `adakv:probe=DIR`. Any other NAME=DIR looks budgets up in a calibrated
    profile, whose policy keeps its own settings; methods of the same policy take these where all profiles agree.
    `settings` are KEY=VALUE for all methods that have such a parameter or option.

    Raises:
        UsageError: an unknown method, policy, parameter or option, the same twice, or a profile that cannot be used.
    """
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise UsageError(f"methods {text!r} has an empty name: separate names by single commas")
    specs = [parse_method(item) for item in items]
    common = dict(parse_setting(text) for text in settings)
    check_unique("--set", [parse_setting(text)[0] for text in settings])
    profiles = {
        spec.name: _read_calibrated(spec.name, spec.recipe, common) for spec in specs if isinstance(spec.recipe, Path)
    }
    agreed = _find_agreed_settings(profiles.values())
    methods = []
    unread = set(common)
    for spec in specs:
        if isinstance(spec.recipe, Path):
            methods.append(profiles[spec.name])
        else:
            shared = {**agreed.get(spec.recipe.policy, {}), **common}
            methods.append(_resolve(spec, spec.recipe, shared))
            unread -= {*_parameters(spec.recipe), *_options(spec.recipe)}
    for key in sorted(unread, key=list(common).index):
        raise UsageError(f"--set {key}: none of these methods has such a parameter or option")
    check_unique("the method", [method.name for method in methods])
    for method, other in combinations(methods, 2):
        if dataclasses.replace(other, name=method.name) == method:
            raise UsageError(f"the methods {method.name} and {other.name} are the same: leave one out")
    return methods


def find_sizes(budgets: str | None, ratios: str | None) -> list[Size]:
    """Return the sizes of two lists such as `128,256` and `0.5,0.8`, in this order.

    Raises:
        UsageError: no size, one that is no number or out of range, or one twice.
    """
    sizes = [Size(budget=number) for number in _parse_numbers(budgets, int, "budget", "128")]
    sizes += [Size(ratio=number) for number in _parse_numbers(ratios, float, "ratio", "0.8")]
    if not sizes:
        raise UsageError("methods are compared at equal sizes: give --budgets (128,256) or --ratios (0.5,0.8)")
    check_unique("the size", map(str, sizes))
    return sizes


def _parse_numbers(text: str | None, kind: Callable[[str], Any], noun: str, example: str) -> list[Any]:
    numbers = []
    for item in [] if text is None else text.split(","):
        try:
            numbers.append(kind(item))
        except ValueError:
            raise UsageError(f"{noun} {item.strip()!r} is not a number such as {example}") from None
    return numbers


# --- from text to MethodSpec ----------------------------------------------------------------------------------------


def parse_method(item: str) -> MethodSpec:
    """Return the spec of NAME=DIR, or of METHOD or METHOD:POLICY with :KEY=VALUE after it; a POLICY may be probe=DIR.

    The weights of a fitted policy are among the settings.
    """
    name, is_given, source = item.partition("=")
    if is_given and ":" not in name and name not in FITTED:
        return MethodSpec(name.strip(), Path(source.strip()), {}, {})
    (method, *others), settings = split_settings(item, "method", "METHOD, METHOD:POLICY or either", most=2)
    method, fitted = parse_policy(method)
    policy = None
    if others:
        policy, fitted = parse_policy(others[0])
    if method == FULL:
        raise UsageError("the full cache is always there: leave the method full out")
    if policy is not None:
        require_known("method", method, METHODS)
        require_known("policy", policy, policy_names())
    elif method not in FITTED:
        require_known("method", method, method_names())
    recipe = METHODS.get(method, Recipe(method))
    weights = {key: fitted.pop(key) for key in (WEIGHTS,) if key in fitted}
    recipe = recipe if policy is None else recipe._replace(policy=policy)
    return MethodSpec(item, recipe, {**weights, **settings}, fitted)


# --- from MethodSpec to Method --------------------------------------------------------------------------------------


def _parameters(recipe: Recipe) -> list[str]:
    """Return the names of the policy's parameters; a control has none."""
    return [] if recipe.policy == RANDOM else [field.name for field in dataclasses.fields(policy_class(recipe.policy))]


def _options(recipe: Recipe) -> list[str]:
    """Return the options of allocation and allocator that can be set; a parameter of that name hides one."""
    allocation = create_allocation(recipe.allocation, recipe.options)
    names = [] if allocation is None else [name for name in allocation.parameters() if name not in recipe.options]
    if recipe.allocator == Pyramid.name:
        names.append(BETA)
    return [] if recipe.policy == RANDOM else [name for name in names if name not in _parameters(recipe)]


def _find_agreed_settings(profiles: Iterable[Method]) -> dict[str, Settings]:
    """Return the parameters of the profiles' policies by their names, of those of which all profiles agree."""
    stated: dict[str, list[Settings]] = {}
    for method in profiles:
        stated.setdefault(method.policy.name, []).append(method.policy.parameters())
    return {policy: several[0] for policy, several in stated.items() if all(other == several[0] for other in several)}


def _resolve(spec: MethodSpec, recipe: Recipe, shared: Settings) -> Method:
    """Return the method of a recipe; settings in its name win over the `shared` ones."""
    stated = spec.settings
    known = [*_parameters(recipe), *_options(recipe)]
    for key in stated:
        if key not in known:
            raise UsageError(f"method {spec.name} has no setting {key!r}{suggest(key, known) if known else ''}")
    settings = {**spec.fitted, **shared, **stated}
    params = {key: settings[key] for key in _parameters(recipe) if key in settings}
    options = {key: settings[key] for key in _options(recipe) if key in settings}
    beta = options.pop(BETA, Pyramid.beta)
    try:
        policy = RandomEviction() if recipe.policy == RANDOM else create_policy(recipe.policy, params)
        allocation = create_allocation(recipe.allocation, {**recipe.options, **options})
        if type(beta) not in (int, float):
            raise UsageError(f"beta must be float, got {beta!r}")
        allocator = Pyramid(float(beta), policy.least) if recipe.allocator == Pyramid.name else Uniform()
    except UsageError as error:
        raise UsageError(f"method {spec.name}: {error}") from error
    return Method(spec.name, policy, Formula(allocator, policy.least), allocation)


def _read_calibrated(name: str, source: Path, common: Settings) -> Method:
    """Return the method of a profile at `source`."""
    if name in (*method_names(), FULL) or not name or set(":@.") & set(name):
        raise UsageError(f"a profile cannot be called {name!r}: choose a name that is no method's, without : @ and .")
    profile = load_profile(source / PROFILE if source.is_dir() else source)
    if EVICTED_RATIO not in profile.arrays:
        raise UsageError(f"method {name}: {source} is a {profile.metadata.method} profile, without a table of budgets")
    policy = policy_of(profile.metadata.policy)
    for key, value in policy.parameters().items():
        if common.get(key, value) != value:
            problem = f"method {name} keeps {key}={value} of its profile: --set {key}={common[key]} is for the others"
            warnings.warn(problem, KvsearchWarning, stacklevel=2)
    return Method(name, policy, Calibrated(profile), source=source)

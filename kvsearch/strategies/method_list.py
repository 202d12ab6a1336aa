"""Read what was typed: a list of methods with their settings, and the sizes to compare them at."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvsearch.budgets.allocator import Uniform
from kvsearch.budgets.dynamic import create_allocation
from kvsearch.budgets.pyramidkv import Pyramid
from kvsearch.config.options import parse_setting
from kvsearch.core.errors import KvsearchWarning, UsageError
from kvsearch.core.naming import suggest, unknown
from kvsearch.plan import Size
from kvsearch.plan.profile import load_profile
from kvsearch.plan.profile_arrays import EVICTED_RATIO
from kvsearch.plan.saved import PROFILE, WEIGHTS
from kvsearch.policies import create_policy
from kvsearch.policies.fitted import fitted_policy
from kvsearch.policies.random import RandomEviction
from kvsearch.policies.registry import FITTED, policy_class, policy_names, policy_of
from kvsearch.strategies.methods import METHODS, Calibrated, Formula, Method, Recipe
from kvsearch.strategies.names import FULL, RANDOM

BETA = "beta"  # the option of the pyramid
Settings = Mapping[str, Any]


class MethodSpec(NamedTuple):
    """A method of a list, as it was typed: what its name stands for (`recipe`), or a profile that was read at `source`.

    `settings` are its own, `fitted` are those of its fit, `parameters` and `options` are all that can be set: those of
    its policy, and those of its allocation and allocator.
    """

    name: str
    settings: Settings
    fitted: Settings
    source: Path | None = None
    recipe: Recipe | None = None
    parameters: Sequence[str] = ()
    options: Sequence[str] = ()


def method_names() -> list[str]:
    """Return all names that `find_methods` knows; profiles are given as NAME=DIR, a fitted policy as POLICY=DIR."""
    policies = [name for name in policy_names() if name not in METHODS and name not in (FULL, *FITTED)]
    return [*METHODS, *policies, RANDOM]


def find_methods(text: str, settings: Sequence[str] = ()) -> list[Method]:
    """Return the methods of a list such as `uniform,pyramid:keydiff,h2o,lukv=runs/snapkv`.

    METHOD:POLICY puts another policy under the budgets of a method, METHOD:KEY=VALUE sets one of its parameters or
    options, so that a method can be there twice (`pyramid:beta=5,pyramid:beta=20`). A fitted policy is given with the
    directory of its weights: `probe=DIR`, `adakv:probe=DIR`. Any other NAME=DIR looks budgets up in a calibrated
    profile, whose policy keeps its own settings; methods of the same policy take these where all profiles agree.
    `settings` are KEY=VALUE for all methods that have such a parameter or option, or METHOD.KEY=VALUE for one.

    Raises:
        UsageError: an unknown method, policy, parameter or option, the same twice, or a profile that cannot be used.
    """
    specs, common = parse_methods(text, settings)
    profiles = {spec.name: _read_calibrated(spec, spec.source, common) for spec in specs if spec.source is not None}
    agreed = _find_agreed_settings(profiles.values())
    methods = []
    for spec in specs:
        if spec.recipe is None:
            methods.append(profiles[spec.name])
        else:
            methods.append(_resolve(spec, spec.recipe, {**agreed.get(spec.recipe.policy, {}), **common}))
    for key in common:
        if not any(key in (*spec.parameters, *spec.options) for spec in specs):
            raise UsageError(f"--set {key}: none of these methods has such a parameter or option")
    _refuse_equals(methods)
    return methods


def find_sizes(budgets: str | None, ratios: str | None) -> list[Size]:
    """Return the sizes of two lists such as `128,256` and `0.5,0.8`, in this order.

    Raises:
        UsageError: no size, one that is no number or out of range, or one twice.
    """
    sizes = [Size(budget=_parse_number(item, int, "budget", "128")) for item in _split_list(budgets)]
    sizes += [Size(ratio=_parse_number(item, float, "ratio", "0.8")) for item in _split_list(ratios)]
    if not sizes:
        raise UsageError("methods are compared at equal sizes: give --budgets (128,256) or --ratios (0.5,0.8)")
    labels = [str(size) for size in sizes]
    for label in labels:
        if labels.count(label) > 1:
            raise UsageError(f"the size {label} is given twice: give each once")
    return sizes


def _split_list(text: str | None) -> list[str]:
    return [] if text is None else [item.strip() for item in text.split(",")]


def _parse_number(text: str, kind: Callable[[str], Any], noun: str, example: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise UsageError(f"{noun} {text!r} is not a number such as {example}") from None


# --- from text to MethodSpec ----------------------------------------------------------------------------------------


def parse_methods(text: str, settings: Sequence[str] = ()) -> tuple[list[MethodSpec], dict[str, Any]]:
    """Return the methods of a list, and the settings of all; see `find_methods`."""
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise UsageError(f"methods {text!r} has an empty name: separate names by single commas")
    labels = [item if ":" in item.partition("=")[0] else item.partition("=")[0].strip() for item in items]
    common, own = _sort_settings(settings, labels)
    return [_parse(item, own.get(label, {})) for item, label in zip(items, labels, strict=True)], common


def _parse(item: str, own: Settings) -> MethodSpec:
    name, given, source = item.partition("=")
    if given and ":" not in name and name not in FITTED:
        return MethodSpec(name.strip(), own, {}, Path(source.strip()))
    method, fitted, inline = _parse_inline(item)
    recipe = _find_recipe(method)
    parameters, options = _list_keys(recipe)
    known = [*parameters, *options]
    for key in (*own, *inline):
        if key not in known:
            raise UsageError(f"method {item} has no setting {key!r}{suggest(key, known) if known else ''}")
    return MethodSpec(item, {**own, **inline}, fitted, None, recipe, parameters, options)


def _sort_settings(settings: Sequence[str], labels: Sequence[str]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return settings of all methods, and those of single ones by label."""
    common: dict[str, Any] = {}
    own: dict[str, dict[str, Any]] = {}
    for key, value in map(parse_setting, settings):
        label, dot, name = key.rpartition(".")
        if dot and label not in labels:
            raise UsageError(f"--set {key}: no method is called {label!r}{suggest(label, labels)}")
        place = own.setdefault(label, {}) if dot else common
        if name in place:
            raise UsageError(f"--set {key} is given twice: give it once")
        place[name] = value
    return common, own


def _parse_inline(item: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return METHOD or METHOD:POLICY, what else is said of a fitted one, and the settings in :KEY=VALUE after it.

    POLICY may be probe=DIR; its weights are among the settings.
    """
    method, *pieces = item.split(":")
    method, fitted = fitted_policy(method)
    found: dict[str, Any] = {}
    for number, piece in enumerate(pieces):
        key, given, _ = piece.partition("=")
        if number == 0 and (not given or key in FITTED):
            policy, fitted = fitted_policy(piece)
            method = f"{method}:{policy}"
        elif not given:
            raise UsageError(f"method {item}: it is METHOD, METHOD:POLICY or either with :KEY=VALUE after it")
        else:
            key, value = parse_setting(piece, "method")
            if key in found or (key == WEIGHTS and key in fitted):
                raise UsageError(f"method {item}: {key} is given twice: give it once")
            found[key] = value
    if WEIGHTS in fitted:
        found[WEIGHTS] = fitted.pop(WEIGHTS)
    return method, fitted, found


def _find_recipe(name: str) -> Recipe:
    """Return what `name`, a method, a policy or METHOD:POLICY, stands for."""
    method, colon, policy = name.partition(":")
    if method == FULL:
        raise UsageError("the full cache is always there: leave the method full out")
    if method not in METHODS and (colon or method not in (*method_names(), *FITTED)):
        known = list(METHODS) if colon else method_names()
        raise UsageError(unknown("method", method, known))
    recipe = METHODS.get(method, Recipe(method))
    if colon and policy not in policy_names():
        raise UsageError(f"method {name}: {unknown('policy', policy, policy_names())}")
    return recipe._replace(policy=policy) if colon else recipe


def _list_keys(recipe: Recipe) -> tuple[list[str], list[str]]:
    """Return names of the policy's parameters, and of the options of allocation and allocator; controls have none."""
    if recipe.policy == RANDOM:
        return [], []
    parameters = [field.name for field in dataclasses.fields(policy_class(recipe.policy))]
    options = []
    allocation = create_allocation(recipe.allocation, recipe.options)
    if allocation is not None:
        options += [key for key in allocation.parameters() if key not in recipe.options]
    if recipe.allocator == Pyramid.name:
        options.append(BETA)
    return parameters, [key for key in options if key not in parameters]


# --- from MethodSpec to Method --------------------------------------------------------------------------------------


def _find_agreed_settings(profiles: Iterable[Method]) -> dict[str, Settings]:
    """Return the parameters of the profiles' policies by their names, of those of which all profiles agree."""
    stated: dict[str, list[Settings]] = {}
    for method in profiles:
        stated.setdefault(method.policy.name, []).append(method.policy.parameters())
    return {policy: several[0] for policy, several in stated.items() if all(other == several[0] for other in several)}


def _resolve(spec: MethodSpec, recipe: Recipe, shared: Settings) -> Method:
    """Return the method of a spec that names one; its own settings win over the `shared` ones."""
    settings = {**spec.fitted, **shared, **spec.settings}
    params = {key: settings[key] for key in spec.parameters if key in settings}
    options = {key: settings[key] for key in spec.options if key in settings}
    beta = options.pop(BETA, Pyramid.beta)
    try:
        policy = RandomEviction() if recipe.policy == RANDOM else create_policy(recipe.policy, params)
        allocation = create_allocation(recipe.allocation, {**recipe.options, **options})
        if type(beta) not in (int, float):
            raise UsageError(f"beta must be float, got {beta!r}")
        allocator = Pyramid(float(beta), policy.floor) if recipe.allocator == Pyramid.name else Uniform()
    except UsageError as error:
        raise UsageError(f"method {spec.name}: {error}") from error
    return Method(spec.name, policy, Formula(allocator, policy.floor), allocation)


def _read_calibrated(spec: MethodSpec, source: Path, common: Settings) -> Method:
    """Return the method of a profile at `source`."""
    name = spec.name
    if name in (*method_names(), FULL) or not name or set(":@.") & set(name):
        raise UsageError(f"a profile cannot be called {name!r}: choose a name that is no method's, without : @ and .")
    if spec.settings:
        raise UsageError(f"method {name} keeps the settings that it was calibrated with: calibrate anew to change them")
    profile = load_profile(source / PROFILE if source.is_dir() else source)
    if EVICTED_RATIO not in profile.arrays:
        raise UsageError(f"method {name}: {source} is a {profile.metadata.method} profile, without a table of budgets")
    policy = policy_of(profile.metadata.policy)
    for key, value in policy.parameters().items():
        if common.get(key, value) != value:
            told = f"method {name} keeps {key}={value} of its profile: --set {key}={common[key]} is for the others"
            warnings.warn(told, KvsearchWarning, stacklevel=2)
    return Method(name, policy, Calibrated(profile), source=source)


def _refuse_equals(methods: Sequence[Method]) -> None:
    for number, method in enumerate(methods):
        for other in methods[:number]:
            if method.name == other.name:
                raise UsageError(f"the method {method.name} is given twice: give each once")
            if dataclasses.replace(method, name=other.name) == other:
                raise UsageError(f"the methods {other.name} and {method.name} are the same: leave one out")

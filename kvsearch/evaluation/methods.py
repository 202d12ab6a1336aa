"""Methods by name, as papers compare them: an eviction policy, a layout of budgets, and what is shared out per prompt.

Budgets are laid out anew for every prompt length, with the same exact total for all methods of one size. A policy with
budgets that need no measurement can be written as a plan, too, see `make_direct_plan`. `parse_methods` and
`parse_sizes` read what was typed: a list of methods with their settings, and the sizes to compare them at.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from kvsearch.budgets.allocator import Uniform
from kvsearch.budgets.dynamic import Allocation, create_allocation
from kvsearch.budgets.pyramidkv import Pyramid
from kvsearch.config.options import parse_setting
from kvsearch.core.arrays import Ints
from kvsearch.core.errors import KvsearchWarning, UsageError
from kvsearch.core.limits import MOST_ENTRIES
from kvsearch.core.naming import check_unique, require_known, suggest
from kvsearch.evaluation.names import FULL, METHODS, RANDOM, Recipe, list_method_names
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import PHASES, Phase, Plan, PolicySpec, Profile, Size
from kvsearch.plan.build import PhaseChoice, build_plan, check_mean, round_ratios
from kvsearch.plan.origin import ContextRecord, make_provenance
from kvsearch.plan.profile import load_profile
from kvsearch.plan.profile_arrays import EVICTED_RATIO
from kvsearch.plan.saved import PROFILE, WEIGHTS
from kvsearch.policies import Policy, create_policy
from kvsearch.policies.fitted import parse_policy, split_settings
from kvsearch.policies.random import RandomEviction
from kvsearch.policies.registry import build_policy, find_policy_class, is_fitted, list_policy_names
from kvsearch.runtime import Program

Heads = tuple[int, int]  # layers, kv heads
Settings = Mapping[str, Any]
BETA = "beta"  # the option of the pyramid


def allocate_unmeasured(allocator: Uniform | Pyramid, floor: int, total: int, length: int, heads: Heads) -> Ints:
    """Allocate budgets [L, Hkv] that need no measurement and sum to `total`, each at most `length`.

    Every head gets `floor` first, as far as the total reaches.
    """
    head_floor = min(floor, length, total // (heads[0] * heads[1]))
    budgets: Ints = allocator.allocate(np.zeros(heads), total, np.full(heads, head_floor), np.full(heads, length))
    return budgets


@dataclass(frozen=True)
class Method:
    """A policy for all full-attention layers, the layout of its budgets, and a dynamic allocation (None: static).

    Budgets are laid out by an allocator, or looked up in a profile; `source` is where that was read from, for messages.
    """

    name: str
    policy: Policy
    layout: Uniform | Pyramid | Profile
    allocation: Allocation | None = None
    source: Path | None = field(default=None, compare=False)

    @property
    def contexts(self) -> ContextRecord | None:
        """Contexts its profile was fitted on: none without a profile, None if unknown."""
        return self.layout.metadata.provenance.contexts if isinstance(self.layout, Profile) else ContextRecord()

    def check(self, sizes: Sequence[Size]) -> None:
        """Check the sizes before a model is loaded.

        Raises:
            UsageError: a budget below what the policy protects, or an allocation that cannot share its entries.
        """
        try:
            for size in sizes:
                if size.budget is not None:
                    check_request(self.policy, size, self.allocation)
                elif self.allocation is not None:
                    self.allocation.check(self.policy, "allocation")
        except UsageError as error:
            raise UsageError(f"method {self.name}: {error}") from error

    def program(self, loaded: LoadedModel, size: Size, phases: str = "prefill") -> Program:
        """Make the program of the method on a model, in the phases of that name: prefill, decode or both.

        Prefill budgets sum to `Size.held`, or to all of a shorter prompt. Decode budgets sum to `Size.held` always.

        Raises:
            IncompatibleError: the profile is of another model.
            UsageError: the allocation cannot share the policy's entries, or the policy has no decode rule.
        """
        self.policy.check_model(loaded.fingerprint)
        if isinstance(self.layout, Profile):
            self.layout.metadata.model.require(loaded.fingerprint, f"the profile {self.source or self.name}")
        shape = describe(loaded.model)
        heads = (len(shape.full_layers), shape.kv_heads)
        tables = {phase: partial(self.allocate_at_size, size, heads, phase) for phase in PHASES[phases]}
        return Program.of_policy(loaded.model, self.policy, tables, self.policy.least, self.allocation)

    def allocate_at_size(self, size: Size, heads: Heads, phase: Phase, length: int) -> Ints:
        """Allocate the budgets at a size, [L, Hkv], for a prompt of `length` tokens."""
        count = heads[0] * heads[1]
        total = size.held(length, count)
        # what a decode phase may hold is not bound by the prompt: the cache has yet to grow
        maximum = max(length, -(-total // count)) if phase == "decode" else length
        return self.budgets(min(total, maximum * count), maximum, heads)

    def budgets(self, total: int, length: int, heads: Heads) -> Ints:
        """Allocate budgets [L, Hkv] that sum to `total`, each at most `length`.

        The budgets of a profile are looked up at the share that the total evicts of the prompt at hand; UsageError if
        it has no table of local ratios.
        """
        if not isinstance(self.layout, Profile):
            return allocate_unmeasured(self.layout, self.policy.least, total, length, heads)
        size = heads[0] * heads[1]
        if total >= length * size:
            return np.full(heads, length, dtype=np.int64)
        floor = min(max(self.layout.metadata.floor, 1), length, total // size)
        return round_ratios(self.layout.local_ratios(1 - total / (length * size)), length, total, floor)

    def definition(self, size: Size, phases: str) -> dict[str, Any]:
        """Return all settings that decide what is kept, as JSON."""
        budgets: dict[str, Any]
        shared = None
        if self.allocation is not None:
            shared = {"name": self.allocation.name, "options": self.allocation.parameters()}
        if isinstance(self.layout, Profile):
            budgets = {"profile_sha256": self.layout.sha256, "calibrated": self.layout.metadata.method}
        else:
            options = asdict(self.layout)
            budgets = {"allocator": self.layout.name, "options": options, "floor": self.policy.least}
        return {
            "policy": {"name": self.policy.name, "params": self.policy.parameters()},
            "budgets": budgets, "allocation": shared, "size": size.as_json(), "phases": phases,
        }  # fmt: skip


def parse_allocation(text: str) -> Allocation | None:
    """Parse an allocation from NAME or NAME:option=value,option=value; None is "static".

    Raises:
        UsageError: the text is not of that form, or there is no such allocation, option or value.
    """
    name, colon, options = text.partition(":")
    items = options.split(",") if colon else []
    if not name.strip() or not all(all(part.strip() for part in item.partition("=")) for item in items):
        raise UsageError(f"allocation {text!r} is not of the form NAME or NAME:option=value,option=value")
    pairs = [parse_setting(item) for item in items]
    check_unique(f"allocation {text!r}:", [key for key, _ in pairs])
    return create_allocation(name.strip(), dict(pairs))


def check_request(policy: Policy, size: Size, allocation: Allocation | None = None) -> None:
    """Check a request before a model is loaded.

    Raises:
        UsageError: a size below what the policy protects or that evicts nothing, or an
            allocation that cannot share the policy's entries.
    """
    size = size.laid_out()
    mean = size.mean(size.length or 0)
    kept = f"{policy.name} always keeps ({policy.sink_count} sinks, {policy.recent_count} recent)"
    check_mean(mean, policy.least, size.length, kept, "lower them with --set")
    if policy.keeps_all(int(mean), 1):
        raise UsageError(
            f"{policy.name} never evicts heads with budgets of {mean:g} entries on average: see its description"
            + ("" if size.ratio is None else ", or give another --length")
        )
    if allocation is not None:
        allocation.check(policy, "--allocation")


def make_direct_plan(
    loaded: LoadedModel,
    policy: Policy,
    size: Size,
    phases: Sequence[Phase],
    allocator: Uniform | Pyramid,
    allocation: Allocation | None = None,
) -> Plan:
    """Make the plan of one policy for all full-attention layers, with budgets that need no measurement.

    With a ratio, budgets are for prompts of `size.laid_out().length` tokens and scale with the prompt at hand. The
    total is exact: what is left by rounding goes to the first heads. `allocation` shares what the budgets add up to
    anew for every prompt.

    Raises:
        UsageError: as `check_request` raises it.
    """
    check_request(policy, size, allocation)
    size = size.laid_out()
    shape = describe(loaded.model)
    heads = (len(shape.full_layers), shape.kv_heads)
    total = size.total(size.length or 0, heads[0] * heads[1])
    budgets = allocate_unmeasured(allocator, policy.least, total, size.length or MOST_ENTRIES, heads)
    chosen = PhaseChoice((policy.spec,) * heads[0], budgets)
    settings = {"ratio": size.ratio, "budget": size.budget, **asdict(allocator)}
    return build_plan(
        loaded.fingerprint,
        shape.full_layers,
        dict.fromkeys(phases, chosen),
        make_provenance(allocator.name, 0, None, settings, ContextRecord()),
        policy.least,
        size.scaling,
        size.length,
        None if allocation is None else PolicySpec(name=allocation.name, params=allocation.parameters()),
    )


# --- from what was typed -------------------------------------------------------------------------------------------


def parse_methods(text: str, settings: Sequence[str] = ()) -> list[Method]:
    """Parse a list of methods such as `uniform,pyramid:keydiff,h2o,lukv=runs/snapkv`.

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
    recipes = {item: _parse_recipe(item) for item in items if not _is_profile(item)}
    pairs = [parse_setting(text) for text in settings]
    check_unique("--set", [key for key, _ in pairs])
    common = dict(pairs)
    profiles = {item: _read_calibrated(item, common) for item in items if item not in recipes}
    agreed = _find_agreed_settings(profiles.values())
    methods = []
    unread = set(common)
    for item in items:
        if item in profiles:
            methods.append(profiles[item])
        else:
            recipe, stated, fitted = recipes[item]
            shared = {**fitted, **agreed.get(recipe.policy, {}), **common}
            methods.append(_make_method(item, recipe, stated, shared))
            unread -= {*_parameters(recipe), *_options(recipe)}
    for key in sorted(unread, key=list(common).index):
        raise UsageError(f"--set {key}: none of these methods has such a parameter or option")
    check_unique("the method", [method.name for method in methods])
    for method, other in combinations(methods, 2):
        if replace(other, name=method.name) == method:
            raise UsageError(f"the methods {method.name} and {other.name} are the same: leave one out")
    return methods


def parse_sizes(budgets: str | None, ratios: str | None) -> list[Size]:
    """Parse the sizes of two lists such as `128,256` and `0.5,0.8`, in this order.

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


def _is_profile(item: str) -> bool:
    """Tell whether an item is NAME=DIR of a profile, not of a fitted policy."""
    name, is_given, _ = item.partition("=")
    return bool(is_given) and ":" not in name and not is_fitted(name)


def _parse_recipe(item: str) -> tuple[Recipe, Settings, Settings]:
    """Parse METHOD or METHOD:POLICY, the :KEY=VALUE after it, and the settings of a fit (probe=DIR).

    The weights of a fitted policy are among the former.
    """
    (method, *others), settings = split_settings(item, "method", "METHOD, METHOD:POLICY or either", max_count=2)
    method, fitted = parse_policy(method)
    policy = None
    if others:
        policy, fitted = parse_policy(others[0])
    if method == FULL:
        raise UsageError("the full cache is always there: leave the method full out")
    if policy is not None:
        require_known("method", method, METHODS)
        require_known("policy", policy, list_policy_names())
    elif not is_fitted(method):
        require_known("method", method, list_method_names())
    recipe = METHODS.get(method, Recipe(method))
    weights = {key: fitted.pop(key) for key in (WEIGHTS,) if key in fitted}
    recipe = recipe if policy is None else recipe._replace(policy=policy)
    return recipe, {**weights, **settings}, fitted


def _parameters(recipe: Recipe) -> list[str]:
    """Return the names of the policy's parameters; a control has none."""
    return [] if recipe.policy == RANDOM else [field.name for field in fields(find_policy_class(recipe.policy))]


def _options(recipe: Recipe) -> list[str]:
    """Return the options of allocation and allocator that can be set; a parameter of that name hides one."""
    allocation = create_allocation(recipe.allocation, recipe.options)
    names = [] if allocation is None else [name for name in allocation.parameters() if name not in recipe.options]
    if recipe.allocator == Pyramid.name:
        names.append(BETA)
    return [] if recipe.policy == RANDOM else [name for name in names if name not in _parameters(recipe)]


def _find_agreed_settings(profiles: Iterable[Method]) -> dict[str, Settings]:
    """Find the parameters of policies, by name, on which all profiles of the policy agree."""
    stated: dict[str, list[Settings]] = {}
    for method in profiles:
        stated.setdefault(method.policy.name, []).append(method.policy.parameters())
    return {policy: several[0] for policy, several in stated.items() if all(other == several[0] for other in several)}


def _make_method(name: str, recipe: Recipe, stated: Settings, shared: Settings) -> Method:
    """Make the method of a recipe; settings `stated` in its name win over the `shared` ones."""
    known = [*_parameters(recipe), *_options(recipe)]
    for key in stated:
        if key not in known:
            raise UsageError(f"method {name} has no setting {key!r}{suggest(key, known) if known else ''}")
    settings = {**shared, **stated}
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
        raise UsageError(f"method {name}: {error}") from error
    return Method(name, policy, allocator, allocation)


def _read_calibrated(item: str, common: Settings) -> Method:
    """Make the method of a profile, NAME=DIR."""
    name, _, place = (part.strip() for part in item.partition("="))
    source = Path(place)
    if name in (*list_method_names(), FULL) or not name or set(":@.") & set(name):
        raise UsageError(f"a profile cannot be called {name!r}: choose a name that is no method's, without : @ and .")
    profile = load_profile(source / PROFILE if source.is_dir() else source)
    if EVICTED_RATIO not in profile.arrays:
        raise UsageError(f"method {name}: {source} is a {profile.metadata.method} profile, without a table of budgets")
    policy = build_policy(profile.metadata.policy)
    for key, value in policy.parameters().items():
        if common.get(key, value) != value:
            problem = f"method {name} keeps {key}={value} of its profile: --set {key}={common[key]} is for the others"
            warnings.warn(problem, KvsearchWarning, stacklevel=2)
    return Method(name, policy, profile, source=source)

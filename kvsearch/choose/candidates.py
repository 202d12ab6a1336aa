"""What `kvsearch select` chooses from: strategies made of a calibration's signals, and the baselines they have to beat.

A candidate is a route (which pattern a layer takes) with an allocator (how much it gets). Beyond the strategies of
PolyKV (arXiv 2606.15157) there are PyramidKV's budgets, powers of sensitivities, and budgets by loss curves. Baselines
have one policy in all layers: every pattern with equal budgets, and the methods of papers with their own allocators.

With both phases budgets are the same in both, by the signals of prefill, as in `kvsearch.strategies.from_signals`:
candidates then hold no more than baselines at any time. Methods with their own allocators lay out or share the same
total in every phase in which they evict.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Final, NamedTuple, NoReturn

import numpy as np

from kvsearch.arrays import Floats, Ints
from kvsearch.budgets.dynamic import create_allocation
from kvsearch.budgets.loss_curves import LossCurves
from kvsearch.budgets.polykv import Proportional
from kvsearch.budgets.pyramidkv import Pyramid
from kvsearch.budgets.uniform import Uniform
from kvsearch.errors import KvsearchWarning, UsageError
from kvsearch.models.loading import LoadedModel
from kvsearch.naming import suggest, unknown
from kvsearch.plan import PHASES, Phase, Plan, Profile, Size, phases_of
from kvsearch.plan.canonical import sha256_of
from kvsearch.plan.guard import round_half_up
from kvsearch.plan.schema import STATIC
from kvsearch.plan.size import Pool
from kvsearch.policies import Policy
from kvsearch.policies.registry import create_policy, policy_class
from kvsearch.signals.table import ROUTES, SENSITIVITIES, SignalTable, is_constant
from kvsearch.strategies.build import Chosen
from kvsearch.strategies.direct import direct_plan
from kvsearch.strategies.from_signals import (
    FULL,
    UNIFORM,
    Strategy,
    choose,
    floor_of,
    floors_of,
    plan_of,
    recent_parameter,
    warn_constant,
)
from kvsearch.strategies.methods import METHODS, Recipe

NONE: Final = "none"  # the route that stands for every pattern alone
PYRAMID, CURVES, JOINT = "pyramid", "curves", "curves-joint"
LOW: Final = "-low"  # ends the name of curves that go on below the smallest measured budget
ALONE, TOGETHER = (CURVES, f"{CURVES}{LOW}"), (JOINT, f"{JOINT}{LOW}")
POWERS: Final = {"^0.5": 0.5, "^2": 2.0}  # of sensitivities, by how their names end
SHARPENED: Final = tuple(f"{signal}{power}" for signal in SENSITIVITIES for power in POWERS)
ALLOCATORS: Final = (UNIFORM, PYRAMID, *SENSITIVITIES, *SHARPENED, *ALONE, *TOGETHER)


class Explored(NamedTuple):
    """Which candidates there are: every route (or pattern) with every allocator."""

    routes: tuple[str, ...]
    allocators: tuple[str, ...]


_PAPER: Final = (UNIFORM, "entropy", "ppl")
_STANDARD: Final = (
    UNIFORM, "entropy", "ppl-chosen", PYRAMID, "cosine-chosen", "error-chosen", "nll-chosen", "nll-chosen^0.5",
    "nll-chosen^2", *ALONE, *TOGETHER,
)  # fmt: skip
LEVELS: Final = {
    "paper": Explored((NONE, "cosine", "ppl"), _PAPER),
    "standard": Explored((NONE, *ROUTES), _STANDARD),
    "full": Explored((NONE, *ROUTES), ALLOCATORS),
}


@dataclass(frozen=True, eq=False)
class CandidateSet:
    """All plans that are compared in one phase setting, every plan once, by the name of its strategy or method.

    There are no candidates if every strategy is a baseline, too. `even` is the baseline that stands for uniform: the
    policy of the profile, if it can be used, with equal budgets. `origins` say what plans are made of, for their
    provenance. `notes` say what was left out, and which signals could not tell patterns or layers apart.
    """

    phases: str
    candidates: Mapping[str, Plan]
    baselines: Mapping[str, Plan]
    even: str
    origins: Mapping[str, Mapping[str, str]]
    notes: tuple[str, ...] = ()

    def has_equal_budgets(self, name: str) -> bool:
        """Return whether a candidate or a pattern is one with equal budgets; methods bring budgets of their own."""
        return self.origins[name].get("budget_signal") == UNIFORM

    @property
    def plans(self) -> dict[str, Plan]:
        """Candidates, then baselines."""
        return {**self.candidates, **self.baselines}


class _Made(NamedTuple):
    name: str
    plan: Plan
    origin: Mapping[str, str]


def explore(
    profile: Profile,
    size: Size,
    level: str = "standard",
    routes: Sequence[str] | None = None,
    allocators: Sequence[str] | None = None,
) -> Explored:
    """Return the routes and allocators of a level of `LEVELS`, as far as they were measured, or those that are named.

    A route is one of `ROUTES`, a pattern (in all layers), or "none", which is every pattern. Allocators are those of
    `ALLOCATORS`: "nll-chosen^2" shares by the square of a sensitivity; "curves" by loss curves of the routed patterns,
    no layer below the smallest measured budget; "curves-joint" by those of the best pattern at each budget, which is
    then the one that is used; with "-low" curves go on below what was measured, down to a tenth of the mean.

    Raises:
        UsageError: an unknown name, or one that is named but was not measured.
    """
    if level not in LEVELS:
        raise UsageError(unknown("level to explore", level, list(LEVELS)))
    table = SignalTable(profile)
    mean = size.pool(profile.metadata).mean
    missing, patterns = _missing_curves(table, mean), _patterns(table)
    has_routes = (NONE, *table.routes, *patterns)
    shares = {UNIFORM, PYRAMID, *table.sensitivities, *(name for name, why in missing.items() if why is None)}
    for name in routes or ():
        if name not in has_routes:
            _refuse("route", name, (NONE, *ROUTES, *patterns), has_routes)
    for name in allocators or ():
        if (why := missing.get(name)) is not None:
            raise UsageError(f"allocator {name!r} cannot be used: {why}")
        if name not in ALLOCATORS or _split(name)[0] not in shares:
            _refuse("allocator", name, ALLOCATORS, (UNIFORM, PYRAMID, *table.sensitivities))
    return Explored(
        tuple(dict.fromkeys(routes or (name for name in LEVELS[level].routes if name in has_routes))),
        tuple(dict.fromkeys(allocators or (name for name in LEVELS[level].allocators if _split(name)[0] in shares))),
    )


def find_candidates(
    loaded: LoadedModel, profile: Profile, size: Size, phases: str = "prefill", explored: Explored | None = None
) -> CandidateSet:
    """Make candidates and baselines of one phase setting ("prefill", "decode" or "both"), all with the same total.

    Plans that differ in nothing but their origin are there once, as a baseline if one of them is.

    Raises:
        UsageError: a phase was not measured, or no pattern can be used at `size`.
    """
    table = SignalTable(profile)
    for phase in phases_of(phases):
        if phase not in table.axes.phases:
            known = ", ".join(table.axes.phases)
            raise UsageError(f"signals of the {phase} phase were not measured (only {known}): calibrate with it")
    pool = size.pool(profile.metadata)
    barred = _barred(table, pool.mean)
    notes = [f"{name} is left out: {why}" for name, why in barred.items()]
    maker = _Maker(table, size, pool, phases, tuple(barred))
    origins, contents = dict[str, Mapping[str, str]](), set[str]()

    def distinct(made: Iterable[_Made]) -> dict[str, Plan]:
        found = {}
        for name, plan, origin in made:
            content = content_hash(plan)
            if content not in contents:
                contents.add(content)
                found[name], origins[name] = plan, origin
        return found

    baselines = distinct([*maker.single(), *maker.methods(loaded, notes)])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", KvsearchWarning)
        candidates = distinct(maker.strategies(explored or explore(profile, size)))
    for one in told:  # of signals: they mean candidates that are there already
        if not issubclass(one.category, KvsearchWarning):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        elif str(one.message) not in notes:
            notes.append(str(one.message))
    own = profile.metadata.policy.name
    even = own if own in baselines else next(iter(baselines))
    return CandidateSet(phases, candidates, baselines, even, origins, tuple(notes))


def content_hash(plan: Plan) -> str:
    """Return a hash that is equal for plans that keep the same of every prompt."""
    scales, shares = plan.scaling == "proportional", plan.allocation.name != STATIC
    kept = plan.model_dump(mode="json", include={"prefill", "decode", "scaling", "allocation"})
    return sha256_of([kept, plan.floor if scales or shares else None, plan.length if scales else None])


def tuned_policy(name: str, profile: Profile) -> Policy:
    """Return a policy with the settings that the patterns of a profile have, so that comparing them is fair.

    One that is no pattern takes over their `window` and `protect`, those of the profile's own policy first.
    """
    patterns = SignalTable(profile).axes.patterns
    for pattern in patterns:
        if pattern.name == name:
            return create_policy(name, pattern.params)
    known = {field.name for field in fields(policy_class(name))} & {"window", "protect"}
    for pattern in (profile.metadata.policy, *patterns):
        if "window" in known & pattern.params.keys():
            return create_policy(name, {key: pattern.params[key] for key in known & pattern.params.keys()})
    return create_policy(name)


@dataclass(frozen=True)
class _Maker:
    """Makes the plans of one phase setting; no layer takes a `barred` pattern."""

    table: SignalTable
    size: Size
    pool: Pool
    phases: str
    barred: tuple[str, ...]

    def single(self) -> Iterator[_Made]:
        """Make every pattern with equal budgets."""
        for name in self._usable:
            chosen = choose(self.table, Strategy(None, policy=name, phases=self.phases), self.size)
            yield self._made(name, chosen, {"baseline": name, "policy": name, "budget_signal": UNIFORM})

    def methods(self, loaded: LoadedModel, notes: list[str]) -> Iterator[_Made]:
        """Make the methods of papers with their own allocators; notes say which cannot be used."""
        for method, recipe in METHODS.items():
            name = f"{method}, own budgets" if method in self.table.patterns else method
            try:
                plan = self._method_plan(loaded, recipe)
            except UsageError as error:
                notes.append(f"baseline {name} is left out: {error}")
            else:
                yield _Made(name, plan, {"baseline": name, "policy": recipe.policy})

    def strategies(self, explored: Explored) -> Iterator[_Made]:
        """Make every route with every allocator; the joint allocator brings its own patterns."""
        for strategy in self._routed(explored.routes):
            routed = choose(self.table, strategy, self.size)
            route = strategy.route or NONE
            for allocator in (name for name in explored.allocators if name not in TOGETHER):
                name = replace(strategy, exclude=()).name + (f" + {allocator}" if allocator != UNIFORM else "")
                budgets = self._budgets(allocator, routed)
                chosen = {phase: part._replace(budgets=budgets) for phase, part in routed.items()}
                yield self._made(name, chosen, {"strategy": name, "route": route, "budget_signal": allocator})
        for name in (name for name in explored.allocators if name in TOGETHER):
            yield self._made(name, self._joint(name), {"strategy": name, "route": name, "budget_signal": name})

    def _routed(self, routes: Sequence[str]) -> Iterator[Strategy]:
        for name in routes:
            if name in self.table.routes:
                yield Strategy(name, phases=self.phases, exclude=self.barred)
            else:
                for pattern in self._usable:
                    if name in (NONE, pattern):
                        yield Strategy(None, policy=pattern, phases=self.phases)

    def _made(self, name: str, chosen: Mapping[Phase, Chosen], origin: Mapping[str, str]) -> _Made:
        return _Made(name, plan_of(self.table.profile, chosen, self.size, {}), origin)

    def _method_plan(self, loaded: LoadedModel, recipe: Recipe) -> Plan:
        policy = tuned_policy(recipe.policy, self.table.profile)
        if self.pool.mean < policy.floor:
            lower = recent_parameter(policy)
            smaller = f", or calibrate with a smaller --set {lower}" if lower else ""
            raise UsageError(
                f"{self.pool.mean:g} entries per kv head is below the {policy.floor} that {policy.name} always "
                f"keeps: keep more{smaller}"
            )
        size = replace(self.size, length=self.pool.length)  # as for candidates, no head gets more
        allocator = Pyramid(window=policy.floor) if recipe.allocator == PYRAMID else Uniform()
        allocation = create_allocation(recipe.allocation, recipe.options)
        return direct_plan(loaded, policy, size, PHASES[self.phases], allocator, allocation)

    def _budgets(self, allocator: str, routed: Mapping[Phase, Chosen]) -> Ints:
        """Return the budgets of the patterns of all phases together, [L, Hkv], by the signals of the first."""
        phase, part = next(iter(routed.items()))
        if allocator == UNIFORM:
            return part.budgets
        floors = self._floors(floors_of({when: other.policies for when, other in routed.items()}))
        bounds = self.pool.total, floors, self._caps
        indices = [self.table.patterns.index(pattern.name) for pattern in part.policies]
        if allocator == PYRAMID:
            return Pyramid(window=0).allocate(np.zeros(0), *bounds)
        if allocator in ALONE:
            losses = self._losses(phase)[np.arange(len(indices)), indices]
            return self._curves(allocator).allocate(losses, *bounds)
        signal, power = _split(allocator)
        weights = self.table.sensitivity(signal, phase, self.pool.mean, indices)
        if len(weights) > 1 and is_constant(weights):
            warn_constant(signal, phase)
            return part.budgets
        if power != 1.0 and weights.max() > 0:  # on a scale where rounding does not matter; below zero counts as zero
            weights = (np.maximum(weights, 0.0) / weights.max()) ** power
        return Proportional().allocate(weights, *bounds)

    def _joint(self, allocator: str) -> dict[Phase, Chosen]:
        """Return budgets by the best patterns of the first phase, and every phase's best patterns at these budgets."""
        usable = [self.table.patterns.index(name) for name in self._usable]
        specs = [self.table.axes.patterns[index] for index in usable]
        low, high = self._floors([max(map(floor_of, specs))] * self.pool.shape[0]), self._caps
        curves, found = self._curves(allocator), dict[Phase, Chosen]()
        for phase in PHASES[self.phases]:
            budgets, best = curves.allocate_jointly(self._losses(phase)[:, usable], self.pool.total, low, high)
            found[phase] = Chosen(tuple(specs[index] for index in best.tolist()), budgets)
            low = high = budgets  # which leaves other phases no choice but of patterns
        return found

    def _curves(self, allocator: str) -> LossCurves:
        least = max(1, round_half_up(self.pool.mean / 10)) if allocator.endswith(LOW) else None
        return LossCurves((*self._measured, self.table.profile.metadata.length), least)

    def _losses(self, phase: Phase) -> Floats:
        """Return nats per token that the model loses at the measured budgets below the length, [L, R, N]."""
        return np.stack([self.table.measured("nll", phase, budget) for budget in self._measured], axis=-1)

    def _floors(self, by_layer: Sequence[int]) -> Ints:
        return np.array(by_layer, dtype=np.int64)[:, None].repeat(self.pool.shape[1], axis=1)

    @cached_property
    def _caps(self) -> Ints:
        return np.full(self.pool.shape, self.pool.length, dtype=np.int64)

    @property
    def _measured(self) -> tuple[int, ...]:
        """Budgets at which something can be lost."""
        return tuple(budget for budget in self.table.axes.budgets if budget < self.table.profile.metadata.length)

    @cached_property
    def _usable(self) -> tuple[str, ...]:
        return tuple(name for name in _patterns(self.table) if name not in self.barred)


def _patterns(table: SignalTable) -> tuple[str, ...]:
    """Return all patterns but the full cache, which evicts nothing."""
    return tuple(name for name in table.patterns if name != FULL.name)


def _barred(table: SignalTable, mean: float) -> dict[str, str]:
    """Return patterns that cannot be used, and why; UsageError if none is left."""
    found = {
        pattern.name: f"it always keeps {floor_of(pattern)} entries per kv head, above the mean of {mean:g}"
        for pattern in table.axes.patterns
        if pattern.name != FULL.name and floor_of(pattern) > mean
    }
    if len(found) == len(_patterns(table)):
        listed = "; ".join(f"{name}: {why}" for name, why in found.items())
        raise UsageError(f"no pattern of the profile can be used ({listed}): keep more, or calibrate other patterns")
    return found


def _missing_curves(table: SignalTable, mean: float) -> dict[str, str | None]:
    """Return why loss curves cannot share out a mean budget, by allocator; None if they can."""
    budgets, listed = table.axes.budgets, ", ".join(map(str, table.axes.budgets))
    why = None
    if "nll" not in table.routes:
        why = "the profile has no nll losses: calibrate with them"
    elif len(budgets) < 2:
        why = f"loss curves need losses at several budgets, the profile has {listed}: calibrate with smaller ones, too"
    none = f"losses were measured at {listed} entries, none below the mean of {mean:g}: calibrate with smaller ones"
    bounded = none if why is None and budgets[0] >= mean else why
    return {name: why if name.endswith(LOW) else bounded for name in (*ALONE, *TOGETHER)}


def _split(allocator: str) -> tuple[str, float]:
    """Return the signal of an allocator, and the power it is raised to."""
    signal, _, power = allocator.partition("^")
    return signal, POWERS[f"^{power}"] if power else 1.0


def _refuse(what: str, name: str, known: Sequence[str], measured: Sequence[str]) -> NoReturn:
    if name not in known:
        raise UsageError(f"unknown {what} {name!r}{suggest(name, known)}")
    there = ", ".join(measured)
    raise UsageError(f"this profile has no signal for {what} {name!r} (it has {there}): calibrate with it")

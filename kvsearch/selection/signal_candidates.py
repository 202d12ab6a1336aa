"""What `kvsearch select` chooses from: strategies made of a calibration's signals, and the baselines they have to beat.

A candidate is a route (which pattern a layer takes) with an allocator (how much it gets). Beyond the strategies of
PolyKV (arXiv 2606.15157) there are PyramidKV's budgets, and budgets by loss curves. Baselines have one policy in all
layers: every pattern with equal budgets, and the methods of papers with their own allocators.

With both phases budgets are the same in both, by the signals of prefill, as in `kvsearch.selection.from_signals`:
candidates then hold no more than baselines at any time. Methods with their own allocators lay out or share the same
total in every phase in which they evict.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property, partial
from typing import Final

import numpy as np

from kvsearch.budgets.loss_curves import LossCurves
from kvsearch.budgets.pyramidkv import Pyramid
from kvsearch.core.arrays import Floats, Ints
from kvsearch.core.errors import KvsearchWarning, UsageError
from kvsearch.evaluation.names import METHODS, PYRAMID, UNIFORM, Recipe
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import PHASES, Phase, Plan, Profile, Size, parse_phases
from kvsearch.plan.build import PhaseChoice
from kvsearch.policies import Policy
from kvsearch.policies.registry import create_policy, find_policy_class
from kvsearch.selection.candidates import CandidateSet, NamedPlan, PlanSource
from kvsearch.selection.from_signals import (
    Strategy,
    check_kept,
    choose_by_signals,
    find_floor,
    find_floors,
    make_signals_plan,
)
from kvsearch.signals.table import ROUTES, SENSITIVITIES, SignalTable

NO_ROUTE: Final = "none"  # the route that stands for every pattern alone
CURVES: Final = "curves"
JOINT_CURVES: Final = "curves-joint"  # which bring their own patterns
STANDARD_ROUTES: Final = (NO_ROUTE, *ROUTES)
STANDARD_ALLOCATORS: Final = (
    UNIFORM, "entropy", "ppl-chosen", PYRAMID, "cosine-chosen", "error-chosen", "nll-chosen", CURVES, JOINT_CURVES,
)  # fmt: skip


def find_measured(
    table: SignalTable, size: Size, routes: Sequence[str] | None = None, allocators: Sequence[str] | None = None
) -> tuple[list[str], list[str]]:
    """Filter routes and allocators, by default the standard ones, to those that were measured.

    A route is one of `ROUTES`, or "none", which is every pattern in all layers. An allocator is a sensitivity; "curves"
    shares by loss curves of the routed patterns, no layer below the smallest measured budget; "curves-joint" by the
    losses of the best pattern at each budget, which is then the one that is used. Curves take losses at several
    budgets, one of them below the mean.
    """
    measured = table.axes.budgets
    known_routes = {NO_ROUTE, *table.routes}
    known_allocators = {UNIFORM, PYRAMID, *table.sensitivities}
    if "nll" in table.routes and len(measured) > 1 and measured[0] < size.pool(table.profile.metadata).mean:
        known_allocators |= {CURVES, JOINT_CURVES}
    return (
        [name for name in routes or STANDARD_ROUTES if name in known_routes],
        [name for name in allocators or STANDARD_ALLOCATORS if name in known_allocators],
    )


def find_signal_candidates(
    loaded: LoadedModel,
    profile: Profile,
    size: Size,
    phases: str = "prefill",
    routes: Sequence[str] | None = None,
    allocators: Sequence[str] | None = None,
) -> CandidateSet:
    """Make candidates and baselines of one phase setting ("prefill", "decode" or "both"), all with the same total.

    Candidates are every route with every allocator, as far as they were measured, see `find_measured`.

    Raises:
        UsageError: a phase was not measured, or no pattern can be used at `size`.
        IncompatibleError: the profile is of another model.
    """
    profile.metadata.model.require(loaded.fingerprint, "this profile")
    table = SignalTable(profile)
    for phase in parse_phases(phases):
        table.phase_index(phase)  # refuses one that was not measured
    return _SignalPlans(loaded, table, size, phases, find_measured(table, size, routes, allocators)).find()


def create_tuned_policy(name: str, profile: Profile) -> Policy:
    """Create a policy with the settings of the patterns of a profile, for a fair comparison.

    A policy that is no pattern takes over `window` and `protect`, of the profile's own policy first.
    """
    patterns = SignalTable(profile).axes.patterns
    for pattern in patterns:
        if pattern.name == name:
            return create_policy(name, pattern.params)
    shared = {field.name for field in fields(find_policy_class(name))} & {"window", "protect"}
    for pattern in (profile.metadata.policy, *patterns):
        if "window" in shared & pattern.params.keys():
            return create_policy(name, {key: pattern.params[key] for key in shared & pattern.params.keys()})
    return create_policy(name)


class _SignalPlans(PlanSource):
    """Plans of one phase setting from the `measured` routes and allocators; no layer takes a `barred` pattern."""

    def __init__(
        self, loaded: LoadedModel, table: SignalTable, size: Size, phases: str, measured: tuple[list[str], list[str]]
    ) -> None:
        super().__init__(loaded, size, phases)
        self.table = table
        self.profile = table.profile
        self.even = table.profile.metadata.policy.name
        self.routes, self.allocators = measured
        self.pool = size.pool(table.profile.metadata)
        barred = _find_barred(table, self.pool.mean)
        self.barred = tuple(barred)
        self.notes += [f"{name} is left out: {why}" for name, why in barred.items()]

    @property
    def baselines(self) -> Sequence[NamedPlan]:
        """Single patterns with uniform budgets, and methods of papers, but of those that read prompts again."""
        entries = []
        for name in self._usable:
            chosen = choose_by_signals(self.table, Strategy(None, policy=name, phases=self.phases), self.size)
            entries.append(self._name_plan(name, chosen, {"baseline": name, "policy": name, "budget_signal": UNIFORM}))
        for method, recipe in METHODS.items():
            if create_policy(recipe.policy).needs().reread is not None:
                continue  # strategies of patterns take one pass over a prompt, and it would be compared at several
            name = f"{method}, own budgets" if method in self.table.patterns else method
            entries.append((name, partial(self._method_plan, recipe), {"baseline": name, "policy": recipe.policy}))
        return entries

    @property
    def candidates(self) -> Sequence[NamedPlan]:
        """Every route with every allocator; warnings of signals become notes.

        What is warned of means candidates that are there already.
        """
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", KvsearchWarning)
            entries = [*self._combine_signals()]
        for warning in caught:
            if issubclass(warning.category, KvsearchWarning):
                self.notes.append(str(warning.message))
            else:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        return entries

    def _combine_signals(self) -> Iterator[NamedPlan]:
        """Yield plans of every route with every allocator; the joint allocator chooses its own patterns."""
        for strategy in self._make_routes():
            for allocator in self.allocators:
                if allocator == JOINT_CURVES:
                    continue
                is_sensitivity = allocator in SENSITIVITIES
                routed = replace(strategy, budgets=allocator if is_sensitivity else UNIFORM)
                chosen = choose_by_signals(self.table, routed, self.size)
                if allocator in (PYRAMID, CURVES):
                    budgets = self._allocate(allocator, chosen)
                    chosen = {phase: part._replace(budgets=budgets) for phase, part in chosen.items()}
                name = strategy.name + (f" + {allocator}" if allocator != UNIFORM else "")
                origin = {"strategy": name, "route": strategy.route or NO_ROUTE, "budget_signal": allocator}
                yield self._name_plan(name, chosen, origin)
        if JOINT_CURVES in self.allocators:
            origin = {"strategy": JOINT_CURVES, "route": JOINT_CURVES, "budget_signal": JOINT_CURVES}
            yield self._name_plan(JOINT_CURVES, self._choose_jointly(), origin)

    def _make_routes(self) -> Iterator[Strategy]:
        for name in self.routes:
            if name == NO_ROUTE:
                yield from (Strategy(None, policy=pattern, phases=self.phases) for pattern in self._usable)
            else:
                yield Strategy(name, phases=self.phases, exclude=self.barred)

    def _name_plan(self, name: str, chosen: Mapping[Phase, PhaseChoice], origin: Mapping[str, str]) -> NamedPlan:
        return name, partial(make_signals_plan, self.table.profile, chosen, self.size), origin

    def _method_plan(self, recipe: Recipe) -> Plan:
        policy = create_tuned_policy(recipe.policy, self.table.profile)
        check_kept(self.pool.mean, policy)
        size = replace(self.size, length=self.pool.length)  # as for candidates, no head gets more
        return self.make_direct_plan(policy, recipe, size)

    def _allocate(self, allocator: str, routed: Mapping[Phase, PhaseChoice]) -> Ints:
        """Allocate budgets [L, Hkv] by PyramidKV or by loss curves for the patterns of all phases together."""
        phase, part = next(iter(routed.items()))
        floors = self._floors(find_floors({when: other.policies for when, other in routed.items()}))
        bounds = self.pool.total, floors, self._caps
        if allocator == PYRAMID:
            return Pyramid(window=0).allocate(np.zeros(0), *bounds)
        indices = [self.table.patterns.index(pattern.name) for pattern in part.policies]
        return self._curves.allocate(self._losses(phase)[np.arange(len(indices)), indices], *bounds)

    def _choose_jointly(self) -> dict[Phase, PhaseChoice]:
        """Choose budgets by the best patterns of the first phase, then the best patterns of every phase for them."""
        usable = [self.table.patterns.index(name) for name in self._usable]
        specs = [self.table.axes.patterns[index] for index in usable]
        low = self._floors([max(map(find_floor, specs))] * self.pool.shape[0])
        high = self._caps
        choices = dict[Phase, PhaseChoice]()
        for phase in PHASES[self.phases]:
            budgets, best = self._curves.allocate_jointly(self._losses(phase)[:, usable], self.pool.total, low, high)
            choices[phase] = PhaseChoice(tuple(specs[index] for index in best.tolist()), budgets)
            low = high = budgets  # which leaves other phases no choice but of patterns
        return choices

    @property
    def _curves(self) -> LossCurves:
        return LossCurves((*self._measured, self.table.profile.metadata.length))

    def _losses(self, phase: Phase) -> Floats:
        """Return the loss increase in nats per token at the measured budgets below the length, [L, R, N]."""
        return np.stack([self.table.measured("nll", phase, budget) for budget in self._measured], axis=-1)

    def _floors(self, by_layer: Sequence[int]) -> Ints:
        return np.array(by_layer, dtype=np.int64)[:, None].repeat(self.pool.shape[1], axis=1)

    @cached_property
    def _caps(self) -> Ints:
        return np.full(self.pool.shape, self.pool.length, dtype=np.int64)

    @property
    def _measured(self) -> tuple[int, ...]:
        """Measured budgets below the length, at which something can be lost."""
        return tuple(budget for budget in self.table.axes.budgets if budget < self.table.profile.metadata.length)

    @cached_property
    def _usable(self) -> tuple[str, ...]:
        return tuple(pattern.name for pattern in self.table.evicting if pattern.name not in self.barred)


def _find_barred(table: SignalTable, mean: float) -> dict[str, str]:
    """Find patterns that cannot be used, with a reason each; UsageError if none is left."""
    reasons = {
        pattern.name: f"it always keeps {find_floor(pattern)} entries per kv head, above the mean of {mean:g}"
        for pattern in table.evicting
        if find_floor(pattern) > mean
    }
    if len(reasons) == len(table.evicting):
        listed = "; ".join(f"{name}: {why}" for name, why in reasons.items())
        raise UsageError(f"no pattern of the profile can be used ({listed}): keep more, or calibrate other patterns")
    return reasons

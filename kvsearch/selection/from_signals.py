"""PolyKV's strategies (arXiv 2606.15157, Algorithm 1): for every phase and layer a pattern, then a budget.

Algorithm 1 shares out budgets in each phase by itself. A layer that has much in prefill and little in decode, beside
one where it is the other way round, would then hold more than the budget for as long as both change over. So with both
phases there is one table of budgets, and the cache never holds more than that, but for the token that is coming in.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvsearch.budgets.allocator import Uniform, check_at_least
from kvsearch.budgets.polykv import Direction, Proportional
from kvsearch.core.arrays import Ints
from kvsearch.core.errors import KvsearchWarning, UsageError
from kvsearch.core.naming import require_known, suggest
from kvsearch.evaluation.names import FULL, UNIFORM
from kvsearch.plan import PHASES, Phase, Plan, PolicySpec, Profile, Size
from kvsearch.plan.build import PhaseChoice, check_pool, make_profile_plan
from kvsearch.plan.size import Pool
from kvsearch.policies import Policy
from kvsearch.policies.registry import build_policy
from kvsearch.signals.table import MEASURES, ROUTES, SENSITIVITIES, SignalTable, is_constant

SIGNAL_BUDGET = "signal_budget"  # in the provenance of plans by signals: the measured budget that was read


@dataclass(frozen=True)
class Strategy:
    """A strategy: a route signal chooses patterns, a sensitivity signal budgets.

    Args:
        route: by which every layer takes its best pattern, one of `ROUTES`; None: `policy` in every layer.
        budgets: "uniform", or the sensitivity of `SENSITIVITIES` that shares out what is above the floors.
        phases: when to evict: "prefill", "decode" or "both". Patterns are chosen in each phase by itself, budgets once:
            with both by the sensitivities of prefill.
        policy: the pattern of a strategy without a route; default: the policy of the profile.
        exclude: patterns that no layer may take. The sensitivities over all patterns still count them.
        least: b_min of budgets by sensitivity, in entries per head; default: a tenth of the mean. The floor of a layer
            is in any case what its patterns, of all phases, always keep (sinks and window).

    Raises:
        UsageError: a name is unknown, a number is out of range, or two settings contradict each other.
    """

    route: str | None = "cosine"
    budgets: str = UNIFORM
    phases: str = "prefill"
    policy: str | None = None
    exclude: tuple[str, ...] = ()
    least: int | None = None

    def __post_init__(self) -> None:
        if self.route is not None:
            require_known("route", self.route, ROUTES)
        require_known("budget signal", self.budgets, (UNIFORM, *SENSITIVITIES))
        require_known("phases", self.phases, PHASES)
        if self.route is not None and self.policy is not None:
            raise UsageError(f"policy {self.policy!r} is for route none: every layer takes it")
        check_at_least(0, minimum=self.least)

    @property
    def name(self) -> str:
        """Name of the strategy in tables, e.g. "cosine + entropy"; the phases are not part of it."""
        parts = [self.route or self.policy or "policy"]
        if self.budgets != UNIFORM:
            parts.append(self.budgets)
        return " + ".join(parts) + ("" if self.least is None else f" (least {self.least})")


def make_strategy_plan(profile: Profile, strategy: Strategy, size: Size) -> Plan:
    """Make the plan of a strategy at `size`; its provenance records the choices and their signals.

    Budgets by the worst pattern of every layer come with a KvsearchWarning of patterns that explode.

    Raises:
        UsageError: as `choose_by_signals` raises it.
    """
    table = SignalTable(profile)
    chosen = choose_by_signals(table, strategy, size)
    if strategy.budgets in MEASURES:
        for explosion in table.find_explosions(PHASES[strategy.phases][0], _size_pool(profile, size).mean):
            _warn(explosion.words)
    settings = asdict(strategy)
    settings["budget_signal"] = settings.pop("budgets")
    settings["policy"] = None if strategy.route else strategy.policy or profile.metadata.policy.name
    settings[SIGNAL_BUDGET] = table.find_nearest(_size_pool(profile, size).mean)
    return make_signals_plan(profile, chosen, size, settings)


def choose_by_signals(
    table: SignalTable, strategy: Strategy, size: Size, inverse: bool = False
) -> dict[Phase, PhaseChoice]:
    """Choose patterns and budgets of every phase of a strategy, by signals at the measured budget nearest to the mean.

    Among equally good patterns the first one is taken. Budgets are the same in all phases and add up to `size`
    exactly; heads of a layer get equal ones, but for odd entries. None is above the length that the plan states: that
    of the size, or else of the calibration's prompts. A signal that is the same everywhere is warned of
    (KvsearchWarning): patterns are then the policy of the profile, budgets equal. `inverse` makes a control: every
    layer takes its worst pattern, and the most sensitive layer gets the smallest budget.

    Raises:
        UsageError: a signal, phase or pattern is not in the profile, no candidate is left, or the size is below what
            patterns always keep or keeps everything.
    """
    pool = _size_pool(table.profile, size)
    routed = {phase: _route(table, strategy, phase, pool.mean, inverse) for phase in PHASES[strategy.phases]}
    patterns = {phase: [table.axes.patterns[index] for index in indices] for phase, indices in routed.items()}
    floors = find_floors(patterns)
    row = int(np.argmax(floors))
    for phase, chosen_patterns in patterns.items():
        instead = f"calibrate without {chosen_patterns[row].name}" if strategy.route else "use another policy"
        where = f" in {phase} layer {table.profile.metadata.layers[row]}"
        check_kept(pool.mean, build_policy(chosen_patterns[row]), where, instead)
    low = np.broadcast_to(np.array(floors)[:, None], pool.shape)
    budgets = _share_total(table, strategy, routed, pool, low, inverse)
    return {phase: PhaseChoice(tuple(chosen_patterns), budgets) for phase, chosen_patterns in patterns.items()}


def find_floors(chosen: Mapping[Phase, Sequence[PolicySpec]]) -> list[int]:
    """Find the entries per kv head that every layer always keeps, by its patterns in all phases; at least one."""
    return [max(map(find_floor, patterns)) for patterns in zip(*chosen.values(), strict=True)]


def find_floor(pattern: PolicySpec) -> int:
    """Find the entries per kv head that a pattern always keeps, at least one."""
    return build_policy(pattern).least


def check_kept(mean: float, policy: Policy, where: str = "", instead: str = "") -> None:
    """Raise UsageError if the mean budget is below the entries that a policy always keeps."""
    if mean < policy.least:
        lower = [name for name in policy.protecting if name in ("protect", "window")]
        remedies = ["keep more", instead, *(f"calibrate with a smaller --set {name}" for name in lower)]
        raise UsageError(
            f"{mean:g} entries per kv head is below the {policy.least} that {policy.name}{where} always keeps: "
            + ", or ".join(filter(None, remedies))
        )


def make_signals_plan(
    profile: Profile, chosen: Mapping[Phase, PhaseChoice], size: Size, settings: Mapping[str, Any] | None = None
) -> Plan:
    """Make the plan of the choices for the layers of a profile; `settings` join the calibration's."""
    floors = [find_floor(policy) for part in chosen.values() for policy in part.policies]
    return make_profile_plan(profile, chosen, size, min(floors), settings=settings)


def _size_pool(profile: Profile, size: Size) -> Pool:
    pool = size.pool(profile.metadata)
    check_pool(pool)
    return pool


def _route(table: SignalTable, strategy: Strategy, phase: Phase, mean: float, inverse: bool) -> list[int]:
    """Choose the pattern of every layer in a phase, as an index into the patterns of the table."""
    own = table.profile.metadata.policy.name
    candidates = _candidates(table, strategy)
    if strategy.route is None:
        policy = strategy.policy or own
        index = _index(table, policy, "use policy")
        if index not in candidates:
            problem = "the full cache evicts nothing" if policy == FULL else "it is excluded"
            raise UsageError(f"cannot use policy {policy!r} in every layer: {problem}")
        return [index] * len(table.profile.metadata.layers)
    wanted = table.read_preference(strategy.route, phase, mean)[:, candidates]
    if len(candidates) > 1 and all(is_constant(row) for row in wanted):
        names = table.patterns
        index = next((index for index in candidates if names[index] == own), candidates[0])
        _warn(
            f"{strategy.route} is the same for all patterns in every {phase} layer: nothing seems to have been evicted "
            f"at {table.find_nearest(mean)} entries per kv head, so {names[index]} is used everywhere"
        )
        return [index] * len(wanted)
    best = wanted.argmin(axis=1) if inverse else wanted.argmax(axis=1)
    return [candidates[index] for index in best]


def _candidates(table: SignalTable, strategy: Strategy) -> list[int]:
    """List the patterns that a layer may take, as indices into the table's patterns.

    No signal can judge the full cache, which agrees with itself: it takes no layer's place.
    """
    excluded = [_index(table, name, "exclude") for name in strategy.exclude]
    names = table.patterns
    indices = [index for index, name in enumerate(names) if index not in excluded and name != FULL]
    if not indices:
        raise UsageError(f"no pattern is left to choose from, the profile has {', '.join(names)}: calibrate others")
    return indices


def _index(table: SignalTable, name: str, what: str) -> int:
    known = table.patterns
    if name not in known:
        raise UsageError(f"cannot {what} {name!r}: the profile has no such pattern{suggest(name, known)}")
    return known.index(name)


def _share_total(
    table: SignalTable,
    strategy: Strategy,
    routed: Mapping[Phase, Sequence[int]],
    pool: Pool,
    low: Ints,
    inverse: bool,
) -> Ints:
    """Share the total out above the floors `low` by the signals of the first phase, [L, Hkv]."""
    phase, indices = next(iter(routed.items()))
    caps = np.full(pool.shape, pool.length)
    if strategy.budgets == UNIFORM:
        return Uniform().allocate(np.zeros(0), pool.total, low, caps)
    weights = table.read_sensitivity(strategy.budgets, phase, pool.mean, indices)
    if len(weights) > 1 and is_constant(weights):
        _warn(f"{strategy.budgets} is the same in every {phase} layer, so it cannot tell them apart: budgets are equal")
        return Uniform().allocate(np.zeros(0), pool.total, low, caps)
    least = strategy.least
    if least is not None and least > pool.mean:
        raise UsageError(f"least {least} is above the mean of {pool.mean:g} entries per kv head: lower it")
    direction: Direction = "inverse" if inverse else "forward"
    return Proportional(direction, least).allocate(weights, pool.total, low, caps)


def _warn(text: str) -> None:
    warnings.warn(text, KvsearchWarning, stacklevel=3)

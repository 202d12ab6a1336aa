"""PolyKV's strategies (arXiv 2606.15157, Algorithm 1): for every phase and layer a pattern, then a budget.

Algorithm 1 shares out budgets in each phase by itself. A layer that has much in prefill and little in decode, beside
one where it is the other way round, would then hold more than the budget for as long as both change over. So with both
phases there is one table of budgets, and the cache never holds more than that, but for the token that is coming in.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kvsearch.budgets.allocator import Uniform, check_at_least, share_above
from kvsearch.budgets.polykv import Direction, Proportional
from kvsearch.core.arrays import Floats, Ints
from kvsearch.core.errors import KvsearchWarning, UsageError
from kvsearch.core.naming import require_known, suggest
from kvsearch.plan import PHASES, Phase, Plan, PolicySpec, Profile, Size
from kvsearch.plan.origin import provenance
from kvsearch.plan.size import Pool
from kvsearch.policies import Policy
from kvsearch.policies.registry import policy_of
from kvsearch.signals.table import MEASURES, ROUTES, SENSITIVITIES, SignalTable, is_constant
from kvsearch.strategies.build import Chosen, build_plan, check_pool

UNIFORM = "uniform"
SIGNAL_BUDGET = "signal_budget"  # in the provenance of plans by signals: the measured budget that was read
FULL = PolicySpec(name="full")


@dataclass(frozen=True)
class Strategy:
    """How signals become a plan: a route chooses patterns, a sensitivity budgets.

    Args:
        route: by which every layer takes its best pattern, one of `ROUTES`; None: `policy` in every layer.
        budgets: "uniform", or the sensitivity of `SENSITIVITIES` that shares out what is above the floors.
        phases: when to evict: "prefill", "decode" or "both". Patterns are chosen in each phase by itself, budgets once:
            with both by the sensitivities of prefill.
        policy: the pattern of a strategy without a route; default: the policy of the profile.
        exclude: patterns that no layer may take. The sensitivities over all patterns still count them.
        least: b_min of budgets by sensitivity, in entries per head; default: a tenth of the mean. The floor of a layer
            is in any case what its patterns, of all phases, always keep (sinks and window).
        full_layers: so many layers keep the full cache, in all phases, at the cost of the whole length: those whose
            best pattern is the worst by the route, or without a route the most sensitive ones, summed over the phases.

    Raises:
        UsageError: a name is unknown, a number is out of range, or two settings contradict each other.
    """

    route: str | None = "cosine"
    budgets: str = UNIFORM
    phases: str = "prefill"
    policy: str | None = None
    exclude: tuple[str, ...] = ()
    least: int | None = None
    full_layers: int = 0

    def __post_init__(self) -> None:
        if self.route is not None:
            require_known("route", self.route, ROUTES)
        require_known("budget signal", self.budgets, (UNIFORM, *SENSITIVITIES))
        require_known("phases", self.phases, PHASES)
        if self.route is not None and self.policy is not None:
            raise UsageError(f"policy {self.policy!r} is for route none: every layer takes it")
        check_at_least(0, least=self.least, full_layers=self.full_layers)
        if self.route is None and self.budgets == UNIFORM and self.full_layers > 0:
            raise UsageError(
                "neither route nor budget signal says which layers should keep the full cache: name one of them"
            )

    @property
    def name(self) -> str:
        """What the strategy is called in tables, e.g. "cosine + entropy"; the phases are not part of it."""
        parts = [self.route or self.policy or "policy"]
        if self.budgets != UNIFORM:
            parts.append(self.budgets)
        details = [f"without {', '.join(self.exclude)}"] if self.exclude else []
        details += [] if self.least is None else [f"least {self.least}"]
        details += [f"{self.full_layers} full"] if self.full_layers else []
        return " + ".join(parts) + (f" ({'; '.join(details)})" if details else "")


def strategy_plan(profile: Profile, strategy: Strategy, size: Size) -> Plan:
    """Return the plan of a strategy at `size`; its provenance says what was chosen and from which signals.

    Budgets by the worst pattern of every layer come with a KvsearchWarning of patterns that explode.

    Raises:
        UsageError: as `choose` raises it.
    """
    table = SignalTable(profile)
    chosen = choose(table, strategy, size)
    if strategy.budgets in MEASURES:
        for one in table.explosions(PHASES[strategy.phases][0], _pool(profile, size).mean):
            _warn(one.words)
    settings = asdict(strategy)
    settings["budget_signal"] = settings.pop("budgets")
    settings["policy"] = None if strategy.route else strategy.policy or profile.metadata.policy.name
    settings[SIGNAL_BUDGET] = table.nearest(_pool(profile, size).mean)
    return plan_of(profile, chosen, size, settings)


def choose(table: SignalTable, strategy: Strategy, size: Size, inverse: bool = False) -> dict[Phase, Chosen]:
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
    return Construction(table, strategy, size, _pool(table.profile, size), inverse).chosen()


def floors_of(chosen: Mapping[Phase, Sequence[PolicySpec]]) -> list[int]:
    """Return what every layer always keeps per kv head, by its patterns in all phases; at least one entry."""
    return [max(map(floor_of, patterns)) for patterns in zip(*chosen.values(), strict=True)]


def floor_of(pattern: PolicySpec) -> int:
    """Return entries per kv head that a pattern always keeps, at least one."""
    return policy_of(pattern).floor


def recent_parameter(policy: Policy) -> str | None:
    """Return the parameter that makes smaller what a policy always keeps, the sinks aside: protect or window."""
    return next((name for name in policy.protecting if name in ("protect", "window")), None)


def warn_constant(signal: str, phase: Phase) -> None:
    """Warn that the budgets by a signal are equal."""
    _warn(f"{signal} is the same in every {phase} layer, so it cannot tell them apart: budgets are equal")


def plan_of(profile: Profile, chosen: Mapping[Phase, Chosen], size: Size, settings: Mapping[str, Any]) -> Plan:
    """Return the plan of what was chosen for the layers of a profile; `settings` join those of the calibration."""
    metadata = profile.metadata
    origin = metadata.provenance
    floors = [floor_of(policy) for part in chosen.values() for policy in part.policies if policy.name != FULL.name]
    joined = {**origin.settings, "ratio": size.ratio, "budget": size.budget, **settings}
    return build_plan(
        metadata.model,
        metadata.layers,
        chosen,
        provenance(origin.method, origin.seed, origin.data_sha256, joined, origin.contexts),
        min(floors, default=1),
        size.scaling,
        size.length or metadata.length,
    )


def cross_plans(profile: Profile, size: Size, policies: Plan, budgets: Plan) -> Plan:
    """Return a plan with the policies of one plan of a profile and the budgets of another, of the same phases and size.

    A layer whose policy always keeps more than its budget gets that much; what the others have above what theirs keep
    shrinks by one factor for all, so the total stays what it is.
    """
    chosen = _read_chosen(policies)
    table = next(iter(_read_chosen(budgets).values())).budgets  # strategies have the same in both phases
    floors = np.array(floors_of({phase: part.policies for phase, part in chosen.items()}))
    low = np.broadcast_to(floors[:, None], table.shape)
    if (table < low).any():
        caps = np.full_like(table, size.pool(profile.metadata).length)
        table = share_above(np.maximum(table - low, 0), int(table.sum()), low, caps)
    return plan_of(profile, {phase: part._replace(budgets=table) for phase, part in chosen.items()}, size, {})


def _read_chosen(plan: Plan) -> dict[Phase, Chosen]:
    """Return what a plan has for the layers that it governs, by phase."""
    chosen = {}
    for name, phase in plan.phases.items():
        layers = [layer for layer in phase.layers if layer is not None]
        budgets = np.array([layer.budget for layer in layers], dtype=np.int64)
        chosen[name] = Chosen(tuple(layer.policy for layer in layers), budgets)
    return chosen


def _pool(profile: Profile, size: Size) -> Pool:
    pool = size.pool(profile.metadata)
    check_pool(pool)
    return pool


@dataclass(frozen=True)
class Construction:
    """Algorithm 1, with one table of budgets for all phases."""

    table: SignalTable
    strategy: Strategy
    size: Size
    pool: Pool
    inverse: bool

    def chosen(self) -> dict[Phase, Chosen]:
        """Return the patterns of every phase, and the budgets of all."""
        routed = {phase: self._route(phase) for phase in PHASES[self.strategy.phases]}
        full = self._full_layers(routed)
        patterns = {phase: [self.table.axes.patterns[index] for index in indices] for phase, indices in routed.items()}
        rest = [row for row in range(self.pool.shape[0]) if row not in full]
        heads = self.pool.shape[1]
        left = self.pool.total - len(full) * heads * self.pool.length
        floors = [floors_of(patterns)[row] for row in rest]
        self._check_floors(patterns, rest, floors, left / (len(rest) * heads))
        budgets = np.full(self.pool.shape, self.pool.length, dtype=np.int64)
        budgets[rest] = self._share(routed, rest, left, floors)
        return {
            phase: Chosen(tuple(FULL if row in full else pattern for row, pattern in enumerate(own)), budgets)
            for phase, own in patterns.items()
        }

    def _route(self, phase: Phase) -> list[int]:
        """Return the pattern of every layer, as an index into the patterns of the table."""
        strategy = self.strategy
        layers = self.pool.shape[0]
        own = self.table.profile.metadata.policy.name
        candidates = self._candidates
        if strategy.route is None:
            policy = strategy.policy or own
            index = self._index(policy, "use policy")
            if index not in candidates:
                problem = "the full cache evicts nothing" if policy == FULL.name else "it is excluded"
                raise UsageError(f"cannot use policy {policy!r} in every layer: {problem}")
            return [index] * layers
        wanted = self._wanted(phase)
        if len(candidates) > 1 and all(is_constant(row) for row in wanted):
            names = self.table.patterns
            index = next((index for index in candidates if names[index] == own), candidates[0])
            _warn(
                f"{strategy.route} is the same for all patterns in every {phase} layer: nothing seems to have "
                f"been evicted at {self.table.nearest(self.pool.mean)} entries per kv head, so "
                f"{names[index]} is used everywhere"
            )
            return [index] * layers
        best = wanted.argmin(axis=1) if self.inverse else wanted.argmax(axis=1)
        return [candidates[index] for index in best]

    def _wanted(self, phase: Phase) -> Floats:
        """Return how much each layer prefers each candidate by the route, [L, candidates]."""
        assert self.strategy.route is not None
        return self.table.preference(self.strategy.route, phase, self.pool.mean)[:, self._candidates]

    @cached_property
    def _candidates(self) -> list[int]:
        """The patterns that a layer may take, as indices into those of the table.

        No signal can judge the full cache, which agrees with itself: it takes a layer's place by `full_layers` alone.
        """
        excluded = [self._index(name, "exclude") for name in self.strategy.exclude]
        names = self.table.patterns
        indices = [index for index, name in enumerate(names) if index not in excluded and name != FULL.name]
        if not indices:
            raise UsageError(f"no pattern is left to choose from, the profile has {', '.join(names)}: exclude fewer")
        return indices

    def _index(self, name: str, what: str) -> int:
        known = self.table.patterns
        if name not in known:
            raise UsageError(f"cannot {what} {name!r}: the profile has no such pattern{suggest(name, known)}")
        return known.index(name)

    def _full_layers(self, routed: Mapping[Phase, Sequence[int]]) -> list[int]:
        """Return the rows of layers that keep the full cache: those that suffer most from the best that can be done."""
        count = self.strategy.full_layers
        layers = self.pool.shape[0]
        if not count:
            return []
        if self.size.length is None and self.size.ratio is None:  # the calibration's is known, not one's own
            raise UsageError("a layer with the full cache costs a whole prompt: give the --length of your prompts")
        if count >= layers:
            raise UsageError(
                f"{count} of {layers} layers in full would leave none to evict from: give fewer --full-layers"
            )
        harm = np.zeros(layers)  # in the unit of the signal
        for phase, indices in routed.items():
            if self.strategy.route is None:
                harm += self._sensitivity(phase, indices)
            else:
                harm -= self._wanted(phase).max(axis=1)
        return sorted(np.argsort(-harm, kind="stable")[:count].tolist())

    def _sensitivity(self, phase: Phase, routed: Sequence[int]) -> Floats:
        return self.table.sensitivity(self.strategy.budgets, phase, self.pool.mean, routed)

    def _check_floors(
        self, patterns: Mapping[Phase, Sequence[PolicySpec]], rest: Sequence[int], floors: Sequence[int], mean: float
    ) -> None:
        """Raise UsageError if the mean is below what a pattern of one of the `rest` layers always keeps."""
        worst = max(range(len(floors)), key=floors.__getitem__)
        if mean >= floors[worst]:
            return
        row = rest[worst]
        full = self.strategy.full_layers
        phase = max(patterns, key=lambda phase: floor_of(patterns[phase][row]))
        pattern = patterns[phase][row]
        layer = self.table.profile.metadata.layers[row]
        mean_words = f"{mean:g} entries per kv head is below"
        remedy = "keep more"
        if full:
            left = f"would leave {max(mean, 0):g} entries per kv head to the others"
            mean_words = f"{full} of {full + len(rest)} layers in full {left}, below"
            remedy = "give fewer --full-layers, keep more"
        instead = f"exclude {pattern.name}" if self.strategy.route else "use another policy"
        lower = recent_parameter(policy_of(pattern))
        smaller = f", or calibrate it with a smaller {lower}" if lower else ""
        raise UsageError(
            f"{mean_words} the {floors[worst]} that {pattern.name} in {phase} layer {layer} always keeps: "
            f"{remedy}{',' if smaller else ' or'} {instead}{smaller}"
        )

    def _share(
        self, routed: Mapping[Phase, Sequence[int]], rest: Sequence[int], total: int, floors: Sequence[int]
    ) -> Ints:
        """Share `total` out between the `rest` layers with these floors, [layers, Hkv], by the first phase."""
        signal = self.strategy.budgets
        least = self.strategy.least
        phase, indices = next(iter(routed.items()))
        shape = len(floors), self.pool.shape[1]
        low = np.broadcast_to(np.array(floors)[:, None], shape)
        caps = np.full(shape, self.pool.length)
        weights = None if signal == UNIFORM else self._sensitivity(phase, indices)[rest]
        if weights is not None and len(weights) > 1 and is_constant(weights):
            warn_constant(signal, phase)
            weights = None
        if weights is None:
            return Uniform().allocate(np.zeros(shape), total, low, caps)
        if least is not None and least * low.size > total:
            raise UsageError(f"least {least} is above the mean of {total / low.size:g} entries per kv head: lower it")
        direction: Direction = "inverse" if self.inverse else "forward"
        return Proportional(direction, least).allocate(weights, total, low, caps)


def _warn(text: str) -> None:
    warnings.warn(text, KvsearchWarning, stacklevel=3)

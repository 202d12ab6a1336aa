"""Candidates of a validation: the strategies of signals (arXiv 2606.15157, Table 3), with controls as baselines.

The paper scores the strategy that a signal makes against its inverse. A large gap may only mean that the inverse is
bad, so the same questions are also asked under controls of the same size: the uniform strategy, and random ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Final

import numpy as np

from kvsearch.core.errors import KvsearchWarning, UsageError
from kvsearch.core.naming import describe_unknown, require_known, suggest
from kvsearch.evaluation.compare import Split
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import PHASES, Phase, PhaseNames, Plan, Profile, Size
from kvsearch.plan.build import PhaseChoice
from kvsearch.policies.registry import build_policy
from kvsearch.selection.candidates import CandidateSet
from kvsearch.selection.from_signals import Strategy, check_kept, choose_by_signals, make_signals_plan
from kvsearch.selection.plan_race import PlanRace, prepare_race
from kvsearch.selection.records import Rule
from kvsearch.selection.verdicts import PHASE_SETTINGS, SIGNAL_KINDS, SignalKind, SignalUse, StrategyNames
from kvsearch.signals.table import ROUTES, SENSITIVITIES, SignalTable

SIGNALS_OF_KIND: Final[dict[SignalKind, tuple[str, ...]]] = {"route": ROUTES, "budgets": SENSITIVITIES}
PAPER_SIGNALS: Final[dict[SignalKind, tuple[str, ...]]] = {"route": ("cosine", "ppl"), "budgets": ("entropy", "ppl")}
# the paper's budgets by ppl take the worst of all patterns, which may be one that explodes
DEFAULT_SIGNALS: Final[dict[SignalKind, tuple[str, ...]]] = {**PAPER_SIGNALS, "budgets": ("entropy", "ppl-chosen")}


def find_uses(
    table: SignalTable, signals: Sequence[str] | None = None, phases: Sequence[str] | None = None
) -> list[SignalUse]:
    """List every signal in every phase setting; by default `DEFAULT_SIGNALS` and all settings that were measured.

    A signal is named as `cosine`, `route:cosine` or `budgets:cosine`. Without its kind it is what the paper uses it
    for; one that the paper does not use is all that it can be.

    Raises:
        UsageError: a name is unknown, or was not measured.
    """
    settings = _choose_phases(table, phases)
    measured: dict[SignalKind, tuple[str, ...]] = {"route": table.routes, "budgets": table.sensitivities}
    if signals is None:
        pairs = [(kind, name) for kind in SIGNAL_KINDS for name in DEFAULT_SIGNALS[kind] if name in measured[kind]]
    else:
        pairs = list(dict.fromkeys(pair for typed in signals for pair in _parse_signal(typed)))
    for kind, name in pairs:
        if name not in measured[kind]:
            available = ", ".join(measured[kind]) or "none"
            raise UsageError(f"this profile has no {name!r} signal for {kind} (it has {available}): calibrate with it")
    if not pairs:
        raise UsageError("this profile has none of cosine, ppl and entropy: name the signals to validate")
    return [SignalUse(name, kind, setting) for kind, name in pairs for setting in settings]


def prepare_signal_race(
    loaded: LoadedModel,
    profile: Profile,
    size: Size,
    split: Split,
    uses: Sequence[SignalUse],
    permutations: int,
) -> PlanRace:
    """Prepare the race of the strategies of signals with their controls at `size`, see `PlanRace.judge_signals`.

    Random controls of a route have a random pattern in every layer; random controls of budgets have the forward budgets
    of the layers in another order. There are `permutations` of them, or all other orders if these are no more.

    Raises:
        UsageError: a task that has one context only, a size that the patterns do not allow or that evicts nothing; see
            `prepare_plans` for more.
        IncompatibleError: model and profile, or model and questions, do not fit together.
    """
    table = SignalTable(profile)
    candidates: dict[str, Plan] = {}
    controls: dict[str, Plan] = {}
    signals: dict[SignalUse, StrategyNames] = {}
    for use in uses:
        names, choices = _make_strategies(table, use, size, permutations, split.seed)
        signals[use] = names
        for name, chosen in choices.items():
            kind = candidates if name == names.forward else controls
            if name not in kind:
                kind[name] = make_signals_plan(profile, chosen, size)
    mean = size.pool(profile.metadata).mean
    notes = [explosion.words for phase in table.axes.phases for explosion in table.find_explosions(phase, mean)]
    phases = ",".join(dict.fromkeys(use.phases for use in uses))
    even = signals[uses[0]].uniform
    plans = CandidateSet(phases, candidates, controls, even, notes=tuple(notes), profile=profile, signals=signals)
    stage = f"ratio-{size.ratio}" if size.budget is None else str(size.budget)
    race = prepare_race(loaded, plans, split, Rule(), size, f"{stage}-{split.protocol}")
    for task in race.encoded:
        if task.distinct < 2:
            raise UsageError(f"task {task.task.name} has one context, which makes no interval: ask at least 2")
    return race


def _parse_signal(typed: str) -> list[tuple[SignalKind, str]]:
    """Parse a signal, with or without its kind, to (kind, name) pairs."""
    kind, colon, name = typed.rpartition(":")
    if colon and kind not in SIGNAL_KINDS:
        raise UsageError(f"unknown kind of signal {kind!r} in {typed!r}{suggest(kind, SIGNAL_KINDS)}")
    kinds = [use for use in SIGNAL_KINDS if name in SIGNALS_OF_KIND[use] and kind in ("", use)]
    if not kinds:
        names = SIGNALS_OF_KIND["route" if kind == "route" else "budgets"]  # all routes are sensitivities, too
        raise UsageError(describe_unknown("signal", name, names))
    paper_kinds = [use for use in kinds if name in PAPER_SIGNALS[use]]
    return [(use, name) for use in paper_kinds or kinds] if not kind else [(use, name) for use in kinds]


def _choose_phases(table: SignalTable, typed: Sequence[str] | None) -> list[PhaseNames]:
    measured = [setting for setting in PHASE_SETTINGS if set(PHASES[setting]) <= set(table.axes.phases)]
    for setting in typed or ():
        require_known("phases", setting, PHASE_SETTINGS)
        for phase in PHASES[setting]:
            table.phase_index(phase)  # refuses one that was not measured
    return [setting for setting in measured if typed is None or setting in typed]


def _make_strategies(
    table: SignalTable, use: SignalUse, size: Size, permutations: int, seed: int
) -> tuple[StrategyNames, dict[str, dict[Phase, PhaseChoice]]]:
    """Make the strategy and controls of a signal, by name.

    Controls that do not depend on the signal have the same names for all signals, so they run once.
    """
    signal, kind, phases = use
    uniform = Strategy(route=None, phases=phases)  # all else is as in it
    if kind == "route":
        mean = size.pool(table.profile.metadata).mean
        for pattern in table.evicting:  # without one of them the choice would be another
            check_kept(mean, build_policy(pattern), instead=f"calibrate without {pattern.name}")
        forward = Strategy(signal, phases=phases)
    else:
        forward = Strategy(None, signal, phases)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KvsearchWarning)  # of constant signals: the verdict says it
        chosen = choose_by_signals(table, forward, size)
        worst = choose_by_signals(table, forward, size, inverse=True)
        uniform_choice = choose_by_signals(table, uniform, size)
    draws = (
        np.random.default_rng((seed, SIGNAL_KINDS.index(kind), PHASE_SETTINGS.index(phases), number))
        for number in count()
    )
    if kind == "route":
        exact, random = False, [_draw_random_patterns(table, chosen, rng) for rng in islice(draws, permutations)]
    else:
        exact, random = _permute_budgets(chosen, draws, permutations)
    signal_name = f"{signal} {kind}"
    chance = "random patterns" if kind == "route" else f"{signal_name} permuted"
    names = StrategyNames(
        f"{signal_name} ({phases})",
        f"{signal_name} inverse ({phases})",
        f"uniform ({phases})",
        tuple(f"{chance} {number} ({phases})" for number in range(1, len(random) + 1)),
        exact,
    )
    strategies = {names.forward: chosen, names.inverse: worst, names.uniform: uniform_choice}
    return names, strategies | dict(zip(names.random, random, strict=True))


def _draw_random_patterns(
    table: SignalTable, forward: Mapping[Phase, PhaseChoice], rng: np.random.Generator
) -> dict[Phase, PhaseChoice]:
    """Draw random patterns of every phase, under the forward budgets."""
    candidates = table.evicting
    layers = table.profile.metadata.shape[0]
    drawn = {phase: rng.integers(len(candidates), size=layers) for phase in forward}
    return {
        phase: chosen._replace(policies=tuple(candidates[index] for index in drawn[phase]))
        for phase, chosen in forward.items()
    }


def _permute_budgets(
    forward: Mapping[Phase, PhaseChoice], draws: Iterable[np.random.Generator], wanted: int
) -> tuple[bool, list[dict[Phase, PhaseChoice]]]:
    """Permute forward budgets over the layers, in distinct orders; also tell whether these are all orders.

    The order is the same in all phases, as budgets are. Layers of one pattern have the same bounds, so budgets in any
    order keep them.
    """
    rows, kinds = np.unique(next(iter(forward.values())).budgets, axis=0, return_inverse=True)
    forward_order = tuple(kinds.ravel().tolist())
    orders = list(
        islice(permute_distinct(forward_order), wanted + 2)
    )  # one more than forward and what is wanted, if there is
    exact = 1 < len(orders) <= wanted + 1
    if len(rows) == 1:
        orders = [forward_order] * wanted  # of equal budgets, which have no other order
    elif exact:
        orders.remove(forward_order)
    else:
        seen = {forward_order: None}
        for rng in draws:
            seen.setdefault(tuple(rng.permutation(forward_order).tolist()))
            if len(seen) > wanted:
                break
        orders = list(seen)[1:]
    permuted = [
        {phase: chosen._replace(budgets=rows[list(order)]) for phase, chosen in forward.items()} for order in orders
    ]
    return exact, permuted


def permute_distinct(items: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield every distinct order of some items once, in lexicographic order; equal items have one order."""
    row = sorted(items)
    while True:
        yield tuple(row)
        falls = next((n for n in reversed(range(len(row) - 1)) if row[n] < row[n + 1]), None)
        if falls is None:
            return
        larger = next(n for n in reversed(range(len(row))) if row[n] > row[falls])
        row[falls], row[larger] = row[larger], row[falls]
        row[falls + 1 :] = reversed(row[falls + 1 :])

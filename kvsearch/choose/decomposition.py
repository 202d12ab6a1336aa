"""What a strategy gains by its policies and what by its budgets, each by itself (arXiv 2606.15157, section 4.3).

Between a strategy and a control, one policy in all layers with equal budgets, stand two plans of the same total: the
strategy's policies with equal budgets, and its budgets with the one policy. So both gains are told twice: alone, above
the control, and beside the other, below the strategy. Where the two differ, policies and budgets need each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from kvsearch.arrays import Ints
from kvsearch.budgets.bounds import share_above
from kvsearch.plan import PHASES, Phase, Plan, Profile, Size
from kvsearch.runs.estimates import Difference
from kvsearch.strategies.build import Chosen
from kvsearch.strategies.from_signals import floors_of, plan_of

if TYPE_CHECKING:
    from kvsearch.evaluation.plan_comparison import PlanComparison

POLICIES_ALONE: Final = "its policies, equal budgets"
BUDGETS_ALONE: Final = "its budgets, one policy"


@dataclass(frozen=True)
class Gained:
    """What a part of a strategy gains: without the other part, and with it."""

    alone: Difference
    beside: Difference


@dataclass(frozen=True)
class Decomposition:
    """The gains of a strategy over a control of one policy with equal budgets, paired by question."""

    strategy: str
    control: str
    policies: Gained
    budgets: Gained
    both: Difference

    @classmethod
    def of(cls, result: PlanComparison, strategy: str, control: str) -> Decomposition:
        """Read it from a comparison that has `between` of the two beside them."""
        policies, budgets = (
            Gained(result.gain(part, [control]), result.gain(strategy, [other]))
            for part, other in ((POLICIES_ALONE, BUDGETS_ALONE), (BUDGETS_ALONE, POLICIES_ALONE))
        )
        return cls(strategy, control, policies, budgets, result.gain(strategy, [control]))


def between(profile: Profile, size: Size, strategy: Plan, control: Plan) -> tuple[dict[str, Plan], bool]:
    """Return the two plans that have one part of a strategy and the other part of a control, by name.

    Beside them whether some budgets of the strategy are too small for the control's policy, see `crossed`.
    """
    found = {
        POLICIES_ALONE: crossed(profile, size, strategy, control),
        BUDGETS_ALONE: crossed(profile, size, control, strategy),
    }
    return found, not np.array_equal(_table(found[BUDGETS_ALONE]), _table(strategy))


def crossed(profile: Profile, size: Size, policies: Plan, budgets: Plan) -> Plan:
    """Return a plan with the policies of one plan of a profile and the budgets of another, of the same phases and size.

    A layer whose policy always keeps more than its budget gets that much; what the others have above what theirs keep
    shrinks by one factor for all, so the total stays what it is.
    """
    chosen, table = _chosen(policies), _table(budgets)
    floors = np.array(floors_of({phase: part.policies for phase, part in chosen.items()}))
    low = np.broadcast_to(floors[:, None], table.shape)
    if (table < low).any():
        caps = np.full_like(table, size.pool(profile.metadata).length)
        table = share_above(np.maximum(table - low, 0), int(table.sum()), low, caps)
    return plan_of(profile, {phase: part._replace(budgets=table) for phase, part in chosen.items()}, size, {})


def _chosen(plan: Plan) -> dict[Phase, Chosen]:
    """Return what a plan has for the layers that it governs, by phase."""
    layers = {
        phase: [layer for layer in part.layers if layer is not None]
        for phase in PHASES["both"]
        if (part := getattr(plan, phase)) is not None
    }
    return {
        phase: Chosen(tuple(one.policy for one in mine), np.array([one.budget for one in mine], dtype=np.int64))
        for phase, mine in layers.items()
    }


def _table(plan: Plan) -> Ints:
    """Return the budgets of the first phase, [L, Hkv]; strategies have the same in both."""
    return next(iter(_chosen(plan).values())).budgets

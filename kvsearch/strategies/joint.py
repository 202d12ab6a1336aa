"""A policy for every layer and the budgets of its heads, from what several policies keep of the same importance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvsearch.budgets.joint import JointSolver
from kvsearch.budgets.lukv import MarginalSolver
from kvsearch.calibration.tables import floor_entries, sampled
from kvsearch.core.arrays import Floats, Ints
from kvsearch.core.errors import UsageError
from kvsearch.core.naming import suggest
from kvsearch.plan import Plan, PolicySpec, Profile, Size
from kvsearch.plan.origin import ContextRecord, join_records
from kvsearch.plan.profile_arrays import KEPT
from kvsearch.plan.rounding import water_fill
from kvsearch.plan.schema import STATIC
from kvsearch.policies.fitted import Fitted, load_fitted_profile
from kvsearch.policies.registry import build_policy
from kvsearch.strategies.build import Chosen, check_pool, plan_of

METHOD = "joint"
SINGLE = "mass"  # the same curves of a profile of one policy, by whole percents
MOST_STEPS = 4096  # of a budget, in which it is solved: longer prompts are rounded from these
LEAST_GAIN = 0.02  # of the importance that one policy loses: for less no layer takes another one


@dataclass(frozen=True, eq=False)
class PolicyCurves:
    """What every head keeps of the importance under each of P policies, in units that compare.

    `kept` is [P, L, Hkv, K + 1] at budgets of 0, 1/K, ... 1 of a prompt, from a `profile`. `rankings` are the profiles
    of policies that were fitted, by name, as far as they are known.
    """

    policies: tuple[PolicySpec, ...]
    kept: Floats
    profile: Profile
    rankings: Mapping[str, Profile] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """What the policies are called; equal names are numbered."""
        names = [policy.name for policy in self.policies]
        numbers = [f"#{names[:at].count(name) + 1}" if names.count(name) > 1 else "" for at, name in enumerate(names)]
        return [name + number for name, number in zip(names, numbers, strict=True)]

    def only(self, names: Sequence[str]) -> PolicyCurves:
        """Return the curves of some policies; UsageError for a name that is none."""
        for name in names:
            if name not in self.names:
                raise UsageError(f"policy {name!r} was not measured{suggest(name, self.names)}")
        mine = [at for at, name in enumerate(self.names) if name in names]
        return replace(self, policies=tuple(self.policies[at] for at in mine), kept=self.kept[mine])

    @property
    def built_in(self) -> list[str]:
        """The names of those that are no `rankings`."""
        return [name for name in self.names if name not in self.rankings]

    def select_plans(self, plans: Mapping[str, Plan]) -> dict[str, Plan]:
        """Return the static ones of some plans that have no other policies than these, and carry nothing."""
        static = {name: plan for name, plan in plans.items() if plan.allocation.name == STATIC and not plan.carries}
        return {name: plan for name, plan in static.items() if all(policy in self.policies for policy in plan.policies)}

    @property
    def contexts(self) -> ContextRecord | None:
        """What all of them were fitted or measured on; None where that is not known of one."""
        return join_records(profile.metadata.provenance.contexts for profile in (self.profile, *self.rankings.values()))

    @property
    def fitted_here(self) -> list[str]:
        """The policies that were fitted on contexts that the curves are of: they look better than they are."""
        record = self.profile.metadata.provenance.contexts
        measured = () if record is None else record.fitted.ids
        names = []
        for name, spec in zip(self.names, self.policies, strict=True):
            policy = build_policy(spec)
            if isinstance(policy, Fitted) and policy.published is None:
                fit = load_fitted_profile(policy.weights, policy.name).metadata.provenance.contexts
                if fit is not None and any(map(fit.used.has, measured)):
                    names.append(name)
        return names


@dataclass(frozen=True, eq=False)
class JointPlan:
    """A plan, what it keeps of the measured importance, and what each policy alone keeps with its own best budgets.

    All are shares of the model's importance. `alone` is by the names of the policies.
    """

    plan: Plan
    names: list[str]
    policies: Ints  # [L], indices of `names`
    kept: float
    alone: dict[str, float]

    @property
    def words(self) -> str:
        """Which policies the layers have, and what that keeps."""
        counts = [(name, int((self.policies == at).sum())) for at, name in enumerate(self.names)]
        layers = ", ".join(f"{name} in {count}" for name, count in counts if count)
        best = max(self.alone, key=self.alone.__getitem__)
        told = f"; {best} in all of them keeps {self.alone[best]:.4f}" if len(self.alone) > 1 else ""
        return f"layers: {layers}; {self.kept:.4f} of the measured importance is kept{told}"


def policy_curves(profile: Profile) -> PolicyCurves:
    """Return the curves of all policies of a profile, whose layers count as under the first of them.

    Raises:
        UsageError: it is no profile of LU-KV with curves.
    """
    arrays = profile.arrays
    if KEPT not in arrays and SINGLE not in arrays:
        raise UsageError(
            f"a profile of method {profile.metadata.method} does not say what policies keep: calibrate lukv"
        )
    kept = (arrays[KEPT] if KEPT in arrays else arrays[SINGLE][None]).astype(np.float64)
    own = kept[..., -1].sum(axis=-1)  # [P, L]; a layer without importance stays without
    scale = np.divide(own[0], own, out=np.zeros_like(own), where=own > 0)
    return PolicyCurves(profile.metadata.measured_policies, kept * scale[..., None, None], profile)


def joint_plan(curves: PolicyCurves, size: Size, least_gain: float = LEAST_GAIN, even: float = 0.0) -> JointPlan:
    """Return the plan that keeps most of the importance: a policy for every layer, and budgets that sum to `size`.

    A layer leaves the policy that is best in all of them only for `least_gain` of what that loses; 0 is the
    plan that keeps most. Of all budgets the share `even` is shared out evenly: measured ones may be too sure of
    themselves.

    Raises:
        UsageError: the size is below what is always kept, or is all of a prompt.
    """
    metadata = curves.profile.metadata
    _, total, length = pool = size.pool(metadata)
    minimum = metadata.provenance.settings.get("minimum", 0.0)
    if not isinstance(minimum, int | float) or not 0 <= minimum <= 1:
        raise UsageError(f"this profile has a minimum of {minimum!r}, which is a share of 0 to 1: calibrate again")
    floor = floor_entries(length, build_policy(curves.policies[0]), minimum)
    check_pool(pool, floor)
    steps = min(length, MOST_STEPS)
    gains = np.maximum(np.diff(sampled(curves.kept, steps + 1), axis=-1), 0.0)
    low = -(-floor * steps // length)
    solver = JointSolver(gains, low)
    found = solver.solve(max(total if steps == length else round(total * steps / length), solver.least))
    found = solver.simplified(found, least_gain)
    if even:
        shared = (1 - even) * found.budgets + even * found.budgets.mean()
        table = water_fill(shared, int(found.budgets.sum()), low, steps)
        kept = MarginalSolver.of_layers(solver.singles, found.policies).kept(table)
        found = found._replace(budgets=table, kept=kept)
    budgets = water_fill(found.budgets, total, floor, length)
    chosen = Chosen(tuple(curves.policies[at] for at in found.policies), budgets)
    named = {"policies": tuple(curves.names)}
    plan = plan_of(curves.profile, {"prefill": chosen}, size, floor, METHOD, named)
    mass = max(float(curves.kept[0, ..., -1].sum()), np.finfo(np.float64).tiny)
    total = int(found.budgets.sum())
    alone = {
        name: single.kept(single.solve(total)) / mass for name, single in zip(curves.names, solver.singles, strict=True)
    }
    return JointPlan(plan, curves.names, found.policies, found.kept / mass, alone)

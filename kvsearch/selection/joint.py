"""Joint plans: a policy for every layer and budgets of its heads, from the importance that several policies keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvsearch.budgets.joint import JointBudgets, JointSolver
from kvsearch.budgets.lukv import MarginalSolver
from kvsearch.calibration.tables import floor_entries, sample_curves
from kvsearch.core.arrays import Floats, Ints
from kvsearch.core.errors import UsageError, assert_present
from kvsearch.core.naming import suggest
from kvsearch.plan import Plan, PolicySpec, Profile, Size
from kvsearch.plan.build import PhaseChoice, check_pool, make_profile_plan
from kvsearch.plan.origin import ContextRecord, join_records
from kvsearch.plan.profile_arrays import KEPT
from kvsearch.plan.rounding import water_fill
from kvsearch.plan.schema import STATIC
from kvsearch.plan.size import Pool
from kvsearch.policies.fitted import Fitted, load_fitted_profile
from kvsearch.policies.registry import build_policy

JOINT_METHOD = "joint"
MASS = "mass"  # the same curves of a profile of one policy, by whole percents
MAX_STEPS = 4096  # of a budget, in which it is solved: longer prompts are rounded from these
MIN_GAIN = 0.02  # of the importance that one policy loses: for less no layer takes another one


@dataclass(frozen=True, eq=False)
class PolicyCurves:
    """Importance that every head keeps under each of P policies, in comparable units.

    `kept` is [P, L, Hkv, K + 1] at budgets of 0, 1/K, ... 1 of a prompt, from a `profile`. `rankings` are the profiles
    of policies that were fitted, by name, as far as they are known.
    """

    policies: tuple[PolicySpec, ...]
    kept: Floats
    profile: Profile
    rankings: Mapping[str, Profile] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Names of the policies; equal names are numbered."""
        names = [policy.name for policy in self.policies]
        numbers = [f"#{names[:at].count(name) + 1}" if names.count(name) > 1 else "" for at, name in enumerate(names)]
        return [name + number for name, number in zip(names, numbers, strict=True)]

    def select(self, names: Sequence[str]) -> PolicyCurves:
        """Select the curves of some policies; UsageError for an unknown name."""
        for name in names:
            if name not in self.names:
                raise UsageError(f"policy {name!r} was not measured{suggest(name, self.names)}")
        indices = [at for at, name in enumerate(self.names) if name in names]
        return replace(self, policies=tuple(self.policies[at] for at in indices), kept=self.kept[indices])

    @property
    def built_in(self) -> list[str]:
        """Names of the policies that are no fitted `rankings`."""
        return [name for name in self.names if name not in self.rankings]

    def select_plans(self, plans: Mapping[str, Plan]) -> dict[str, Plan]:
        """Select the static plans that use only these policies, and carry nothing."""
        static = {name: plan for name, plan in plans.items() if plan.allocation.name == STATIC and not plan.carries}
        return {name: plan for name, plan in static.items() if all(policy in self.policies for policy in plan.policies)}

    def measure_kept(self, plan: Plan) -> float:
        """Measure the importance that a plan of these policies keeps, for prompts as long as its budgets are for."""
        length = plan.length or self.profile.metadata.length
        shares = np.linspace(0, 1, self.kept.shape[-1])
        phase = assert_present(plan.prefill, "plans of curves evict in prefill")
        policies = [self.policies.index(spec) for spec in phase.policies if spec is not None]
        kept = 0.0
        for layer, (policy, budgets) in enumerate(zip(policies, phase.table / length, strict=True)):
            heads = zip(budgets, self.kept[policy, layer], strict=True)
            kept += sum(float(np.interp(share, shares, curve)) for share, curve in heads)
        return kept

    @property
    def contexts(self) -> ContextRecord | None:
        """Contexts that the policies were fitted or measured on; None if unknown for one."""
        return join_records(profile.metadata.provenance.contexts for profile in (self.profile, *self.rankings.values()))

    @property
    def fitted_here(self) -> list[str]:
        """Policies that were fitted on contexts of these curves: they look better than they are."""
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
    """A plan with the measured importance it keeps, and that of each policy alone with its own best budgets.

    All are shares of the model's importance. `alone` is by the names of the policies.
    """

    plan: Plan
    names: list[str]
    policies: Ints  # [L], indices of `names`
    kept: float
    alone: dict[str, float]

    @property
    def words(self) -> str:
        """Description of the policies of layers, and of the importance they keep."""
        counts = [(name, int((self.policies == at).sum())) for at, name in enumerate(self.names)]
        layers = ", ".join(f"{name} in {count}" for name, count in counts if count)
        best = max(self.alone, key=self.alone.__getitem__)
        comparison = f"; {best} in all of them keeps {self.alone[best]:.4f}" if len(self.alone) > 1 else ""
        return f"layers: {layers}; {self.kept:.4f} of the measured importance is kept{comparison}"


def read_policy_curves(profile: Profile) -> PolicyCurves:
    """Read the curves of all policies of a profile; layers are weighted as under the first of them.

    Raises:
        UsageError: it is no profile of LU-KV with curves.
    """
    arrays = profile.arrays
    if KEPT not in arrays and MASS not in arrays:
        raise UsageError(
            f"a profile of method {profile.metadata.method} does not say what policies keep: calibrate lukv"
        )
    kept = (arrays[KEPT] if KEPT in arrays else arrays[MASS][None]).astype(np.float64)
    mass = kept[..., -1].sum(axis=-1)  # [P, L]; a layer without importance stays without
    scale = np.divide(mass[0], mass, out=np.zeros_like(mass), where=mass > 0)
    return PolicyCurves(profile.metadata.measured_policies, kept * scale[..., None, None], profile)


def solve_joint_budgets(
    kept: Floats, pool: Pool, floor: int, min_gain: float, even: float = 0.0
) -> tuple[JointSolver, JointBudgets]:
    """Solve a policy for every layer and budgets of its heads, in steps of a prompt, `MAX_STEPS` at most.

    `kept` [P, L, Hkv, K + 1] is what heads keep under each policy at budgets of 0, 1/K, ... 1; no head gets fewer than
    `floor` entries. `min_gain` and `even` as for `make_joint_plan`.
    """
    _, total, length = pool
    steps = min(length, MAX_STEPS)
    gains = np.maximum(np.diff(sample_curves(kept, steps + 1), axis=-1), 0.0)
    low = -(-floor * steps // length)
    solver = JointSolver(gains, low)
    solution = solver.solve(max(round(total * steps / length), solver.least))
    solution = solver.simplified(solution, min_gain)
    if even:
        shared = (1 - even) * solution.budgets + even * solution.budgets.mean()
        table = water_fill(shared, int(solution.budgets.sum()), low, steps)
        kept_by_table = MarginalSolver.of_layers(solver.singles, solution.policies).kept(table)
        solution = solution._replace(budgets=table, kept=kept_by_table)
    return solver, solution


def make_joint_plan(curves: PolicyCurves, size: Size, min_gain: float = MIN_GAIN, even: float = 0.0) -> JointPlan:
    """Solve the plan that keeps most importance: a policy for every layer, and budgets that sum to `size`.

    A layer leaves the policy that is best in all of them only for `min_gain` of what that loses; 0 is the
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
    solver, solution = solve_joint_budgets(curves.kept, pool, floor, min_gain, even)
    budgets = water_fill(solution.budgets, total, floor, length)
    chosen = PhaseChoice(tuple(curves.policies[at] for at in solution.policies), budgets)
    settings = {"policies": tuple(curves.names)}
    plan = make_profile_plan(curves.profile, {"prefill": chosen}, size, floor, JOINT_METHOD, settings)
    mass = max(float(curves.kept[0, ..., -1].sum()), np.finfo(np.float64).tiny)
    total = int(solution.budgets.sum())
    alone = {
        name: single.kept(single.solve(total)) / mass for name, single in zip(curves.names, solver.singles, strict=True)
    }
    return JointPlan(plan, curves.names, solution.policies, solution.kept / mass, alone)

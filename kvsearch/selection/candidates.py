"""The plans that are compared at one size: candidates, baselines, and what makes them.

`find_policy_candidates` makes those of `kvsearch run`: plans by fitted rankings, and every single built-in policy with
budgets of its own. Names are those of `evaluate --methods`: a policy alone has even budgets, METHOD:POLICY is a policy
under the budgets of a method. Only what a fitted ranking or a choice between policies brings is a candidate. A built-in
policy is a baseline, also with the budgets that keep most of its measured importance: a candidate must be worth more.
NAME+match is the plan NAME whose entries carry what leaves the prompt.

`lukv:X` are the budgets that `export` makes of the curves of `calibrate --method lukv`. The calibration's own table is
the mean of what single questions would keep, and it is mixed with even budgets where that keeps more held-out answers.
That check takes more contexts than are measured here; in its place `half:X`, halfway between measured budgets and even
ones, is asked beside `lukv:X` and X, so the questions of the first stage choose the mixture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Final

from kvsearch.budgets.allocator import Uniform
from kvsearch.budgets.dynamic import create_allocation
from kvsearch.budgets.pyramidkv import Pyramid
from kvsearch.calibration.options import OBSERVING, RECENT, SCORED
from kvsearch.core.canonical import hash_json
from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.models.architecture import require_plain_rotary
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import PHASES, Plan, Size
from kvsearch.plan.arithmetic import add_carry
from kvsearch.plan.origin import join_records
from kvsearch.plan.schema import STATIC
from kvsearch.policies import Policy, create_policy
from kvsearch.policies.registry import build_policy
from kvsearch.runtime.cache import check_rotary
from kvsearch.strategies.joint import PolicyCurves, joint_plan
from kvsearch.strategies.methods import direct_plan
from kvsearch.strategies.names import METHODS, Recipe

PHASE: Final = "prefill"
BUILT_IN: Final = (*SCORED, "streaming", "criticalkv", "defensivekv", "scissorhands", "cam", "d2o")
LUKV: Final = "lukv"
JOINT: Final = "joint"
HALF: Final = "half"  # of measured budgets and of even ones
MIXTURES: Final = {LUKV: 0.0, HALF: 0.5}  # shares of even budgets
ALONE: Final = "uniform"  # of a policy, with even budgets
CARRY: Final = "match"  # what kept entries carry of those that leave, where they carry something
# the name of a plan, the plan or what makes it where that may be impossible, and its origin
NamedPlan = tuple[str, Plan | Callable[[], Plan], Mapping[str, str]]


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
    origins: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def plans(self) -> dict[str, Plan]:
        """Candidates, then baselines."""
        return {**self.candidates, **self.baselines}


class PlanFactory:
    """Makes the plans of one size and phase setting; subclasses say which.

    `origins` are those of all plans that were collected, `notes` say why others are impossible.
    """

    def __init__(self, loaded: LoadedModel, size: Size, phases: str) -> None:
        self.loaded = loaded
        self.size = size
        self.phases = phases
        self.origins: dict[str, Mapping[str, str]] = {}
        self.notes: list[str] = []
        self._contents: set[str] = set()

    def collect(self, entries: Iterable[NamedPlan]) -> dict[str, Plan]:
        """Return plans by name; without those that differ from one collected before in nothing but their origin."""
        plans = {}
        for name, plan, origin in entries:
            if not isinstance(plan, Plan):
                try:
                    plan = plan()
                except (UsageError, IncompatibleError) as error:
                    kind = "baseline " if "baseline" in origin else ""
                    self.notes.append(f"{kind}{name} is left out: {error}")
                    continue
            content = content_hash(plan)
            if content not in self._contents:
                self._contents.add(content)
                self.origins[name] = origin
                plans[name] = plan
        return plans

    def direct_plan(self, policy: Policy, recipe: Recipe, size: Size) -> Plan:
        """Return a policy under the budgets of a method; errors as for `kvsearch.strategies.methods.direct_plan`."""
        allocator = Pyramid(window=policy.least) if recipe.allocator == "pyramid" else Uniform()
        allocation = create_allocation(recipe.allocation, recipe.options)
        return direct_plan(self.loaded, policy, size, PHASES[self.phases], allocator, allocation)


def content_hash(plan: Plan) -> str:
    """Return a hash that is equal for plans that keep the same of every prompt."""
    scales = plan.scaling == "proportional"
    shares = plan.allocation.name != STATIC
    kept = plan.model_dump(mode="json", include={"prefill", "decode", "scaling", "allocation"})
    return hash_json([kept, plan.floor if scales or shares else None, plan.length if scales else None])


def find_policy_candidates(
    loaded: LoadedModel, calibrated: PolicyCurves | None, size: Size, more: Mapping[str, Plan] | None = None
) -> CandidateSet:
    """Make candidates and baselines, all with the same total; `more` are candidates that were made elsewhere.

    Without measurements (None) there are only baselines whose budgets need none; `size` then says a length. Plans that
    differ in nothing but their origin are there once, as a baseline if one of them is. Notes say what cannot be used at
    this size or on this model.

    Raises:
        UsageError: no baseline can be used at `size`.
    """
    if calibrated is not None:
        size = replace(size, length=size.length or calibrated.profile.metadata.length)
    factory = _PolicyPlans(loaded, calibrated, size)
    single = list(factory.baselines())
    baselines = factory.collect(single)
    if not baselines:
        raise UsageError(f"{size.words}: no policy can be used at this size: {factory.notes[0]}")
    others: list[NamedPlan] = [(name, plan, {"strategy": name}) for name, plan in (more or {}).items()]
    made = list(factory.candidates())
    candidates = factory.collect([*made, *others, *factory.carrying([*single, *made], others)])
    return CandidateSet(PHASE, candidates, baselines, next(iter(baselines)), factory.origins, tuple(factory.notes))


class _PolicyPlans(PlanFactory):
    """Makes the plans of one size from policies and what was measured of them."""

    def __init__(self, loaded: LoadedModel, calibrated: PolicyCurves | None, size: Size) -> None:
        super().__init__(loaded, size, PHASE)
        self.calibrated = calibrated

    def baselines(self) -> Iterator[NamedPlan]:
        """Make built-in policies with even budgets, with those of papers, and with measured ones."""
        for name in BUILT_IN:  # a method has the name of its policy
            yield self._direct(f"{ALONE}:{name}" if name in METHODS else name, Recipe(name))
        for method, recipe in METHODS.items():
            if method != ALONE:
                yield self._direct(method, recipe)
        for name in [] if self.calibrated is None else self.calibrated.built_in:
            yield from self._solved(name)

    def candidates(self) -> Iterator[NamedPlan]:
        """Make fitted rankings with even budgets, with AdaKV's and with measured ones, then several policies."""
        if self.calibrated is None:
            return
        entries: list[NamedPlan] = []
        for name in self.calibrated.rankings:
            entries.append(self._direct(name, Recipe(name)))
            entries.append(self._direct(f"adakv:{name}", METHODS["adakv"]._replace(policy=name)))
            entries += self._solved(name)
        entries.append((JOINT, self._solver(self.calibrated.names), {"strategy": JOINT}))
        for name, plan, origin in entries:
            yield name, partial(self._fitted, plan), origin
        name = f"{JOINT}:built-in"
        yield name, self._solver(self.calibrated.built_in), {"strategy": name}

    def carrying(self, made: Iterable[NamedPlan], others: Iterable[NamedPlan]) -> Iterator[NamedPlan]:
        """Yield those of the plans `made` that have measured budgets, and all `others`, with entries that carry."""
        measured = [entry for entry in made if entry[0].partition(":")[0] in (LUKV, JOINT)]
        for name, plan, origin in (*measured, *others):
            yield f"{name}+{CARRY}", partial(self._carry, plan), {**origin, "carry": CARRY}

    def _carry(self, plan: Plan | Callable[[], Plan]) -> Plan:
        """Return a plan whose entries carry what leaves; errors: see `add_carry` and `require_plain_rotary`."""
        require_plain_rotary(self.loaded.model, "a plan whose entries carry what leaves")
        return add_carry(plan if isinstance(plan, Plan) else plan(), CARRY)

    def _policy(self, name: str) -> Policy:
        """Return a policy as it was measured, or else protecting as many recent entries as those that were."""
        curves = self.calibrated
        measured = {} if curves is None else dict(zip(curves.names, map(build_policy, curves.policies), strict=True))
        if name in measured:
            return measured[name]
        recent = min((policy.recent_count for policy in measured.values()), default=RECENT)
        return create_policy(name, {"protect": recent} if name in OBSERVING else {})

    def _direct(self, name: str, recipe: Recipe) -> NamedPlan:
        """Return a policy under the budgets of a method, by the name of the candidate."""
        policy = self._policy(recipe.policy)

        def make() -> Plan:
            policy.check_model(self.loaded.fingerprint)
            check_rotary(self.loaded.model, [policy])
            return self.direct_plan(policy, recipe, self.size)

        return name, make, {"strategy": name}

    def _solved(self, policy: str) -> Iterator[NamedPlan]:
        """Yield a policy with measured budgets, and with their mixture with even ones."""
        for method, even in MIXTURES.items():
            name = f"{method}:{policy}"
            yield name, self._solver([policy], even), {"strategy": name}

    def _solver(self, policies: Sequence[str], even: float = 0.0) -> Callable[[], Plan]:
        """Return what makes a joint plan, once: plans that carry are made of it, too."""
        return cache(partial(self._joint_plan, policies, even))

    def _joint_plan(self, policies: Sequence[str], even: float = 0.0) -> Plan:
        """Return the plan that keeps most of the measured importance under some policies, or its mixture with even."""
        assert self.calibrated is not None
        return joint_plan(self.calibrated.only(policies), self.size, even=even).plan

    def _fitted(self, make: Plan | Callable[[], Plan]) -> Plan:
        """Return a plan that says what its rankings were fitted on, too."""
        assert self.calibrated is not None
        plan = make if isinstance(make, Plan) else make()
        policies = {spec.name for spec in plan.policies}
        fits = [
            profile.metadata.provenance.contexts
            for name, profile in self.calibrated.rankings.items()
            if name in policies
        ]
        contexts = join_records([plan.provenance.contexts, *fits])
        origin = plan.provenance.model_copy(update={"contexts": contexts})
        return plan.model_copy(update={"provenance": origin})

"""The plans that are compared at one size: candidates, baselines, and the sources that they come from.

`find_policy_candidates` makes the plans of `kvsearch run`: by fitted rankings, and by every single built-in policy with
budgets of its own. Plans have the names of `evaluate --methods`: a policy alone has even budgets, METHOD:POLICY is a
policy under the budgets of a method. Only what a fitted ranking or a choice between policies brings is a candidate. A
built-in policy is a baseline, also with the budgets that keep most of its measured importance: a candidate must be
worth more. NAME+match is the plan NAME whose entries carry what leaves the prompt.

`lukv:X` are the budgets that `export` makes of the curves of `calibrate --method lukv`. The calibration's own table is
the mean of what single questions would keep, and it is mixed with even budgets where that keeps more held-out answers.
That check takes more contexts than are measured here; in its place `half:X`, halfway between measured budgets and even
ones, is asked beside `lukv:X` and X, so the questions of the first stage choose the mixture.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Final

from kvsearch.budgets.allocator import Uniform
from kvsearch.budgets.dynamic import create_allocation
from kvsearch.budgets.pyramidkv import Pyramid
from kvsearch.calibration.options import DEFAULT_RECENT, WINDOW_PARAMETERS
from kvsearch.core.canonical import hash_json
from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.evaluation.methods import make_direct_plan
from kvsearch.evaluation.names import METHODS, Recipe
from kvsearch.models.architecture import require_plain_rotary
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import PHASES, Plan, Profile, Size
from kvsearch.plan.arithmetic import add_carry
from kvsearch.plan.origin import join_records
from kvsearch.plan.schema import STATIC
from kvsearch.policies import Policy, create_policy
from kvsearch.policies.registry import build_policy, has_parameters, list_baselines
from kvsearch.runtime.cache import check_rotary
from kvsearch.selection.joint import PolicyCurves, make_joint_plan
from kvsearch.selection.verdicts import SignalUse, StrategyNames

PHASE: Final = "prefill"
LUKV: Final = "lukv"
JOINT: Final = "joint"
HALF_MIXED: Final = "half"  # of measured budgets and of even ones
SHARES_OF_EVEN: Final = {LUKV: 0.0, HALF_MIXED: 0.5}  # shares of even budgets
UNIFORM_METHOD: Final = "uniform"  # of a policy, with even budgets
CARRY_RULE: Final = "match"  # what kept entries carry of those that leave, where they carry something
MakePlan = Callable[[], Plan]  # UsageError or IncompatibleError where there is no such plan
NamedPlan = tuple[str, MakePlan, Mapping[str, str]]  # and what the plan is made of


@dataclass(frozen=True, eq=False)
class CandidateSet:
    """Candidates and baselines of one phase setting, by the name of their strategy or method.

    There are no candidates if every strategy is a baseline, too. `even` is the baseline that stands for uniform: the
    policy of the profile, if it can be used, with equal budgets. `origins` say what plans are made of, for their
    provenance. `notes` say what was left out, and which signals could not tell patterns or layers apart. `profile` is
    the calibration that all plans are made of, `signals` names the strategy and controls of each signal to judge.
    """

    phases: str
    candidates: Mapping[str, Plan]
    baselines: Mapping[str, Plan]
    even: str
    origins: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    profile: Profile | None = None
    signals: Mapping[SignalUse, StrategyNames] = field(default_factory=dict)

    @property
    def plans(self) -> dict[str, Plan]:
        """All plans by name: candidates, then baselines."""
        return {**self.candidates, **self.baselines}


class PlanSource(ABC):
    """Base of sources of the named plans of one size and phase setting; `find` makes them.

    `even` is the name of the baseline that stands for uniform, by default the first one.
    """

    even = ""
    profile: Profile | None = None

    def __init__(self, loaded: LoadedModel, size: Size, phases: str) -> None:
        self.loaded = loaded
        self.size = size
        self.phases = phases
        self.notes: list[str] = []
        self._origins: dict[str, Mapping[str, str]] = {}
        self._contents: set[str] = set()

    @property
    @abstractmethod
    def baselines(self) -> Sequence[NamedPlan]:
        """What a candidate has to beat."""

    @property
    @abstractmethod
    def candidates(self) -> Sequence[NamedPlan]:
        """What may be written if it is better than every baseline."""

    def find(self) -> CandidateSet:
        """Make all plans; of duplicates, which differ in their origin only, the first is kept, baselines before others.

        Raises:
            UsageError: no baseline can be used at this size.
        """
        baselines = self._collect(self.baselines)
        if not baselines:
            raise UsageError(f"{self.size.words}: no policy can be used at this size: {self.notes[0]}")
        candidates = self._collect(self.candidates)
        even = self.even if self.even in baselines else next(iter(baselines))
        return CandidateSet(
            self.phases, candidates, baselines, even, self._origins, tuple(dict.fromkeys(self.notes)), self.profile
        )

    def _collect(self, entries: Iterable[NamedPlan]) -> dict[str, Plan]:
        """Make new plans by name, and note why others are impossible."""
        plans = {}
        for name, make, origin in entries:
            try:
                plan = make()
            except (UsageError, IncompatibleError) as error:
                kind = "baseline " if "baseline" in origin else ""
                self.notes.append(f"{kind}{name} is left out: {error}")
                continue
            content = content_hash(plan)
            if content not in self._contents:
                self._contents.add(content)
                self._origins[name] = origin
                plans[name] = plan
        return plans

    def make_direct_plan(self, policy: Policy, recipe: Recipe, size: Size) -> Plan:
        """Make the plan of a policy under the budgets of a method; errors as `evaluation.methods.make_direct_plan`."""
        allocator = Pyramid(window=policy.least) if recipe.allocator == "pyramid" else Uniform()
        allocation = create_allocation(recipe.allocation, recipe.options)
        return make_direct_plan(self.loaded, policy, size, PHASES[self.phases], allocator, allocation)


def content_hash(plan: Plan) -> str:
    """Return a SHA-256 that is equal for plans that keep the same entries of every prompt."""
    scales = plan.scaling == "proportional"
    shares = plan.allocation.name != STATIC
    kept = plan.model_dump(mode="json", include={"prefill", "decode", "scaling", "allocation"})
    return hash_json([kept, plan.floor if scales or shares else None, plan.length if scales else None])


def find_policy_candidates(
    loaded: LoadedModel, calibrated: PolicyCurves | None, size: Size, more: Mapping[str, Plan] | None = None
) -> CandidateSet:
    """Make candidates and baselines, all with the same total; `more` are candidates made elsewhere.

    Without measurements (`calibrated` is None) there are only baselines with budgets that need none; `size` then has a
    length. Notes name the plans that cannot be used at this size or on this model.

    Raises:
        UsageError: no baseline can be used at `size`.
    """
    if calibrated is not None:
        size = replace(size, length=size.length or calibrated.profile.metadata.length)
    return _PolicyPlans(loaded, calibrated, size, more or {}).find()


def list_expected_plans(loaded: LoadedModel, size: Size, policies: int, rankings: int, others: int) -> list[Plan]:
    """Return about the plans that `find_policy_candidates` will make, to forecast costs, those that carry last.

    It will get the curves of so many built-in `policies` and fitted `rankings`, and so many `others`. Compressing by
    what is not known yet takes about as long as by the first baseline.

    Raises:
        UsageError: no baseline can be used at `size`.
    """
    baselines = [*find_policy_candidates(loaded, None, size).baselines.values()]
    joint = 2 if rankings else 1
    plain = len(SHARES_OF_EVEN) * (policies + rankings) + 2 * rankings + joint + others
    try:
        require_plain_rotary(loaded.model, "a plan whose entries carry what leaves")
    except IncompatibleError:
        carrying = 0
    else:
        carrying = policies + rankings + joint + others
    return [*baselines, *baselines[:1] * plain, *[add_carry(baselines[0], CARRY_RULE)] * carrying]


class _PolicyPlans(PlanSource):
    """Plans of one size from policies and their measured curves, and those that were made elsewhere (`more`)."""

    def __init__(
        self, loaded: LoadedModel, calibrated: PolicyCurves | None, size: Size, more: Mapping[str, Plan]
    ) -> None:
        super().__init__(loaded, size, PHASE)
        self.calibrated = calibrated
        self.more = more

    @cached_property
    def baselines(self) -> Sequence[NamedPlan]:
        """Built-in policies with uniform budgets, with budgets of papers, and with measured budgets."""
        # A method has the name of its policy.
        even = [(f"{UNIFORM_METHOD}:{name}" if name in METHODS else name, Recipe(name)) for name in list_baselines()]
        papers = [(method, recipe) for method, recipe in METHODS.items() if method != UNIFORM_METHOD]
        entries = [self._make_direct(name, recipe) for name, recipe in (*even, *papers)]
        for name in [] if self.calibrated is None else self.calibrated.built_in:
            entries += self._make_solved(name)
        return entries

    @property
    def candidates(self) -> Sequence[NamedPlan]:
        """Fitted rankings with uniform, AdaKV's and measured budgets, then plans of several policies.

        Those with measured budgets are there a second time, with entries that carry evicted ones.
        """
        entries: list[NamedPlan] = []
        if self.calibrated is not None:
            for name in self.calibrated.rankings:
                entries.append(self._make_direct(name, Recipe(name)))
                entries.append(self._make_direct(f"adakv:{name}", METHODS["adakv"]._replace(policy=name)))
                entries += self._make_solved(name)
            entries.append((JOINT, self._solver(self.calibrated.names), {"strategy": JOINT}))
            entries = [(name, partial(self._make_fitted, make), origin) for name, make, origin in entries]
            name = f"{JOINT}:built-in"
            entries.append((name, self._solver(self.calibrated.built_in), {"strategy": name}))
        measured = [entry for entry in (*self.baselines, *entries) if entry[0].partition(":")[0] in (LUKV, JOINT)]
        others: list[NamedPlan] = [
            (name, partial(self.more.__getitem__, name), {"strategy": name}) for name in self.more
        ]
        carrying: list[NamedPlan] = [
            (f"{name}+{CARRY_RULE}", partial(self._carry, make), {**origin, "carry": CARRY_RULE})
            for name, make, origin in (*measured, *others)
        ]
        return [*entries, *others, *carrying]

    def _carry(self, make: MakePlan) -> Plan:
        """Make the entries of a plan carry evicted ones; errors: see `add_carry` and `require_plain_rotary`."""
        require_plain_rotary(self.loaded.model, "a plan whose entries carry what leaves")
        return add_carry(make(), CARRY_RULE)

    def _find_policy(self, name: str) -> Policy:
        """Find a policy as it was measured, else create it with as many protected recent entries as measured ones."""
        curves = self.calibrated
        measured = {} if curves is None else dict(zip(curves.names, map(build_policy, curves.policies), strict=True))
        if name in measured:
            return measured[name]
        recent = min((policy.recent_count for policy in measured.values()), default=DEFAULT_RECENT)
        return create_policy(name, {"protect": recent} if has_parameters(name, *WINDOW_PARAMETERS) else {})

    def _make_direct(self, name: str, recipe: Recipe) -> NamedPlan:
        """Return the named factory of a policy under the budgets of a method."""
        policy = self._find_policy(recipe.policy)

        def make() -> Plan:
            policy.check_model(self.loaded.fingerprint)
            check_rotary(self.loaded.model, [policy])
            return self.make_direct_plan(policy, recipe, self.size)

        return name, make, {"strategy": name}

    def _make_solved(self, policy: str) -> Iterator[NamedPlan]:
        """Yield a policy with measured budgets, and with their mixture with uniform ones."""
        for method, even in SHARES_OF_EVEN.items():
            name = f"{method}:{policy}"
            yield name, self._solver([policy], even), {"strategy": name}

    def _solver(self, policies: Sequence[str], even: float = 0.0) -> MakePlan:
        """Return a cached factory of a joint plan, which carrying plans reuse."""
        return cache(partial(self._joint_plan, policies, even))

    def _joint_plan(self, policies: Sequence[str], even: float = 0.0) -> Plan:
        """Make the plan that keeps most measured importance under `policies`, mixed with a share of uniform budgets."""
        assert self.calibrated is not None
        return make_joint_plan(self.calibrated.select(policies), self.size, even=even).plan

    def _make_fitted(self, make: MakePlan) -> Plan:
        """Make a plan whose provenance includes the contexts its rankings were fitted on."""
        assert self.calibrated is not None
        plan = make()
        policies = {spec.name for spec in plan.policies}
        fits = [
            profile.metadata.provenance.contexts
            for name, profile in self.calibrated.rankings.items()
            if name in policies
        ]
        contexts = join_records([plan.provenance.contexts, *fits])
        origin = plan.provenance.model_copy(update={"contexts": contexts})
        return plan.model_copy(update={"provenance": origin})

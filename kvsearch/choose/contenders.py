"""What `kvsearch run` chooses from: plans by fitted rankings, and every single built-in policy with budgets of its own.

Names are those of `evaluate --methods`: a policy alone has even budgets, METHOD:POLICY is a policy under the budgets of
a method. Only what a fitted ranking or a solver over several policies brings is a candidate. A built-in policy is a
baseline, also with the budgets that were calibrated for it: a candidate must be worth more than calibrated budgets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Final, NamedTuple

from kvsearch.budgets.dynamic import create_allocation
from kvsearch.budgets.pyramidkv import Pyramid
from kvsearch.budgets.uniform import Uniform
from kvsearch.calibration.options import COMPARED
from kvsearch.choose.candidates import CandidateSet, content_hash
from kvsearch.errors import IncompatibleError, UsageError
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import PHASES, Plan, Profile, Size
from kvsearch.plan.contexts import ContextRecord, joined
from kvsearch.policies import Policy, create_policy
from kvsearch.policies.registry import policy_class, policy_of
from kvsearch.runtime.cache import check_rotary
from kvsearch.strategies.direct import direct_plan
from kvsearch.strategies.from_profile import plan_from_profile
from kvsearch.strategies.methods import METHODS, Recipe

PHASE: Final = "prefill"
BUILT_IN: Final = (*COMPARED, "streaming", "criticalkv")
LUKV: Final = "lukv"
ALONE: Final = "uniform"  # of a policy, with even budgets
PROTECT: Final = 8  # recent entries that stay, for policies that need not keep all they look at; as of fitted rankings


def own_settings(name: str) -> dict[str, int]:
    """Return the parameters that a built-in policy is measured and compared with, where they are not its defaults.

    At small budgets what is protected is most of what is kept, so policies are compared with as much of it as fitted
    rankings have.
    """
    return {"protect": PROTECT} if "protect" in {one.name for one in fields(policy_class(name))} else {}


class Tables(NamedTuple):
    """LU-KV's tables, by what they are over: policies that are built in, and rankings that were fitted.

    `rankings` are the profiles of the fits themselves.
    """

    built_in: Mapping[str, Profile]
    fitted: Mapping[str, Profile]
    rankings: Mapping[str, Profile]

    @property
    def contexts(self) -> ContextRecord | None:
        """What all of them were fitted on; None where that is not known of one."""
        profiles = (*self.built_in.values(), *self.fitted.values(), *self.rankings.values())
        return joined(one.metadata.provenance.contexts for one in profiles)

    @property
    def length(self) -> int:
        """The longest prompt that was measured, in tokens: that of plans by ratio."""
        return max(one.metadata.length for one in (*self.built_in.values(), *self.fitted.values()))


def find_contenders(
    loaded: LoadedModel, tables: Tables, size: Size, more: Mapping[str, Plan] | None = None
) -> CandidateSet:
    """Make candidates and baselines, all with the same total; `more` are candidates that were made elsewhere.

    Plans that differ in nothing but their origin are there once, as a baseline if one of them is. Notes say what
    cannot be used at this size or on this model.

    Raises:
        UsageError: no baseline can be used at `size`.
    """
    maker = _Maker(loaded, tables, replace(size, length=size.length or tables.length))
    contents, notes = set[str](), list[str]()

    def distinct(made: Iterator[tuple[str, Plan | str]]) -> dict[str, Plan]:
        found = {}
        for name, plan in made:
            if isinstance(plan, str):
                notes.append(f"{name} is left out: {plan}")
            elif (content := content_hash(plan)) not in contents:
                contents.add(content)
                found[name] = plan
        return found

    baselines = distinct(maker.baselines())
    if not baselines:
        raise UsageError(f"{size.words}: no policy can be used at this size: {notes[0]}")
    candidates = distinct(iter([*maker.candidates(), *(more or {}).items()]))
    origins = {name: {"strategy": name} for name in (*candidates, *baselines)}
    return CandidateSet(PHASE, candidates, baselines, next(iter(baselines)), origins, tuple(notes))


class _Maker:
    """Makes the plans of one size; one that cannot be made is the reason, in words."""

    def __init__(self, loaded: LoadedModel, tables: Tables, size: Size) -> None:
        self.loaded, self.tables, self.size = loaded, tables, size

    def baselines(self) -> Iterator[tuple[str, Plan | str]]:
        """Make built-in policies with even budgets, with those of papers, and with calibrated ones."""
        for name in BUILT_IN:
            yield name, self._direct(self._policy(name), Recipe(name))
        for method, recipe in METHODS.items():
            if method != ALONE:
                yield method, self._direct(self._policy(recipe.policy), recipe)
        for name, profile in self.tables.built_in.items():
            yield f"{LUKV}:{name}", self._looked_up(profile)

    def candidates(self) -> Iterator[tuple[str, Plan | str]]:
        """Make fitted rankings with even budgets, with AdaKV's, and with calibrated ones."""
        for name, profile in self.tables.fitted.items():
            policy = policy_of(profile.metadata.policy)
            fitted = self.tables.rankings[name].metadata.provenance.contexts
            recipes = {name: Recipe(name), f"adakv:{name}": METHODS["adakv"]}
            for called, recipe in recipes.items():
                yield called, _recorded(self._direct(policy, recipe), [fitted])
            plan = self._looked_up(profile)
            yield f"{LUKV}:{name}", _recorded(plan, [fitted, profile.metadata.provenance.contexts])

    def _policy(self, name: str) -> Policy:
        """Return a policy with the settings that its table was measured with, or else with its own."""
        table = self.tables.built_in.get(name)
        return create_policy(name, own_settings(name)) if table is None else policy_of(table.metadata.policy)

    def _direct(self, policy: Policy, recipe: Recipe) -> Plan | str:
        allocator = Pyramid(window=policy.floor) if recipe.allocator == "pyramid" else Uniform()
        try:
            policy.check_model(self.loaded.fingerprint)
            check_rotary(self.loaded.model, [policy])
            allocation = create_allocation(recipe.allocation, recipe.options)
            return direct_plan(self.loaded, policy, self.size, PHASES[PHASE], allocator, allocation)
        except (UsageError, IncompatibleError) as error:
            return str(error)

    def _looked_up(self, profile: Profile) -> Plan | str:
        try:
            return plan_from_profile(profile, self.size)
        except UsageError as error:
            return str(error)


def _recorded(plan: Plan | str, contexts: Sequence[ContextRecord | None]) -> Plan | str:
    """Return a plan that says what it was fitted on."""
    if isinstance(plan, str):
        return plan
    made = plan.provenance.model_copy(update={"contexts": joined(contexts)})
    return plan.model_copy(update={"provenance": made})

"""What `kvsearch run` chooses from: plans by fitted rankings, and every single built-in policy with budgets of its own.

Names are those of `evaluate --methods`: a policy alone has even budgets, METHOD:POLICY is a policy under the budgets of
a method. Only what a fitted ranking or a choice between policies brings is a candidate. A built-in policy is a
baseline, also with the budgets that keep most of its measured importance: a candidate must be worth more than these.

`lukv:X` are the budgets that `export` makes of the curves of `calibrate --method lukv`. The calibration's own table is
the mean of what single questions would keep, and it is mixed with even budgets where that keeps more held-out answers.
That check takes more contexts than are measured here; in its place `half:X`, halfway between measured budgets and even
ones, is asked beside `lukv:X` and X, so the questions of the first stage choose the mixture.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from kvsearch.budgets.dynamic import create_allocation
from kvsearch.budgets.pyramidkv import Pyramid
from kvsearch.budgets.uniform import Uniform
from kvsearch.calibration.options import COMPARED, PROTECTED
from kvsearch.choose.candidates import CandidateSet, content_hash
from kvsearch.errors import IncompatibleError, UsageError
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import PHASES, Plan, PolicySpec, Profile, Size
from kvsearch.plan.contexts import ContextRecord, joined
from kvsearch.plan.schema import STATIC
from kvsearch.policies import Policy, create_policy
from kvsearch.policies.registry import policy_of
from kvsearch.runtime.cache import check_rotary
from kvsearch.strategies.direct import direct_plan
from kvsearch.strategies.joint import PolicyCurves, joint_plan
from kvsearch.strategies.methods import METHODS, Recipe

PHASE: Final = "prefill"
BUILT_IN: Final = (*COMPARED, "streaming", "criticalkv")
LUKV: Final = "lukv"
JOINT: Final = "joint"
HALF: Final = "half"  # of measured budgets and of even ones
MIXTURES: Final = {LUKV: 0.0, HALF: 0.5}  # shares of even budgets
ALONE: Final = "uniform"  # of a policy, with even budgets


class Measured(NamedTuple):
    """What policies keep of the importance of the same contexts, and the profiles of those that were fitted."""

    curves: PolicyCurves
    rankings: Mapping[str, Profile]

    @property
    def policies(self) -> dict[str, PolicySpec]:
        """The policies that were measured, by name."""
        return dict(zip(self.curves.names, self.curves.policies, strict=True))

    @property
    def built_in(self) -> list[str]:
        """The names of those that were not fitted."""
        return [name for name in self.curves.names if name not in self.rankings]

    @property
    def length(self) -> int:
        """Tokens of the contexts that were measured."""
        return self.curves.profiles[0].metadata.length

    def made_of(self, plans: Mapping[str, Plan]) -> dict[str, Plan]:
        """Return the static ones of some plans that have no other policies than those that were measured."""
        known = self.curves.policies
        return {
            name: plan
            for name, plan in plans.items()
            if plan.allocation.name == STATIC and all(policy in known for policy in plan.policies)
        }

    @property
    def contexts(self) -> ContextRecord | None:
        """What all of them were fitted or measured on; None where that is not known of one."""
        return joined(one.metadata.provenance.contexts for one in (*self.curves.profiles, *self.rankings.values()))


def find_contenders(
    loaded: LoadedModel, measured: Measured | None, size: Size, more: Mapping[str, Plan] | None = None
) -> CandidateSet:
    """Make candidates and baselines, all with the same total; `more` are candidates that were made elsewhere.

    Without measurements (None) there are only baselines whose budgets need none; `size` then says a length. Plans that
    differ in nothing but their origin are there once, as a baseline if one of them is. Notes say what cannot be used at
    this size or on this model.

    Raises:
        UsageError: no baseline can be used at `size`.
    """
    contents, notes = set[str](), list[str]()

    def distinct(made: Iterable[tuple[str, Plan | str]]) -> dict[str, Plan]:
        found = {}
        for name, plan in made:
            if isinstance(plan, str):
                notes.append(f"{name} is left out: {plan}")
            elif (content := content_hash(plan)) not in contents:
                contents.add(content)
                found[name] = plan
        return found

    if measured is not None:
        size = replace(size, length=size.length or measured.length)
    maker = _Maker(loaded, measured, size)
    baselines = distinct(maker.baselines())
    if not baselines:
        raise UsageError(f"{size.words}: no policy can be used at this size: {notes[0]}")
    candidates = distinct([*maker.candidates(), *(more or {}).items()])
    origins = {name: {"strategy": name} for name in (*candidates, *baselines)}
    return CandidateSet(PHASE, candidates, baselines, next(iter(baselines)), origins, tuple(notes))


@dataclass(frozen=True)
class _Maker:
    """Makes the plans of one size; one that cannot be made is the reason, in words."""

    loaded: LoadedModel
    measured: Measured | None
    size: Size

    def baselines(self) -> Iterator[tuple[str, Plan | str]]:
        """Make built-in policies with even budgets, with those of papers, and with measured ones."""
        for name in BUILT_IN:
            yield name, self._direct(self._policy(name), Recipe(name))
        for method, recipe in METHODS.items():
            if method != ALONE:
                yield method, self._direct(self._policy(recipe.policy), recipe)
        for name in [] if self.measured is None else self.measured.built_in:
            for method, even in MIXTURES.items():
                yield f"{method}:{name}", self._solved([name], even)

    def candidates(self) -> Iterator[tuple[str, Plan | str]]:
        """Make fitted rankings with even budgets, with AdaKV's and with measured ones, then several policies."""
        if self.measured is None:
            return
        for name in self.measured.rankings:
            yield name, self._fitted(self._direct(self._policy(name), Recipe(name)))
            yield f"adakv:{name}", self._fitted(self._direct(self._policy(name), METHODS["adakv"]))
            for method, even in MIXTURES.items():
                yield f"{method}:{name}", self._fitted(self._solved([name], even))
        yield JOINT, self._fitted(self._solved(self.measured.curves.names))
        yield f"{JOINT}:built-in", self._solved(self.measured.built_in)

    def _policy(self, name: str) -> Policy:
        """Return a policy as it was measured, or else with the settings that it would be measured with."""
        measured = {} if self.measured is None else self.measured.policies
        return policy_of(measured[name]) if name in measured else create_policy(name, PROTECTED.get(name, {}))

    def _direct(self, policy: Policy, recipe: Recipe) -> Plan | str:
        allocator = Pyramid(window=policy.floor) if recipe.allocator == "pyramid" else Uniform()
        try:
            policy.check_model(self.loaded.fingerprint)
            check_rotary(self.loaded.model, [policy])
            allocation = create_allocation(recipe.allocation, recipe.options)
            return direct_plan(self.loaded, policy, self.size, PHASES[PHASE], allocator, allocation)
        except (UsageError, IncompatibleError) as error:
            return str(error)

    def _solved(self, names: Sequence[str], even: float = 0.0) -> Plan | str:
        """Return the plan that keeps most of the measured importance under some policies, or its mixture with even."""
        assert self.measured is not None
        try:
            return joint_plan(self.measured.curves.only(names), self.size, even=even).plan
        except UsageError as error:
            return str(error)

    def _fitted(self, plan: Plan | str) -> Plan | str:
        """Return a plan that says what its rankings were fitted on, too."""
        if isinstance(plan, str) or self.measured is None:
            return plan
        used = {spec.name for spec in plan.policies}
        fits = [one.metadata.provenance.contexts for name, one in self.measured.rankings.items() if name in used]
        made = plan.provenance.model_copy(update={"contexts": joined([plan.provenance.contexts, *fits])})
        return plan.model_copy(update={"provenance": made})

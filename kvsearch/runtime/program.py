"""A plan made ready to run on one model: policy objects, and budgets for the prompt at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kvsearch.budgets.dynamic import Allocation, create_allocation
from kvsearch.errors import IncompatibleError
from kvsearch.models.architecture import FULL, describe
from kvsearch.plan.arithmetic import budgets_at
from kvsearch.policies import Policy, create_policy
from kvsearch.policies.registry import policy_of
from kvsearch.runtime.rule import decode_needs

if TYPE_CHECKING:
    from kvsearch.plan import Phase, Plan

BudgetTable = Callable[[int], NDArray[np.int64]]


@dataclass(frozen=True)
class PhaseProgram:
    """One phase: the policy of each governed layer, and its budgets.

    `table` maps a prompt length (real tokens) to entries [governed layers, Hkv], rows in ascending layer order.
    """

    policies: dict[int, Policy]
    table: BudgetTable
    floor: int = 1  # the fewest entries a head may get where budgets are shared
    allocation: Allocation | None = None  # how they are shared; set by the program
    _tables: dict[int, NDArray[np.int64]] = field(init=False, default_factory=dict, compare=False, repr=False)

    def entries(self, length: int) -> int:
        """Count the entries of all layers and heads that the budgets allow after a prompt of `length` tokens."""
        table = self.table(length)
        if self.allocation is not None:
            room = np.full_like(table, length)
            if self.allocation.shares_layers:
                return int(min(table.sum(), room.sum()))
            return int(np.minimum(table.sum(-1), room.sum(-1)).sum())
        table = np.minimum(table, length)
        for row, (_, policy) in enumerate(sorted(self.policies.items())):
            table[row] = [length if policy.exempt(budget, length) else budget for budget in table[row].tolist()]
        return int(table.sum())

    def budgets(self, layer: int, lengths: Sequence[int]) -> Tensor:
        """Return the entries per sequence and kv head of one layer, [B, Hkv] int64."""
        for length in set(lengths) - set(self._tables):
            self._tables[length] = self.table(length)
        row = sorted(self.policies).index(layer)
        return torch.from_numpy(np.stack([self._tables[length][row] for length in lengths]))


@dataclass(frozen=True)
class Program:
    """What each full-attention layer does: once at the end of the prompt, and after every token that follows.

    A phase that is None leaves the cache alone: without prefill the prompt stays whole until the first decode step,
    without decode the cache grows by one entry per token.
    """

    prefill: PhaseProgram | None = None
    decode: PhaseProgram | None = None
    allocation: Allocation | None = None  # how budgets are shared anew for every prompt; None: they are not
    plan: Plan | None = field(default=None, compare=False, repr=False)  # the plan that this is made of, if it is

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            if (phase := getattr(self, name)) is not None:
                object.__setattr__(self, name, replace(phase, allocation=self.allocation))
        for policy in self.decode.policies.values() if self.decode else ():
            decode_needs(policy)
        for phase in self.phases if self.allocation else ():
            for layer, policy in sorted(phase.policies.items()):
                self.allocation.check(policy, f"layer {layer}")  # type: ignore[union-attr]

    @classmethod
    def from_plan(cls, model: nn.Module, plan: Plan) -> Program:
        """Check `plan` against `model` and build its policies.

        Raises:
            IncompatibleError: the plan is for another model, or budgets a layer the runtime must leave alone.
            UsageError: an unknown policy or parameter, or a policy without a decode rule in the decode phase.
        """
        from kvsearch.budgets.plan_checks import check_plan
        from kvsearch.models.fingerprint import fingerprint
        from kvsearch.runtime.key_norms import warn_unfit

        plan.model.require(fingerprint(model, plan.model.name), "this plan")
        check_plan(plan, "this plan")
        kinds = describe(model).kinds
        allocation = create_allocation(plan.allocation.name, plan.allocation.params)
        clip = allocation is None
        program = cls(_phase(plan, "prefill", kinds, clip), _phase(plan, "decode", kinds, clip), allocation, plan)
        for policy in program.policies:
            policy.check_model(plan.model)
        warn_unfit(model, program.policies)
        return program

    @classmethod
    def uniform(
        cls,
        model: nn.Module,
        policy: Policy,
        entries: Callable[[int], int],
        allocation: Allocation | None = None,
    ) -> Program:
        """Use one policy and prefill budget in all full-attention layers and heads; `entries` maps length to budget."""
        shape = describe(model)
        size = (len(shape.full_layers), shape.kv_heads)
        return cls.of_policy(
            model, policy, {"prefill": lambda length: np.full(size, entries(length), np.int64)}, allocation=allocation
        )

    @classmethod
    def of_policy(
        cls,
        model: nn.Module,
        policy: Policy,
        tables: Mapping[Phase, BudgetTable],
        floor: int = 1,
        allocation: Allocation | None = None,
    ) -> Program:
        """Use one policy in all full-attention layers, with the budgets of `tables` in its phases."""
        policies = dict.fromkeys(describe(model).full_layers, policy)
        phases = {phase: PhaseProgram(policies, table, floor) for phase, table in tables.items()}
        return cls(phases.get("prefill"), phases.get("decode"), allocation)

    @property
    def layers(self) -> tuple[int, ...]:
        """The model layers governed in some phase, ascending."""
        return tuple(sorted({layer for phase in self.phases for layer in phase.policies}))

    @property
    def phases(self) -> tuple[PhaseProgram, ...]:
        """The phases that do something."""
        return tuple(phase for phase in (self.prefill, self.decode) if phase is not None)

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The policies of all phases and layers."""
        return tuple(policy for phase in self.phases for policy in phase.policies.values())


def full_cache(model: nn.Module) -> Program:
    """Return the program that evicts nothing."""
    return Program.uniform(model, create_policy("full"), lambda length: length)


def _phase(plan: Plan, name: Phase, kinds: Sequence[str], clip: bool) -> PhaseProgram | None:
    """Return the phase "prefill" or "decode"; `clip`: no head gets more than the prompt has."""
    phase = plan.prefill if name == "prefill" else plan.decode
    if phase is None:
        return None
    foreign = [layer for layer in phase.planned_layers if kinds[layer] != FULL]
    if foreign:
        what = ", ".join(sorted({kinds[layer] for layer in foreign}))
        raise IncompatibleError(
            f"the plan budgets layers {foreign}, which are of kind {what} and belong to the model: only layers of kind "
            f"{FULL} can be planned"
        )
    policies = {index: policy_of(layer.policy) for index, layer in enumerate(phase.layers) if layer is not None}
    return PhaseProgram(policies, lambda length: budgets_at(plan, name, length, clip), max(plan.floor, 1))

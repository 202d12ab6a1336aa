"""A plan made ready to run on one model: policy objects, and budgets for the prompt at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from kvsearch.errors import IncompatibleError, UsageError
from kvsearch.models.architecture import describe
from kvsearch.plan.arithmetic import budgets_at
from kvsearch.policies import Policy, create_policy

if TYPE_CHECKING:
    from kvsearch.plan import Plan

BudgetTable = Callable[[int], np.ndarray]


@dataclass
class Program:
    """What each full-attention layer does at the end of prefill.

    `policies` maps model layer to policy; `table` maps a prompt length (real tokens) to integer budgets
    [planned layers, Hkv], rows in ascending layer order. Budgets above the length mean "keep everything".
    """

    policies: dict[int, Policy]
    table: BudgetTable

    def __post_init__(self) -> None:
        self._rows = {layer: row for row, layer in enumerate(sorted(self.policies))}
        self._tables: dict[int, np.ndarray] = {}

    @classmethod
    def from_plan(cls, model: nn.Module, plan: Plan) -> Program:
        """Check `plan` against `model` and build its policies.

        Raises:
            IncompatibleError: the plan is for another model, or budgets a layer the runtime must leave alone.
            UsageError: an unknown policy or parameter, or a phase this version cannot execute.
        """
        from kvsearch.models.fingerprint import fingerprint

        plan.model.require(fingerprint(model, plan.model.name), "this plan")
        if plan.prefill is None or plan.decode is not None:
            raise UsageError("this version executes prefill-phase plans only: the plan has a decode phase")
        foreign = sorted(set(plan.planned_layers("prefill")) - set(describe(model).full_layers))
        if foreign:
            raise IncompatibleError(f"the plan budgets layers {foreign}, whose window belongs to the model")
        policies = {
            index: create_policy(layer.policy.name, layer.policy.params)
            for index, layer in enumerate(plan.prefill.layers)
            if layer is not None
        }
        return cls(policies, lambda length: budgets_at(plan, "prefill", length))

    @classmethod
    def uniform(cls, model: nn.Module, policy: Policy, entries: Callable[[int], int]) -> Program:
        """One policy and one budget for every full-attention layer and head; `entries` maps length to budget."""
        shape = describe(model)
        return cls(
            dict.fromkeys(shape.full_layers, policy),
            lambda length: np.full((len(shape.full_layers), shape.kv_heads), entries(length), dtype=np.int64),
        )

    def budgets(self, layer: int, lengths: Sequence[int]) -> Tensor:
        """Entries per sequence and kv head of one model layer, [B, Hkv] int64."""
        for length in set(lengths) - set(self._tables):
            self._tables[length] = np.minimum(self.table(length), length)
        row = self._rows[layer]
        return torch.from_numpy(np.stack([self._tables[length][row] for length in lengths]))

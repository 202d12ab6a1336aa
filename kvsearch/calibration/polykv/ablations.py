"""What is tried in every layer, one thing at a time, and the arrays that hold what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvsearch.plan import Phase
from kvsearch.policies import Policy
from kvsearch.policies.base import Needs
from kvsearch.runtime.eviction import PhaseRule
from kvsearch.runtime.rule import decode_needs


def needs_of(policies: Sequence[Policy], phases: Sequence[Phase]) -> list[Needs]:
    """Return what a layer must be given of the prompt, to try `policies` in these phases."""
    found = [policy.needs() for policy in policies if "prefill" in phases]
    return found + [decode_needs(policy) for policy in policies if "decode" in phases]


def entropy_needs(rows: int, phases: Sequence[str]) -> Needs:
    """Return what entropy needs of a prompt: its last `rows`, and for the mean row what every key received of all."""
    return Needs(query_rows=rows, column_sums="prefill" in phases)


class Ablation(NamedTuple):
    """One budget, phase and pattern, by their place in `Ablations`."""

    budget: int
    phase: int
    pattern: int


@dataclass(frozen=True, eq=False)
class Ablations:
    """Everything that is tried in every full-attention layer: each pattern at each budget in each phase."""

    policies: tuple[Policy, ...]
    budgets: tuple[int, ...]
    phases: tuple[Phase, ...]
    layers: tuple[int, ...]  # of the model
    kv_heads: int

    @property
    def of_layer(self) -> list[Ablation]:
        """All that happens to one layer."""
        return [
            Ablation(budget, phase, pattern)
            for budget in range(len(self.budgets))
            for phase in range(len(self.phases))
            for pattern in range(len(self.policies))
        ]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Budgets, phases, layers and patterns."""
        return len(self.budgets), len(self.phases), len(self.layers), len(self.policies)

    def rules(self, item: Ablation) -> tuple[PhaseRule | None, PhaseRule | None]:
        """Return the rules of the prefill and the decode phase."""
        entries = self.budgets[item.budget]

        def budgets(lengths: Sequence[int]) -> Tensor:
            return torch.full((len(lengths), self.kv_heads), entries, dtype=torch.int64)

        rule = PhaseRule(self.policies[item.pattern], budgets)
        return (rule, None) if self.phases[item.phase] == "prefill" else (None, rule)


class AblationResults:
    """Arrays of M continuations of prompts, [M, N, P, L, R]; what is not measured stays NaN.

    `entropy` [M, P, L] is that of the last attention rows of the prompt and of those of what follows it, `attention`
    [M, P, L, N] fp32 the mean of all rows of either by position, zeros behind the last; None where it is not measured.
    """

    def __init__(self, tried: Ablations, samples: int) -> None:
        shape = (samples, *tried.shape)
        self.cosine, self.error, self.loss = (np.full(shape, np.nan) for _ in range(3))
        self.full_loss = np.zeros(samples)
        self.entropy: NDArray[np.float64] | None = None
        self.attention: NDArray[np.float32] | None = None

    def note_outputs(self, row: int, items: Sequence[Ablation], agreement: tuple[Tensor, Tensor]) -> None:
        """Note cosine and relative error [items, M] of what layer `row` puts out."""
        for array, found in zip((self.cosine, self.error), agreement, strict=True):
            for item, values in zip(items, found.cpu().numpy(), strict=True):
                array[:, item.budget, item.phase, row, item.pattern] = values

    def note_losses(self, places: Sequence[tuple[int, Ablation]], losses: Tensor) -> None:
        """Note losses [groups, M] of ablations of layers."""
        for (row, item), values in zip(places, losses.cpu().numpy(), strict=True):
            self.loss[:, item.budget, item.phase, row, item.pattern] = values

    def arrays(self, *, outputs: bool, losses: bool) -> dict[str, NDArray[Any]]:
        """Return what was measured, by its name in a profile."""
        found: dict[str, NDArray[Any]] = {}
        if outputs:
            found |= {"cosine": self.cosine.astype(np.float32), "relative_error": self.error.astype(np.float32)}
        if losses:
            found |= {"nll": self.loss, "full_nll": self.full_loss}
        return found

"""TOVA (Oren et al. 2024): what the last query attends to, the same entries for all heads of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsearch.policies.base import AttentionRow, Needs, Observation, Policy, Running
from kvsearch.policies.decoding import Step
from kvsearch.policies.scoring import average_window_attention
from kvsearch.policies.tensors import Tensor


@dataclass(frozen=True)
class TOVA(Policy):
    """score[i] = (1/Hq) sum_q a[q, n-1, i] over all query heads of the layer, one set for all kv heads.

    Every decode step ranks by its own row, and the lowest entry leaves: as in the official code that may be the first
    token, or the newest one unless `protect_last`.
    """

    name: ClassVar[str] = "tova"
    source: ClassVar[str] = "TOVA, arXiv 2401.06104; layer mean as in the official code"
    summary: ClassVar[str] = "mean over all query heads of the layer of a[n-1, i]"
    weakness: ClassVar[str] = (
        "one row decides for all heads; while decoding the first token or the newest may leave (`protect_last=true`)"
    )
    is_baseline: ClassVar[bool] = True
    is_rival: ClassVar[bool] = True
    row: ClassVar[AttentionRow] = "layer"
    running: ClassVar[Running] = "row"

    protect_last: bool = False
    sinks: int = 0

    @property
    def recent_count(self) -> int:
        return int(self.protect_last)

    def needs(self) -> Needs:
        return Needs(query_rows=1)

    def score(self, observation: Observation) -> Tensor:
        """Return the attention of the last row, mean over all heads, [B, Hkv, T] fp32."""
        groups = average_window_attention(observation, 1)
        return groups.mean(1, keepdim=True).expand_as(groups)

    def step(self, step: Step) -> Tensor:
        """Return the step's own row, [S, C] fp32."""
        return step.row

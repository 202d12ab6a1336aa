"""DefensiveKV (Feng et al. 2025): what any query of the window, of any head, attended to, and never nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsearch.policies.base import AS_WINDOW, Needs, Observation, Policy
from kvsearch.policies.scoring import average_window_attention, count_window_rows, iterate_window_rows, pool_positions
from kvsearch.policies.tensors import F, Tensor, torch

FIRST_SCORE = 2.0  # above all scores of entries that are not taken first


@dataclass(frozen=True)
class DefensiveKV(Policy):
    """score[i] = max(m[i], mean_j m[j]) * v[i], with m[i] = max_{g, t in last w} pool_i(a[g, t, i]) of a row's mass.

    `aggregate` "mean" takes the mean over g and t in place of the maximum, `floor` "none" leaves out mean_j m[j].

    v[i] is the mean over the group of |v_i W_O[q]|_1, as a share of all candidates i < n - p. Rows are pooled by their
    mean and scaled back to the mass that they had. Entries that make up the first `mass` of the mean attention, that of
    protected ones included, are taken before all others, the most attended first. The last p = `protect` entries stay
    (-1: `window`). The method `defensivekv` has the authors' head budgets, `layer-defensivekv` their layer budgets.
    """

    name: ClassVar[str] = "defensivekv"
    source: ClassVar[str] = "DefensiveKV, arXiv 2510.13334; w=32, k=5, mass=0.9 as in the authors' code"
    summary: ClassVar[str] = (
        "max(m, mean of m) times the share of value norms, m the largest attention of any query of window and "
        "group; the entries that make up 90% of the mean attention come first; `aggregate=mean` and `floor=none` "
        "switch parts off"
    )
    weakness: ClassVar[str] = (
        "a stray query keeps an entry; spread attention, where 90% of it are most entries: `mass=0`. Its authors' "
        "budgets are the [methods](evaluation.md#what-is-compared) `defensivekv` and `layer-defensivekv`"
    )
    is_baseline: ClassVar[bool] = True
    is_rival: ClassVar[bool] = True

    window: int = 32
    kernel: int = 5
    aggregate: str = "max"
    floor: str = "mean"
    mass: float = 0.9
    sinks: int = 0
    refresh: int = 0  # decode steps between two scorings; 0: half the window
    protect: int = AS_WINDOW

    def __post_init__(self) -> None:
        self._at_least(1, "window")
        super().__post_init__()
        self._require(self.kernel >= 1 and self.kernel % 2 == 1, f"kernel must be odd, got {self.kernel}")
        self._one_of("aggregate", "mean", "max")
        self._one_of("floor", "mean", "none")
        self._require(0 <= self.mass <= 1, f"mass must be between 0 and 1, got {self.mass}")

    def needs(self) -> Needs:
        return Needs(query_rows=self.window, projection=True)

    def score(self, observation: Observation) -> Tensor:
        """Return defended attention times value norms, [B, Hkv, T] fp32; `FIRST_SCORE` and more for those first."""
        candidates = observation.candidates(0, self.protect)
        attention = self._window_attention(observation, candidates)
        if self.floor == "mean":
            count = candidates.sum(-1).clamp(min=1)[:, None, None]
            attention = torch.maximum(attention, attention.sum(-1, keepdim=True) / count)
        norms = observation.projected_norms("l1").mean(2).masked_fill(~candidates[:, None], 0.0)
        shares = norms / norms.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        mean = average_window_attention(observation, self.window).masked_fill(~candidates[:, None], 0.0)
        beside = 1 - mean.sum(-1, keepdim=True)
        highest, order = mean.sort(dim=-1, descending=True, stable=True)
        is_first = (highest.cumsum(-1) < self.mass - beside) & (highest > 0)
        is_first = torch.zeros_like(is_first).scatter(-1, order, is_first)
        return torch.where(is_first, FIRST_SCORE + mean, attention * shares)

    def _window_attention(self, observation: Observation, candidates: Tensor) -> Tensor:
        """Return what the queries of the window and group attend to each candidate, aggregated, [B, Hkv, T] fp32."""
        batch, heads, length, _ = observation.keys.shape
        attention = observation.keys.new_zeros(batch, heads, length, dtype=torch.float32)
        rows_of_head = count_window_rows(observation, self.window)[:, None, None] * observation.group
        for (sequences, of_heads), probability in iterate_window_rows(observation, self.window):
            hidden = ~candidates[sequences, None, None, None]
            rows = F.pad(probability, (0, length - probability.shape[-1])).masked_fill(hidden, 0.0)
            mass = rows.sum(-1, keepdim=True)
            pooled = pool_positions(rows.flatten(1, 3), self.kernel, "avg").view_as(rows).masked_fill(hidden, 0.0)
            rows = pooled * mass / pooled.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
            part = attention[sequences, of_heads]
            if self.aggregate == "max":
                attention[sequences, of_heads] = torch.maximum(part, rows.amax((2, 3)))
            else:
                attention[sequences, of_heads] = part + rows.sum((2, 3)) / rows_of_head[sequences]
        return attention

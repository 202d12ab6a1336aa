"""H2O (Zhang et al. 2023): heavy hitters by accumulated attention, and the most recent tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsearch.plan.size import round_down
from kvsearch.policies.base import AttentionRow, Needs, Observation, Policy, Running
from kvsearch.policies.decoding import State, Step
from kvsearch.policies.tensors import Tensor

MASS_STATE = "mass"


@dataclass(frozen=True)
class H2O(Policy):
    """score[i] = sum_{t >= i} mean_g a[t, i] over all queries t so far, as long as entry i is held.

    The most recent r entries of a budget b are kept whatever their score: r = b - floor(b * (1 - `recent_share`)), so
    that 0.5 gives halves and the odd entry to the recent ones, or a fixed r = `recent` where that is not 0.
    """

    name: ClassVar[str] = "h2o"
    source: ClassVar[str] = "H2O, arXiv 2306.14048; halves as in the official scripts, mean over the query group"
    summary: ClassVar[str] = "sum over t >= i of mean_g a[t, i]; half of the budget is for recent entries"
    weakness: ClassVar[str] = "early entries, seen by more queries, add up more; the cost of column sums"
    is_baseline: ClassVar[bool] = True
    is_rival: ClassVar[bool] = True
    row: ClassVar[AttentionRow] = "group"
    running: ClassVar[Running] = "mass"

    recent_share: float = 0.5
    recent: int = 0
    sinks: int = 0

    def __post_init__(self) -> None:
        self._require(0 <= self.recent_share <= 1, f"recent_share must be between 0 and 1, got {self.recent_share}")
        self._at_least(0, "recent")
        super().__post_init__()

    @property
    def recent_count(self) -> int:
        return self.recent or 1  # of a share, the newest entry; the others follow from the first stage

    def needs(self) -> Needs:
        return Needs(column_sums=True)

    def score(self, observation: Observation) -> Tensor:
        """Return the attention received so far, [B, Hkv, T] fp32."""
        return observation.received()

    def first_stage(self, observation: Observation) -> Tensor | None:
        """Return how recent an entry is, where a share of the budget is for recent ones."""
        if self.recent:
            return None
        return observation.index.float()[:, None].expand(observation.keys.shape[:3])

    def first_stage_budget(self, budget: int) -> int:
        """Return how many sinks and recent entries there are, where a share of the budget is for recent ones."""
        return 0 if self.recent else self.sinks + self._share_of(budget)

    def _share_of(self, budget: int) -> int:
        return budget - round_down(budget * (1 - self.recent_share))

    # --- decoding -------------------------------------------------------------------------------------------------

    def recent_at(self, budget: int) -> int:
        """Return the recent part of a budget, the newest entry at least."""
        return self.recent or max(1, self._share_of(budget))

    def start(self, observation: Observation) -> State:
        """Return the attention that every entry received in the prompt."""
        return State({MASS_STATE: observation.received().clone()})

    def step(self, step: Step) -> Tensor:
        """Return the attention received, this step's included, [S, C] fp32."""
        mass = step.cached.state.entries[MASS_STATE]
        mass += step.row
        return mass

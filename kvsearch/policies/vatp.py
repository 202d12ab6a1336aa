"""VATP (Guo et al. 2024): what attention an entry gets, times the length of its value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsearch.policies.base import AS_WINDOW, Observation, Policy
from kvsearch.policies.decoding import State, Step
from kvsearch.policies.h2o import H2O
from kvsearch.policies.snapkv import SnapKV
from kvsearch.policies.tensors import Tensor
from kvsearch.policies.wrapper import Wrapper

NORM_STATE = "norm"
RECENT_WINDOW = 10  # entries that the official code protects around the mean over a history


@dataclass(frozen=True)
class VATP(Wrapper):
    """score[i] = S[i] * |v_i|_1, with S of a base policy; the sinks, whose values are short, are always kept.

    `base` is "h2o" (accumulated attention; reads `recent_share` and `recent`), "scissorhands" (mean attention of the
    last `history` queries; protects the last `recent` entries, 10 if that is 0) or "snapkv" (reads `window`, `protect`,
    `kernel`, `pooling` and `group`). The latter two are scored anew every `refresh` decode steps, 0: half of `recent`
    and of `window`.
    """

    name: ClassVar[str] = "vatp"
    source: ClassVar[str] = "VATP, arXiv 2406.12335; 20 sinks, recent 10, history 400 as in the official code"
    summary: ClassVar[str] = "the base policy's score times |v_i|_1; 20 sinks stay"
    weakness: ClassVar[str] = "small budgets, where 20 sinks take much; `sinks=0` loses sinks, whose values are short"
    is_baseline: ClassVar[bool] = True
    is_rival: ClassVar[bool] = True

    base: str = "h2o"
    sinks: int = 20
    recent_share: float = 0.5
    recent: int = 0
    history: int = 400
    window: int = 32
    kernel: int = 7
    pooling: str = "max"
    group: str = "mean"
    refresh: int = 0
    protect: int = AS_WINDOW

    def __post_init__(self) -> None:
        self._one_of("base", "h2o", "scissorhands", "snapkv")
        self._at_least(0, "recent")
        self._at_least(1, "history")
        super().__post_init__()

    @property
    def inner(self) -> Policy:
        """The base policy."""
        if self.base == "h2o":
            return H2O(self.recent_share, self.recent, self.sinks)
        if self.base == "scissorhands":
            recent = self.recent or RECENT_WINDOW
            refresh = self.refresh or max(1, recent // 2)
            return SnapKV(self.history, 1, "none", sinks=self.sinks, refresh=refresh, protect=recent)
        return SnapKV(self.window, self.kernel, self.pooling, self.group, self.sinks, self.refresh, self.protect)

    def score(self, observation: Observation) -> Tensor:
        """Return the base score times value norm, [B, Hkv, T] fp32."""
        # pooling gives -inf to columns without a candidate nearby
        return self.inner.score(observation).clamp(min=0.0) * observation.value_norms(1)

    def start(self, observation: Observation) -> State:
        """Return the base's state and the norms of the prompt's values."""
        state = self.inner.start(observation)
        state.entries[NORM_STATE] = observation.value_norms(1).clone()
        return state

    def step(self, step: Step) -> Tensor:
        """Return the base's priority times value norm, [S, C] fp32; only the newest value's norm is computed."""
        norms = step.cached.state.entries[NORM_STATE]
        newest = step.at_newest(step.cached.values).float().norm(p=1, dim=-1)
        norms.scatter_(1, step.newest[:, None], newest[:, None])
        return self.inner.step(step) * norms

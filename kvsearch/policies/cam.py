"""CaM (Zhang et al. 2024): the value of an evicted entry is added to the next ones, at random by its attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from kvsearch.policies.base import AttentionRow, Needs, Observation, Policy
from kvsearch.policies.decoding import Cached, State, Step, sort_by_position
from kvsearch.policies.h2o import H2O, MASS_STATE
from kvsearch.policies.random import uniform
from kvsearch.policies.scoring import fold, split_segments
from kvsearch.policies.streaming import StreamingLLM
from kvsearch.policies.tensors import Tensor, torch
from kvsearch.policies.wrapper import Wrapper


@dataclass(frozen=True)
class CaM(Wrapper):
    """v_j += M v_i / |J| for the entry i that leaves and all j in J, the next `merge_next` entries that stay.

    Which entry leaves is up to a base policy. M is 1 with probability p = min(1, A_i / mean_{j in J} A_j), else 0, and
    A is the attention accumulated over all queries. With `expectation`, M = p. Keys stay as they are. What is drawn
    depends on `seed`, the layer, the head and the position of i alone.

    As in the official code at most one entry of a head merges per decode step. Where several leave at once, as all that
    is too much of a prompt does at the first step, that is the youngest, which the step itself pushed out of the recent
    ones; what else leaves the prompt is gone.

    `base` is "streaming", or "h2o", which reads `recent_share` and `recent`.
    """

    name: ClassVar[str] = "cam"
    source: ClassVar[str] = "CaM, ICML 2024 (PMLR 235:58840); accumulated attention, the next m=32, one merge per step"
    summary: ClassVar[str] = (
        "as `streaming` or `h2o`; the value that leaves is added to the next m with p = min(1, A_i / mean A_j)"
    )
    weakness: ClassVar[str] = (
        "what leaves a prompt is lost: merging all of it there gained 380 in perplexity in one layer"
    )
    is_baseline: ClassVar[bool] = True
    row: ClassVar[AttentionRow] = "group"
    merges: ClassVar[bool] = True
    merges_prompt: ClassVar[bool] = False

    base: str = "streaming"
    sinks: int = 4
    recent_share: float = 0.5
    recent: int = 0
    merge_next: int = 32
    seed: int = 0
    expectation: bool = False

    def __post_init__(self) -> None:
        self._one_of("base", "streaming", "h2o")
        self._at_least(1, "merge_next")
        self._require(0 <= self.seed < 2**63, f"seed must be between 0 and 2^63 - 1, got {self.seed}")
        super().__post_init__()

    @property
    def inner(self) -> Policy:
        """The base policy."""
        if self.base == "h2o":
            return H2O(self.recent_share, self.recent, self.sinks)
        return StreamingLLM(self.sinks)

    def needs(self) -> Needs:
        return replace(self.inner.needs(), column_sums=True)

    def start(self, observation: Observation) -> State:
        """Return the base's state, and the attention that every entry received in the prompt where that has none."""
        state = self.inner.start(observation)
        if self.base == "streaming":
            state.entries[MASS_STATE] = observation.received().clone()
        return state

    def step(self, step: Step) -> Tensor:
        """Return the base's priority, [S, C] fp32; adds to the attention received where the base does not."""
        priorities = self.inner.step(step)
        if self.base == "streaming":
            step.cached.state.entries[MASS_STATE] += step.row
        return priorities

    def merge(self, cached: Cached, leaving: Tensor) -> None:
        """Add the youngest value that leaves to the next ones that stay, or not, as drawn."""
        if leaving.shape[1] > 1:
            leaving = leaving.gather(1, (leaving >= 0).sum(-1, keepdim=True).sub_(1).clamp_(min=0))
        slots, dim = cached.values.shape[1:]
        for part, entry in split_segments(cached, leaving, 8 * slots * (dim + 4)):
            self._spread(part, entry)

    def _spread(self, cached: Cached, leaving: Tensor) -> None:
        """Add the value in slot `leaving` [S, 1] to the next ones that stay."""
        stays = cached.staying(leaving)
        order = sort_by_position(cached.positions, stays)
        stays = stays.gather(1, order)
        source = leaving.clamp(min=0)
        position = cached.positions.gather(1, source)
        ahead = cached.positions.gather(1, order).masked_fill(~stays, torch.iinfo(torch.int64).max)
        first = torch.searchsorted(ahead, position)
        offset = torch.arange(min(self.merge_next, order.shape[1]), device=order.device)
        targets = order.gather(1, (first + offset) % order.shape[1])  # [S, m]
        reach = (stays.sum(-1, keepdim=True) - first).clamp(max=len(offset))
        inside = offset < reach
        weight = self._share(cached, position, source, targets, inside) / reach.clamp(min=1)
        own_weight = torch.ones_like(targets, dtype=torch.float32)
        into = offset.expand_as(targets)
        active = (leaving >= 0) & inside
        fold(cached.values, targets, own_weight, into, source.expand_as(targets), weight.expand_as(targets), active)

    def _share(self, cached: Cached, position: Tensor, source: Tensor, following: Tensor, inside: Tensor) -> Tensor:
        """Return what part of the value is added, [S, 1] fp32: 0 or 1 as drawn, or the probability of 1."""
        mass = cached.state.entries[MASS_STATE]
        ahead = mass.gather(1, following).masked_fill(~inside, 0.0)
        mean = ahead.sum(-1, keepdim=True) / inside.sum(-1, keepdim=True)  # NaN where nothing follows
        probability = (mass.gather(1, source) / mean).nan_to_num(nan=0.0, posinf=1.0).clamp(0.0, 1.0)
        if self.expectation:
            return probability
        return (uniform(self.seed, cached.layer, cached.heads[:, None], position) < probability).float()

"""D2O (Wan et al. 2024) as a pattern: H2O, and what it evicts is merged into similar entries where there are any."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from kvsearch.policies.base import Observation
from kvsearch.policies.decoding import Cached, State, sort_by_position
from kvsearch.policies.h2o import H2O
from kvsearch.policies.scoring import choose_chunk_bytes, fold, gather_slots, split_segments
from kvsearch.policies.tensors import F, Tensor, torch

TAU = "tau"
MIN_KEY_NORM = 1e-12  # the least norm that a key is divided by


@dataclass(frozen=True)
class D2O(H2O):
    """H2O's score with sinks. Leaving entries e with u_e = max_c cos(k_e, k_c) >= tau are merged into their c.

    With `merging` "paper", k_c <- w_c k_c + sum_e w_e k_e, where w_e = exp(u_e) / (sum_e exp(u_e) + e^1) and
    w_c = e^1 / (the same); with "code", k_c <- (k_c + sum_e u_e k_e) / (1 + how many). Values likewise; `keys_frozen`
    merges values only, as merged keys mix the positions in their rotation. Every kv head has its tau: the mean of u in
    its first eviction, then tau <- (1 - ema) tau + ema mean(u), before the entries are compared with it.

    The official code never compresses layers 0, 1 and the last one. Here every layer of a plan keeps its budget, and in
    the first ones merged keys can cost far more than evicting would.
    """

    name: ClassVar[str] = "d2o"
    source: ClassVar[str] = "D2O, arXiv 2406.13035; 4 sinks, halves and ema=0.5 as in the official code, tau per head"
    summary: ClassVar[str] = "as `h2o`; what leaves merges into the most similar entry if cos(k_e, k_c) >= tau"
    weakness: ClassVar[str] = (
        "low layers: merged keys mix positions (perplexity +11.2 in layer 0; 0.0008 with `keys_frozen=true`). Its "
        "authors leave layers 0, 1 and the last alone"
    )
    is_baseline: ClassVar[bool] = True
    merges: ClassVar[bool] = True

    sinks: int = 4
    merging: str = "paper"
    ema: float = 0.5
    keys_frozen: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_of("merging", "paper", "code")
        self._require(0 < self.ema <= 1, f"ema must be above 0 and at most 1, got {self.ema}")

    def start(self, observation: Observation) -> State:
        """Return H2O's state, and tau, NaN before the first eviction."""
        state = super().start(observation)
        state.heads[TAU] = observation.keys.new_full(observation.keys.shape[:2], math.nan, dtype=torch.float32)
        return state

    def merge(self, cached: Cached, leaving: Tensor) -> None:
        """Merge what is similar enough to an entry that stays, keys and values."""
        dim = cached.keys.shape[-1] + cached.values.shape[-1]
        for part, entries in split_segments(cached, leaving, 8 * cached.keys.shape[1] * dim):
            self._merge(part, entries)

    def _merge(self, cached: Cached, leaving: Tensor) -> None:
        gone = leaving >= 0
        sources = leaving.clamp(min=0)
        real = cached.staying(leaving)
        if leaving.shape[1] == 1:  # one per step: nothing is sorted or copied, and nothing waits for the device
            similarity, targets = find_nearest_slot(cached, sources, real)
            into = torch.zeros_like(targets)
        else:
            width = cached.positions.shape[1] if cached.most_staying is None else max(1, cached.most_staying)
            targets = sort_by_position(cached.positions, real)[:, :width]
            similarity, into = find_most_similar(cached.keys, sources, targets, real.gather(1, targets))
        event = gone.any(-1) & real.any(-1)
        tau = cached.state.heads[TAU]
        # in double, so that equal similarities are their mean
        mean_similarity = similarity.masked_fill(~gone, 0.0).double().sum(-1) / gone.sum(-1).clamp(min=1)
        later = torch.where(tau.isnan(), mean_similarity, (1 - self.ema) * tau.double() + self.ema * mean_similarity)
        tau.copy_(torch.where(event, later.float(), tau))
        merged = gone & (similarity >= tau[:, None])
        mean = self.merging == "code"
        weight = similarity if mean else similarity.exp()
        own_weight = 1.0 if mean else math.e
        counted = torch.ones_like(weight) if mean else weight
        total = torch.full_like(targets, own_weight, dtype=torch.float32)
        total.scatter_add_(1, into, counted.masked_fill(~merged, 0.0))
        for states in (cached.values,) if self.keys_frozen else (cached.keys, cached.values):
            fold(states, targets, own_weight / total, into, sources, weight / total.gather(1, into), merged)


def find_nearest_slot(cached: Cached, source: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest cosine of the key in slot `source` [S, 1] to those in `real` slots [S, C], and its slot.

    Both [S, 1]; of equal ones the first position.
    """
    keys = cached.keys.float()
    unit = F.normalize(gather_slots(cached.keys, source), dim=-1, eps=MIN_KEY_NORM)
    cosine = (keys @ unit.transpose(-1, -2))[..., 0] / keys.norm(dim=-1).clamp(min=MIN_KEY_NORM)
    cosine = cosine.masked_fill(~real, -math.inf)
    value = cosine.amax(-1, keepdim=True)
    last = torch.iinfo(torch.int64).max
    return value, cached.positions.masked_fill(cosine < value, last).masked_fill(~real, last).argmin(-1, keepdim=True)


def find_most_similar(keys: Tensor, sources: Tensor, targets: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest cosine of each source's key to the targets', and which target that is (of equals the first).

    `keys` is [S, C, D], `sources` [S, E] and `targets` [S, R] are slots, `real` [S, R] bool says which targets count.
    """
    units = F.normalize(gather_slots(keys, targets), dim=-1).transpose(-1, -2)
    step = max(1, choose_chunk_bytes(keys.device) // (8 * len(keys) * (targets.shape[1] + keys.shape[-1])))
    hidden = ~real[:, None]
    values = []
    indices = []
    for first in range(0, sources.shape[1], step):
        cosine = F.normalize(gather_slots(keys, sources[:, first : first + step]), dim=-1) @ units
        value, index = cosine.masked_fill_(hidden, -math.inf).max(-1)
        values.append(value)
        indices.append(index)
    return torch.cat(values, 1), torch.cat(indices, 1)

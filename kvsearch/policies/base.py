"""The Policy seam: WHAT to evict. A policy ranks cached entries; how many stay is the budget's business.

A policy is a frozen dataclass of its hyper-parameters. It declares what it needs, and the runtime computes only that,
never a T x T matrix. Scores say how much an entry is worth keeping; protection (sinks and recent window), padding and
budgets are applied outside, in `ranking`, in the same way for every policy.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvsearch.errors import UsageError


@dataclass(frozen=True)
class Needs:
    """What a policy must be given besides keys and values."""

    query_rows: int = 0  # the last so many query rows
    query_statistics_from: int | None = None  # mean and covariance of the unrotated queries from this position on


@dataclass(frozen=True)
class QueryStatistics:
    """Mean and covariance (divided by N) of the unrotated queries of a prompt, per query head."""

    mean: Tensor  # [B, Hq, D] fp32
    covariance: Tensor  # [B, Hq, D, D] fp32


@dataclass(frozen=True)
class Observation:
    """One layer as seen at the end of prefill. Batches are padded on the left; T counts padding.

    Queries and keys are rotated (RoPE) and normalised (q_norm, k_norm) as attention sees them.
    """

    keys: Tensor  # [B, Hkv, T, D]
    values: Tensor  # [B, Hkv, T, Dv]
    valid: Tensor  # [B, T] bool, False where padding
    scaling: float  # logits = scaling * q.k
    queries: Tensor | None = None  # [B, Hq, rows, D], the last rows of the prompt
    softcap: float | None = None
    statistics: QueryStatistics | None = None
    rotary: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None  # positions [N] -> cos, sin [N, rotary dims]
    next_position: Tensor | None = None  # [B] rotary position of the token that comes next; default: the lengths

    @property
    def lengths(self) -> Tensor:
        """Real tokens per sequence, [B]."""
        return self.valid.sum(-1)


@dataclass(frozen=True)
class Policy(ABC):
    """Base of all eviction patterns.

    `sinks` and `window` are the protected entries: the first real tokens and the most recent ones of a sequence.
    """

    name: ClassVar[str]
    source: ClassVar[str]

    @property
    def sink_count(self) -> int:
        return int(getattr(self, "sinks", 0))

    @property
    def window_count(self) -> int:
        return int(getattr(self, "window", 0))

    def needs(self) -> Needs:
        """What must be in the observation besides keys, values and validity."""
        return Needs()

    @abstractmethod
    def score(self, observation: Observation) -> Tensor:
        """Keep-priority of every entry, [B, Hkv, T] fp32, higher is kept; padding and protected columns are ignored."""

    def protected(self, length: int) -> int:
        """How many entries of a sequence of `length` tokens are protected."""
        return min(length, self.sink_count + self.window_count)

    def parameters(self) -> dict[str, int | float | bool | str]:
        """Hyper-parameters by name, as a plan stores them."""
        return dataclasses.asdict(self)

    def _require(self, condition: bool, problem: str) -> None:
        if not condition:
            raise UsageError(f"policy {self.name}: {problem}")

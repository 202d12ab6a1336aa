"""CAKE (Qin et al. 2025) as a pattern: how much attention an entry gets, and how much that varies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from kvsearch.policies.base import AS_WINDOW, AttentionRow, Needs, Observation, Policy, Running
from kvsearch.policies.decoding import Step
from kvsearch.policies.scoring import find_kernel_rows, iterate_window_rows, pool_positions
from kvsearch.policies.tensors import Tensor, torch


@dataclass(frozen=True)
class CAKE(Policy):
    """score[i] = mean_g pool_i( mean_t a[t, i] + gamma * var_t a[t, i] ), t in the last w rows, candidates i < n - p.

    w = `window` rows are looked at, and the last p = `protect` entries stay (-1: as many); what a row does not see
    counts as 0. The variance is the unbiased one, 0 for a single row. While decoding, the official code ranks by the
    step's own row, pooled, without variance; here it is pooled over the order of positions, and over the mean of the
    group.
    """

    name: ClassVar[str] = "cake"
    source: ClassVar[str] = "CAKE, arXiv 2503.12491; pooled as in the official code, w=32, k=5, avg, gamma=200"
    summary: ClassVar[str] = "mean_g pool(mean_t a + gamma var_t a), t in the last w"
    weakness: ClassVar[str] = (
        "question-agnostic prompts, whose last rows are no question; while decoding it has one row and no variance"
    )
    is_baseline: ClassVar[bool] = True
    is_rival: ClassVar[bool] = True
    row: ClassVar[AttentionRow] = "group"
    running: ClassVar[Running] = "pooled"

    window: int = 32
    kernel: int = 5
    gamma: float = 200.0
    pooling: str = "avg"
    sinks: int = 0
    protect: int = AS_WINDOW

    def __post_init__(self) -> None:
        self._at_least(1, "window")
        super().__post_init__()
        self._require(self.kernel >= 1 and self.kernel % 2 == 1, f"kernel must be odd, got {self.kernel}")
        self._one_of("pooling", "max", "avg", "none")
        self._require(0 <= self.gamma < math.inf, f"gamma must be finite and 0 or more, got {self.gamma}")

    def needs(self) -> Needs:
        return Needs(query_rows=self.window)

    def score(self, observation: Observation) -> Tensor:
        """Return the pooled mean plus weighted variance, [B, Hkv, T] fp32."""
        mean, variance = compute_row_moments(observation, self.window)
        indicator = (mean + self.gamma * variance).flatten(1, 2)
        pooled = pool_positions(indicator, self.kernel, self.pooling, observation.candidates(0, self.protect))
        return pooled.view_as(mean).mean(2)

    @property
    def running_constants(self) -> dict[str, int | str]:
        kernel = 1 if self.pooling == "none" else self.kernel
        return {"KERNEL": kernel, "POOLING": self.pooling, "PROTECT": self.protect}

    def step(self, step: Step) -> Tensor:
        """Return the step's own row, pooled over the candidates held, [S, C] fp32; +inf for the last `protect`."""
        # Neighbours in the text lie anywhere in the slots: pooling takes them by position.
        positions, order = step.cached.positions.sort(-1)  # slots without an entry come first, with 0, the window last
        window = positions >= (step.seen - self.protect)[:, None]
        row = step.row.gather(-1, order).masked_fill_(window, 0.0)
        pooled = pool_positions(row[:, None], self.kernel, self.pooling)[:, 0].masked_fill_(window, float("inf"))
        return torch.empty_like(pooled).scatter_(-1, order, pooled)


def compute_row_moments(observation: Observation, window: int) -> tuple[Tensor, Tensor]:
    """Return the mean and unbiased variance of attention over the real rows of the window, each [B, Hkv, G, T] fp32.

    The moments of the chunks of rows are merged pairwise (Chan et al. 1983), so that a small variance next to a large
    mean stays accurate. Computed once per observation and window.
    """

    def compute() -> tuple[Tensor, Tensor]:
        if (served := find_kernel_rows(observation, window)) is not None:
            return served.moments()
        batch, heads, length, _ = observation.keys.shape
        mean = observation.keys.new_zeros(batch, heads, observation.group, length, dtype=torch.float32)
        scatter = torch.zeros_like(mean)
        rows = observation.keys.new_zeros(batch, heads, 1, 1, dtype=torch.float32)
        for part, probability in iterate_window_rows(observation, window):
            real = probability.sum(-1, keepdim=True) > 0
            count = real.sum(-2)[:, :, :1]
            chunk_mean = probability.sum(-2) / count.clamp(min=1)
            chunk_scatter = probability.sub_(chunk_mean[..., None, :]).mul_(real).square_().sum(-2)
            total = rows[part] + count
            index = *part, slice(None), slice(probability.shape[-1])
            share = count / total.clamp(min=1)
            # Chan's update: the means of both sets, weighted by their rows, and the scatter between them.
            apart = chunk_mean - mean[index]
            scatter[index] += chunk_scatter + apart.square() * rows[part] * share
            mean[index] += apart * share
            rows[part] = total
        return mean, scatter / (rows - 1).clamp(min=1)

    return observation.shared(("row moments", window), compute)

"""StreamingLLM (Xiao et al. 2024): attention sinks and the most recent tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsearch.policies.base import Observation, Policy, Running
from kvsearch.policies.decoding import Step
from kvsearch.policies.tensors import Tensor, torch


@dataclass(frozen=True)
class StreamingLLM(Policy):
    """Keeps the first `sinks` entries and the last `budget - sinks`; keys keep their original rotation.

    While decoding, the oldest entry behind the sinks leaves.
    """

    name: ClassVar[str] = "streaming"
    source: ClassVar[str] = "StreamingLLM, arXiv 2309.17453; one-shot form"
    summary: ClassVar[str] = "recency; the first `sinks` stay"
    weakness: ClassVar[str] = "anything in the middle: 21 of 100 at 20% kept"
    is_baseline: ClassVar[bool] = True

    running: ClassVar[Running] = "position"

    sinks: int = 4

    @property
    def recent_count(self) -> int:
        return 1  # the newest entry; the rest of the recent entries follow from the score

    def score(self, observation: Observation) -> Tensor:
        """Return the position itself: newer is better, [B, Hkv, T] fp32."""
        batch, heads, length, _ = observation.keys.shape
        return torch.arange(length, device=observation.keys.device).float().expand(batch, heads, length)

    def step(self, step: Step) -> Tensor:
        """Return the position, as in the prompt, [S, C] fp32."""
        return step.cached.positions.float()

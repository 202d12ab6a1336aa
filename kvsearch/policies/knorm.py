"""Knorm (Devoto et al. 2024): keys of low norm stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsearch.policies.base import Observation, Policy
from kvsearch.policies.decoding import State, Step
from kvsearch.policies.tensors import Tensor, torch

NORM = "norm"


@dataclass(frozen=True)
class Knorm(Policy):
    """score[i] = -|k_i|_2. Rotation keeps norms; models that normalise their keys leave little to tell apart."""

    name: ClassVar[str] = "knorm"
    signed_scores: ClassVar[bool] = True
    source: ClassVar[str] = "A simple and effective L2 norm-based strategy for KV cache compression, arXiv 2406.11430"
    summary: ClassVar[str] = "-|k_i|"
    weakness: ClassVar[str] = "models that normalise their keys (Qwen3, Gemma3): kvsearch warns"
    is_baseline: ClassVar[bool] = True
    is_rival: ClassVar[bool] = True

    sinks: int = 0
    window: int = 0

    def score(self, observation: Observation) -> Tensor:
        """Return the negative key norm, [B, Hkv, T] fp32."""
        return -_norms(observation.keys)

    def start(self, observation: Observation) -> State:
        """Return the norms of the prompt's keys."""
        return State({NORM: _norms(observation.keys)})

    def step(self, step: Step) -> Tensor:
        """Return the negative norms, [S, C] fp32; only the newest key's is computed."""
        norms = step.cached.state.entries[NORM]
        norms.scatter_(1, step.newest[:, None], _norms(step.at_newest(step.cached.keys))[:, None])
        return -norms


def _norms(keys: Tensor) -> Tensor:
    """Return |k|_2 of keys [..., D], fp32."""
    norms: Tensor = torch.linalg.vector_norm(keys.float(), dim=-1)
    return norms

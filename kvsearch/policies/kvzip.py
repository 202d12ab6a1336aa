"""KVzip (Kim et al. 2025): what the prompt attends to when it is read again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsearch.policies.base import Needs, Observation, Policy, SecondPass
from kvsearch.policies.tensors import Tensor


@dataclass(frozen=True)
class KVzip(Policy):
    """score[i] = max_g max_k A[g, k, i] over the tokens k of the prompt when it is read again, after itself.

    It is read again under the full cache, `chunk` tokens at a time, each chunk led by the last 8 tokens before it, so
    that no instruction in words is needed; the softmax is over the whole prompt and the chunk. With `plus` (KVzip+,
    arXiv 2601.07891) attention is multiplied by |v_i W_O[g]| / |h_k|, h_k the residual stream that enters the layer.

    Takes two more passes over the prompt, one in evaluations. There is nothing to read again of new tokens: it is for
    prefill alone.
    """

    name: ClassVar[str] = "kvzip"
    source: ClassVar[str] = "KVzip, arXiv 2505.23416; without its instruction to repeat"
    summary: ClassVar[str] = "max over g and k of a[k, i] when the prompt is read again after itself"
    weakness: ClassVar[str] = "decoding and `evolve` refuse it; two more passes over the prompt, one in evaluations"

    chunk: int = 256
    plus: bool = False
    sinks: int = 4
    protect: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "chunk")

    @property
    def rereading(self) -> SecondPass:
        """What is measured while the prompt is read again."""
        return SecondPass(self.chunk, self.plus)

    def needs(self) -> Needs:
        return Needs(reread=self.rereading)

    def score(self, observation: Observation) -> Tensor:
        """Return the largest attention from the prompt that is read again, [B, Hkv, T] fp32."""
        return observation.reread(self.rereading)

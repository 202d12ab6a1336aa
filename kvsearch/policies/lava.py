"""LAVa (Shen et al. 2025) as a pattern: window attention, weighed by how large the values of a head can be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsearch.policies.base import Observation
from kvsearch.policies.scoring import average_window_attention, pool_positions
from kvsearch.policies.snapkv import SnapKV
from kvsearch.policies.tensors import Tensor


@dataclass(frozen=True)
class LAVa(SnapKV):
    """score[i] = max_k |v_k|_1 * pool_i( max_g (1/w) sum_{t in last w} a[t, i] ) over the candidates i, k < n - p.

    The value factor is one number per kv head: it changes no order within a head, but makes heads comparable, so that
    the entries of a layer can be ranked together. As in the official code it looks at the candidates only.
    """

    name: ClassVar[str] = "lava"
    source: ClassVar[str] = "LAVa, arXiv 2509.09754, Eq. 5; w rows, k=7, max, as in the official code"
    summary: ClassVar[str] = "max_k |v_k|_1 pool(max_g mean_t a[t, i]), t in the last w"
    weakness: ClassVar[str] = (
        "alone it orders a head as `snapkv` with `group=max`: its value factor compares heads, so it needs an "
        "allocation that shares"
    )
    is_baseline: ClassVar[bool] = True
    is_rival: ClassVar[bool] = True

    group: str = "max"

    def score(self, observation: Observation) -> Tensor:
        """Return the pooled attention of the window times the largest value norm, [B, Hkv, T] fp32."""
        inside = observation.candidates(0, self.protect)
        largest = observation.value_norms(1).masked_fill(~inside[:, None], 0.0).amax(-1, keepdim=True)
        attention = average_window_attention(observation, self.window, self.group)
        return pool_positions(attention * largest, self.kernel, self.pooling, inside)

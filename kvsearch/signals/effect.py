"""What an answer loses when one layer may no longer see the context: the unit in which layers are compared.

Attention norms differ between layers for reasons that do not reach the output. The effect is measured instead: one more
pass over the K question and answer tokens for every layer, on the stored context, so it costs L * K token-layers more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def divergence(full: Tensor, changed: Tensor) -> float:
    """Kullback-Leibler divergence of the changed from the full next-token distributions, summed over rows, in nats.

    Both are logits [rows, vocabulary].
    """
    expected, got = full.float().log_softmax(-1), changed.float().log_softmax(-1)
    return float((expected.exp() * (expected - got)).sum().clamp(min=0))


def layer_effects(full: Tensor, without: Callable[[int, Tensor], Tensor], protected: Tensor) -> Tensor:
    """Divergence of the answer when layer l keeps only its protected entries, all other layers everything, [L] fp32.

    `full` are the answer's logits under the full cache, [rows, vocabulary]; `without(l, keep)` those when layer l sees
    the context entries `keep` [Hkv, T] bool only; `protected` is [L, Hkv, T] bool.
    """
    return torch.tensor([divergence(full, without(layer, keep)) for layer, keep in enumerate(protected)])

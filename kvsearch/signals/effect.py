"""What an answer loses when one layer may no longer see the context: the unit in which layers are compared.

Attention norms differ between layers for reasons that do not reach the output. The effect is measured instead: one more
pass over the K question and answer tokens for every layer, on the stored context, so it costs L * K token-layers more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvsearch.signals.perplexity import Floats, sum_answers


def divergence(full: Tensor, changed: Tensor) -> float:
    """Return the divergence KL(full || changed) of next-token distributions, summed over rows, in nats.

    Both are logits [rows, vocabulary].
    """
    return float(_terms(full.float().log_softmax(-1), changed).sum().clamp(min=0))


def answer_divergences(full: Tensor, changed: Tensor, answers: Tensor) -> Floats:
    """Sum the divergences KL(full || changed) over the rows that predict answers [S, R], -1 where there is none, [S].

    `full` are log-probabilities, `changed` logits, [S, R, vocabulary].
    """
    return sum_answers(_terms(full.to(changed.device), changed).sum(-1), answers)


def _terms(full: Tensor, changed: Tensor) -> Tensor:
    """Return what each token of the vocabulary adds, by log-probabilities and logits."""
    return full.exp() * (full - changed.float().log_softmax(-1))


def layer_effects(full: Tensor, without: Callable[[int, Tensor], Tensor], protected: Tensor) -> Tensor:
    """Return what the answer diverges by when only layer l is reduced to its protected entries, [L] fp32.

    `full` are the answer's logits under the full cache, [rows, vocabulary]; `without(l, keep)` those when layer l sees
    the context entries `keep` [Hkv, T] bool only; `protected` is [L, Hkv, T] bool.
    """
    return torch.tensor([divergence(full, without(layer, keep)) for layer, keep in enumerate(protected)])

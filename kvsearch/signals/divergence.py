"""How far next-token distributions move when a cache evicts: Kullback-Leibler divergence from the full cache."""

from __future__ import annotations

from torch import Tensor

from kvsearch.arrays import Floats
from kvsearch.signals.perplexity import sum_answers


def divergence(full: Tensor, changed: Tensor) -> float:
    """Return the divergence KL(full || changed) of next-token distributions, summed over rows, in nats.

    Both are logits [rows, vocabulary].
    """
    return float(_terms(full.float().log_softmax(-1), changed).sum().clamp(min=0))


def total_variation(full: Tensor, changed: Tensor) -> float:
    """Return the total variation of next-token distributions, 1/2 sum |p - q|, mean over rows, in [0, 1].

    Unlike the divergence it has a bound: a reply that is lost for certain weighs as much as one that is just lost.
    Both are logits [rows, vocabulary].
    """
    moved = (full.float().softmax(-1) - changed.float().softmax(-1)).abs().sum(-1) / 2
    return float(moved.mean())


def answer_divergences(full: Tensor, changed: Tensor, answers: Tensor) -> Floats:
    """Sum the divergences KL(full || changed) over the rows that predict answers [S, R], -1 where there is none, [S].

    `full` are log-probabilities, `changed` logits, [S, R, vocabulary].
    """
    return sum_answers(_terms(full.to(changed.device), changed).sum(-1), answers)


def _terms(full: Tensor, changed: Tensor) -> Tensor:
    """Return what each token of the vocabulary adds, by log-probabilities and logits."""
    return full.exp() * (full - changed.float().log_softmax(-1))

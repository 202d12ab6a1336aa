"""Losses of a model on target tokens, and distances of its next-token distributions.

PolyKV (arXiv 2606.15157, Eq. 3) compares perplexity, exp of the mean loss, with and without eviction. Means and
differences are left to the caller, in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvsearch.core.arrays import Floats

PREDICTION_SCRATCH_BYTES = 64 * 2**20


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return -log p of `targets` [K] or [..., K] under `logits` [..., K, V], in nats, [..., K] fp32.

    The row of a target is the one that predicts it. fp32 logits are made of a few rows at a time.

    Examples:
        >>> logits = torch.tensor([[0.0, 0.0], [0.0, 2.0]])
        >>> token_losses(logits, torch.tensor([0, 1]))
        tensor([0.6931, 0.1269])
    """
    wanted = targets.to(logits.device).expand(logits.shape[:-1]).reshape(-1, 1)
    rows = logits.flatten(0, -2)
    # fp32 logits of a large vocabulary would take more than the pass itself.
    step = max(1, PREDICTION_SCRATCH_BYTES // (8 * rows.shape[-1]))
    losses = [
        -part.float().log_softmax(-1).gather(-1, chosen)
        for part, chosen in zip(torch.split(rows, step), torch.split(wanted, step), strict=True)
    ]
    return torch.cat(losses).reshape(logits.shape[:-1])


def compute_log_odds(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute log p / (1 - p) of `targets` [K] under `logits` [K, V], in nats, [K] fp32."""
    scores = logits.float()
    wanted = targets.to(logits.device)[:, None]
    # log p - log(1 - p) from logits: 1 - p itself is 0 in fp32 where the model is sure.
    others = scores.scatter(-1, wanted, float("-inf")).logsumexp(-1)
    return scores.gather(-1, wanted)[:, 0] - others


def sum_answer_losses(logits: Tensor, answers: Tensor) -> Floats:
    """Sum the negative log-likelihoods of answers over their tokens, in nats, [S].

    Logits are [S, R, V], in the rows that predict the answers [S, R]; -1 where there is no token.
    """
    scores = logits.float()
    answers = answers.to(logits.device)
    picked = scores.gather(-1, answers.clamp(min=0)[..., None])[..., 0]
    # not `token_losses`, whose last bits differ: the ledgers and plans of searches hold on to these
    losses = (scores.logsumexp(-1) - picked).double().masked_fill(answers.to(scores.device) < 0, 0.0)
    sums: Floats = losses.sum(-1).cpu().numpy()
    return sums


def compute_total_variation(full: Tensor, changed: Tensor) -> float:
    """Compute the total variation of next-token distributions, 1/2 sum |p - q|, mean over rows, in [0, 1].

    Unlike a divergence it has a bound: a reply that is lost for certain weighs as much as one that is just lost.
    Both are logits [rows, vocabulary].
    """
    moved = (full.float().softmax(-1) - changed.float().softmax(-1)).abs().sum(-1) / 2
    return float(moved.mean())

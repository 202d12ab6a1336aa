"""How scattered the attention of a layer is: PolyKV's budget signal (arXiv 2606.15157, Eq. 4), and CAKE's preference.

Eq. 4 is the entropy of the mean row, which is high for two heads that look at one place each. The mean of the rows'
entropies is low for them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvsearch.policies.base import Observation
from kvsearch.policies.cake import row_moments
from kvsearch.policies.scoring import column_sums, window_rows, window_size
from kvsearch.signals.attention_rows import attention_rows, score_rows

TINY = 1e-10  # added inside the logarithm, as in the official code


def row_entropy(
    query: Tensor,
    keys: Tensor,
    scaling: float,
    softcap: float | None,
    valid: Tensor,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the entropy of attention rows as a share of the largest possible, mean over heads and rows, [B] fp32.

    `query` [B, Hq, K, D] are the last K of the N tokens of `keys` [B, Hkv, N, D]; `valid` [B, N] is False where there
    is padding. The largest possible is the logarithm of how many keys the row sees. A row that sees one
    key has no choice, so it is left out, and so are rows of padding; 0 if no row is left.
    """
    # how many keys each row sees, [B, K]; 0 for rows of padding
    seen = valid.cumsum(-1).masked_fill(~valid, 0)[:, keys.shape[2] - query.shape[2] :]
    counted = seen > 1
    total = query.new_zeros(len(query), dtype=torch.float32)
    for part, scores in score_rows(query, keys, scaling, softcap, tables=3, valid=valid):
        attention = attention_rows(scores, part, sinks)
        entropy = torch.special.entr(attention).sum(-1)  # 0 log 0 is 0
        share = entropy / seen.clamp(min=2).log()[:, None, None]
        total += share.masked_fill(~counted[:, None, None], 0).sum((1, 2, 3))
    rows = counted.sum(-1) * query.shape[1]
    return (total / rows.clamp(min=1)).clamp(0, 1)


def mean_row(
    query: Tensor,
    keys: Tensor,
    scaling: float,
    softcap: float | None,
    valid: Tensor,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention to every key, the mean over heads and rows, [B, N] fp32; arguments as in `row_entropy`.

    It adds up to 1, less what `sinks` take. Rows of padding are left out; 0 everywhere if no row is left.
    """
    rows = valid[:, keys.shape[2] - query.shape[2] :].sum(-1, keepdim=True)
    return column_sums(query, keys, valid, scaling, softcap, sinks).mean(1) / rows.clamp(min=1)


def mean_entropy(mean: Tensor) -> float:
    """Return the entropy in nats of the attention to each key position, `mean` [N] (Eq. 4).

    What sinks take is at no position: it is left out, and the rest is not made to add up to 1.
    """
    return float(torch.special.entr(mean.double()).sum())


def dispersion(observation: Observation, window: int) -> tuple[Tensor, Tensor]:
    """Return entropy and variance of the attention of the last `window` real rows to what came before them, [B] each.

    Entropy is -sum a * log(a + 1e-10), the mean over the rows, variance the unbiased variance of a over the rows, both
    summed over query heads and candidates, fp32 (CAKE, arXiv 2503.12491, Eq. 5 and 6 as in the official code: the
    window's own columns are left out and the rest is not normalised again; the code adds the rows up, which is the same
    where all layers have as many). Where there is no candidate both are 0.
    """
    inside = observation.candidates(0, window)
    outside = ~inside[:, None, None, None]
    entropy = observation.keys.new_zeros(len(inside), dtype=torch.float32)
    for (some, _), probability in window_rows(observation, window):
        terms = (
            probability.add(TINY)
            .log_()
            .mul_(probability)
            .masked_fill_(outside[some, ..., : probability.shape[-1]], 0.0)
        )
        entropy[some] -= terms.sum((1, 2, 3, 4))
    variance = row_moments(observation, window)[1].masked_fill(~inside[:, None, None], 0.0).sum((1, 2, 3))
    return entropy.clamp(min=0.0) / window_size(observation, window), variance

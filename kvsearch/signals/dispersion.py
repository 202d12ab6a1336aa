"""How scattered the attention of a layer's last queries is, and how much it shifts between them (CAKE)."""

from __future__ import annotations

from kvsearch.policies.base import Observation
from kvsearch.policies.cake import row_moments
from kvsearch.policies.scoring import window_rows, window_size
from kvsearch.policies.tensors import Tensor, torch

TINY = 1e-10  # added inside the logarithm, as in the official code


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

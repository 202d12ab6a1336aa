"""How far the output of an attention block moves when its layer evicts: PolyKV's routing signal, arXiv 2606.15157."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Agreement(NamedTuple):
    """How well two attention outputs agree, per token, [..., K] fp32 each."""

    cosine: Tensor  # 1 where they point the same way
    error: Tensor  # |full - changed| / |full|, 0 where they are equal


def output_agreement(full: Tensor, changed: Tensor) -> Agreement:
    """Compare attention outputs [..., K, d_model] after W_O, which broadcast: cosine (Eq. 2) and relative L2 distance.

    Outputs are compared before the residual is added: it would make every cosine nearly 1. All is computed in fp32.
    Equal vectors have cosine 1 and error 0 exactly, two zero vectors too. Of one zero vector the cosine is 0; the error
    is 1 whichever of the two is zero, as there is nothing to measure a change of nothing against.
    """
    first, second = full.float(), changed.float()
    length, other = torch.linalg.vector_norm(first, dim=-1), torch.linalg.vector_norm(second, dim=-1)
    distance = torch.linalg.vector_norm(first - second, dim=-1)
    product = (first * second).sum(-1)
    cosine = (product / length / other).clamp(-1, 1)  # one after the other: their product can overflow
    error = distance / length
    nothing, gone = length == 0, other == 0
    cosine = cosine.masked_fill(nothing | gone, 0.0)
    error = torch.where(nothing, 1.0, error)
    equal = (distance == 0) | (nothing & gone)
    return Agreement(cosine.masked_fill(equal, 1.0), error.masked_fill(equal, 0.0))

"""Norms of values behind the output projection: how far an entry can move the layer's output."""

from __future__ import annotations

from kvsearch.policies.base import Norm
from kvsearch.policies.scoring import SCRATCH_BYTES
from kvsearch.policies.tensors import Tensor, torch


def projected_norms(values: Tensor, output_weight: Tensor, order: Norm) -> Tensor:
    """Return |v_i W_O[q]|, L1 or L2 by `order`, of every entry under each query head of its group, [B, Hkv, G, T] fp32.

    `values` is [B, Hkv, T, Dv], `output_weight` [Hq, Dv, d_model]. L2 norms come from the Gram matrix W W^T, so that
    each costs Dv^2 instead of Dv * d_model. Works on one query head and a few entries at a time: nothing of size
    T x d_model is made.
    """
    batch, heads, length, dim = values.shape
    weight = output_weight.float()
    factors = weight @ weight.transpose(-1, -2) if order == "l2" else weight
    factors = factors.reshape(heads, -1, dim, factors.shape[-1])
    norms = values.new_empty(batch, heads, factors.shape[1], length, dtype=torch.float32)
    step = max(1, SCRATCH_BYTES // (4 * batch * (dim + factors.shape[-1])))
    for head, group in enumerate(factors):
        for first in range(0, length, step):
            part = slice(first, first + step)
            states = values[:, head, part].float()
            for member, factor in enumerate(group):
                product = states @ factor  # v W, or v W W^T
                if order == "l1":
                    norms[:, head, member, part] = torch.linalg.vector_norm(product, ord=1, dim=-1)
                else:  # rounding may leave a square just below zero
                    norms[:, head, member, part] = product.mul_(states).sum(-1).clamp(min=0).sqrt()
    return norms

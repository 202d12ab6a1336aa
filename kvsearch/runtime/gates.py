"""Attention through gates: how much of a prompt's entries tokens see, from all of it to nothing, differentiably."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kvsearch.runtime.attention import causal_mask
from kvsearch.runtime.logits import Logits

HELD_LOGITS = 2**21  # of a layer that are held for the backward pass: 8 MiB, several times


def gated_attention(states: tuple[Tensor, Tensor, Tensor], keep: Tensor, gates: Tensor, logits: Logits) -> Tensor:
    """Attend with K tokens to a prompt of T tokens through gates; [1, K, Hq, Dv].

    `states` are the tokens' queries [1, Hq, K, D], and keys [1, Hkv, T + K, D] and values [1, Hkv, T + K, Dv] of prompt
    and tokens. `keep` [Hkv, T] bool are entries without a gate; every other entry gets its share of attention times its
    gate, [Hkv, T] in [0, 1], and what the gates hold back goes to the entries without one, in proportion. So gates of 1
    are the full cache, gates of 0 a cache without these entries, and the output is linear in between.

    Where it is large, backward passes compute attention again, so that no more than one layer's is there at a time.
    """
    query, keys, _ = states
    if query.shape[1] * query.shape[2] * keys.shape[2] <= HELD_LOGITS:
        return _gated(*states, keep, gates, logits)
    output: Tensor = checkpoint(_gated, *states, keep, gates, logits, use_reentrant=False)
    return output


def _gated(query: Tensor, keys: Tensor, values: Tensor, keep: Tensor, gates: Tensor, how: Logits) -> Tensor:
    heads, rows, length = keys.shape[1], query.shape[2], keep.shape[1]
    scores = how.of(query.reshape(heads, -1, query.shape[-1]), keys[0]).view(heads, -1, rows, keys.shape[2])
    own = causal_mask(rows, rows, query.device)[None, None]
    everyone = torch.arange(heads, device=query.device)

    def attention(prompt: Tensor) -> Tensor:
        shown = torch.cat([prompt[:, None, None].expand(-1, 1, rows, -1), own.expand(heads, -1, -1, -1)], -1)
        return how.softmax(scores.masked_fill(~shown, float("-inf")), everyone)

    through = attention(torch.ones_like(keep))[..., :length] * gates.masked_fill(keep, 0.0)[:, None, None]
    weights = attention(keep) * (1 - through.sum(-1, keepdim=True))
    weights = torch.cat([weights[..., :length] + through, weights[..., length:]], -1)
    output = weights.flatten(1, 2).to(values.dtype) @ values[0]
    return output.reshape(1, query.shape[1], rows, -1).transpose(1, 2)

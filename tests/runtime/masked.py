"""Eviction as it is meant, without a smaller cache: full attention by the model's own code, evicted keys masked.

It shares nothing with ragged storage, so what a plan makes of a model is held against it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from kvsearch.runtime.attention import Output, using

REFERENCE = "kvsearch_masked"
_evicted: dict[int, Tensor] = {}  # by model layer, [B, Hkv, T] bool: the entries of the prompt that are not seen


def _masked_eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> Output:
    index: Any = module.layer_idx
    evicted = _evicted.get(index)
    if evicted is not None and key.shape[2] > evicted.shape[2]:
        bias = torch.zeros(*evicted.shape[:2], 1, key.shape[2], device=key.device)
        bias[:, :, 0, : evicted.shape[2]].masked_fill_(evicted.to(key.device), float("-inf"))
        bias = bias.repeat_interleave(query.shape[1] // key.shape[1], 1)
        mask = bias if mask is None else mask + bias
    output: Output = sys.modules[type(module).__module__].eager_attention_forward(
        module, query, key, value, mask, **kwargs
    )
    return output


def hide(kept: Mapping[int, Tensor]) -> None:
    """From now on, of the columns [B, Hkv, T] bool of each layer, only the `kept` ones are seen."""
    _evicted.update({layer: ~chosen for layer, chosen in kept.items()})


@contextmanager
def masked(model: Any, kept: Mapping[int, Tensor]) -> Iterator[None]:
    """Let `model` see of its prompt only what is `kept` in each layer, once the prompt has passed."""
    hide(kept)
    try:
        with using(model, REFERENCE):
            yield
    finally:
        _evicted.clear()


AttentionInterface.register(REFERENCE, _masked_eager)
AttentionMaskInterface.register(REFERENCE, eager_mask)

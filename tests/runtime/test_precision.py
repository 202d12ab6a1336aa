"""Half precision: logits are summed and kept in fp32, however large, and outputs are as exact as SDPA's."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kvsearch.runtime.attention import make_causal_mask
from kvsearch.runtime.logits import Logits
from kvsearch.search.bank.passes import VisibleKV, attend_prefix
from tests.combinations import in_turn
from tests.runtime.layers import Layer, Scene
from tests.runtime.policies import FIRST, KINDS, SMALL, policies_of

HALF = [torch.float16, torch.bfloat16]
EXACT = {torch.float16: 4e-3, torch.bfloat16: 1e-2}  # of outputs
SCENE = Scene(heads=2, group=2, length=14, pads=(0, 3), tokens=6, budgets=(7, 10), seed=0)
LARGE = 260.0  # in all keys and queries, as biases make it: every product is beyond what fp16 holds


def layer(dtype: torch.dtype, scene: Scene = SCENE) -> Layer:
    """A layer whose keys and queries all have the same large number in their first place."""
    made = Layer(scene)
    made.query[..., 0] = made.key[..., 0] = LARGE
    made.query, made.key, made.value = (tensor.to(dtype) for tensor in (made.query, made.key, made.value))
    return made


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


@in_turn(name=policies_of(FIRST[kind] for kind in KINDS), dtype=HALF)
def test_nothing_evicted_is_sdpa(name: str, dtype: torch.dtype) -> None:
    scene = replace(SCENE, budgets=(40, 40), pads=(0,))
    made, policy = layer(dtype, scene), SMALL[name]
    observation = made.observation(policy)
    states = [tensor.repeat_interleave(heads, 1) for tensor, heads in ((made.query, 1), (made.key, 2), (made.value, 2))]
    mask = make_causal_mask(scene.tokens, scene.length + scene.tokens, made.key.device)
    query = states[0][:, :, scene.length :]
    expected = F.scaled_dot_product_attention(query, *states[1:], attn_mask=mask, scale=made.logits.scaling).double()
    exact = F.scaled_dot_product_attention(
        *(tensor.double() for tensor in (query, *states[1:])), attn_mask=mask, scale=made.logits.scaling
    )
    rule, followed = made.rule(policy), made.followed(observation)
    replayed = [followed.replay(rule, decode).outputs for decode in (rule, None)]
    for outputs in (made.decode(policy, policy)[0], *replayed):
        assert error(outputs, exact) < EXACT[dtype]
        assert error(outputs, expected) < 2 * EXACT[dtype]


@in_turn(dtype=HALF, softcap=[None, 50.0])
def test_candidates_of_a_bank(dtype: torch.dtype, softcap: float | None) -> None:
    made = layer(dtype)
    query, keys, values = (tensor[:1] for tensor in (made.query[:, :, -1:], made.key, made.value))
    logits = Logits(made.logits.scaling, softcap)
    parts = [VisibleKV(keys[:, :, part], values[:, :, part], None) for part in (slice(14), slice(14, None))]
    found = attend_prefix(query, parts[0], parts[1], logits, slice(0, 2))
    scores = query.double().view(2, 2, -1) @ keys[0].double().transpose(-1, -2) * logits.scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    expected = (scores.softmax(-1) @ values[0].double()).view_as(found)
    assert error(found, expected) < EXACT[dtype]

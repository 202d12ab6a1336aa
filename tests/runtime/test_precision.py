"""Half precision: logits are summed and kept in fp32, however large, and outputs are as exact as SDPA's."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvsearch.runtime.attention import make_causal_mask
from kvsearch.runtime.decode.decoding import Decoding
from kvsearch.runtime.eviction import evict
from kvsearch.runtime.logits import Logits, multiply
from kvsearch.search.bank.passes import VisibleKV, attend_prefix
from kvsearch.testing.policy_contract import DIM
from tests.combinations import in_turn
from tests.runtime.layers import Layer, Scene
from tests.runtime.policies import SMALL, policies_of

HALF = [torch.float16, torch.bfloat16]
EXACT = {torch.float16: 4e-3, torch.bfloat16: 1e-2}  # of outputs
SCENE = Scene(heads=2, group=2, length=14, pads=(0, 3), tokens=6, budgets=(7, 10), seed=0)
LARGE = 260.0  # in all keys and queries, as biases make it: every product is beyond what fp16 holds


def layer(dtype: torch.dtype, scene: Scene = SCENE, large: float = LARGE) -> Layer:
    """A layer whose keys and queries all have the same large number in their first place."""
    made = Layer(scene)
    made.query[..., 0] = made.key[..., 0] = large
    made.query, made.key, made.value = (tensor.to(dtype) for tensor in (made.query, made.key, made.value))
    return made


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("dtype", HALF)
def test_products_do_not_overflow_and_are_not_rounded(dtype: torch.dtype) -> None:
    query, keys = (torch.randn(5, rows, 64).to(dtype) * 100 for rows in (3, 40))
    found = multiply(query, keys, 1.0)
    exact = query.double() @ keys.double().transpose(-1, -2)
    assert found.dtype == torch.float32
    assert float(exact.abs().max()) > torch.finfo(torch.float16).max
    assert error(found, exact) < 1e-6
    nested = multiply(query.view(5, 1, 3, 64), keys.view(5, 1, 40, 64), 1.0)
    assert torch.equal(nested[:, 0], found)


class OnCuda(Tensor):
    is_cuda = True


def test_products_on_cuda_ask_for_what_torch_2_8_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """There `baddbmm(out_dtype=)` wants what is added in the shape of the result; `bmm` has nothing added."""
    added, plain = torch.randn(5, 1, 40), torch.bmm
    query, keys = (torch.randn(5, rows, 64).half().as_subclass(OnCuda) for rows in (3, 40))
    monkeypatch.setattr(torch, "bmm", lambda one, other, out_dtype: plain(one.to(out_dtype), other.to(out_dtype)))
    expected = query.double() @ keys.double().transpose(-1, -2) * 0.5
    assert error(multiply(query, keys, 0.5), expected) < 1e-6
    assert error(multiply(query, keys, 0.5, added), expected + added) < 1e-6


@in_turn(name=policies_of(), dtype=HALF)
def test_outputs_while_decoding(name: str, dtype: torch.dtype) -> None:
    policy, made = SMALL[name], layer(dtype)
    observation = made.observation(policy)
    holder = evict(observation, made.rule(policy), made.rule(policy))
    for index, (query, key, value) in enumerate(zip(*(t.split(1, 2) for t in made.tokens()), strict=True)):
        expected = _next_outputs(holder, query, key, value, made.logits)
        positions = made.valid.sum(-1, keepdim=True) + index
        output = holder.attend(query, key, value, positions, made.logits)
        assert output.dtype == dtype
        assert error(output[:, :, 0], expected) < EXACT[dtype]


def _next_outputs(holder: Decoding, query: Tensor, key: Tensor, value: Tensor, logits: Logits) -> Tensor:
    """What the next token attends to: all that is held now, merged as it may be, and itself; [B, Hq, Dv] fp64."""
    own = [tensor.flatten(0, 1) for tensor in (query, key, value)]
    outputs = torch.empty(query.shape[0] * query.shape[1] // 2, 2, value.shape[-1], dtype=torch.float64)
    for block in holder.blocks:
        cached, names = block.cached, torch.as_tensor(block.names)
        keys, values = (
            torch.cat([held, new[names]], 1) for held, new in zip((cached.keys, cached.values), own[1:], strict=True)
        )
        shown = F.pad(cached.held, (0, 1), value=True)
        scores = own[0].view(-1, 2, DIM)[names].double() @ keys.double().transpose(-1, -2) * logits.scaling
        outputs[names] = scores.masked_fill(~shown[:, None], -torch.inf).softmax(-1) @ values.double()
    return outputs.view(len(query), -1, value.shape[-1])


@in_turn(name=policies_of(), dtype=HALF)
def test_scores_of_a_prompt(name: str, dtype: torch.dtype) -> None:
    """Scored in half precision or in fp32, a prompt of the same numbers has the same scores."""
    made = layer(dtype, large=10.0)
    seen = made.observation(SMALL[name])
    whole = copy.copy(made)
    whole.query, whole.key, whole.value = made.query.float(), made.key.float(), made.value.float()
    found, expected = (SMALL[name].score(one) for one in (seen, whole.observation(SMALL[name])))
    shown = made.valid[:, None].expand_as(found) & expected.isfinite()
    assert torch.allclose(found[shown], expected[shown], rtol=1e-4, atol=1e-6)


@in_turn(name=policies_of(), dtype=HALF)
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


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("softcap", [None, 50.0])
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

"""The query bank: what stored queries attend to, with every state at position 0."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.calibration.probe.bank import choose_by_k_means, choose_farthest
from kvsearch.core.errors import UsageError
from kvsearch.models.architecture import unrotate
from kvsearch.testing.policy_contract import DIM, rope
from tests import tiny
from tests.policies.probes import bank
from tests.policies.test_probe import scored_while_decoding
from tests.runtime.layers import Layer, Scene

QUERIES = np.random.default_rng(3).normal(size=(1, 2, 2, 5, DIM))  # 2 kv heads of 2 query heads, 5 queries each


def plain_key(layer: Layer, row: int, head: int, column: int) -> np.ndarray:
    """A key turned back to position 0."""
    position = torch.tensor([column - layer.scene.pads[row]])
    cos, sin = (table[None] for table in rope(position))
    found: np.ndarray = unrotate(layer.key[row : row + 1, head : head + 1, column : column + 1], cos, sin).numpy()
    return found[0, 0, 0].astype(float)


def norms(layer: Layer, row: int, head: int, column: int) -> np.ndarray:
    """|v W_O| under the query heads of a kv head, [G]."""
    weight = layer.module.o_proj.weight.detach().double().numpy()  # [out, Hq * D]
    value = layer.value[row, head, column].double().numpy()
    group = layer.scene.group
    heads = range(head * group, (head + 1) * group)
    return np.array([np.linalg.norm(weight[:, q * DIM : (q + 1) * DIM] @ value) for q in heads])


def test_the_score_is_the_largest_attention_of_the_bank_times_the_projected_norm() -> None:
    layer = Layer(Scene(2, 2, 9, (0, 3), 1, (4, 4), 0))
    policy = bank(QUERIES, layers=(3,))
    found = policy.score(layer.observation(policy))
    for row, pads in enumerate((0, 3)):
        for head in range(2):
            keys = np.stack([plain_key(layer, row, head, column) for column in range(pads, 9)])
            logits = QUERIES[0, head] @ keys.T * DIM**-0.5  # [G, N, T]
            weights = np.exp(logits)
            weights /= weights.sum(-1, keepdims=True)
            worth = np.stack([norms(layer, row, head, column) for column in range(pads, 9)], -1)
            wanted = (weights * worth[:, None]).sum(0).max(0)
            np.testing.assert_allclose(found[row, head, pads:].detach().numpy(), wanted, rtol=1e-4)
            assert not found[row, head, :pads].any()


def test_heads_that_are_even_spread_their_mean_score_over_the_places() -> None:
    """Of the second head alone; while decoding, too. The mean is over the entries that are ranked."""
    scene = Scene(2, 2, 9, (0, 2), 4, (20, 20), 5)
    plain, even = (bank(QUERIES, layers=(3,), sinks=1, protect=1, even=marks) for marks in ([[0, 0]], [[0, 1]]))
    layer, found = scored_while_decoding(even, scene)
    scores = plain.score(layer.observation(plain))
    for (row, head), held in found.items():
        pads = scene.pads[row]
        mean = scores[row, head, pads + 1 : 8].mean().item()
        for position, score in held.items():
            if head == 1:
                assert score == pytest.approx(2 * mean * (position * (5**0.5 - 1) / 2 % 1), rel=1e-4, abs=1e-7)
            elif position < 9 - pads:
                assert score == pytest.approx(scores[row, head, position + pads].item(), rel=1e-4)


def test_a_new_token_is_scored_among_the_prompt_and_itself() -> None:
    scene = Scene(2, 2, 9, (0, 2), 4, (20, 20), 5)
    layer, found = scored_while_decoding(bank(QUERIES, layers=(3,), sinks=0, protect=1), scene)
    for (row, head), scores in found.items():
        pads = scene.pads[row]
        assert set(scores) == set(range(13 - pads))
        prompt = np.stack([plain_key(layer, row, head, column) for column in range(pads, 9)])
        for position in range(9 - pads, 13 - pads):
            key = plain_key(layer, row, head, position + pads)
            logits = QUERIES[0, head] @ np.concatenate([prompt, key[None]]).T * DIM**-0.5
            taken = np.exp(logits[..., -1]) / np.exp(logits).sum(-1)  # [G, N]
            wanted = (taken * norms(layer, row, head, position + pads)[:, None]).sum(0).max()
            assert scores[position] == pytest.approx(wanted, rel=1e-3)


def test_learned_sinks_take_their_share() -> None:
    layer = Layer(Scene(1, 1, 6, (0,), 1, (4,), 0))
    policy = bank(QUERIES[:, :1, :1], layers=(3,))
    seen = layer.observation(policy)
    strong = dataclasses.replace(seen, sinks=torch.full((1, 1), 20.0))
    assert float(policy.score(strong).sum()) < 1e-4 * float(policy.score(seen).sum())
    assert float(policy.start(strong).heads["normaliser"].min()) == pytest.approx(20, abs=1e-3)


def test_what_the_rotary_embedding_multiplies_by_counts() -> None:
    """YaRN scales its tables: logits of queries and keys at one place have the square of that."""
    layer, times = Layer(Scene(1, 2, 6, (0,), 1, (4,), 0)), 1.5
    policy = bank(QUERIES[:, :1], layers=(3,))
    seen = layer.observation(policy)

    def scaled(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = rope(positions)
        return cos * times, sin * times

    larger = dataclasses.replace(seen, rotary=scaled, keys=seen.keys * times)
    wanted = bank(QUERIES[:, :1] * times**2, layers=(3,)).score(seen)
    torch.testing.assert_close(policy.score(larger), wanted, rtol=1e-4, atol=1e-6)


def test_weights_that_cannot_be_used() -> None:
    layer = Layer(Scene(1, 1, 6, (0,), 1, (4,), 0))
    with pytest.raises(UsageError, match="its weights are for 2 query heads of every kv head, and this model has 1"):
        bank(QUERIES[:, :1], layers=(3,)).score(layer.observation(bank()))
    with pytest.raises(UsageError, match=r"queries has shape \[1, 2, 2, 5\], not \[1, 2, G, N, 5\]; fit them again"):
        bank(QUERIES[..., 0], layers=(3,)).check_model(tiny.loaded().fingerprint)


@given(st.integers(1, 12), st.integers(1, 8), st.integers(0, 99))
def test_a_bank_is_chosen_of_the_queries(tokens: int, count: int, seed: int) -> None:
    """Every query of it is one of those given, of the same token in all query heads; none is there twice."""
    queries = torch.randn(1, 2, 2, tokens, 3, generator=torch.Generator().manual_seed(seed))
    apart_most = choose_farthest(queries, count)
    for found in (apart_most, choose_by_k_means(queries, apart_most)):
        assert found.shape == (1, 2, 2, min(count, tokens), 3)
        for head in range(2):
            apart = (found[0, head, :, :, None] - queries[0, head, :, None]).abs().amax((0, -1))  # [N, M]
            assert (apart.amin(-1) == 0).all()
            if found is apart_most:
                assert len(set(apart.argmin(-1).tolist())) == min(count, tokens)
    # two clusters and one far point: the far one first, and centres are of the clusters
    line = torch.tensor([0.0, 0.1, 0.2, 5.0, 5.1, 5.2, 20.0]).view(1, 1, 1, -1, 1)
    assert choose_farthest(line, 3).flatten().tolist() == pytest.approx([20, 0, 5.2])
    centres = choose_by_k_means(line, choose_farthest(line, 3)).flatten()
    assert sorted(centres.tolist()) == pytest.approx([0.1, 5.1, 20])

"""The fitted ranking: what it looks at, and what it makes of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.models.architecture import unrotate
from kvsearch.policies import Observation, Policy, create_policy
from kvsearch.policies.probe import FEATURES, SINKS, WINDOW, Probe, features_of
from kvsearch.runtime.collector import unrotate_queries
from kvsearch.testing.policy_contract import DIM, rope
from tests import tiny
from tests.policies.probes import fitted, ranking
from tests.runtime.layers import Layer, Scene


def observation(length: int = 20) -> Observation:
    layer = Layer(Scene(2, 2, length, (0, 3), 1, (4, 4), 0))
    return layer.observation(fitted(ranking(FEATURES, size=13, layers=range(8))))


def test_the_features_of_an_entry() -> None:
    seen = observation()
    found = features_of(seen, FEATURES)
    dim = seen.keys.shape[-1]
    assert found.shape == (*seen.keys.shape[:3], 2 * dim + 5)
    turned = unrotate_queries(seen.keys, seen.index.clamp(min=0), seen.rotary)
    torch.testing.assert_close(found[..., :dim], turned)
    torch.testing.assert_close(found[..., dim : 2 * dim], seen.values)
    torch.testing.assert_close(found[..., 2 * dim].exp(), seen.values.norm(dim=-1), atol=1e-4, rtol=1e-4)
    count = seen.valid.sum(-1)[:, None, None]
    for place, name in ((1, "expected_attention"), (2, "snapkv")):
        params = {"sinks": SINKS} if place == 1 else {"sinks": SINKS, "window": WINDOW}
        score = create_policy(name, params).score(seen).clamp(min=0)
        torch.testing.assert_close(found[..., 2 * dim + place], (score * count + 1e-8).log())
    torch.testing.assert_close(found[..., -2], create_policy("keydiff", {"sinks": SINKS}).score(seen))
    places = (seen.index.clamp(min=0).double() * (5**0.5 - 1) / 2 % 1).float()
    torch.testing.assert_close(found[..., -1], places[:, None].expand(found.shape[:3]))


def test_the_score_is_the_exponential_of_a_small_network() -> None:
    profile = ranking(("value_norm", "keydiff"), width=3, heads=2, layers=(3,))
    seen = observation()
    found = fitted(profile).score(seen)
    x, a = features_of(seen, ("value_norm", "keydiff")).double().numpy(), profile.arrays
    for head in range(2):
        z = (x[:, head] - a["center"][0, head]) / a["scale"][0, head]
        inner = z @ a["hidden"][0, head] + a["hidden_bias"][0, head]
        gelu = inner * 0.5 * (1 + np.vectorize(math.erf)(inner / math.sqrt(2)))
        wanted = z @ a["linear"][0, head] + gelu @ a["output"][0, head] + a["bias"][0, head]
        np.testing.assert_allclose(found[:, head].numpy(), np.exp(wanted), rtol=1e-4)


def test_weights_that_cannot_be_used() -> None:
    with pytest.raises(UsageError, match=r"the weights 0000.* are not here: they lie in a file beside the plan"):
        create_policy("probe", {"weights": "0" * 64}).needs()
    with pytest.raises(UsageError, match="weights is the SHA-256 of a file"):
        Probe("mine")
    with pytest.raises(UsageError, match=r"they look at .*'cosmic'.*, and this version knows key, value"):
        fitted(ranking(("keydiff", "cosmic"))).needs()
    with pytest.raises(UsageError, match=r"its weights are for layers \(5,\), not 3"):
        fitted(ranking(layers=(5,))).score(observation())
    other = tiny.loaded().fingerprint
    with pytest.raises(IncompatibleError, match="the fitted ranking of policy probe"):
        fitted().check_model(other)
    fitted(ranking(heads=2, model=other)).check_model(other)


def scored_while_decoding(policy: Policy, scene: Scene) -> tuple[Layer, dict[tuple[int, int], dict[int, float]]]:
    """Decode all tokens of a scene; the scores of what is held at the end by position, for each sequence and head."""
    layer = Layer(scene)
    _, holder = layer.decode(policy, policy)
    found = {}
    for block in holder.blocks:
        for row, name in enumerate(block.names.tolist()):
            cached = block.first(block.width)
            state = next(iter(cached.state.entries.values()))[row]
            pairs = zip(cached.positions[row].tolist(), state.tolist(), strict=True)
            found[divmod(name, scene.heads)] = {position: score for position, score in pairs if position >= 0}
    return layer, found


def test_a_new_token_is_scored_when_it_comes() -> None:
    """By its own head's regression, from its key, value and the cosine to the prompt's mean key."""
    dim = DIM
    profile = ranking(FEATURES, size=2 * dim + 5, heads=2, layers=(3,))
    scene = Scene(2, 2, 9, (0, 2), 4, (20, 20), 5)
    layer, found = scored_while_decoding(fitted(profile, sinks=0, protect=1), scene)
    keys, values, a = layer.key, layer.value, profile.arrays
    prompt = fitted(profile).score(layer.observation(fitted(profile)))
    for (row, head), scores in found.items():
        pads = scene.pads[row]
        assert set(scores) == set(range(13 - pads))
        for position, score in scores.items():
            column = position + pads
            if position < 9 - pads:
                assert score == pytest.approx(float(prompt[row, head, column]), rel=1e-4)
                continue
            cos, sin = (table[None] for table in rope(torch.tensor([position])))
            key = unrotate(keys[row : row + 1, head : head + 1, column : column + 1], cos, sin)[0, 0, 0]
            mean = torch.nn.functional.normalize(keys[row, head, pads:9], dim=-1).mean(0)
            cosine = torch.nn.functional.cosine_similarity(keys[row, head, column], mean, dim=0)
            value = values[row, head, column]
            x = np.concatenate(
                [key, value, [math.log(value.norm() + 1e-8)], [0, 0], [-cosine], [position * (5**0.5 - 1) / 2 % 1]]
            )
            z = (x - a["center"][0, head]) / a["scale"][0, head]
            z[2 * dim + 1 : 2 * dim + 3] = 0
            inner = z @ a["hidden"][0, head] + a["hidden_bias"][0, head]
            gelu = inner * 0.5 * (1 + np.vectorize(math.erf)(inner / math.sqrt(2)))
            wanted = z @ a["linear"][0, head] + gelu @ a["output"][0, head] + a["bias"][0, head]
            assert score == pytest.approx(math.exp(wanted), rel=1e-3)

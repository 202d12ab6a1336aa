"""The fitted ranking: what it looks at, and what it makes of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvsearch.errors import IncompatibleError, UsageError
from kvsearch.policies import Observation, create_policy
from kvsearch.policies.probe import FEATURES, SINKS, WINDOW, Probe, features_of, needs_of
from kvsearch.runtime.collector import plain_queries
from tests import tiny
from tests.policies.probes import fitted, ranking
from tests.runtime.layers import Layer, Scene


def observation(length: int = 20) -> Observation:
    layer = Layer(Scene(2, 2, length, (0, 3), 1, (4, 4), 0))
    return layer.observation(fitted(ranking(FEATURES, size=12, layers=range(8))))


def test_the_features_of_an_entry() -> None:
    seen = observation()
    found = features_of(seen, FEATURES)
    dim = seen.keys.shape[-1]
    assert found.shape == (*seen.keys.shape[:3], 2 * dim + 4)
    assert seen.rotary is not None
    turned = plain_queries(seen.keys, seen.index.clamp(min=0), seen.rotary)
    torch.testing.assert_close(found[..., :dim], turned)
    torch.testing.assert_close(found[..., dim : 2 * dim], seen.values)
    torch.testing.assert_close(found[..., 2 * dim].exp(), seen.values.norm(dim=-1), atol=1e-4, rtol=1e-4)
    count = seen.valid.sum(-1)[:, None, None]
    for place, name in ((1, "expected_attention"), (2, "snapkv")):
        params = {"sinks": SINKS} if place == 1 else {"sinks": SINKS, "window": WINDOW}
        score = create_policy(name, params).score(seen).clamp(min=0)
        torch.testing.assert_close(found[..., 2 * dim + place], (score * count + 1e-8).log())
    torch.testing.assert_close(found[..., -1], create_policy("keydiff", {"sinks": SINKS}).score(seen))


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


def test_a_linear_fit_has_no_hidden_units() -> None:
    arrays = {"linear": [[[2.0]]], "center": [[[0.0]]], "scale": [[[1.0]]], "bias": [[0.0]]}
    profile = ranking(("value_norm",), width=0, layers=(3,), **arrays)
    found = fitted(profile).score(observation())
    torch.testing.assert_close(found, observation().values.norm(dim=-1) ** 2, rtol=1e-3, atol=1e-3)


def test_needs_are_those_of_the_features() -> None:
    assert needs_of(("value", "keydiff")).describe() == []
    assert needs_of(("snapkv",)).query_rows == WINDOW
    assert needs_of(("key",)).query_statistics_from == SINKS  # as its rotary embedding must be undone


def test_weights_that_cannot_be_used() -> None:
    with pytest.raises(UsageError, match=r"the weights 0000.* are not here: they lie in a file beside the plan"):
        create_policy("probe", {"weights": "0" * 64}).needs()
    with pytest.raises(UsageError, match="weights is the SHA-256 of a file"):
        Probe("mine")
    with pytest.raises(UsageError, match=r"its weights are for layers \(5,\), not 3"):
        fitted(ranking(layers=(5,))).score(observation())
    other = tiny.loaded().fingerprint
    with pytest.raises(IncompatibleError, match="the fitted ranking of policy probe"):
        fitted().check_model(other)
    fitted(ranking(model=other)).check_model(other)


def test_protection_is_stated_as_it_is() -> None:
    policy = fitted(protect=0)
    assert policy.parameters()["protect"] == 0
    assert (policy.recent_count, fitted().recent_count) == (0, 8)

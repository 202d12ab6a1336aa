"""Heads of a probe rank by one built-in score alone where that keeps more of the measured importance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvsearch.core.arrays import Floats
from kvsearch.plan import Size
from kvsearch.policies import Policy, create_policy
from kvsearch.policies.probe import SINKS
from kvsearch.policies.ranking import rank_under
from kvsearch.policies.registry import build_policy
from kvsearch.selection.joint import PolicyCurves, make_joint_plan, read_policy_curves
from kvsearch.selection.probe_heads import rank_heads_by_scores
from tests.policies.probes import fitted, ranking
from tests.runtime.layers import Layer, Scene
from tests.selection.test_joint import curve, profile

LAYERS, HEADS = 4, 2
LAYER = 3  # of a head that ranks by a score, and of the observation
RECENT = 1
EXPECTED = {"sinks": SINKS, "window": RECENT}
PROBE = ranking(layers=range(LAYERS), heads=HEADS)


def measured(probe: Floats, expected_attention: Floats, **params: int) -> PolicyCurves:
    """Curves [L, Hkv] of a probe and of ExpectedAttention that find so much in their first tenth."""
    kept = np.array([[[curve(share) for share in heads] for heads in layers] for layers in (probe, expected_attention)])
    policy = fitted(PROBE, sinks=SINKS, protect=RECENT)
    specs = [policy.spec, create_policy("expected_attention", {**EXPECTED, **params}).spec]
    curves = read_policy_curves(profile(kept, *(spec.model_dump() for spec in specs)))
    return replace(curves, rankings={"probe": PROBE})


BETTER_IN_ONE_HEAD = np.full((LAYERS, HEADS), 0.3)
BETTER_IN_ONE_HEAD[LAYER, 1] = 0.9
PROBE_ELSEWHERE = np.full((LAYERS, HEADS), 0.8)
PROBE_ELSEWHERE[LAYER, 1] = 0.4
HARDLY_BETTER = np.where(BETTER_IN_ONE_HEAD == 0.9, PROBE_ELSEWHERE + 1e-4, 0.3)


def scored(policy: Policy) -> torch.Tensor:
    layer = Layer(Scene(HEADS, 2, 40, (0,), 1, (4, 4), 0))
    return rank_under(policy, layer.observation(policy))


def test_the_curves_of_the_probe_are_those_of_its_heads() -> None:
    curves = measured(PROBE_ELSEWHERE, BETTER_IN_ONE_HEAD)
    mixed = rank_heads_by_scores(curves, Size(budget=10))
    of_heads = curves.kept[0].copy()
    of_heads[LAYER, 1] = curves.kept[1, LAYER, 1]
    np.testing.assert_array_equal(mixed.kept, [of_heads, curves.kept[1]])
    before, after = (make_joint_plan(each.select(["probe"]), Size(budget=10)).kept for each in (curves, mixed))
    assert after > before
    (change,) = mixed.rankings["probe"].metadata.provenance.settings["changes"]
    assert change == "heads that rank by one score alone: 1 by expected_attention"


def test_such_a_head_keeps_what_the_policy_of_its_score_keeps() -> None:
    mixed = rank_heads_by_scores(measured(PROBE_ELSEWHERE, BETTER_IN_ONE_HEAD), Size(budget=10))
    probe, expected_attention, before = (
        scored(build_policy(spec)) for spec in (*mixed.policies, fitted(PROBE, sinks=SINKS, protect=RECENT).spec)
    )
    torch.testing.assert_close(probe[:, 1], expected_attention[:, 1])
    torch.testing.assert_close(probe[:, 0], before[:, 0])
    assert not torch.equal(before[:, 1], expected_attention[:, 1])


@pytest.mark.parametrize(
    "curves",
    [
        measured(PROBE_ELSEWHERE, PROBE_ELSEWHERE - 0.1),  # its fit is best everywhere
        measured(PROBE_ELSEWHERE, HARDLY_BETTER),  # next to nothing is won
        measured(PROBE_ELSEWHERE, BETTER_IN_ONE_HEAD, sinks=SINKS + 1),  # it protects others
        replace(measured(PROBE_ELSEWHERE, BETTER_IN_ONE_HEAD), rankings={}),  # the weights are not of this run
    ],
    ids=["worse", "no gain", "protection", "unknown"],
)
def test_a_probe_that_stays_as_it_is(curves: PolicyCurves) -> None:
    assert rank_heads_by_scores(curves, Size(budget=10)) is curves

"""The teacher-forced replay equals decoding token by token: outputs to 1e-5, kept entries exactly."""

from __future__ import annotations

import torch
from hypothesis import given

from kvsearch.policies import Policy
from kvsearch.policies.registry import BUILT_IN
from kvsearch.runtime.replay.replay import Followed, replay
from tests.combinations import every_value
from tests.policies.contract import properties, rope
from tests.policies.probes import example
from tests.runtime.layers import Layer, Scene, held, scenes


@every_value(name=[name for name in BUILT_IN if name not in ("kvzip", "kvzap")], phases=["decode", "both"])
def test_replay_equals_token_by_token(name: str, phases: str) -> None:
    policy = example(name)

    @properties
    @given(scenes())
    def equal(scene: Scene) -> None:
        check(scene, policy if phases == "both" else None, policy)

    equal()


def check(scene: Scene, prefill: Policy | None, decode: Policy) -> None:
    layer = Layer(scene)
    before = [tensor.clone() for tensor in (layer.query, layer.key, layer.value)]
    outputs, holder = layer.decode(prefill, decode)
    used = [policy for policy in (prefill, decode) if policy is not None]
    followed = Followed(layer.observation(*used), layer.tokens(), layer.logits, rope)
    found = replay(followed, prefill and layer.rule(prefill), layer.rule(decode))
    assert found.kept == held(holder)
    assert torch.equal(found.most, holder.most_entries())
    torch.testing.assert_close(found.outputs, outputs, atol=1e-5, rtol=1e-5)
    for tensor, same in zip((layer.query, layer.key, layer.value), before, strict=True):
        assert torch.equal(tensor, same)

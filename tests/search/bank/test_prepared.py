"""Which policies a bank takes, and which it refuses."""

from __future__ import annotations

import pytest

from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.models.loading import LoadedModel
from kvsearch.policies import Policy, create_policy
from kvsearch.search.bank.prepared import resolve_policies
from tests.families import build


@pytest.mark.parametrize(
    ("policy", "problem"),
    [
        (create_policy("d2o"), "layer 0: policy d2o merges what it evicts into what it keeps"),
        (create_policy("full"), "layer 0: policy full never evicts some heads, whatever their budget"),
    ],
)
def test_policies_without_one_order_are_refused(model: LoadedModel, policy: Policy, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        resolve_policies(model.model, policy)


def test_a_policy_in_every_layer(model: LoadedModel) -> None:
    policies = {layer: create_policy("snapkv", {"window": layer + 1}) for layer in (3, 1, 0, 2)}
    found = resolve_policies(model.model, policies)
    assert list(found.items()) == [(layer, (policies[layer],)) for layer in range(4)]
    del policies[2]
    with pytest.raises(UsageError, match=r"layers \[2\]: a search needs a policy in every full-attention layer"):
        resolve_policies(model.model, policies)


def test_a_policy_that_does_not_suit_the_model() -> None:
    rotary = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(IncompatibleError, match="policy expected_attention turns queries back"):
        resolve_policies(build("llama", rope_parameters=rotary), create_policy("expected_attention"))

"""One dense pass per prompt: what it keeps, in which order, and which policies it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.policies import Observation, Policy, create_policy
from kvsearch.runtime import PlanCache
from kvsearch.runtime.attention import run_attention
from kvsearch.search.bank.prepared import find_windows, prefill, resolve_policies
from tests import tiny
from tests.families import FAMILIES, build, prompts, take_families
from tests.search.bank.cases import SNAPKV, program_of, random_candidates


@take_families(*FAMILIES)
def test_a_prefix_holds_what_the_runtime_keeps(family: str) -> None:
    """The best entries of every head at any budget, and sliding windows as the model's own cache has them."""
    model = tiny.loaded(family)
    ids = prompts(1, 40)[0]
    candidate = random_candidates(model, 1, 40)[0]
    with run_attention(model.model), torch.no_grad():
        kept_layers, logits = prefill(model.model, resolve_policies(model.model, SNAPKV), ids[0], 40)
        planned, full = PlanCache(model.model, program_of(model, candidate)), DynamicCache(config=model.model.config)
        model.model(ids, past_key_values=planned)
        expected = model.model(ids, past_key_values=full).logits[0, -1]
    torch.testing.assert_close(logits, expected)
    for row, layer in enumerate(describe(model.model).full_layers):
        for head, budget in enumerate(candidate[row]):
            kept = planned.kept_positions(layer, 0, head)
            keys, values = (states[head, :budget] for states in kept_layers[layer][0])
            assert same_rows(keys, full.layers[layer].keys[0, head, kept])
            assert same_rows(values, full.layers[layer].values[0, head, kept])
    for layer in find_windows(model.model):
        torch.testing.assert_close(kept_layers[layer][0][0], full.layers[layer].keys[0])
        torch.testing.assert_close(kept_layers[layer][0][1], full.layers[layer].values[0])


def same_rows(one: Tensor, two: Tensor) -> bool:
    """Whether two sets of vectors [N, D] are the same up to their order."""
    return torch.allclose(one[one[:, 0].argsort()], two[two[:, 0].argsort()], atol=1e-5)


def test_no_more_than_the_cap_is_kept() -> None:
    model = tiny.loaded("gemma3")
    policies = resolve_policies(model.model, SNAPKV)
    ids = prompts(1, 40)[0][0]
    with run_attention(model.model):
        whole, capped = (prefill(model.model, policies, ids, cap)[0] for cap in (40, 12))
    for layer, (states, all_states) in enumerate(zip(capped, whole, strict=True)):
        count = 12 if layer in policies else 15
        assert torch.equal(states[0][0], all_states[0][0][:, :count])
        assert states[0][1].shape[1] == count


@dataclass(frozen=True)
class SomeHeads(Policy):
    """Never evicts heads with a budget of 1000 or more."""

    name: ClassVar[str] = "some-heads"
    source: ClassVar[str] = "tests"

    def score(self, observation: Observation) -> Tensor:
        return observation.keys[..., 0].float()

    def keeps_all(self, budget: int, length: int) -> bool:
        return budget >= 1000


@pytest.mark.parametrize(
    ("policy", "problem"),
    [
        (create_policy("d2o"), "layer 0: policy d2o merges what it evicts into what it keeps"),
        (create_policy("full"), "layer 0: policy full never evicts some heads, whatever their budget"),
        (SomeHeads(), "layer 0: policy some-heads never evicts some heads"),
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

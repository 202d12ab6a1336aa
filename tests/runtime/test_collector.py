from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from kvsearch.models.architecture import describe, find_attention_modules, find_decoder
from kvsearch.policies import Needs, Observation, Policy
from kvsearch.runtime import PlanCache, Program, collector
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.collector import DensePrompt
from kvsearch.runtime.logits import Logits
from kvsearch.testing.policy_contract import no_rope
from tests.combinations import first_value
from tests.families import DEVICES, build, prompts
from tests.runtime.helpers import feed, running

FROM = 4


@dataclass(frozen=True)
class Recorder(Policy):
    """Asks for everything and remembers what it was given."""

    name: ClassVar[str] = "recorder"
    source: ClassVar[str] = "tests"

    seen: list[Observation] = field(default_factory=list)

    def needs(self) -> Needs:
        return Needs(query_rows=5, query_statistics_from=FROM)

    def score(self, observation: Observation) -> Tensor:
        self.seen.append(observation)
        return observation.keys[..., 0].float()


def observed(model: Any, pieces: list[tuple[Tensor, Tensor]]) -> list[Observation]:
    """What the policy of each layer is shown of a prompt that arrives in `pieces`."""
    recorder = Recorder()
    length = sum(ids.shape[1] for ids, _ in pieces)
    with running(model, NAME):
        feed(model, PlanCache(model, Program.uniform(model, recorder, lambda n: n), prompt_length=length), pieces)
    return recorder.seen


def plain_queries(model: Any, ids: Tensor, mask: Tensor) -> list[Tensor]:
    """Queries before the rotary embedding, [B, Hq, T, D] of every layer, from hidden states and weights alone."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    hidden = model(ids, attention_mask=mask, position_ids=positions, output_hidden_states=True).hidden_states
    queries = []
    for layer, state in zip(find_decoder(model).layers, hidden, strict=False):
        attention, state = layer.self_attn, layer.input_layernorm(state)
        query = attention.q_proj(state)
        query = query.unflatten(-1, (8, -1))
        if hasattr(attention, "q_norm"):
            query = attention.q_norm(query)
        queries.append(query.transpose(1, 2))
    return queries


MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3": {},
    "mistral": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128,
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@first_value("family", MODELS, usual=2)
@torch.no_grad()
def test_statistics_are_those_of_the_models_queries(family: str, device: str) -> None:
    model = build(family, device, **MODELS[family])
    ids, mask = prompts(3, 40, pads=9, device=device)
    mask[1, :37] = 0  # three real tokens: no query behind the sinks
    queries = plain_queries(model, ids, mask)
    observations = observed(model, [(ids, mask)])
    index = mask.cumsum(-1) - 1
    for observation, layer in zip(observations, describe(model).full_layers, strict=True):
        statistics = observation.statistics[FROM]
        for row in range(3):
            chosen = queries[layer][row][:, (index[row] >= FROM) & mask[row].bool()].double()
            if row == 1:
                assert not statistics.mean[row].any()
                assert not statistics.covariance[row].any()
                continue
            mean = chosen.mean(1)
            centred = chosen - mean[:, None]
            covariance = centred.transpose(-1, -2) @ centred / chosen.shape[1]
            torch.testing.assert_close(statistics.mean[row].double(), mean, atol=2e-5, rtol=2e-5)
            torch.testing.assert_close(statistics.covariance[row].double(), covariance, atol=2e-4, rtol=2e-4)
        module: Any = find_attention_modules(model)[layer]
        assert observation.scaling == pytest.approx(module.scaling)
        assert observation.next_position.tolist() == [31, 3, 40]


def test_a_large_mean_does_not_drown_the_covariance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen2's query biases reach hundreds; second moments minus squared means would lose the difference in fp32."""
    monkeypatch.setattr(collector, "ROWS_PER_CHUNK", 64)
    query = torch.randn(1, 2, 1000, 4, generator=torch.Generator().manual_seed(0)) + 300.0
    gathered = DensePrompt([Needs(query_statistics_from=0)], no_rope, layer=0)
    for part in query.split(300, 2):
        real = torch.ones(1, part.shape[2], dtype=torch.bool)
        gathered.add(part, (part, part), torch.arange(part.shape[2])[None], real, Logits(1.0))
    statistics = gathered.observation().statistics[0]
    exact = query[0].double() - query[0].double().mean(1, keepdim=True)
    covariance = exact.transpose(-1, -2) @ exact / 1000
    torch.testing.assert_close(statistics.covariance[0].double(), covariance, atol=1e-4, rtol=1e-4)

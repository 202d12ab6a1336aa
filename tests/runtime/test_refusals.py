"""What cannot work is refused, in one line that says what to do."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration

from kvsearch.core import errors
from kvsearch.core.errors import IncompatibleError, KvsearchError, KvsearchWarning, UsageError
from kvsearch.policies import Needs, Observation, Policy, create_policy
from kvsearch.policies.full import FullKV
from kvsearch.policies.snapkv import SnapKV
from kvsearch.runtime import PlanCache, Program, attach
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.program import PhaseProgram, has_key_norm, make_full_program, warn_unfit
from tests.families import FAMILIES, build, prompts
from tests.runtime.helpers import plan_for, running


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


def refusal(kind: type[KvsearchError], expected: str, act: Any) -> None:
    with pytest.raises(kind) as caught:
        act()
    message = str(caught.value)
    assert expected in message
    assert "\n" not in message


def test_the_wrong_attention_implementation(model: Any) -> None:
    ids, _ = prompts(1, 10)
    cache = PlanCache(model, make_full_program(model))
    with running(model, "sdpa"):
        expected = "needs the attention implementation 'kvsearch', the model runs 'sdpa'"
        for act in (model, partial(model.generate, max_new_tokens=2)):
            refusal(UsageError, expected, lambda act=act: act(ids, past_key_values=cache))
    with running(model, NAME), torch.no_grad():
        model(ids, past_key_values=cache)
    refusal(UsageError, "use attach(model, plan)", lambda: model(ids[:, :1], past_key_values=cache))
    planned = attach(model, make_full_program(model))
    refusal(UsageError, "`with attach(model, plan) as planned:`", lambda: planned.generate(ids))


def test_right_padding(model: Any) -> None:
    ids, mask = prompts(2, 10)
    mask[0, -1] = 0
    with running(model, NAME):
        cache = PlanCache(model, Program.uniform(model, create_policy("snapkv"), lambda length: 5))
        refusal(UsageError, "pad batches on the left", lambda: model(ids, attention_mask=mask, past_key_values=cache))


def test_a_plan_of_another_model(model: Any) -> None:
    plan = plan_for(model, [[5, 5]] * 4)
    other = build("llama", num_hidden_layers=3)
    changed = build("llama")
    with torch.no_grad():
        changed.lm_head.weight.mul_(2)
    refusal(IncompatibleError, "this plan was made for another model", lambda: attach(other, plan))
    refusal(IncompatibleError, "other weights", lambda: PlanCache(changed, plan))
    assert PlanCache(build("llama").to(torch.bfloat16), plan).planned.keys() == {0, 1, 2, 3}


@dataclass(frozen=True)
class Sums(Policy):
    """Wants column sums, and has no decode rule of its own that would keep them up."""

    name: ClassVar[str] = "sums"
    source: ClassVar[str] = "tests"

    def needs(self) -> Needs:
        return Needs(column_sums=True)

    def score(self, observation: Observation) -> Tensor:
        return observation.received()


def test_a_policy_that_cannot_decode(model: Any) -> None:
    phase = PhaseProgram({0: Sums()}, lambda n: np.full((1, 2), 5))
    assert Program(phase).layers == (0,)
    refusal(UsageError, "policy sums needs attention column sums and has no decode rule", lambda: Program(None, phase))


def test_taking_back_what_a_decode_phase_displaced(model: Any) -> None:
    program = Program(None, PhaseProgram({0: create_policy("streaming")}, lambda n: np.full((1, 2), 5)))
    with running(model, NAME), torch.no_grad():
        cache = PlanCache(model, program)
        model(prompts(1, 10)[0], past_key_values=cache)
        model(prompts(1, 2)[0], past_key_values=cache)
    refusal(UsageError, "cannot take tokens back under a plan that evicts while decoding", lambda: cache.crop(-1))
    assert not cache.layers[0].is_croppable


def test_a_layer_with_its_own_window() -> None:
    program = Program(PhaseProgram({0: FullKV()}, lambda n: np.full((1, 2), n)))
    refusal(IncompatibleError, "layer 0 is a DynamicSlidingWindowLayer", lambda: PlanCache(build("gemma2"), program))


def test_encoder_decoders() -> None:
    config = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config)
    refusal(IncompatibleError, "it is an encoder-decoder", lambda: make_full_program(model))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_kv_shared_layers": 2}, "some of its layers share one KV cache"),
        ({"layer_types": ["full_attention", "hybrid"] * 2}, "layers of kind hybrid"),
        ({"kv_lora_rank": 8}, "multi-head latent attention"),
    ],
)
def test_configurations(changes: dict[str, Any], problem: str) -> None:
    model = build("llama")
    for name, value in changes.items():
        object.__setattr__(model.config, name, value)
    refusal(IncompatibleError, problem, lambda: make_full_program(model))
    program = Program(PhaseProgram({0: FullKV()}, lambda n: np.full((1, 2), n)))
    refusal(IncompatibleError, "docs/models.md lists what is", lambda: PlanCache(model, program))


def test_knorm_on_such_a_model_is_warned_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_said", set())
    assert [has_key_norm(build(family)) for family in FAMILIES] == [name in ("qwen3", "gemma3") for name in FAMILIES]
    model, knorm = build("qwen3"), create_policy("knorm")
    with pytest.warns(KvsearchWarning, match="Qwen3ForCausalLM normalises its keys.* policy knorm") as caught:
        warn_unfit(model, [SnapKV(), knorm, create_policy("knorm", {"sinks": 4})])
        warn_unfit(model, [knorm])
    assert len(caught) == 1

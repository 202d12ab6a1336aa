"""Static tables of dynamic rules: every decision is the runtime's, and the table is their mean."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from torch import Tensor

from kvsearch.budgets.adakv import AdaKVAllocation
from kvsearch.budgets.allocator import Uniform
from kvsearch.budgets.cake import CAKEAllocation
from kvsearch.budgets.dynamic import Allocation
from kvsearch.budgets.lava import LAVaAllocation
from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.dynamic import decide_budgets, observe_demands
from kvsearch.calibration.options import STABILITY_RATIOS, DynamicOptions
from kvsearch.calibration.prompts import CalibrationPrompt, encode_prompts
from kvsearch.core.errors import IncompatibleError
from kvsearch.models.loading import LoadedModel
from kvsearch.policies import Policy, create_policy
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.program import PhaseProgram
from kvsearch.tasks.synthetic.language import WORDS
from tests import tiny
from tests.calibrations import calibrate_dynamic
from tests.combinations import first_value, in_turn
from tests.runtime import test_sharing
from tests.runtime.helpers import running

LAVA: Policy = create_policy("lava", {"window": 4, "kernel": 3, "sinks": 2})
SNAPKV: Policy = create_policy("snapkv", {"window": 4, "kernel": 3, "sinks": 2})
SCORED_BELOW_ZERO: Policy = create_policy("keydiff", {"sinks": 2, "window": 4})
PROTECTED = 6
METHODS: dict[str, tuple[Policy, Allocation]] = {
    "lava": (LAVA, LAVaAllocation()),
    "cake": (create_policy("cake", {"window": 4, "kernel": 3, "sinks": 2}), CAKEAllocation()),
    "adakv": (SNAPKV, AdaKVAllocation()),
}
VARIANTS: dict[str, tuple[Policy, Allocation]] = {
    "lava, no floor": (LAVA, LAVaAllocation(0.0)),
    "lava, planned layers": (LAVA, LAVaAllocation(layers="planned")),
    "lava, equal heads": (LAVA, LAVaAllocation(heads="equal")),
    "cake, tempered": (SNAPKV, CAKEAllocation(1.6, 0.4, window=7)),
    "cake over keydiff": (SCORED_BELOW_ZERO, CAKEAllocation(window=3)),
    "adakv, kvpress": (SNAPKV, AdaKVAllocation(0.4, "kvpress")),
    "adakv over keydiff": (SCORED_BELOW_ZERO, AdaKVAllocation()),
}


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return uneven()


@pytest.fixture(scope="module")
def data() -> CalibrationData:
    return tiny.calibration_data(70, 90, 90)


def uneven() -> LoadedModel:
    return tiny.wrap(test_sharing.uneven(vocab_size=len(WORDS)))


def decided(model: LoadedModel, prompt: CalibrationPrompt, how: tuple[Policy, Allocation], floor: int) -> np.ndarray:
    with running(model.model, NAME):
        return decide_budgets(how[1], observe_demands(model, prompt, *how), prompt.length, floor)


@torch.no_grad()
def held(model: LoadedModel, program: Program, ids: Tensor) -> list[list[int]]:
    """Entries the runtime holds after a prompt, [L][Hkv]."""
    cache = PlanCache(model.model, program)
    with running(model.model, NAME):
        model.model(ids, past_key_values=cache)
    found: list[list[int]] = cache.entries()[:, 0].tolist()
    return found


def even_program(model: LoadedModel, how: tuple[Policy, Allocation], total: int, length: int, floor: int) -> Program:
    policy, allocation = how
    layers = tuple(Program.uniform(model.model, policy, lambda _: 1).layers)
    shape = (len(layers), model.fingerprint.kv_heads)
    table = Uniform().allocate(np.zeros(shape), total, np.full(shape, min(floor, length)), np.full(shape, length))
    return Program(PhaseProgram(dict.fromkeys(layers, policy), lambda _: table, floor), allocation=allocation)


def assert_runtime_agrees(
    model: LoadedModel, prompt: CalibrationPrompt, how: tuple[Policy, Allocation], floor: int, rows: Iterable[int]
) -> None:
    found = decided(model, prompt, how, floor)
    heads = found[0].size
    for row in rows:
        total = int(found[row].sum())
        exact = (2 * (99 - row) * heads * prompt.length + 100) // 200
        assert total == max(exact, heads * floor)
        assert held(model, even_program(model, how, total, prompt.length, floor), prompt.ids) == found[row].tolist()


@first_value("how", [*METHODS, *VARIANTS], usual=2)
def test_the_runtime_decides_the_same(how: str, model: LoadedModel, data: CalibrationData) -> None:
    prompt, rule = encode_prompts(model, data)[1], {**METHODS, **VARIANTS}[how]
    assert_runtime_agrees(model, prompt, rule, PROTECTED, (0, 49, 79, 98))
    at_eighty = decided(model, prompt, rule, PROTECTED)[79]
    assert np.ptp(at_eighty) > 3 or how == "lava, equal heads", "something should be decided"


@pytest.mark.nightly
@in_turn(method=METHODS, family=["qwen2", "qwen3", "gemma2", "gemma3"])
def test_every_family_decides_as_the_runtime_does(method: str, family: str, data: CalibrationData) -> None:
    other = tiny.loaded(family)
    assert_runtime_agrees(other, encode_prompts(other, data)[0], METHODS[method], PROTECTED, (9, 49, 84))


def test_the_table_is_the_mean_of_the_decisions_of_all_readings(model: LoadedModel) -> None:
    """Here of contexts with their questions."""
    data = tiny.calibration_data(70, 90, questions=1)
    made = calibrate_dynamic(model, data, *METHODS["lava"], DynamicOptions(protocol="question-aware"))
    prompts = encode_prompts(model, data, "question-aware")
    assert made.arrays["question_context"].tolist() == [0, 1]
    assert made.arrays["question_length"].tolist() == [prompt.length for prompt in prompts]
    assert (made.metadata.length, made.metadata.floor) == (max(prompt.length for prompt in prompts), PROTECTED)
    each = np.stack([1 - decided(model, prompt, METHODS["lava"], PROTECTED) / prompt.length for prompt in prompts])
    reach = slice(0, 90)  # every prompt can be cut that far
    np.testing.assert_allclose(made.arrays["evicted_ratio"][reach], each[:, reach].mean(0), atol=1e-6)
    np.testing.assert_allclose(made.arrays["ratio_deviation"][reach], each[:, reach].std(0), atol=1e-6)
    rows = [round(100 * ratio) - 1 for ratio in STABILITY_RATIOS]
    np.testing.assert_allclose(made.arrays["question_ratio"], each[:, rows], atol=1e-6)


def test_a_least_share_for_every_head(model: LoadedModel, data: CalibrationData) -> None:
    made = calibrate_dynamic(model, data, *METHODS["lava"], DynamicOptions(minimum=0.2))
    assert made.metadata.floor == int(np.ceil(0.2 * made.metadata.length))
    assert made.arrays["evicted_ratio"].max() <= 0.8 + 1e-6
    np.testing.assert_allclose(made.arrays["evicted_ratio"][98], made.arrays["evicted_ratio"][80], atol=1e-2)


def test_a_model_that_computes_nan(data: CalibrationData) -> None:
    model = uneven()
    with torch.no_grad():
        model.model.get_submodule("model.layers.0.self_attn.v_proj").weight[0] = float("nan")
    with pytest.raises(IncompatibleError, match=r"^tiny: the model computes NaN on calibration context 0$"):
        calibrate_dynamic(model, data, *METHODS["lava"])
    assert model.model.config._attn_implementation == "sdpa"

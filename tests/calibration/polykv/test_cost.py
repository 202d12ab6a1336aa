"""What a calibration costs: a documented example by hand, limits, and what is read off a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.calibration.polykv import cost
from kvsearch.calibration.polykv.cost import ModelSize, SweepWork, estimate, memory_of
from kvsearch.calibration.polykv.measure import calibrate_polykv
from kvsearch.calibration.polykv.options import PolykvOptions
from kvsearch.calibration.prompts import prompts_of
from kvsearch.errors import UsageError
from kvsearch.models.architecture import decoder
from kvsearch.policies import create_policy
from tests import tiny

# Llama-3.1-8B: query and output projections, key and value projections, the three matrices of the MLP
PER_LAYER = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336
LLAMA = ModelSize(32, tuple(range(32)), 4096, 14336, 32, 8, 128, 128256, 32 * PER_LAYER)
NINE = SweepWork(((8192, (128,)),), tried=9 * 2 * 1, batch=1)
SMALL = ModelSize(3, (0, 1, 2), 8, 16, 4, 2, 2, 10, 300)


def test_llama_at_8k_by_hand() -> None:
    found = estimate(LLAMA, NINE)
    assert found.samples == 1
    assert found.runs == 1 + 9 * 2 * 32 == 577
    assert found.naive.forward_tokens == 577 * (8192 + 128) == 4_800_640
    # layer l of 32 is left by 18 groups of 128 tokens for 32 - l layers: 16.5 forward passes on average
    assert found.sweep.forward_tokens == 8192 + 128 + 18 * 32 * 128 * 16.5 / 32 * 1 == 8320 + 18 * 16.5 * 128
    token, pair, head = 2 * PER_LAYER, 4 * 32 * 128, 2 * 4096 * 128256
    prompt, after = 8192 * 8193 // 2, 128 * 8192 + 128 * 129 // 2
    once = 32 * (8320 * token + (prompt + after) * pair) + 128 * head
    assert found.naive.flops == 577 * once
    grown = 18 * sum(range(1, 33)) * (128 * token + after * pair) + 18 * 32 * 128 * head
    assert found.sweep.flops == once + grown
    assert found.naive.seconds == pytest.approx(776, abs=1)
    assert found.sweep.seconds == pytest.approx(9.07, abs=0.01)
    assert found.speedup == pytest.approx(85.5, abs=0.1)
    for number in ("4,800,640", "46,336", "77.6 PFLOP", "0.9 PFLOP", "776 s", "9.1 s", "85 times"):
        assert number in str(cost.__doc__)


def test_memory_of_llama_at_8k_by_hand() -> None:
    work = replace(NINE, query_rows=400, column_sums=True, patterns=9)
    found = memory_of(LLAMA, work)
    assert found.cache == 8192 * 131_072 == 2**30
    assert found.observed == 32 * (400 * 4096 * 2 + 8192 * 8 * 4 + 17 * 9 * 8192 * 8)
    token = 2 * (4 * 4096 + 6144 + 3 * 14336)  # residual stream and norms, queries to values, the MLP
    baseline = 128 * 2 * (33 * 4096 + 32 * 6144)
    replay = 8320 * (2 * 4096 + 4 * 4 * 32 + 80 * 8) + 18 * 128 * 4096 * 2  # of a layer
    head = 128 * 128256 * 6
    fixed, held = baseline + head, found.cache + found.observed
    assert found.minimum == held + 8192 * token  # to read the prompt takes more than to sweep one group
    assert found.groups == 18 * 32
    assert found.layers == 32
    assert found.peak == held + fixed + 576 * 128 * token + 32 * replay
    assert found.peak == pytest.approx(14.45e9, rel=0.001)


def test_groups_are_as_many_as_fit() -> None:
    whole = memory_of(LLAMA, NINE)
    half = memory_of(LLAMA, NINE, whole.peak // 2)
    assert 1 < half.groups < whole.groups
    assert half.peak <= whole.peak // 2 < memory_of(LLAMA, NINE, half.peak + 128 * LLAMA.activations).peak
    assert memory_of(LLAMA, NINE, whole.peak) == whole
    least = memory_of(LLAMA, NINE, whole.minimum)
    assert least.peak == least.minimum == whole.minimum
    with pytest.raises(UsageError, match=r"prompts of up to 8192 tokens takes 2\.148 GB besides the weights"):
        memory_of(LLAMA, NINE, whole.minimum - 1)
    with pytest.raises(UsageError, match=r"a batch of 2 with .* --max-memory is 1 GB: lower --batch or raise it"):
        memory_of(LLAMA, replace(NINE, prompts=NINE.prompts * 2, batch=8), 10**9)


@pytest.mark.parametrize(("prompts", "batch", "size"), [(1, 8, 1), (3, 2, 2), (3, 8, 3)])
def test_a_batch_is_not_larger_than_there_are_prompts(prompts: int, batch: int, size: int) -> None:
    work = SweepWork(((64, (4,)),) * prompts, 6, batch=batch)
    assert memory_of(SMALL, work).cache == size * 64 * 3 * 2 * 2 * 2 * 2


def test_a_prompt_is_read_once_for_all_its_questions() -> None:
    together, apart = SweepWork(((100, (5, 7)),), 6), SweepWork(((100, (5,)), (100, (7,))), 6)
    assert estimate(SMALL, together).naive == estimate(SMALL, apart).naive
    more, less = estimate(SMALL, apart).sweep, estimate(SMALL, together).sweep
    assert more.forward_tokens - less.forward_tokens == pytest.approx(100)


def test_what_each_signal_costs() -> None:
    work = SweepWork(((100, (5,)),), 6)
    losses, outputs = estimate(SMALL, work), estimate(SMALL, replace(work, losses=False))
    entropy = estimate(SMALL, replace(work, losses=False, tried=0))
    assert losses.sweep.flops > outputs.sweep.flops > entropy.sweep.flops
    assert outputs.sweep.forward_tokens == entropy.sweep.forward_tokens == 105  # replays are attention only
    assert losses.naive == outputs.naive  # the papers run the model to its end for either
    assert (entropy.runs, entropy.speedup) == (1, 1)
    assert memory_of(SMALL, replace(work, losses=False)).groups == 1


def test_layers_with_a_sliding_window_are_gone_through_only() -> None:
    some = replace(SMALL, full_layers=(1,))
    found = estimate(some, SweepWork(((100, (6,)),), 4))
    assert found.runs == 1 + 4
    assert found.sweep.forward_tokens == pytest.approx(106 + 4 * 6 * 2 / 3)


@given(st.integers(1, 5000), st.integers(1, 200), st.integers(0, 40), st.integers(1, 3), st.booleans(), st.booleans())
def test_the_sweep_never_costs_more(
    length: int, count: int, tried: int, samples: int, losses: bool, deep: bool
) -> None:
    size = replace(SMALL, layers=12, full_layers=tuple(range(0, 12, 1 if deep else 5)))
    found = estimate(size, SweepWork(((length, (count,) * samples),), tried, losses))
    assert found.sweep.forward_tokens <= found.naive.forward_tokens
    assert found.sweep.flops <= found.naive.flops
    assert found.memory.minimum <= found.memory.peak
    longer = estimate(size, SweepWork(((length + 1, (count,) * samples),), tried, losses))
    assert longer.sweep.flops > found.sweep.flops
    assert longer.memory.minimum >= found.memory.minimum


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_rates_that_are_none(rate: float) -> None:
    with pytest.raises(UsageError, match="must be above 0"):
        estimate(SMALL, SweepWork(((10, (2,)),), 1), rate)


def test_as_json() -> None:
    found = estimate(SMALL, SweepWork(((10, (2,)),), 1)).as_json()
    assert found.keys() == {"tflops", "samples", "runs", "naive", "sweep", "memory", "speedup"}
    assert found["naive"].keys() == {"forward_tokens", "flops", "seconds"}
    assert found["memory"].keys() == {"cache", "observed", "minimum", "layers", "groups", "peak"}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_the_size_of_a_model(family: str) -> None:
    model: Any = tiny.loaded(family).model
    found, config = ModelSize.of(model), model.config.get_text_config()
    assert (found.layers, found.hidden) == (config.num_hidden_layers, config.hidden_size)
    assert (found.heads, found.kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
    assert found.vocabulary == model.get_output_embeddings().weight.shape[0]
    outside = {model.get_input_embeddings().weight, model.get_output_embeddings().weight, model.model.norm.weight}
    assert found.parameters == sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in outside)
    assert (found.full_layers == tuple(range(found.layers))) == (family != "gemma3")
    assert found.bytes == 4


def test_the_work_of_a_calibration() -> None:
    model, data = tiny.loaded(), tiny.calibration_data(60, 80, questions=2)
    policies = [create_policy("h2o"), create_policy("snapkv", {"window": 8})]
    prompts = prompts_of(model, data)
    found = SweepWork.of(prompts, policies, PolykvOptions(budgets=(8, 16), batch=3, entropy_rows=5))
    assert [length for length, _ in found.prompts] == [prompt.length for prompt in prompts]
    assert found.prompts[1][1] == tuple(after.tokens.shape[1] for after in prompts[1].continuations)
    assert (found.tried, found.losses, found.batch) == (2 * 2 * 2, True, 3)
    assert (found.query_rows, found.column_sums) == (8, True)
    one = SweepWork.of(prompts, policies[1:], PolykvOptions(phases="decode", signals=("cosine",)))
    assert (one.tried, one.losses, one.query_rows, one.column_sums) == (1, False, 8, False)
    none = SweepWork.of(prompts, policies, PolykvOptions(signals=("entropy",), entropy_rows=5))
    assert (none.tried, none.losses, none.query_rows, none.column_sums) == (0, False, 5, True)
    assert found.longest == (prompts[1].length, max(found.prompts[0][1] + found.prompts[1][1]))


@pytest.mark.parametrize("signals", [("ppl",), ("cosine",)])
@pytest.mark.parametrize("naive", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_calibration_runs_as_many_tokens_as_were_counted(family: str, naive: bool, signals: Any) -> None:
    """Counted at every layer, one prompt at a time, as batches are padded."""
    model, data = tiny.loaded(family), tiny.calibration_data(40, 50, questions=2)
    policies = [create_policy("tova"), create_policy("streaming", {"sinks": 2})]
    options = PolykvOptions(policy="tova", budgets=(8, 12), signals=signals, naive=naive, batch=1)
    seen = 0

    def count(_: Any, arguments: Any, keywords: Any) -> None:
        nonlocal seen
        hidden = arguments[0] if arguments else keywords["hidden_states"]
        seen += hidden.shape[0] * hidden.shape[1]

    layers: Any = decoder(model.model).layers
    for layer in layers:
        layer.register_forward_pre_hook(count, with_kwargs=True)
    calibrate_polykv(model, data, options, policies)
    size = ModelSize.of(model.model)
    found = estimate(size, SweepWork.of(prompts_of(model, data), policies, options))
    expected = found.naive if naive else found.sweep
    assert seen == pytest.approx(expected.forward_tokens * size.layers, abs=1e-6)

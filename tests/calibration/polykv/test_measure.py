"""Whole PolyKV calibrations on tiny models: rounding, entropy, what it costs, refusals."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.polykv.measure import (
    RANKING_TIME_FACTOR,
    PolykvCalibration,
)
from kvsearch.calibration.polykv.options import PolykvOptions
from kvsearch.calibration.prompts import encode_prompts
from kvsearch.core.errors import IncompatibleError, KvsearchWarning, UsageError
from kvsearch.models.architecture import describe, find_decoder
from kvsearch.plan import Profile
from kvsearch.policies import Policy, create_policy
from kvsearch.signals.table import SignalTable
from tests import tiny
from tests.calibration.polykv.test_layer_sweep import small
from tests.calibrations import calibrate_polykv
from tests.combinations import in_turn
from tests.tiny import calibration_data, loaded

OPTIONS = PolykvOptions(budgets=(8, 24), batch=2)
DATA = calibration_data(40, 60, 50)


def policies() -> tuple[Policy, ...]:
    return (
        create_policy("snapkv", {"window": 4, "kernel": 3}),
        create_policy("tova", {}),
        create_policy("streaming", {"sinks": 2}),
    )


def profile(data: CalibrationData = DATA, **changes: Any) -> Profile:
    return calibrate_polykv(loaded(), data, PolykvOptions(**{**OPTIONS.model_dump(), **changes}), policies())


@pytest.mark.nightly
def test_a_model_in_half_precision_is_measured_like_its_weights_in_fp32() -> None:
    """Under two patterns, whose ranks serve both budgets: rounding moves some entries, and means of signals hardly."""
    half = loaded()
    half.model.to(torch.bfloat16)
    whole = replace(half, model=copy.deepcopy(half.model).float())
    patterns, options = small(("tova", "snapkv")), PolykvOptions(budgets=(9, 24), batch=2)
    exact, swept = (calibrate_polykv(model, DATA, options, patterns).arrays for model in (whole, half))
    for name, close in (("cosine", 0.03), ("relative_error", 0.04), ("nll", 0.2)):
        means = [arrays[name].mean((0, 3)) for arrays in (swept, exact)]  # by budget, phase and pattern
        np.testing.assert_allclose(*means, rtol=0, atol=close, err_msg=name)
    np.testing.assert_allclose(swept["mean_entropy"], exact["mean_entropy"], rtol=0, atol=0.01)


def test_entropy_is_that_of_the_mean_attention_of_all_texts_heads_and_tokens() -> None:
    """Eq. 4 from whole attention matrices, texts of different lengths: position i of a text that is shorter has 0."""
    model, data = loaded(), calibration_data(40, 60, 70, questions=2)
    prompts = encode_prompts(model, data)
    assert len({prompt.length for prompt in prompts}) > 1
    longest = max(prompt.length + after.tokens.shape[1] for prompt in prompts for after in prompt.continuations)
    mean, samples = np.zeros((2, 4, longest)), 0
    model.model.set_attn_implementation("eager")
    for prompt in prompts:
        for after in prompt.continuations:
            samples += 1
            with torch.no_grad():
                maps = model.model(torch.cat([prompt.ids, after.tokens], 1), output_attentions=True).attentions
            for layer, attention in enumerate(maps):
                tokens = attention[0].double().numpy()  # [Hq, T + K, T + K]
                for phase, rows in enumerate((slice(0, prompt.length), slice(prompt.length, None))):
                    mean[phase, layer, : tokens.shape[2]] += tokens[:, rows].mean((0, 1))
    p = mean / samples
    expected = -(p * np.log(np.where(p > 0, p, 1.0))).sum(-1)
    for batch in (1, 9):
        found = profile(data, batch=batch, signals=("entropy",))
        assert found.arrays["mean_entropy"] == pytest.approx(expected, abs=1e-5)
    table = SignalTable(found)
    assert table.read_sensitivity("entropy", "decode", 8, [0] * 4) == pytest.approx(expected[1], abs=1e-5)


def test_a_budget_above_some_prompts_is_told() -> None:
    with pytest.warns(KvsearchWarning, match="nothing is evicted at a budget of 45 from 1 of 3 calibration prompts"):
        profile(budgets=(45,))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"budgets": (8, 64)}, "nothing is evicted at a budget of 64: no calibration prompt has more"),
        ({"answer_tokens": 1, "protocol": "question-aware"}, "no answer has a second token"),
    ],
)
def test_what_cannot_be_measured(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        profile(**changes)


def test_a_model_that_computes_nan_is_named() -> None:
    model = loaded()
    model.model.model.layers[1].mlp.down_proj.weight.data.fill_(float("nan"))
    with pytest.raises(IncompatibleError, match="computes NaN"):
        calibrate_polykv(model, DATA, OPTIONS, policies())


@in_turn(family=["llama", "gemma3"], signals=[("ppl",), ("cosine",)])
def test_a_calibration_runs_as_many_tokens_as_were_counted(family: str, signals: Any) -> None:
    """Counted at every layer, one prompt at a time, as batches are padded."""
    model, data = tiny.loaded(family), tiny.calibration_data(40, 50, questions=2)
    policies = [create_policy("tova"), create_policy("streaming", {"sinks": 2})]
    options = PolykvOptions(policy="tova", budgets=(8, 12), signals=signals, batch=1)
    seen = 0

    def count(_: Any, arguments: Any, keywords: Any) -> None:
        nonlocal seen
        hidden = arguments[0] if arguments else keywords["hidden_states"]
        seen += hidden.shape[0] * hidden.shape[1]

    layers: Any = find_decoder(model.model).layers
    for layer in layers:
        layer.register_forward_pre_hook(count, with_kwargs=True)
    calibrate_polykv(model, data, options, policies)
    work = PolykvCalibration(model, data, policies, options).estimate(encode_prompts(model, data))
    work *= 1 / RANKING_TIME_FACTOR
    ablations = 2 * 2 * 2 * len(describe(model.model).full_layers)  # policies, budgets and phases in every layer
    assert work.passes == pytest.approx(2 + (4 * ablations if "ppl" in signals else 0))
    assert seen == pytest.approx(work.tokens * len(layers), rel=0, abs=len(layers) * 4)

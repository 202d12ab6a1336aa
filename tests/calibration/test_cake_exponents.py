"""CAKE's exponents: what a pair costs is what the runtime would make the answers lose."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from kvsearch.budgets.cake import CAKEAllocation
from kvsearch.calibration.analysis import fit_gain, least_loss
from kvsearch.calibration.cake_exponents import PAIRS, PLAIN, CakeCalibration
from kvsearch.calibration.data import CalibrationData, Context
from kvsearch.calibration.dynamic import even_budgets
from kvsearch.calibration.options import CakeOptions
from kvsearch.calibration.prompts import prompts_of
from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Profile, load_profile, save_profile
from kvsearch.plan.size import round_half_up
from kvsearch.policies import Policy, create_policy
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.program import PhaseProgram
from kvsearch.signals.predictions import divergence
from tests import tiny
from tests.calibration.test_dynamic import uneven
from tests.calibrations import calibrate_cake, calibrate_dynamic
from tests.runtime.helpers import running

POLICY: Policy = create_policy("cake", {"window": 4, "kernel": 3, "sinks": 2})
FIT = CakeOptions(exponents="fit")
Losses = NDArray[np.float32]  # [pairs, questions]


def fit_exponents(model: LoadedModel, data: CalibrationData, options: CakeOptions = FIT) -> Losses:
    return CakeCalibration(model, data, [POLICY], options).fit()[0]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return uneven()


@pytest.fixture(scope="module")
def data() -> CalibrationData:
    return tiny.calibration_data(70, 90)


@pytest.fixture(scope="module")
def fit(model: LoadedModel, data: CalibrationData) -> Losses:
    return fit_exponents(model, data)


@pytest.fixture(scope="module")
def profile(model: LoadedModel, data: CalibrationData) -> Profile:
    return calibrate_cake(model, data, POLICY, FIT)


@torch.no_grad()
def lost_at_run_time(model: LoadedModel, data: CalibrationData, pair: tuple[float, float], options: Any) -> list[float]:
    """Divergence of every answer read after the runtime evicted its prompt under CAKE with `pair`."""
    layers, losses = tuple(range(4)), []
    for prompt in prompts_of(model, data, options.protocol):
        total = round_half_up(0.2 * prompt.length * 8)
        table = even_budgets(total, np.full((4, 2), 6), np.full((4, 2), prompt.length))
        phase = PhaseProgram(dict.fromkeys(layers, POLICY), lambda _, table=table: table)  # type: ignore[misc]
        for after in prompt.continuations:
            planned, full = PlanCache(model.model, Program(phase, allocation=CAKEAllocation(*pair))), DynamicCache()
            with running(model.model, NAME):
                model.model(prompt.ids, past_key_values=planned)
                got = model.model(after.tokens, past_key_values=planned).logits[0, after.predicting]
            model.model(prompt.ids, past_key_values=full)
            expected = model.model(after.tokens, past_key_values=full).logits[0, after.predicting]
            losses.append(divergence(expected, got))
    return losses


@pytest.mark.parametrize("protocol", ["question-agnostic", "question-aware"])
def test_the_loss_is_that_of_the_runtime(protocol: Any, model: LoadedModel, data: CalibrationData) -> None:
    options = CakeOptions(exponents="fit", protocol=protocol)
    found = fit_exponents(model, data, options)
    assert found.shape == (25, 4)
    for pair in (PLAIN, (0.5, 5.0), (2.0, 0.5)):
        expected = lost_at_run_time(model, data, pair, options)
        np.testing.assert_allclose(found[PAIRS.index(pair)], expected, rtol=2e-3, atol=1e-5)
    assert np.ptp(found.mean(1)) > 0.01, "exponents should matter here"


def test_the_least_loss_is_chosen(fit: Losses, profile: Profile) -> None:
    best = int(fit.astype(np.float64).mean(1).argmin())
    assert PAIRS[least_loss(fit)] == PAIRS[best] != PLAIN
    settings = profile.metadata.provenance.settings
    assert (settings["tau1"], settings["tau2"]) == PAIRS[least_loss(fit)]


def test_ties_go_to_the_plain_pair() -> None:
    loss = np.ones((25, 3), np.float32)
    assert PAIRS[least_loss(loss)] == PLAIN
    loss[7, 2] = 0.5
    assert PAIRS[least_loss(loss)] == PAIRS[7]


def test_a_model_whose_answers_ignore_the_context(data: CalibrationData) -> None:
    """A null result: nothing is lost, nothing is gained, and the pair is (1, 1)."""
    model = uneven()
    with torch.no_grad():
        model.model.lm_head.weight.zero_()
    made = calibrate_cake(model, data, POLICY, FIT)
    assert made.arrays["fit_loss"].max() == 0.0
    found = fit_gain(made)
    assert found is not None
    assert (found.tau1, found.tau2, found.seen, found.held_out) == (1.0, 1.0, 0.0, 0.0)


def test_what_was_tried_is_in_the_profile(fit: Losses, profile: Profile, tmp_path: Any) -> None:
    assert profile.arrays["fit_exponents"].tolist() == [list(pair) for pair in PAIRS]
    np.testing.assert_array_equal(profile.arrays["fit_loss"], fit)
    settings = profile.metadata.provenance.settings
    assert (settings["exponents"], settings["fit_ratio"], settings["answer_tokens"]) == ("fit", 0.8, 128)
    save_profile(profile, tmp_path / "profile.safetensors")
    assert load_profile(tmp_path / "profile.safetensors").to_bytes() == profile.to_bytes()


def test_the_table_is_that_of_the_chosen_pair(profile: Profile, fit: Losses, model: LoadedModel, data: Any) -> None:
    plain = calibrate_dynamic(model, data, POLICY, CAKEAllocation(*PAIRS[least_loss(fit)]))
    for name, array in plain.arrays.items():
        np.testing.assert_array_equal(profile.arrays[name], array)


def test_fixed_exponents(model: LoadedModel, data: CalibrationData) -> None:
    made = calibrate_cake(model, data, POLICY, CakeOptions(exponents="fixed", tau1=1.6, tau2=0.4, window=3))
    settings = made.metadata.provenance.settings
    assert [settings[key] for key in ("exponents", "tau1", "tau2", "window")] == ["fixed", 1.6, 0.4, 3]
    assert fit_gain(made) is None
    expected = calibrate_dynamic(model, data, POLICY, CAKEAllocation(1.6, 0.4, 3)).arrays["evicted_ratio"]
    np.testing.assert_array_equal(made.arrays["evicted_ratio"], expected)


@pytest.mark.parametrize(
    ("name", "tuned_for", "expected"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 1024, (1.6, 0.4)),
        ("meta-llama/Llama-3.1-8B-Instruct", 128, (1.6, 0.6)),
        ("meta-llama/Llama-3.1-8B-Instruct", 512, PLAIN),
        ("tiny", 1024, PLAIN),
    ],
)
def test_exponents_that_are_looked_up(
    name: str, tuned_for: int, expected: tuple[float, float], model: LoadedModel, data: CalibrationData
) -> None:
    named = LoadedModel(name, model.model, model.tokenizer, model.fingerprint)
    settings = calibrate_cake(named, data, POLICY, CakeOptions(tuned_for=tuned_for)).metadata.provenance.settings
    assert (settings["tau1"], settings["tau2"]) == expected
    assert (settings["exponents"], settings["tuned_for"]) == ("auto", tuned_for)


def test_only_what_eviction_changes_is_measured(model: LoadedModel, data: CalibrationData) -> None:
    """With the question in the prompt, the first token of an answer is predicted before anything is evicted."""
    with pytest.raises(UsageError, match=r"^no answer is long enough to fit exponents: .* use protocol question-agn"):
        fit_exponents(model, data, CakeOptions(exponents="fit", answer_tokens=1, protocol="question-aware"))


def test_a_ratio_below_what_is_always_kept(model: LoadedModel, data: CalibrationData) -> None:
    with pytest.raises(
        UsageError, match=r"^fit_ratio 0.95 keeps 3.\d+ entries per kv head .* below the 6 .* lower it$"
    ):
        fit_exponents(model, data, CakeOptions(exponents="fit", fit_ratio=0.95))


def test_a_ratio_that_leaves_just_that(model: LoadedModel, data: CalibrationData) -> None:
    """A fifth of 60 tokens is 12 entries, although (1 - 0.8) * 60 is less in floating point."""
    words = " ".join(data.contexts[0].text.split()[:59])
    short = CalibrationData("short", data.prompt, (Context(words, data.contexts[0].questions),), data.sha256)
    assert (prompts_of(model, short)[0].length, (1 - 0.8) * 60 < 12) == (60, True)
    found = fit_exponents(model, short, CakeOptions(exponents="fit", minimum=0.2))
    assert len({row.tobytes() for row in found}) == 1
    assert PAIRS[least_loss(found)] == PLAIN


def test_a_model_that_computes_nan_on_an_answer(data: CalibrationData) -> None:
    """A token that only questions have; the contexts are read without it."""
    model = uneven()
    asks = int(tiny.ids_of("?")[0, -1])
    assert all(asks not in prompt.ids for prompt in prompts_of(model, data))
    with torch.no_grad():
        model.model.model.embed_tokens.weight[asks] = float("nan")
    with pytest.raises(IncompatibleError, match=r"^tiny: the model computes NaN after calibration context 0$"):
        fit_exponents(model, data)
    assert calibrate_cake(model, data, POLICY, CakeOptions()).metadata.questions == 2

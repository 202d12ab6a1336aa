"""Whole PolyKV calibrations on tiny models: what is in the profile, going on after an interruption, refusals."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.polykv.measure import calibrate_polykv
from kvsearch.calibration.polykv.options import PolykvOptions
from kvsearch.calibration.prompts import prompts_of
from kvsearch.calibration.sample_files import SAMPLES
from kvsearch.errors import IncompatibleError, KvsearchWarning, UsageError
from kvsearch.plan import Profile
from kvsearch.policies import Policy, create_policy
from kvsearch.signals.table import SignalTable
from tests.calibration.polykv.test_layer_sweep import NAMES, small
from tests.tiny import calibration_data, loaded

OPTIONS = PolykvOptions(budgets=(8, 24), entropy_rows=8, batch=2)
DATA = calibration_data(40, 60, 50)


def policies() -> tuple[Policy, ...]:
    return (
        create_policy("snapkv", {"window": 4, "kernel": 3}),
        create_policy("tova", {}),
        create_policy("streaming", {"sinks": 2}),
    )


def changed(**changes: Any) -> PolykvOptions:
    return PolykvOptions(**{**OPTIONS.model_dump(), **changes})


def profile(data: CalibrationData = DATA, directory: Path | None = None, **changes: Any) -> Profile:
    return calibrate_polykv(
        loaded(), data, PolykvOptions(**{**OPTIONS.model_dump(), **changes}), policies(), directory=directory
    )


@pytest.fixture(scope="module")
def made() -> Profile:
    return profile()


def test_a_profile_has_every_signal_of_every_sample(made: Profile) -> None:
    """Three contexts with two questions each; two budgets, two phases, four layers, three patterns."""
    shapes = {name: array.shape for name, array in made.arrays.items()}
    whole = (6, 2, 2, 4, 3)
    assert shapes == {
        **dict.fromkeys(("cosine", "relative_error", "nll"), whole),
        **dict.fromkeys(("full_nll", "sample_tokens", "sample_length", "sample_context"), (6,)),
        "entropy": (6, 2, 4),
        "mean_entropy": (2, 4),
    }
    assert made.arrays["sample_context"].tolist() == [0, 0, 1, 1, 2, 2]
    assert made.metadata.questions == 6
    table = SignalTable(made)
    assert table.patterns == ("snapkv", "tova", "streaming")
    assert table.axes.budgets == (8, 24)
    assert table.measured("cosine", "prefill", 8).shape == (4, 3)


def test_the_naive_procedure_gives_the_same_profile(made: Profile) -> None:
    found = profile(naive=True)
    for name, array in made.arrays.items():
        np.testing.assert_allclose(found.arrays[name], array, rtol=0, atol=1e-4, err_msg=name)


def test_larger_budgets_disturb_less(made: Profile) -> None:
    """On average: a quarter of a prompt against half of it and more."""
    table = SignalTable(made)
    assert table.measured("error", "prefill", 24).mean() < table.measured("error", "prefill", 8).mean()


def test_a_model_in_half_precision_is_measured_like_its_weights_in_fp32() -> None:
    """Under nine patterns, whose ranks serve both budgets: rounding moves some entries, and means of signals hardly."""
    half = loaded()
    half.model.to(torch.bfloat16)
    whole = replace(half, model=copy.deepcopy(half.model).float())
    patterns, options = small(NAMES[:9]), changed(budgets=(9, 24))
    exact, swept, naive = (
        calibrate_polykv(model, DATA, options.model_copy(update={"naive": naive}), patterns).arrays
        for model, naive in ((whole, False), (half, False), (half, True))
    )
    for name, close, rounding in (("cosine", 0.03, 0.015), ("relative_error", 0.04, 0.015), ("nll", 0.2, 0.06)):
        means = [arrays[name].mean((0, 3)) for arrays in (swept, exact, naive)]  # by budget, phase and pattern
        np.testing.assert_allclose(means[0], means[1], rtol=0, atol=close, err_msg=name)
        np.testing.assert_allclose(means[0], means[2], rtol=0, atol=rounding, err_msg=name)
    np.testing.assert_allclose(swept["mean_entropy"], exact["mean_entropy"], rtol=0, atol=0.01)


@pytest.mark.parametrize("batch", [1, 8])
def test_batches_change_rounding_only(made: Profile, batch: int) -> None:
    found = profile(batch=batch)
    for name, array in made.arrays.items():
        np.testing.assert_allclose(found.arrays[name], array, rtol=0, atol=1e-5, err_msg=name)


class Stop(Exception):
    pass


@pytest.mark.parametrize("after", range(1, 6))
def test_an_interrupted_calibration_goes_on(made: Profile, tmp_path: Path, after: int) -> None:
    """Wherever it is interrupted, also between the questions of one context: the profile is the same to the byte."""

    def stop(done: int, _: int) -> None:
        if done >= after:
            raise Stop

    with pytest.raises(Stop):
        calibrate_polykv(loaded(), DATA, OPTIONS, policies(), progress=stop, directory=tmp_path)
    seen: list[int] = []
    found = calibrate_polykv(
        loaded(), DATA, OPTIONS, policies(), progress=lambda done, _: seen.append(done), directory=tmp_path
    )
    assert seen[0] >= after  # what was finished before is told first
    assert seen == sorted(set(seen))
    assert seen[-1] == 6
    assert found.to_bytes() == made.to_bytes()


def test_going_on_with_other_batches(made: Profile, tmp_path: Path) -> None:
    """The second question of two contexts is done, of the third it is not."""

    def stop(done: int, _: int) -> None:
        if done >= 2:
            raise Stop

    with pytest.raises(Stop):
        calibrate_polykv(loaded(), DATA, OPTIONS, policies(), progress=stop, directory=tmp_path)
    found = profile(directory=tmp_path, batch=3)
    assert {name: array.shape for name, array in found.arrays.items()} == {
        name: array.shape for name, array in made.arrays.items()
    }
    for name, array in made.arrays.items():
        np.testing.assert_allclose(found.arrays[name], array, rtol=0, atol=1e-5, err_msg=name)


def test_one_context_is_kept_pass_by_pass(tmp_path: Path) -> None:
    """Four questions after one context, two at a time: one file, after which it goes on."""

    def stop(done: int, _: int) -> None:
        if done == 2:
            raise Stop

    data = calibration_data(60, questions=4)
    with pytest.raises(Stop):
        calibrate_polykv(loaded(), data, OPTIONS, policies(), progress=stop, directory=tmp_path)
    assert len(list((tmp_path / SAMPLES).iterdir())) == 1
    assert profile(data, tmp_path).to_bytes() == profile(data).to_bytes()


def test_a_damaged_file_of_samples_is_refused(tmp_path: Path) -> None:
    profile(directory=tmp_path)
    (path,) = sorted((tmp_path / SAMPLES).iterdir())[:1]
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UsageError, match=r"safetensors is damaged .*: remove it, and what it held is measured again"):
        profile(directory=tmp_path)


def test_signals_that_were_not_asked_for_are_not_there() -> None:
    found = profile(signals=("cosine",), phases="prefill", budgets=(8,))
    assert set(found.arrays) == {"cosine", "relative_error", "sample_tokens", "sample_length", "sample_context"}
    assert SignalTable(found).routes == ("cosine", "error")
    only = profile(signals=("entropy",))
    assert SignalTable(only).sensitivities == ("entropy", "entropy-rows")


def test_entropy_is_that_of_the_mean_attention_of_all_texts_heads_and_tokens() -> None:
    """Eq. 4 from whole attention matrices, texts of different lengths: position i of a text that is shorter has 0."""
    model, data = loaded(), calibration_data(40, 60, 70, questions=2)
    prompts = prompts_of(model, data)
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
    for batch in (1, 2, 9):
        found = profile(data, batch=batch)
        assert found.arrays["mean_entropy"] == pytest.approx(expected, abs=1e-5)
    table = SignalTable(found)
    assert table.sensitivity("entropy", "decode", 8, [0] * 4) == pytest.approx(expected[1], abs=1e-5)
    assert table.sensitivity("entropy-rows", "decode", 8, [0] * 4).max() <= 1.0


def test_attention_is_added_up_of_samples_that_were_not_finished(tmp_path: Path) -> None:
    """Parts of an interrupted run and of other batches: no sample is counted twice."""
    data = calibration_data(40, 60, 70, questions=2)
    whole = profile(data, directory=tmp_path)
    first, *_, last = sorted((tmp_path / SAMPLES).iterdir())
    first.unlink()
    last.unlink()
    again = profile(data, directory=tmp_path, batch=9)
    assert again.arrays["mean_entropy"] == pytest.approx(whole.arrays["mean_entropy"], abs=1e-5)


def test_question_aware_prompts_hold_their_question() -> None:
    agnostic = profile()
    aware = profile(protocol="question-aware")
    assert (aware.arrays["sample_length"] > agnostic.arrays["sample_length"]).all()
    assert aware.metadata.signals is not None
    assert aware.metadata.signals.protocol == "question-aware"


def test_a_budget_above_all_prompts_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing is evicted at a budget of 64: no calibration prompt has more"):
        profile(budgets=(8, 64))


def test_a_budget_above_some_prompts_is_told() -> None:
    with pytest.warns(KvsearchWarning, match="nothing is evicted at a budget of 45 from 1 of 3 calibration prompts"):
        profile(budgets=(45,))


def test_too_little_memory_is_refused_with_what_is_needed() -> None:
    with pytest.raises(UsageError, match=r"takes [\d.]+ GB besides the weights, --max-memory is 1e-06 GB"):
        profile(max_memory=1e-6)


def test_little_memory_means_smaller_sweeps(made: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as one disturbance at a time needs."""
    from kvsearch.calibration.polykv import measure as polykv
    from kvsearch.calibration.polykv.cost import ModelSize, SweepWork, memory_of
    from kvsearch.calibration.prompts import prompts_of

    model = loaded()
    work = SweepWork.of(prompts_of(model, DATA), policies(), OPTIONS)
    least = memory_of(ModelSize.of(model.model), work).minimum
    swept: list[int] = []
    original = polykv.LayerSweep

    def noted(*args: Any, **kwargs: Any) -> Any:
        swept.append(args[-1].groups)
        return original(*args, **kwargs)

    monkeypatch.setattr(polykv, "LayerSweep", noted)
    found = profile(max_memory=least / 1e9)
    assert swept
    assert max(swept) < 3 * 2 * 2 * 4
    np.testing.assert_allclose(found.arrays["nll"], made.arrays["nll"], atol=1e-5)


def test_answers_of_one_token_say_nothing_after_their_question() -> None:
    with pytest.raises(UsageError, match="no answer has a second token"):
        profile(answer_tokens=1, protocol="question-aware")


def test_a_model_that_computes_nan_is_named() -> None:
    model = loaded()
    model.model.model.layers[1].mlp.down_proj.weight.data.fill_(float("nan"))
    with pytest.raises(IncompatibleError, match="computes NaN"):
        calibrate_polykv(model, DATA, OPTIONS, policies())


def test_a_prompt_beyond_the_positions_is_cut() -> None:
    model = loaded(max_position_embeddings=50)
    with pytest.warns(KvsearchWarning, match="was cut out, .* fit 50 tokens"):
        assert calibrate_polykv(model, DATA, OPTIONS, policies()).metadata.length < 50


def test_one_layer_is_measured_like_others() -> None:
    found = calibrate_polykv(loaded(num_hidden_layers=1), DATA, OPTIONS, policies())
    assert found.arrays["nll"].shape == (6, 2, 2, 1, 3)
    assert np.isfinite(found.arrays["nll"]).all()

"""What a calibration costs: its tokens, and how much of it fits the memory at a time."""

from __future__ import annotations

from typing import Any

import pytest

from kvsearch.calibration.polykv import measure
from kvsearch.calibration.polykv.layer_sweep import AtOnce
from kvsearch.calibration.polykv.measure import RANKED, PolykvCalibration, choose_at_once, replay_bytes
from kvsearch.calibration.polykv.options import PolykvOptions
from kvsearch.calibration.prompts import prompts_of
from kvsearch.models.architecture import Architecture, decoder, describe
from kvsearch.policies import create_policy
from tests import tiny
from tests.calibrations import calibrate_polykv
from tests.combinations import every_value


def test_a_replay_of_llama_at_8k_by_hand() -> None:
    llama = Architecture("llama", 32, 32, 8, 128, 4096, tuple(range(32)), 131072)
    assert replay_bytes(llama, 2, 8192, 128, 18) == 8320 * (2 * 4096 + 4 * 4 * 32 + 80 * 8) + 18 * 128 * 4096 * 2


def test_as_much_as_fits_is_computed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = tiny.loaded(), tiny.calibration_data(60, 80, questions=2)
    prompts = prompts_of(model, data)
    policies = [create_policy("tova"), create_policy("streaming", {"sinks": 2})]
    layers = len(describe(model.model).full_layers)

    def choose(**changes: Any) -> AtOnce:
        return choose_at_once(model, prompts, policies, PolykvOptions(budgets=(8, 16), **changes))

    assert choose() == (layers * 2 * 2 * 2, layers)
    assert choose(signals=("cosine",)) == (1, layers)
    assert choose(signals=("entropy",)) == (1, 1)
    whole = choose()
    found = []
    for memory in (0, 10**6, 2 * 10**6, 10**7):
        monkeypatch.setattr(measure, "CPU_BYTES", memory)
        found.append(choose())
    assert found[0] == (1, 1)
    assert found == sorted(found)
    assert found[-1] == whole


@every_value(family=["llama", "gemma3"], signals=[("ppl",), ("cosine",)])
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

    layers: Any = decoder(model.model).layers
    for layer in layers:
        layer.register_forward_pre_hook(count, with_kwargs=True)
    calibrate_polykv(model, data, options, policies)
    work = PolykvCalibration(model, data, policies, options).estimate(prompts_of(model, data)) * (1 / RANKED)
    ablations = 2 * 2 * 2 * len(describe(model.model).full_layers)  # policies, budgets and phases in every layer
    assert work.passes == pytest.approx(2 + (4 * ablations if "ppl" in signals else 0))
    assert seen == pytest.approx(work.tokens * len(layers), rel=0, abs=len(layers) * 4)

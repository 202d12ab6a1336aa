"""Query statistics: against plain arithmetic on what the model computes, and in the files of other tools."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from kvsearch.calibration.options import QueryStatisticsOptions
from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.exporters.base import WEIGHTS_FILE, ExportInputs
from kvsearch.exporters.statistics import STATISTICS, KvpressEA, TriAttention
from kvsearch.models.architecture import find_attention_modules
from kvsearch.models.loading import MODEL_CONFIG_FILE
from kvsearch.plan import Profile
from kvsearch.runtime.collector import Moments
from tests.calibrations import calibrate_query_statistics
from tests.plan.builders import make_profile
from tests.tiny import calibration_data, loaded

SINKS = 3


def measured(family: str = "llama", **changes: Any) -> tuple[Any, Profile]:
    torch.manual_seed(0)
    made = loaded(family, **changes)
    options = QueryStatisticsOptions(params={"sinks": SINKS})
    return made, calibrate_query_statistics(made, calibration_data(40, 60), options.make_policy(), options)


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Profile]:
    return measured()


def queries_of(made: Any, layer: int) -> torch.Tensor:
    """The output of q_proj on both contexts behind the sinks, [Hq, N, D]."""
    found: list[torch.Tensor] = []
    module = find_attention_modules(made.model)[layer].q_proj
    handle = module.register_forward_hook(lambda _, __, output: found.append(output[0, SINKS:].double()))
    with torch.no_grad():
        for context in calibration_data(40, 60).contexts:
            made.model(made.tokenizer(context.text, return_tensors="pt").input_ids)
    handle.remove()
    heads = made.model.config.num_attention_heads
    return torch.cat(found).view(sum(map(len, found)), heads, -1).transpose(0, 1)


def test_they_are_those_of_the_projection(llama: tuple[Any, Profile]) -> None:
    made, profile = llama
    for layer in profile.metadata.layers:
        queries = queries_of(made, layer).numpy()
        np.testing.assert_allclose(profile.arrays["query_mean"][layer], queries.mean(1), atol=2e-5)
        for head, rows in enumerate(queries):
            wanted = np.cov(rows.T, ddof=0)
            np.testing.assert_allclose(profile.arrays["query_cov"][layer, head], wanted, atol=2e-5)
        half = queries.shape[2] // 2
        modulus = np.hypot(queries[..., :half], queries[..., half:]).mean(1)
        np.testing.assert_allclose(profile.arrays["query_abs"][layer], modulus, atol=2e-5)
        assert profile.metadata.provenance.settings["queries"] == queries.shape[1]


@given(st.integers(2, 9), st.integers(1, 8), st.integers(0, 2**16))
def test_parts_add_up(count: int, cut: int, seed: int) -> None:
    queries = torch.randn(1, 2, count, 4, generator=torch.Generator().manual_seed(seed))
    every, cut = torch.ones(1, count, dtype=torch.bool), min(cut, count - 1)
    first, last = slice(cut), slice(cut, None)
    both = Moments.of(queries[:, :, first], every[:, first]).merged(Moments.of(queries[:, :, last], every[:, last]))
    torch.testing.assert_close(tuple(both), tuple(Moments.of(queries, every)), atol=1e-4, rtol=1e-4)


def test_the_folder_of_kvpress(llama: tuple[Any, Profile]) -> None:
    _, profile = llama
    exported = KvpressEA().export(profile, ExportInputs())
    read = load(exported.files[WEIGHTS_FILE])
    assert not exported.losses
    for name in ("query_mean", "query_cov"):
        np.testing.assert_array_equal(read[name], profile.arrays[name])
    told = json.loads(exported.files[MODEL_CONFIG_FILE])
    assert (told["num_layers"], told["n_sink"], told["num_samples"]) == (profile.metadata.model.layers, SINKS, 2)
    assert "n_sink=3" in exported.usage[0]


def test_the_script_of_the_card_makes_what_triattention_reads(
    llama: tuple[Any, Profile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, profile = llama
    files = TriAttention().export(profile, ExportInputs()).files
    (tmp_path / STATISTICS).write_bytes(files[STATISTICS])
    script = re.search(r"```python\n(.*?)```", files["README.md"].decode(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(script.group(1), {})
    found = torch.load(tmp_path / "statistics.pt", weights_only=True)
    mean = profile.arrays["query_mean"]
    assert found["metadata"]["sampled_heads"] == [list(pair) for pair in np.ndindex(*mean.shape[:2])]
    one = found["stats"]["layer01_head02"]
    np.testing.assert_array_equal(torch.cat([one["q_mean_real"], one["q_mean_imag"]]).numpy(), mean[1, 2])
    np.testing.assert_array_equal(one["q_abs_mean"].numpy(), profile.arrays["query_abs"][1, 2])


def test_what_cannot_be_told() -> None:
    with pytest.raises(UsageError, match="calibrate --method query_statistics"):
        KvpressEA().export(make_profile(), ExportInputs())
    _, partial = measured("gpt_neox")
    with pytest.raises(IncompatibleError, match=r"turned as a whole, and \d+ of \d+ numbers"):
        TriAttention().export(partial, ExportInputs())
    _, hybrid = measured("gemma3")
    with pytest.raises(IncompatibleError, match="have no full attention"):
        KvpressEA().export(hybrid, ExportInputs())

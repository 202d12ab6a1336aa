"""`kvsearch show` of PolyKV profiles: tables by phase and budget, the best patterns, and all means as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvsearch.plan import Profile, save_profile
from kvsearch.signals.table import SignalTable
from tests.cli.conftest import Run, done
from tests.plan.builders import model
from tests.signals.profiles import make_signals, signal_metadata


def saved(directory: Path, profile: Profile) -> Path:
    save_profile(profile, directory / "profile.safetensors")
    return directory


def by_layer(*layers: list[float]) -> np.ndarray:
    return np.broadcast_to(np.array(layers, dtype=np.float32), (3, 1, 1, len(layers), 3))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Two layers, three patterns and one phase with known values."""
    metadata = signal_metadata(model(layers=2), phases=("prefill",), budgets=(16,))
    losses = by_layer([1.5, 1.25, 1.0], [1.0, 1.0, 1.0]).astype(np.float64)
    profile = make_signals(
        metadata, cosine=by_layer([0.5, 0.875, 0.75], [0.25, 0.5, 1.0]), nll=losses, full_nll=np.ones(3),
        mean_entropy=np.array([[0.25, 0.75]], dtype=np.float32), entropy=None,
    )  # fmt: skip
    return saved(tmp_path, profile)


def rows(out: str, title: str) -> list[list[str]]:
    """The cells of the table under a title, the header first."""
    lines = out[out.index(title) :].splitlines()[1:]
    found = [line.split() for line in lines if line.strip() and not line.strip().startswith("─")]
    return found[: next((at for at, cells in enumerate(found) if not cells[0][0].isdigit() and at), len(found))]


def test_the_tables(run: Run, small: Path) -> None:
    code, out, talk = run("show", small)
    assert (code, talk) == (0, "")
    assert rows(out, "prefill at 16 entries per kv head: cosine of attention outputs") == [
        ["layer", "snapkv", "streaming", "tova"],
        ["0", "0.5000", "*0.8750", "0.7500"],
        ["1", "0.2500", "0.5000", "*1.0000"],
    ]
    assert rows(out, "prefill: entropy of attention") == [["layer", "entropy"], ["0", "0.2500"], ["1", "0.7500"]]
    assert rows(out, "prefill at 16 entries per kv head: what perplexity gains") == [
        ["layer", "snapkv", "streaming", "tova"],
        ["0", "+1.76", "+0.772", "*+0"],
        ["1", "+0", "+0", "+0"],
    ]
    assert "perplexity  2.71828 under the full cache" in out
    assert out.index("what perplexity gains") > out.index("cosine of attention")


def test_a_pattern_that_explodes_is_named_where_it_is_worst(tmp_path: Path) -> None:
    metadata = signal_metadata(model(layers=2), phases=("prefill",), budgets=(16, 64))
    gains = np.array([[[0.01, 0.01, 9.0], [4.0, 6.0, 8.0]], [[0.01, 0.01, 7.0], [4.0, 6.0, 8.0]]])  # [N, L, R]
    losses = np.broadcast_to(np.log1p(gains)[None, :, None], (3, 2, 1, 2, 3))
    saved(tmp_path, make_signals(metadata, nll=losses, full_nll=np.zeros(3)))
    out, _ = done("show", tmp_path)
    assert out.count("tova explodes in prefill layer 0") == out.count("explodes") == 1
    assert "at 16 entries per kv head: perplexity gains 9," in out


def test_all_means_as_json(run: Run, tmp_path: Path) -> None:
    profile = make_signals(signal_metadata(budgets=(16, 64)))
    code, out, talk = run("show", saved(tmp_path, profile), "--json")
    assert (code, talk) == (0, "")
    shown = json.loads(out)
    assert shown["metadata"]["method"] == "polykv"
    tables = {table["title"]: table for table in shown["tables"]}
    assert len(tables) == 2 * 2 * 2 + 2
    table = tables["decode at 64 entries per kv head: what perplexity gains"]
    assert table["header"] == ["layer", "snapkv", "streaming", "tova"]
    values = [row[1:] for row in table["rows"]]
    assert np.allclose(values, SignalTable(profile).measured("ppl", "decode", 64), atol=1e-8)


def test_what_was_not_measured_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "errors").mkdir()
    (tmp_path / "entropies").mkdir()
    errors = make_signals(cosine=None, nll=None, full_nll=None, mean_entropy=None)
    out, _ = done("show", saved(tmp_path / "errors", errors))
    assert "relative distance of attention outputs" in out
    assert "perplexity" not in out
    assert "entropy" not in out
    entropies = make_signals(cosine=None, relative_error=None, nll=None, full_nll=None)
    out, _ = done("show", saved(tmp_path / "entropies", entropies))
    assert rows(out, "decode: entropy of attention")[0] == ["layer", "entropy"]
    assert "*" not in out

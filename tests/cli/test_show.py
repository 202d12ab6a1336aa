"""`kvsearch show` of plans, of what commands write, finished or not, and of PolyKV profiles."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsearch.plan import Profile, save_plan, save_profile
from tests.cli.conftest import Run, done
from tests.plan.builders import make_plan, model, model_dict, phase_dict
from tests.shared import Finished
from tests.signals.profiles import make_signals, signal_metadata

ASKED = ("--length", 512, "--samples", 2, "--tasks", "synthetic:single,multikey")


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory of an evaluation, and what the command printed."""

    directory = tmp_path_factory.mktemp("evaluated") / "run"
    how = ("--methods", "uniform,streaming", "--budgets", "32,64", "--set", "window=8", *ASKED)
    out, _ = done("evaluate", "bundled", *how, "-o", directory)
    return directory, out


def test_an_evaluation_is_shown_as_it_was_printed_and_its_folder_lists_it(
    run: Run, evaluated: tuple[Path, str]
) -> None:
    directory, printed = evaluated
    for path in (directory, directory / "ledger.jsonl", directory / "samples.csv"):
        code, out, talk = run("show", path)
        assert (code, talk) == (0, "")
        assert out.splitlines()[2:] == printed.splitlines()
        assert out.startswith("of     ")
    assert run("show", directory / "report.json")[1] == printed
    assert "score in percent, 95% interval (question-agnostic, phases: prefill, " in printed
    code, out, _ = run("show", directory, "--json")
    assert json.loads(out) == json.loads((directory / "report.json").read_text())
    (row,) = json.loads(run("show", directory.parent, "--json")[1])["tables"][0]["rows"]
    assert row[:3] == ["run", "evaluation", "bundled"]
    assert row[4].startswith("highest scores: ")


def test_a_packed_evaluation_is_shown_like_its_directory(run: Run, evaluated: tuple[Path, str], tmp_path: Path) -> None:
    packed = tmp_path / "run.tar.xz"
    with tarfile.open(packed, "w:xz") as archive:
        for name in ("config.json", "report.json", "samples.csv"):
            archive.add(evaluated[0] / name, name)
    code, out, talk = run("show", packed)
    assert (code, talk) == (0, "")
    assert out == run("show", evaluated[0])[1]
    packed.write_bytes(packed.read_bytes()[:1000])
    code, _, talk = run("show", packed)
    assert code == 2
    assert "is damaged (Compressed file ended before the end-of-stream marker was reached): restore it" in talk


def test_an_evaluation_that_is_not_finished(run: Run, evaluated: tuple[Path, str], tmp_path: Path) -> None:
    for name in ("config.json", "ledger.jsonl"):
        (tmp_path / name).write_bytes((evaluated[0] / name).read_bytes())
    code, out, talk = run("show", tmp_path)
    assert (code, talk) == (0, "")
    assert "uniform@32" in out
    assert "this run is not finished" in out
    shown = json.loads(run("show", tmp_path, "--json")[1])
    assert shown["tables"][0]["rows"][0][:2] == ["full", 2]


@pytest.mark.slow
def test_a_search(evolved: Finished, tmp_path: Path) -> None:
    """Finished: what was chosen, and how it converged; cut short: how far it is."""
    directory = Path(shutil.copytree(evolved.folder / "run", tmp_path / "run"))
    out, _ = done("show", directory)
    for line in filter(str.strip, evolved.out.splitlines()):
        assert line in out.splitlines()
    assert "convergence: " in out
    assert f"next: kvsearch show {directory / 'plan.json'}" in out
    for name in ("report.json", "plan.json"):
        (directory / name).unlink()
    out, _ = done("show", directory)
    assert "this run is not finished" in out
    assert "; best value" in out


def test_what_is_not_ours(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"schema": "other/1"}')
    (tmp_path / "a.yaml").write_text("- 1")
    for path in (tmp_path / "a.json", tmp_path / "a.yaml", tmp_path):
        code, _, talk = run("show", path)
        assert code == 2
        assert "is nothing that kvsearch can show, which is: a plan, a strategy or recipe" in talk
        assert len(talk.splitlines()) == 1


SNAPKV, NARROW = ({"name": "snapkv", "params": {"window": width}} for width in (4, 2))
TOVA = {"name": "tova", "params": {}}


@pytest.mark.parametrize(
    ("policies", "names"),
    [
        ((SNAPKV, TOVA, SNAPKV), ["0 snapkv", "2 tova", "3 snapkv"]),
        ((SNAPKV, NARROW, NARROW), ["0 snapkv {'window': 4}", "2 snapkv {'window': 2}", "3 snapkv {'window': 2}"]),
        ((TOVA, TOVA, TOVA), ["0", "2", "3"]),
    ],
)
def test_the_pattern_of_every_layer(
    run: Run, tmp_path: Path, policies: tuple[dict[str, Any], ...], names: list[str]
) -> None:
    phase = phase_dict([[10, 6], None, [4, 12], [8, 8]])
    for layer, policy in zip([layer for layer in phase["layers"] if layer], policies, strict=True):
        layer["policy"] = policy
    save_plan(make_plan(model=model_dict(layers=4), prefill=phase, total=48), tmp_path / "plan.json")
    code, out, talk = run("show", tmp_path / "plan.json")
    assert (code, talk) == (0, "")
    rows = [" ".join(line.split()) for line in out.splitlines() if line.strip(" ─")][-4:]
    assert rows == ["layer h0 h1 sum", f"{names[0]} 10 6 16", f"{names[1]} 4 12 16", f"{names[2]} 8 8 16"]


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

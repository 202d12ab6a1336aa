"""kvsearch report: every kind of run becomes a page, grouped by models; nothing is overwritten that is not ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsearch.plan import save_plan
from kvsearch.plan.profile import save_profile
from tests.cli.conftest import Run, done, done_json
from tests.plan.builders import make_plan, make_profile, model_dict
from tests.report.reader import Reader


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A plan, a profile of the same model, and a plan of another model of the same name."""
    model = model_dict(layers=3, kv_heads=2)
    plan, profile, other = tmp_path / "plan.json", tmp_path / "profile.safetensors", tmp_path / "other.json"
    save_plan(make_plan(), plan)
    save_profile(make_profile(model=model), profile)
    save_plan(make_plan(model={**model, "weights_sha256": "0" * 64}), other)
    return plan, profile, other


def test_results_are_grouped_by_what_their_models_are(files: tuple[Path, ...], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    told = done_json("report", *files, "-o", page, "--json")
    assert told["report"] == str(page)
    assert told["bytes"] == page.stat().st_size
    assert told["figures"] >= 3
    sections = page.read_text().split('<section class="model">')[1:]
    assert len(sections) == 2
    assert [str(files[0]) in sections[0], str(files[1]) in sections[0], str(files[2]) in sections[1]] == [True] * 3
    assert "32 entries of a prompt of 40 tokens" in Reader(sections[0]).text


def test_a_calibration_says_what_was_asked_and_how_it_was_made(calibrated: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    _, talk = done("report", calibrated, "-o", page)
    assert talk.startswith(f"wrote {page}: ")
    text = Reader(page.read_text()).text
    assert "bundled: lukv, " in text
    assert "importance evicted" in text
    assert page.read_text().count("<figure") >= 4
    for made in ("resolved options", "provenance", "weights_sha256"):
        assert made in text


def test_a_file_that_is_no_report_is_left_alone(run: Run, files: tuple[Path, ...], tmp_path: Path) -> None:
    page = tmp_path / "paper.html"
    page.write_text("<!doctype html>my paper")
    code, _, talk = run("report", files[0], "-o", page)
    assert (code, page.read_text()) == (2, "<!doctype html>my paper")
    assert "is no report of kvsearch: choose another file, or --force to replace it" in talk
    assert run("report", files[0], "-o", page, "--force")[0] == 0
    assert run("report", files[1], "-o", page)[0] == 0  # a report of ours is made again

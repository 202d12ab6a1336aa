"""Whatever is done to a file of a run, `verify` finds it, names it, and says nothing of the others."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from kvsearch.core.errors import UsageError
from kvsearch.evaluation.compare import Split, prepare
from kvsearch.evaluation.methods import Size, parse_methods
from kvsearch.evaluation.ready_methods import prepare_methods
from kvsearch.evaluation.reply_store import REPLY_FILES, open_run
from kvsearch.evaluation.samples import write_samples
from kvsearch.plan import save_plan
from kvsearch.report.integrity import Verification
from kvsearch.results.evaluation import EvaluationResult
from kvsearch.runs.identity import CONFIG, LEDGER, LOSSES, SUMS, read_config
from kvsearch.runs.run import finish_run, mark_unfinished, write_json
from tests import tiny
from tests.combinations import in_turn
from tests.plan.builders import make_plan, phase_dict


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished evaluation of a tiny model."""
    directory, model = tmp_path_factory.mktemp("integrity") / "run", tiny.loaded()
    ready = prepare_methods(model, parse_methods("pyramid,tova", ["window=3"]), [Size(8)], "prefill")
    one = prepare(model, ready, ready[1].name, Split([tiny.listed((60, 2), (48, 1))], batch=1))
    with open_run(directory, one.config()) as (opened, store):
        result = one.run(store=store)
        write_samples(result.samples, directory / "samples.csv")
        write_json(directory / "report.json", EvaluationResult.of(result).as_json())
        opened.finish()
    return directory


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def states(found: Verification) -> dict[str, str]:
    return {one.path.name: one.state for one in found.artefacts}


def problem(directory: Path, name: str) -> str:
    """What is said of the one file that is damaged, on one line, with what to do."""
    found = Verification([directory])
    assert [one.path.name for one in found.damaged] == [name], found.damaged
    (damaged,) = found.damaged
    assert damaged.remedy
    assert "\n" not in damaged.problem + damaged.remedy
    return damaged.problem


def test_a_finished_run_is_whole(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Verification([run])
    assert set(states(found).items()) == {
        (name, "whole") for name in (CONFIG, LEDGER, SUMS, "samples.csv", "report.json")
    }
    assert {one.path.name for one in found.artefacts if not one.sealed} == {SUMS}
    assert {one.what for one in found.artefacts} >= {"an evaluation", "checksums of 4 files"}
    assert found.as_json()["whole"]
    (line,) = found.parts()
    assert line.endswith("compared; -v lists them")
    assert len(list(found.parts(all_artefacts=True))) == 2
    monkeypatch.chdir(run)
    assert Verification([Path()]).damaged == ()
    assert [one.path for one in Verification([Path("report.json")]).artefacts] == [Path("report.json")]
    assert Verification([Path("report.json"), run]).artefacts[0].sealed  # the checksums lie beside it


def flipped(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@in_turn(
    name=[CONFIG, LEDGER, "samples.csv", "report.json"],
    damage=[
        lambda path: flipped(path, path.stat().st_size // 3),
        lambda path: flipped(path, path.stat().st_size - 1),
        lambda path: os.truncate(path, path.stat().st_size // 2),
        lambda path: os.truncate(path, 0),
        lambda path: path.unlink(),
        lambda path: path.write_bytes(path.read_bytes() * 2),
    ],
)
def test_any_damage_to_any_file_is_found(run: Path, name: str, damage: Callable[[Path], None]) -> None:
    damage(run / name)
    found = Verification([run])
    assert name in [one.path.name for one in found.damaged]
    assert all(one.path.name in (name, LEDGER) for one in found.damaged)  # what a ledger has its configuration says


def test_no_run_goes_on_from_a_finished_file_that_was_changed(run: Path) -> None:
    """Its own checksums would hide that."""
    (run / LOSSES).write_text("[]")
    finish_run(run, (CONFIG, LEDGER, *REPLY_FILES))
    config = read_config(run)
    assert config is not None
    (run / LOSSES).write_text("[1]")
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    with pytest.raises(UsageError, match=r"losses.json was changed since it was finished, .*: delete it, and give"):
        open_run(run, config).__enter__()
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_what_is_not_finished_is_not_damaged(run: Path) -> None:
    mark_unfinished(run)
    os.truncate(run / LEDGER, (run / LEDGER).stat().st_size - 5)
    (run / ".kvsearch-12.tmp").write_text("{")
    (run / "samples.csv").unlink()
    found = Verification([run])
    assert states(found) == {CONFIG: "unfinished", LEDGER: "whole", "report.json": "whole"}
    assert found.damaged == ()
    ledger = next(one for one in found.artefacts if one.path.name == LEDGER)
    assert ledger.what.endswith("; one more was cut short and is done again")
    config = next(one for one in found.artefacts if one.path.name == CONFIG)
    assert (config.problem, config.remedy) == ("its command has not ended", "repeat it to go on: config.json has it")


def test_files_that_stand_for_themselves(tmp_path: Path) -> None:
    budgets = [[10, 6], [8, 8], [4, 12]]
    phase = phase_dict(budgets, {"name": "streaming", "params": {"sinks": 2}})
    save_plan(make_plan(budgets, prefill=phase), tmp_path / "mine.json")
    assert Verification([tmp_path]).artefacts[0].what == "a plan of 48 entries"
    text = (tmp_path / "mine.json").read_text()
    for old, new, words in (
        ('"total": 48', '"total": 49', "add up to 48"),
        ('"sinks": 2', '"sinks": -2', "sinks must be 0 or more, got -2"),
        ("}", "", "is not valid JSON"),
    ):
        (tmp_path / "mine.json").write_text(text.replace(old, new))
        assert words in problem(tmp_path, "mine.json")


def test_files_of_others_are_left_alone(run: Path, tmp_path: Path) -> None:
    (run / "notes.txt").write_text("mine")
    (run / "mine.json").write_text("{")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"architectures": []}')
    (tmp_path / "model" / "model.safetensors").write_bytes(save({"x": np.zeros(3, np.float32)}))
    assert set(states(Verification([tmp_path]))) == {CONFIG, LEDGER, SUMS, "samples.csv", "report.json"}
    for path in (tmp_path / "model", tmp_path / "nothing"):
        with pytest.raises(UsageError, match="nothing"):
            Verification([path])
    assert Verification([run / "notes.txt", run / "mine.json"]).damaged[0].path == run / "mine.json"

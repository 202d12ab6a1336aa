"""What all verbs have in common: help, bad options, and how a run that is kept begins, ends and goes on."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kvsearch.core import files as plan_files
from kvsearch.runs.identity import RunConfig
from kvsearch.runs.ledger import Ledger
from kvsearch.runs.lock import lock_directory
from kvsearch.runs.run import begin_run
from tests.cli.conftest import Run, done, invoke
from tests.cli.test_bad_input import INTERRUPTED, USAGE, refused
from tests.combinations import in_turn
from tests.runs.guard import locked_elsewhere
from tests.shared import Finished, finished_once

FINISHED_NOTE = "this run was finished: nothing was left to do"


@dataclass(frozen=True)
class Kept:
    """A verb that keeps a run: IN stands for the folder of its inputs, RUN for the directory of the run."""

    typed: str
    other: str  # options with which it is another run
    results: tuple[str, ...]  # files that have the same bytes whenever the same is asked
    printed: str | None  # file with what --json prints
    write: int  # one of its writes, of which there are as many again or more
    reads_run: bool = False  # its directory is that of a calibration

    def words(self, inputs: Path, folder: Path, *more: object) -> list[object]:
        typed = self.typed.replace("IN/", f"{inputs}/").replace("RUN", str(folder / "run"))
        return [*shlex.split(typed), *more]


TASKS = "--tasks jsonl:IN/mine.jsonl"
KEPT = {
    "calibrate": Kept(
        "calibrate bundled --data IN/texts.json --policy knorm --no-check --normalization layer "
        "--questions 3 --answer-tokens 2 -o RUN",
        "--questions 2", ("run/profile.safetensors", "run/contexts.json"), None, 4,
    ),
    "headroom": Kept(
        f"headroom bundled {TASKS} --samples 2 -o RUN", "--ratio 0.7", ("run/report.json",), "run/report.json", 4,
    ),
    "evaluate": Kept(
        f"evaluate bundled {TASKS} --budgets 24 --samples 2 --batch 1 --methods tova -o RUN",
        "--seed 1", ("run/report.json",), "run/report.json", 3,
    ),
    "validate": Kept(
        f"validate RUN {TASKS} --budget 24 --samples 2 --batch 1 --phases prefill --signals cosine",
        "--seed 1", ("run/validation/validation.json",), "run/validation/validation.json", 3, reads_run=True,
    ),
    "select": Kept(
        f"select IN/polykv {TASKS} --budget 24 --samples 2 --batch 1 "
        "--run RUN -o RUN.json",
        "--seed 1", ("run/selection.json", "run.json"), "run/selection.json", 4,
    ),
    "evolve": Kept(
        f"evolve bundled {TASKS} --budget 12 --samples 2 --set window=4 --group-size 6 --generations 1 --finalists 2 "
        "-o RUN",
        "--seed 1", ("run/plan.json", "run/report.json"), "run/report.json", 5,
    ),
    "run": Kept(
        f"run bundled {TASKS} --budget 40 --samples 2 --policies snapkv --rankings query_bank --fit 4 --measure 2 "
        "--no-refine -o RUN",
        "--seed 1", ("run/plan.json", "run/run.json"), "run/run.json", 14,
    ),
}  # fmt: skip
# for whole runs: those that take longest have files of their own in this folder before every commit
MARKS = {"evaluate": [], **{verb: [pytest.mark.nightly] for verb in ("run", "select", "evolve")}}
finished = pytest.mark.parametrize(
    "verb", [pytest.param(verb, marks=MARKS.get(verb, [pytest.mark.slow])) for verb in KEPT]
)
# runs that are made again: two verbs before every commit
made_again = pytest.mark.parametrize(
    "verb",
    [
        pytest.param(verb, marks=MARKS.get(verb, [pytest.mark.slow if verb == "calibrate" else pytest.mark.nightly]))
        for verb in KEPT
    ],
)


def prepare(verb: str, inputs: Path, folder: Path) -> None:
    """Leave in a folder what has to be there before the verb is run."""
    if KEPT[verb].reads_run:
        shutil.copytree(inputs / "polykv", folder / "run")


@pytest.fixture(scope="session")
def finished_by(tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> Callable[[str], Finished]:
    """The finished run of a verb, which nobody changes."""
    known: dict[str, Finished] = {}

    def finished(verb: str) -> Finished:
        def make(folder: Path) -> tuple[int, str, str]:
            prepare(verb, inputs, folder)
            return invoke(*KEPT[verb].words(inputs, folder))

        if verb not in known:
            known[verb] = finished_once(tmp_path_factory, f"verb-{verb}", make)
        return known[verb]

    return finished


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def results(verb: str, folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in KEPT[verb].results]


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever loads a model fails."""
    monkeypatch.setattr("kvsearch.models.loading.load", lambda *_: pytest.fail("a model is loaded"))


@pytest.mark.parametrize("verb", [*KEPT, "generate", "bench"])
def test_a_dry_run_writes_nothing(inputs: Path, tmp_path: Path, verb: str) -> None:
    others = {"bench": "bench bundled --budget 40 --length 64"}
    asked = KEPT.get(verb) or Kept(others.get(verb, "generate bundled"), "", (), None, 0)
    if verb in KEPT:
        prepare(verb, inputs, tmp_path)
    before = contents(tmp_path)
    out, _ = done(*asked.words(inputs, tmp_path, "--dry-run", "--json"))
    estimate = json.loads(out)["estimate"]
    seconds = [stage["seconds"] for stage in estimate["stages"]]
    assert estimate["seconds"] == pytest.approx(estimate["start"] + sum(seconds))
    least, most = (end - estimate["start"] for end in estimate["range"])
    assert least * 1.49 < sum(seconds) < most / 1.49
    assert min(seconds) > 0
    assert contents(tmp_path) == before
    assert (tmp_path / "run").exists() == asked.reads_run


def test_a_dry_run_is_a_table(run: Run) -> None:
    _, out, _ = run("generate", "bundled", "--dry-run")
    lines = [
        line.split() for line in out.splitlines() if line.strip() and "measured" not in line and "busy" not in line
    ]
    header, _, start, *stages = lines
    columns = ["stage", "contexts", "questions", "passes", "tokens", "time"]
    assert (header, start[0], stages[-1][0], stages[-1][-2]) == (columns, "load", "total", "to")
    _, out, _ = run("generate", "bundled", "--dry-run", "--json")
    named = [stage["name"].split()[0] for stage in json.loads(out)["estimate"]["stages"]]
    assert named == [stage[0] for stage in stages[:-1]]


@finished
def test_a_finished_run_says_so_and_stays_as_it_is(
    run: Run, inputs: Path, finished_by: Callable[[str], Finished], verb: str
) -> None:
    folder, out, talk = finished_by(verb)
    assert FINISHED_NOTE not in talk
    if KEPT[verb].reads_run:
        run(*KEPT[verb].words(inputs, folder))  # notes in its configuration where the copy is
    before = contents(folder)
    code, again, talk = run(*KEPT[verb].words(inputs, folder))
    assert (code, again, FINISHED_NOTE in talk) == (0, out, True)
    told, _ = done(*KEPT[verb].words(inputs, folder, "--json"))
    printed = KEPT[verb].printed
    found = json.loads(told)
    assert found
    assert printed is None or json.loads((folder / printed).read_bytes()).items() <= found.items()
    assert contents(folder) == before


@finished
def test_another_run_is_refused(run: Run, inputs: Path, finished_by: Callable[[str], Finished], verb: str) -> None:
    folder = finished_by(verb).folder
    before = contents(folder)
    told = refused(run, USAGE, "--force", *KEPT[verb].words(inputs, folder, *shlex.split(KEPT[verb].other)))
    assert told.count("\n") == 1
    assert contents(folder) == before


@contextmanager
def stopped_at(number: int) -> Iterator[None]:
    """Meanwhile, Ctrl-C comes in place of the write of this number."""
    writes = 0

    def counted(write: Callable[..., Any]) -> Callable[..., Any]:
        def stopping(*arguments: Any, **keywords: Any) -> Any:
            nonlocal writes
            writes += 1
            if writes == number:
                raise KeyboardInterrupt
            return write(*arguments, **keywords)

        return stopping

    replace = mock.patch.object(plan_files, "_replace", counted(plan_files._replace))
    append = mock.patch.object(Ledger, "_append", counted(Ledger._append))
    with replace, append:
        yield


@made_again
def test_a_run_that_was_stopped_goes_on_to_the_same_bytes(
    run: Run, inputs: Path, finished_by: Callable[[str], Finished], tmp_path: Path, verb: str
) -> None:
    prepare(verb, inputs, tmp_path)
    with stopped_at(KEPT[verb].write):
        code, out, talk = run(*KEPT[verb].words(inputs, tmp_path))
    assert (code, out) == (INTERRUPTED, ""), talk
    assert not (tmp_path / KEPT[verb].results[0]).exists()
    _, talk = done(*KEPT[verb].words(inputs, tmp_path))
    assert FINISHED_NOTE not in talk
    assert results(verb, tmp_path) == results(verb, finished_by(verb).folder)


@pytest.mark.parametrize("verb", ["evaluate", pytest.param("calibrate", marks=pytest.mark.nightly)])
def test_force_starts_anew_and_comes_to_the_same(
    inputs: Path, finished_by: Callable[[str], Finished], tmp_path: Path, verb: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(finished_by(verb).folder, folder)
    _, talk = done(*KEPT[verb].words(inputs, folder, "--force"))
    assert FINISHED_NOTE not in talk
    assert results(verb, folder) == results(verb, finished_by(verb).folder)


@pytest.mark.usefixtures("no_model")
@in_turn(verb=KEPT, more=[(), ("--force",)])
def test_a_second_writer_is_refused(run: Run, inputs: Path, tmp_path: Path, verb: str, more: tuple[str, ...]) -> None:
    """At once, and nothing is touched."""
    prepare(verb, inputs, tmp_path)
    with locked_elsewhere(tmp_path / "run"):
        before = contents(tmp_path)
        words = f"another kvsearch is writing to {tmp_path / 'run'} (process {os.getpid()} on "
        told = refused(run, USAGE, words, *KEPT[verb].words(inputs, tmp_path, *more))
        assert told.count("\n") == 1
        assert contents(tmp_path) == before


def model_of_mine(directory: Path) -> None:
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "llama"}')


def run_of_another_job(directory: Path) -> None:
    directory.mkdir()
    with lock_directory(directory):
        begin_run(directory, RunConfig(job="select", content={"seed": 1}))


def thesis(directory: Path) -> None:
    directory.mkdir()
    (directory / "thesis.tex").write_text("mine")


@pytest.mark.usefixtures("no_model")
@in_turn(
    verb=[verb for verb in KEPT if verb not in ("validate", "select")],
    occupy=[model_of_mine, run_of_another_job, thesis],
    more=[(), ("--force",)],
)
def test_a_directory_of_something_else_is_kept(
    run: Run, inputs: Path, tmp_path: Path, verb: str, occupy: Callable[[Path], None], more: tuple[str, ...]
) -> None:
    occupy(tmp_path / "run")
    before = contents(tmp_path)
    refused(run, USAGE, "holds something else than", *KEPT[verb].words(inputs, tmp_path, *more))
    assert contents(tmp_path) == before

"""kvsearch evolve, end to end on the bundled model and short contexts."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console as RichConsole

from kvsearch.budgets.plan_checks import check_plan
from kvsearch.cli.console import Console
from kvsearch.commands.searching import search_progress
from kvsearch.models.loading import load
from kvsearch.plan import load_plan, save_plan
from kvsearch.plan.origin import ContextSet
from kvsearch.runs.lock import lock_directory
from kvsearch.runs.run import read_contexts
from kvsearch.search.trials import Candidate, TrialLog
from tests import tiny
from tests.cli.conftest import SEARCH, Run, done
from tests.cli.test_bad_input import ENVIRONMENT, USAGE, refused
from tests.plan.builders import PROVENANCE
from tests.shared import Finished

SAMPLES = 4
SMALL = SEARCH.split()


@pytest.fixture(scope="module")
def questions(inputs: Path) -> Path:
    return inputs / "mine.jsonl"


def command(questions: Path, output: Path, *more: object, small: Sequence[object] = SMALL) -> tuple[object, ...]:
    return ("evolve", "bundled", *small, "--samples", SAMPLES, "--tasks", f"jsonl:{questions}", "-o", output, *more)


def results(directory: Path) -> tuple[bytes, bytes]:
    return (directory / "plan.json").read_bytes(), (directory / "report.json").read_bytes()


@pytest.mark.slow
def test_a_search_writes_a_plan_and_a_report(evolved: Finished) -> None:
    directory, out, talk = evolved.folder / "run", evolved.out, evolved.talk
    plan = load_plan(directory / "plan.json")
    check_plan(plan, "plan.json")
    assert plan.total == 12 * 24
    report = json.loads((directory / "report.json").read_text())["found"]["12"]
    assert [list(row) for row in report["budgets"]] == [list(row.budget) for row in plan.prefill.layers]
    assert "report split, 12 entries per kv head, question-agnostic" in out
    lines = talk.splitlines()
    assert re.match(rf"the model's own reply is right and teacher-forced after \d of {2 * SAMPLES} questions", lines[0])
    assert lines[1] == f"reading {2 * SAMPLES} questions once for all candidates"
    assert "search ended: all stages are finished" in lines


@pytest.mark.slow
def test_several_budgets(questions: Path, tmp_path: Path) -> None:
    small = ("--budgets", "8,16", *SMALL[2:], "--generations", 1)
    out, _ = done(*command(questions, tmp_path / "run", small=small))
    for budget in (8, 16):
        assert load_plan(tmp_path / "run" / f"plan-{budget}.json").total == budget * 24
    front = json.loads((tmp_path / "run" / "report.json").read_text())
    assert set(front["found"]) == {"8", "16"}
    assert "scaled from the smallest" in out


@pytest.mark.nightly
def test_budgets_of_the_decode_phase(questions: Path, tmp_path: Path) -> None:
    small = (*SMALL, "--phases", "decode", "--generations", 1, "--group-size", 6, "--max-evals", 4)
    out, talk = done(*command(questions, tmp_path / "run", small=small))
    plan = load_plan(tmp_path / "run" / "plan.json")
    assert plan.prefill is None
    assert plan.phase("decode").total == plan.total == 12 * 24
    assert f"every candidate is run whole on {2 * SAMPLES} questions: budgets of the decode phase" in talk
    assert "report split, 12 entries per kv head, question-agnostic, decode" in out


@pytest.mark.slow
def test_start_plans_bring_their_policies_and_what_they_have_seen(
    evolved: Finished, questions: Path, run: Run, tmp_path: Path
) -> None:
    before, start = evolved.folder / "run", tmp_path / "plan.json"
    plan, asked = load_plan(before / "plan.json"), read_contexts(before)
    record = plan.provenance.contexts
    assert (record.chosen, record.reported) == (ContextSet.of(asked.chosen), ContextSet.of(asked.reported))
    save_plan(tiny.plan_for(load("bundled"), [[20] * 4] * 3 + [[8] * 4] * 3, provenance=plan.provenance), start)
    small = ("--budget", 16, "--start", start, "--group-size", 2)
    out, talk = done(*command(questions, tmp_path / "run", "--dry-run", "--json", small=small))
    told = json.loads(out)
    content = json.loads((before / "config.json").read_text())["content"]
    assert told["splits"]["choice"] != content["splits"]["choice"]
    assert "does not say what it was fitted" not in talk
    assert list(told["starts"][0]) == ["plan", "pyramid", "uniform"]
    assert {one["params"]["window"] for one in told["policies"]} == {4}
    save_plan(tiny.plan_for(load("bundled"), [[20] * 4] * 6, provenance=PROVENANCE), start, overwrite=True)
    _, _, talk = run(*command(questions, tmp_path / "run", "--dry-run", small=small))
    assert "start plan plan does not say what it was fitted and chosen on, or not all of it" in " ".join(talk.split())


def test_one_question_is_not_enough(run: Run, questions: Path, tmp_path: Path) -> None:
    single = tmp_path / "single.jsonl"
    rows = questions.read_text().splitlines()[:6:2]  # a context for each split
    single.write_text("\n".join(rows))
    arguments = ("evolve", "bundled", *SMALL, "--tasks", f"jsonl:{single}", "--samples", 2, "-o", tmp_path / "run")
    refused(run, USAGE, "one question to search on: the result would fit that one alone", *arguments)


@pytest.mark.slow
def test_what_cannot_begin_leaves_the_old_run(evolved: Finished, questions: Path, run: Run) -> None:
    directory = evolved.folder / "run"
    before = results(directory), (directory / "ledger.jsonl").read_bytes()
    code, _, _ = run(*command(questions, directory, "--force", "--max-memory", 0.00001))
    assert code in (USAGE, ENVIRONMENT)
    assert (results(directory), (directory / "ledger.jsonl").read_bytes()) == before


START = Candidate(np.full((2, 1), 8), 2.5, "start uniform")
BETTER = Candidate(np.full((2, 1), 8), 1.25, "layers 0-1, generation 0")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[TrialLog]:
    with lock_directory(tmp_path), TrialLog(tmp_path / "ledger.jsonl") as log:
        yield log


def test_a_search_ends_and_gives_the_screen_back(log: TrialLog) -> None:
    console, screen = Console(), io.StringIO()
    console.__dict__["reporter"] = RichConsole(file=screen, force_terminal=True, width=200, highlight=False)
    with search_progress(console, log, 40) as watcher:
        watcher.stage("start plans")
        watcher.generation("start", 0, [2.5], START)
        watcher.stage("layers 0-1 (1 of 2)")
        watcher.generation("layers 0-1", 0, [1.25, math.nan], BETTER)
        assert watcher.title == "search, layers 0-1 (1 of 2), generation 0, best 1.25 (best start 2.5), 1 failed"
        watcher.ended("all stages are finished")
        console.say("after it")
    shown = screen.getvalue()
    assert "best start 2.5" in shown
    assert shown.index("search ended: all stages are finished") < shown.index("after it")
    with console.reporter.capture(), console.progress("what comes next"):  # a second live display would be refused
        pass


def test_an_interruption_tells_the_best_so_far(log: TrialLog, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), search_progress(Console(), log, 40) as watcher:
        log.append("best", candidate=BETTER.table.tolist(), value=BETTER.value, where=BETTER.where)
        watcher.stage("start plans")
        watcher.generation("start", 0, [2.5], START)
        raise KeyboardInterrupt
    said = " ".join(capsys.readouterr().err.split())
    assert "best so far: 1.25 (layers 0-1, generation 0), in " in said
    assert "give the same command again to go on" in said
    assert (log.path.parent / "best.json").exists()

"""How a search is shown: as other work, with the best so far in its title."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console as RichConsole

from kvsearch.cli.console import Console
from kvsearch.jobs.searching import watching
from kvsearch.runs.lock import locked
from kvsearch.search.trials import Candidate, TrialLog

START = Candidate(np.full((2, 1), 8), 2.5, "start uniform")
BETTER = Candidate(np.full((2, 1), 8), 1.25, "layers 0-1, generation 0")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[TrialLog]:
    with locked(tmp_path), TrialLog(tmp_path / "ledger.jsonl") as log:
        yield log


def console_on(terminal: bool) -> tuple[Console, io.StringIO]:
    console, screen = Console(), io.StringIO()
    console.__dict__["reporter"] = RichConsole(file=screen, force_terminal=terminal, width=200, highlight=False)
    return console, screen


@pytest.mark.parametrize("terminal", [False, True])
def test_a_search_ends_and_gives_the_screen_back(terminal: bool, log: TrialLog) -> None:
    console, screen = console_on(terminal)
    with watching(console, log, 40) as watcher:
        watcher.stage("start plans")
        watcher.generation("start", 0, [2.5], START)
        watcher.stage("layers 0-1 (1 of 2)")
        watcher.generation("layers 0-1", 0, [1.25, math.nan], BETTER)
        assert watcher.title == "search, layers 0-1 (1 of 2), generation 0, best 1.25 (best start 2.5), 1 failed"
        watcher.ended("all stages are finished")
        console.say("after it")
    shown = screen.getvalue()
    assert ("best start 2.5" in shown) == terminal
    assert shown.index("search ended: all stages are finished") < shown.index("after it")
    with console.reporter.capture(), console.progress("what comes next"):  # a second live display would be refused
        pass


@pytest.mark.parametrize("terminal", [False, True])
def test_an_interruption_tells_the_best_so_far(terminal: bool, log: TrialLog) -> None:
    console, screen = console_on(terminal)
    with pytest.raises(KeyboardInterrupt), watching(console, log, 40) as watcher:
        log.append("best", candidate=BETTER.table.tolist(), value=BETTER.value, where=BETTER.where)
        watcher.stage("start plans")
        watcher.generation("start", 0, [2.5], START)
        raise KeyboardInterrupt
    assert "best so far: 1.25 (layers 0-1, generation 0), in " in screen.getvalue()
    assert "give the same command again to go on" in screen.getvalue()
    assert (log.path.parent / "best.json").exists()
    with console.reporter.capture(), console.progress("what comes next"):  # a second live display would be refused
        pass

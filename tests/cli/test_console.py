"""What every command says of itself: warnings, signals, how far it is, and its log."""

from __future__ import annotations

import os
import platform
import re
import signal
import threading
import warnings
from pathlib import Path

import pytest
import typer

from kvsearch.cli.console import Console, Count, print_lines
from kvsearch.commands.reporter import StagedProgress, on_interruption
from kvsearch.core.errors import KvsearchWarning
from kvsearch.models.work import StageCost, Work
from kvsearch.report.costs import Forecast
from kvsearch.runtime.speed import Speed
from tests import tiny
from tests.cli.conftest import Run
from tests.cli.test_bad_input import USAGE

WORK = {"fit": 60.0, "search": 30.0, "report": 10.0}  # seconds of the stages of a job


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_is_kept_is_told(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    heard = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    console = Console()
    before = signal.signal(number, heard)  # tests in the background ignore some

    try:
        with (
            pytest.raises(typer.Exit) as ended,
            console.reporting_failures(),
            on_interruption(console, lambda: "7 replies are kept"),
        ):
            os.kill(os.getpid(), number)
            threading.Event().wait(60)
        assert ended.value.exit_code == 128 + number
        assert signal.getsignal(number) is heard
    finally:
        signal.signal(number, before)
    assert capsys.readouterr().err.startswith("7 replies are kept\nkvsearch: error: ")


def test_our_warnings_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def warned(console: Console) -> str:
        with console.reporting_failures():
            warnings.warn("no good", KvsearchWarning, stacklevel=1)
        return capsys.readouterr().err

    assert warned(Console()) == "kvsearch: warning: no good\n"
    assert warned(Console(quiet=True, log_file=tmp_path / "log.txt")) == ""
    assert "WARNING no good" in (tmp_path / "log.txt").read_text()


def test_time_left_is_of_what_this_process_does() -> None:
    now = [0.0]
    count = Count("asking: context", clock=lambda: now[0])
    assert count.describe() == "asking: context: begun 0:00 ago"
    count(10, 40)  # what is kept
    assert count.describe() == "asking: context 11 of 40: 25% in 0:00"
    now[0] = 20.0
    count(20, 40)
    assert count.describe() == "asking: context 21 of 40: 50% in 0:20, about 0:40 left"
    count(0, 5)
    now[0] = 3690.0
    count(1, 5)
    told = "asking: context 2 of 5: 20% in 1:01:30, about 4:04:40 left"
    assert count.describe() == f"{told}, a further part has begun"
    count(2, 5)
    assert count.describe() == "asking: context 3 of 5: 40% in 1:01:30, about 1:31:45 left"


def test_a_time_left_rises_only_with_the_reason() -> None:
    """It falls with the clock through a long step; a later end that is hardly news is not told."""
    now = [0.0]
    count = Count("asking: context", clock=lambda: now[0])
    count(0, 100)
    told = []
    steps = {60: 10, 120: 20, 150: 20, 190: 30, 400: 40, 430: 50, 1500: 50, 1530: 60, 1560: 80}
    for second in range(0, 1561, 10):
        now[0] = float(second)
        if second in steps:
            count(steps[second], 100)
        if second >= 60 and second % 30 == 0:
            told.append(count.time_left())
    assert told[:4] == ["about 9:00 left", "about 8:30 left", "about 8:00 left", "about 7:30 left"]
    seconds = None
    for words in told:
        match = re.search(r"about (\d+):(\d+) left", words)
        left = int(match[1]) * 60 + int(match[2]) if match else None
        if left is not None and seconds is not None and left > seconds - 30:
            assert words.endswith(", slower than before")
        seconds = left if left is not None else seconds
    assert "longer than was said" in told
    assert any(words.endswith("slower than before") for words in told)


def test_stages_have_one_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that was finished before is left out of the whole."""
    now = [0.0]
    monkeypatch.setattr("kvsearch.commands.reporter.time.monotonic", lambda: now[0])
    stages = [StageCost(name, 1, 0, Work(seconds=seconds)) for name, seconds in WORK.items()]
    forecast = Forecast({}, stages)
    forecast.speed = Speed(tiny.loaded("llama").model)
    forecast.speed.fastest, forecast.speed.slowest = 0.5, 1.2
    said: list[str] = []
    console = Console(quiet=True)
    monkeypatch.setattr(Console, "say", lambda _, text: said.append(text))
    display = StagedProgress(console, forecast.work, forecast.words)
    with display.stage("fit") as stage, stage.progress("context") as show:
        show(5, 10)
        assert display.title == "fit: context 6 of 10"
        show(1, 10)  # steps count anew
        assert display.done == 30
        now[0] = 1.4  # to read what was finished
    assert (display.done, display.whole) == (0, 40)
    with display.stage("search") as stage:
        stage.part = 0.5
        for _ in range(2):
            with stage.progress("round") as show:
                show(4, 4)
        assert display.done == 30 * 0.75
        now[0] = 61.4
    assert (display.done, display.whole) == (30, 40)
    with display.stage("report"):
        pass
    assert said == [  # after what was really done its pace counts
        "stage 1 of 3: fit (1 contexts; 0:30 to 1:30)",
        "stage 2 of 3: search (1 contexts; 0:15 to 0:45)",
        "stage 3 of 3: report (1 contexts; about 0:20)",
    ]


def test_lines_come_while_one_step_takes_long() -> None:
    said = list[str]()
    twice = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        if len(said) == 2:
            twice.set()

    with print_lines(Count("batch"), say, every=0.01) as progress:
        progress(0, 3)
        assert twice.wait(60)
    assert said[-1].startswith("batch 1 of 3: 0% in ")


def test_a_log_goes_to_the_end_of_a_file(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    assert run("policies", "snapkv", "--log-file", log)[0] == 0
    assert run("policies", "nonesuch", "--log-file", log)[0] == USAGE
    assert log.read_text().count(f" on {platform.node()})\n") == 2
    assert "ERROR unknown policy 'nonesuch'" in log.read_text()

"""Signals that end a process end a command as Ctrl-C does."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from kvsearch.cli.console import Console
from kvsearch.cli.progress import Count, lines
from kvsearch.jobs.stages import on_interruption


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_what_is_kept_is_told(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    heard = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    console, before = Console(), signal.signal(number, heard)  # tests in the background ignore some

    def work() -> None:
        with on_interruption(console, lambda: "7 replies are kept"):
            os.kill(os.getpid(), number)
            threading.Event().wait(60)

    try:
        assert console.run(work) == 128 + number
        assert signal.getsignal(number) is heard
    finally:
        signal.signal(number, before)
    told = capsys.readouterr().err
    assert told.startswith("7 replies are kept\nkvsearch: error: ")


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert Console().run(lambda: os.kill(os.getpid(), signal.SIGHUP)) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


# --- how far it is, where there is no terminal ------------------------------------------------------------------------


def test_time_left_is_of_what_this_process_does() -> None:
    now = [0.0]
    count = Count("batches", clock=lambda: now[0])
    assert count.words() == "batches: begun 0:00 ago"
    count(10, 40)  # what is kept
    assert count.words() == "batches: 10 of 40 in 0:00"
    now[0] = 20.0
    count(20, 40)
    assert count.words() == "batches: 20 of 40 in 0:20, about 0:40 left"
    count(0, 5)  # another part begins
    now[0] = 3630.0
    count(1, 5)
    assert count.words() == "batches: 1 of 5 in 1:00:30, about 4:00:40 left"


def test_lines_come_while_one_step_takes_long() -> None:
    said, twice = list[str](), threading.Event()

    def say(text: str) -> None:
        said.append(text)
        if len(said) == 2:
            twice.set()

    with lines(Count("batches"), say, every=0.01) as progress:
        progress(0, 3)
        assert twice.wait(60)
    assert said[-1].startswith("batches: 0 of 3 in ")

"""The ledger of a search: what is appended is read again bit for bit, and no interruption damages what was there."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.errors import EnvironmentFault, InternalError, UsageError
from kvsearch.search.executors import Job, Outcome, SerialExecutor, evaluate_all, keys_of
from kvsearch.search.ledger import Ledger
from kvsearch.search.records import LINES
from tests.search.executors.fakes import Fake, table

KEYS = ["a" * 64, "b" * 64, "c" * 64]
JOB = Job(0, (np.array([[8, 4]]), np.array([[6, 6]])), (3, 5), "nll")
OK = Outcome(0, "ok", np.array([[0.1 + 0.2, 2.0], [1 / 3, -5e-324]]), "", 1.5, 40)


def result(*keys: str, outcome: str = "ok", value: float = 1.0) -> dict[str, Any]:
    values = [[value]] * len(keys) if outcome in ("ok", "non-finite") else None
    return {"keys": list(keys), "outcome": outcome, "values": values, "seconds": 1.0, "tokens": 10}


def told(generation: int = 0) -> dict[str, Any]:
    return {"stage": "group 1", "generation": generation, "points": [[1.0]], "values": [2.0]}


# --- what is written is read again -----------------------------------------------------------------------------------


def test_the_lines_of_a_search(tmp_path: Path) -> None:
    points = [np.array([1.0, 0.1 + 0.2]), np.array([2**-1074, -1e308])]
    with Ledger(tmp_path / "l") as ledger:
        ledger.append("note", text="begun")
        ledger.append("stage", name="group 1", begins=True, settings={"layers": [0, 1], "sigma": np.float64(0.3)})
        ledger.append("asked", stage="group 1", generation=0, points=points)
        ledger.keep(JOB, OK)
        ledger.append("told", stage="group 1", generation=0, points=points[::-1], values=np.array([0.5, 1 / 3]))
        ledger.append("best", candidate=JOB.candidates[1], value=np.float64(1 / 3), where="group 1, generation 0")
        ledger.append("asked", stage="group 2", generation=0, points=points[:1])
        ledger.append("stage", name="group 1", begins=False)
    with Ledger(tmp_path / "l") as ledger:
        [asked] = ledger.asked("group 1")
        [heard] = ledger.told("group 1")
        assert [vector.tobytes() for vector in asked.vectors] == [point.tobytes() for point in points]
        assert [vector.tobytes() for vector in heard.vectors] == [point.tobytes() for point in points[::-1]]
        assert (heard.generation, heard.values) == (0, [0.5, 1 / 3])
        assert len(ledger.asked("group 2")) == 1
        assert ledger.asked("group 3") == ledger.told("group 2") == []
        assert ledger.best is not None
        assert ledger.best.table.tolist() == [[6, 6]]
        assert ledger.best.table.dtype == np.int64
        assert (ledger.best.value, ledger.best.where) == (1 / 3, "group 1, generation 0")
        begin, end = ledger.stages()
        assert (begin.name, begin.begins, begin.settings) == ("group 1", True, {"layers": [0, 1], "sigma": 0.3})
        assert (end.begins, end.settings) == (False, {})
        assert [note.text for note in ledger.notes()] == ["begun"]
        found = ledger.results()
        for number, key in enumerate(keys_of(JOB)):
            values = found[key].values
            assert values is not None
            assert OK.values is not None
            assert values.tobytes() == OK.values[number].tobytes()
            assert (found[key].kind, found[key].seconds, found[key].message) == ("ok", 0.75, "")


def test_an_empty_ledger(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l") as ledger:
        assert ledger.best is None
        assert ledger.results() == {}
        assert ledger.spent[:2] == (0, 0)


@given(st.lists(st.floats(allow_nan=True), min_size=1))
def test_values_are_kept_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, values: list[float]) -> None:
    path = tmp_path_factory.mktemp("values") / "l"
    with Ledger(path) as ledger:
        ledger.append("result", **{**result(KEYS[0], outcome="non-finite"), "values": [values]})
        ledger.append("told", **told())
    json.loads(path.read_text().splitlines()[0], parse_constant=pytest.fail)  # JSON that everyone reads
    with Ledger(path) as ledger:
        found = ledger.results()[KEYS[0]]
    assert found.values is not None
    np.testing.assert_array_equal(found.values, np.array(values))  # takes any NaN for any other
    assert np.array_equal(np.signbit(found.values), np.signbit(values)) or any(map(math.isnan, values))
    assert (found.kind == "ok") == bool(np.isfinite(values).all())


# --- results ---------------------------------------------------------------------------------------------------------


def test_only_what_was_written_before_a_line(tmp_path: Path) -> None:
    """So that a generation that was interrupted is divided into the same jobs as it was at first."""
    with Ledger(tmp_path / "l") as ledger:
        ledger.append("result", **result(KEYS[0]))
        asked = ledger.append("asked", stage="s", generation=0, points=[[1.0]])
        ledger.append("result", **result(KEYS[1]))
        assert list(ledger.results(before=asked)) == KEYS[:1]
        assert list(ledger.results()) == KEYS[:2]
    with Ledger(tmp_path / "l") as ledger:
        assert list(ledger.results(before=ledger.asked("s")[0])) == KEYS[:1]


@pytest.mark.parametrize("outcome", ["oom", "timeout", "error", "non-finite"])
def test_a_failure_stands_once_it_was_told(tmp_path: Path, outcome: str) -> None:
    failure = result(KEYS[0], outcome=outcome, value=math.nan)
    with Ledger(tmp_path / "l") as ledger:
        ledger.append("result", **failure)
        ledger.append("result", **result(KEYS[1]))
        assert list(ledger.results()) == [KEYS[1]]
        ledger.append("told", **told())
        assert {key: found.kind for key, found in ledger.results().items()} == {KEYS[0]: outcome, KEYS[1]: "ok"}


def test_a_candidate_that_failed_and_was_done_again(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l") as ledger:
        ledger.append("result", **result(KEYS[0], outcome="oom"))
        ledger.append("result", **result(KEYS[0], value=3.0))
        ledger.append("told", **told())
        found = ledger.results()[KEYS[0]]
        assert found.kind == "ok"
        assert found.values is not None
        assert found.values.tolist() == [3.0]
        assert ledger.spent[:2] == (1, 20)


@pytest.mark.parametrize("finished", range(5))
def test_a_generation_goes_on_where_it_was_interrupted(tmp_path: Path, finished: int) -> None:
    """Nothing is measured twice or in other company, and the outcomes are those of a generation in one go."""

    class Interrupted(Exception):
        pass

    # The first job is split, and 901 does not even fit alone.
    jobs = [Job(0, tuple(map(table, [8, 9, 901, 11, 12])), None, "nll"), Job(1, (table(13), table(14)), None, "nll")]
    parts: list[list[str]] = []

    def evaluate(ledger: Ledger, most: int) -> dict[int, Outcome]:
        def keep(part: Job, outcome: Outcome) -> None:
            if len(parts) == most:
                raise Interrupted
            parts.append(keys_of(part))
            ledger.keep(part, outcome)

        return evaluate_all(SerialExecutor(Fake(tmp_path)), jobs, keep, ledger.results())

    with Ledger(tmp_path / "whole") as ledger:
        whole = evaluate(ledger, 99)
    in_one_go, parts = parts, []
    assert len(in_one_go) == 4
    with Ledger(tmp_path / "l") as ledger:
        ledger.append("asked", stage="s", generation=0, points=[[1.0]])
        with suppress(Interrupted):
            evaluate(ledger, finished)
    with Ledger(tmp_path / "l") as ledger:
        assert ledger.results(before=ledger.asked("s")[0]) == {}
        found = evaluate(ledger, 99)
        assert ledger.spent.evaluations == 7
    again = [part for number, part in enumerate(parts) if part in parts[:number]]
    assert again in ([], [keys_of(jobs[0]._replace(candidates=(table(901),)))])  # a failure that was not told
    assert {tuple(part) for part in parts} == {tuple(part) for part in in_one_go}
    for number, outcome in whole.items():
        np.testing.assert_array_equal(found[number].values, outcome.values)
        assert found[number].kind == outcome.kind


def test_what_is_spent_is_counted_over_sessions(tmp_path: Path) -> None:
    path = tmp_path / "l"
    with Ledger(path) as ledger:
        ledger.append("result", **result(*KEYS[:2]))
        time.sleep(0.05)
        ledger.append("result", **result(KEYS[1], KEYS[2]))
        first = ledger.spent
        ledger.append("note", text="the end")
    assert first[:2] == (3, 20)
    assert first.seconds >= 0.05
    time.sleep(0.2)  # no work on the run
    with Ledger(path) as ledger:
        second = ledger.spent
        assert second[:2] == (3, 20)
        assert first.seconds <= second.seconds < first.seconds + 0.15
        time.sleep(0.05)
        assert ledger.spent.seconds >= second.seconds + 0.05
        ledger.append("note", text="again")
    ats = [json.loads(line)["at"] for line in path.read_text().splitlines()]
    assert ats == sorted(ats)
    assert ats[-1] >= first.seconds + 0.05


# --- files that are cut short or damaged -----------------------------------------------------------------------------


def test_a_last_line_that_is_cut_short_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "l"
    with Ledger(path) as ledger:
        ledger.append("note", text="one")
        ledger.append("note", text="two")
    data = path.read_bytes()
    for size in range(data.index(b"\n") + 1, len(data)):
        path.write_bytes(data[:size])
        with Ledger(path) as ledger:
            assert [note.text for note in ledger.notes()] == ["one"]
            ledger.append("note", text="three")
        with Ledger(path) as ledger:
            assert [note.text for note in ledger.notes()] == ["one", "three"]


@pytest.mark.parametrize("broken", [b"\0\0\0\n", b'{"kind": fal\n', b"\xff\n", b"[" * 100_000 + b"\n"])
def test_a_last_line_that_is_nonsense_is_dropped_and_another_one_is_refused(tmp_path: Path, broken: bytes) -> None:
    path = tmp_path / "l"
    with Ledger(path) as ledger:
        ledger.append("note", text="one")
    good = path.read_bytes()
    path.write_bytes(good + broken)
    with Ledger(path) as ledger:
        assert len(ledger.notes()) == 1
    assert path.read_bytes() == good
    path.write_bytes(good + broken + good)
    with pytest.raises(UsageError, match=r"l, line 2 is damaged \(it is no JSON\): restore the file, or start anew"):
        Ledger(path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[]", "it is no object"),
        ("{}", "there is no kind None"),
        ('{"kind": "tell", "at": 1}', "there is no kind 'tell'; did you mean 'told'?"),
        ('{"kind": ["note"], "at": 1}', "there is no kind"),
        ('{"kind": "note", "text": "x"}', "at: is missing"),
        ('{"kind": "note", "at": -1, "text": "x"}', "at: "),
        ('{"kind": "note", "at": 1, "text": 5}', "text: "),
        ('{"kind": "note", "at": 1, "text": "x", "more": 1}', "more: unknown key"),
        ('{"kind": "asked", "at": 1, "stage": "s", "generation": 0, "points": [[NaN]]}', "points.0.0: "),
        ('{"kind": "asked", "at": 1, "stage": "s", "generation": 0, "points": [["1"]]}', "points.0.0: "),
        ('{"kind": "asked", "at": 1, "stage": "s", "generation": true, "points": []}', "generation: "),
        (
            '{"kind": "told", "at": 1, "stage": "s", "generation": 0, "points": [[1.0]], "values": []}',
            "values: has 0 for 1 points",
        ),
        ('{"kind": "best", "at": 1, "candidate": [[1.5]], "value": 1.0, "where": "s"}', "candidate.0.0: "),
        ('{"kind": "result", "at": 1, "keys": [], "outcome": "ok", "seconds": 1, "tokens": 1}', "keys: "),
        ('{"kind": "result", "at": 1, "keys": ["x"], "outcome": "ok", "seconds": 1, "tokens": 1}', "keys.0: "),
    ],
)
def test_a_whole_line_with_other_content_is_refused(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "l"
    path.write_text(f'{{"kind": "note", "at": 1, "text": "x"}}\n{line}\n')
    with pytest.raises(UsageError, match="line 2 is damaged") as found:
        Ledger(path)
    assert words in str(found.value)
    assert "\n" not in str(found.value)


def test_results_need_a_row_per_candidate(tmp_path: Path) -> None:
    path = tmp_path / "l"
    line = {"kind": "result", "at": 1.0, **result(KEYS[0]), "values": [[1.0], [2.0]]}
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(UsageError, match=r"line 1 is damaged \(values: has 2 rows for 1 candidates\)"):
        Ledger(path)


@pytest.mark.parametrize(
    ("kind", "data", "words"),
    [
        ("tell", {}, "there is no kind 'tell'; did you mean 'told'?"),
        ("note", {"txt": "x"}, "text: is missing"),
        ("told", {**told(), "values": [math.nan]}, "values.0: "),
        ("stage", {"name": "s", "begins": True, "settings": {"x": math.inf}}, "Out of range float"),
        ("stage", {"name": "s", "begins": True, "settings": {"x": object()}}, "not JSON serializable"),
    ],
)
def test_what_is_no_line_is_not_written(tmp_path: Path, kind: str, data: dict[str, Any], words: str) -> None:
    with Ledger(tmp_path / "l") as ledger:
        with pytest.raises(InternalError, match=f"cannot write a line of kind '{kind}'") as found:
            ledger.append(kind, **data)
        assert words in str(found.value)
        assert (tmp_path / "l").read_bytes() == b""


def test_every_kind_of_line_is_tested() -> None:
    assert set(LINES) == {"asked", "result", "told", "best", "stage", "note"}


# --- several processes, full disks, sudden deaths --------------------------------------------------------------------


def test_two_processes_do_not_write_to_one_ledger(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l") as ledger:
        ledger.append("note", text="one")
        for anew in (False, True):
            with pytest.raises(UsageError, match=f"^another kvsearch is writing to {tmp_path}: wait for it to end$"):
                Ledger(tmp_path / "l", anew=anew)
        assert len((tmp_path / "l").read_bytes().splitlines()) == 1
    with Ledger(tmp_path / "l", anew=True) as ledger:
        assert ledger.notes() == []


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "no space left on device; free some space, then go on with --resume"),
        (errno.EIO, "input/output error; check the disk and the permissions, then go on with --resume"),
    ],
)
def test_a_line_that_does_not_reach_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    path = tmp_path / "l"
    with Ledger(path) as ledger:
        ledger.append("result", **result(KEYS[0]))
        before = path.read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(EnvironmentFault) as found:
                ledger.append("result", **result(KEYS[1]))
        assert str(found.value) == f"cannot write {path}: {words}"
        assert path.read_bytes() == before
        assert list(ledger.results()) == KEYS[:1]
        assert ledger.spent[:2] == (1, 10)
        ledger.append("result", **result(KEYS[2]))
    with Ledger(path) as ledger:
        assert list(ledger.results()) == [KEYS[0], KEYS[2]]


def test_a_disk_that_fills_up_in_the_middle_of_a_line(tmp_path: Path) -> None:
    """A limit on the size of files stands for the end of the disk: the system takes the first part of a line only."""
    path = tmp_path / "l"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Ledger(path) as ledger:
        ledger.append("note", text="one")
        before = path.read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limits[1]))
        try:
            with pytest.raises(EnvironmentFault, match=f"^cannot write {path}: file too large"):
                ledger.append("note", text="two")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert path.read_bytes() == before


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "l").mkdir()
    with pytest.raises(EnvironmentFault, match=f"^cannot write {tmp_path / 'l'}: is a directory; check the disk"):
        Ledger(tmp_path / "l")


WRITER = """
import sys
from pathlib import Path
from kvsearch.search.ledger import Ledger
with Ledger(Path(sys.argv[1])) as ledger:
    number = len(ledger.notes())
    print("ready", flush=True)
    while True:
        ledger.append("note", text=f"{number} " + "x" * (number * 37 % 5000))
        print(number, flush=True)
        number += 1
"""


def test_a_writer_that_is_killed_leaves_a_prefix(tmp_path: Path) -> None:
    """kill -9 at any moment: whatever was reported as written is there, in order, and the next one goes on."""
    path, chance = tmp_path / "l", random.Random(0)
    written = 0
    for _ in range(6):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        time.sleep(chance.uniform(0.0, 0.3))
        writer.send_signal(signal.SIGKILL)
        reported = [int(line) for line in writer.stdout.read().split()]
        writer.wait()
        assert reported == list(range(written, written + len(reported)))
        with Ledger(path) as ledger:
            texts = [note.text for note in ledger.notes()]
        assert [int(text.split()[0]) for text in texts] == list(range(len(texts)))
        assert all(len(text) == len(f"{number} ") + number * 37 % 5000 for number, text in enumerate(texts))
        assert written + len(reported) <= len(texts) <= written + len(reported) + 1
        written = len(texts)
    assert written > 6

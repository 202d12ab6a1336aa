"""The ledger of a search: what is appended is read again bit for bit, and no interruption damages what was there."""

from __future__ import annotations

import errno
import json
import math
import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.errors import EnvironmentFault, InternalError, UsageError
from kvsearch.search.jobs import Job, JobOutcome, keys_of
from kvsearch.search.ledger import SearchLedger
from kvsearch.search.population import evaluate_all
from kvsearch.search.records import LINES, StageLine
from kvsearch.workers.serial import SerialExecutor
from tests.runs.sealing import sealed
from tests.workers.fakes import Fake, table

KEYS = ["a" * 64, "b" * 64, "c" * 64]
JOB = Job(0, (np.array([[8, 4]]), np.array([[6, 6]])), (3, 5), "nll")
OK = JobOutcome(0, "ok", np.array([[0.1 + 0.2, 2.0], [1 / 3, -5e-324]]), "", 1.5, 40)


def result(*keys: str, outcome: str = "ok", value: float = 1.0) -> dict[str, Any]:
    values = [[value]] * len(keys) if outcome in ("ok", "non-finite") else None
    return {"keys": list(keys), "outcome": outcome, "values": values, "seconds": 1.0, "tokens": 10}


def told(generation: int = 0) -> dict[str, Any]:
    return {"stage": "group 1", "generation": generation, "points": [[1.0]], "values": [2.0]}


# --- what is written is read again -----------------------------------------------------------------------------------


def test_the_lines_of_a_search(tmp_path: Path) -> None:
    points = [np.array([1.0, 0.1 + 0.2]), np.array([2**-1074, -1e308])]
    with SearchLedger(tmp_path / "l") as ledger:
        ledger.append("stage", name="group 1", begins=True, settings={"layers": [0, 1], "sigma": np.float64(0.3)})
        ledger.append("asked", stage="group 1", generation=0, points=points)
        ledger.keep(JOB, OK)
        ledger.append("told", stage="group 1", generation=0, points=points[::-1], values=np.array([0.5, 1 / 3]))
        ledger.append("best", candidate=JOB.candidates[1], value=np.float64(1 / 3), where="group 1, generation 0")
        ledger.append("asked", stage="group 2", generation=0, points=points[:1])
        ledger.append("stage", name="group 1", begins=False)
    with SearchLedger(tmp_path / "l") as ledger:
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
        begin, end = ledger.line(1), ledger.line(ledger.count)
        assert isinstance(begin, StageLine) and isinstance(end, StageLine)
        assert (begin.name, begin.begins, begin.settings) == ("group 1", True, {"layers": [0, 1], "sigma": 0.3})
        assert (end.begins, end.settings) == (False, {})
        found = ledger.results()
        for number, key in enumerate(keys_of(JOB)):
            values = found[key].values
            assert values is not None
            assert OK.values is not None
            assert values.tobytes() == OK.values[number].tobytes()
            assert (found[key].kind, found[key].seconds, found[key].message) == ("ok", 0.75, "")


def test_an_empty_ledger(tmp_path: Path) -> None:
    with SearchLedger(tmp_path / "l") as ledger:
        assert ledger.best is None
        assert ledger.results() == {}
        assert ledger.spent[:2] == (0, 0)


@given(st.lists(st.floats(allow_nan=True), min_size=1))
def test_values_are_kept_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, values: list[float]) -> None:
    path = tmp_path_factory.mktemp("values") / "l"
    with SearchLedger(path) as ledger:
        ledger.append("result", **{**result(KEYS[0], outcome="non-finite"), "values": [values]})
        ledger.append("told", **told())
    json.loads(path.read_text().splitlines()[0], parse_constant=pytest.fail)  # JSON that everyone reads
    with SearchLedger(path) as ledger:
        found = ledger.results()[KEYS[0]]
    assert found.values is not None
    np.testing.assert_array_equal(found.values, np.array(values))  # takes any NaN for any other
    assert np.array_equal(np.signbit(found.values), np.signbit(values)) or any(map(math.isnan, values))
    assert (found.kind == "ok") == bool(np.isfinite(values).all())


# --- results ---------------------------------------------------------------------------------------------------------


def test_only_what_was_written_before_a_line(tmp_path: Path) -> None:
    """So that a generation that was interrupted is divided into the same jobs as it was at first."""
    with SearchLedger(tmp_path / "l") as ledger:
        ledger.append("result", **result(KEYS[0]))
        asked = ledger.append("asked", stage="s", generation=0, points=[[1.0]])
        ledger.append("result", **result(KEYS[1]))
        assert list(ledger.results(before=asked)) == KEYS[:1]
        assert list(ledger.results()) == KEYS[:2]
    with SearchLedger(tmp_path / "l") as ledger:
        assert list(ledger.results(before=ledger.ask("s", 0, [np.array([1.0])]))) == KEYS[:1]


@pytest.mark.parametrize("outcome", ["oom", "timeout", "error", "non-finite"])
def test_a_failure_stands_once_it_was_told(tmp_path: Path, outcome: str) -> None:
    failure = result(KEYS[0], outcome=outcome, value=math.nan)
    with SearchLedger(tmp_path / "l") as ledger:
        ledger.append("result", **failure)
        ledger.append("result", **result(KEYS[1]))
        assert list(ledger.results()) == [KEYS[1]]
        ledger.append("told", **told())
        assert {key: found.kind for key, found in ledger.results().items()} == {KEYS[0]: outcome, KEYS[1]: "ok"}


def test_a_candidate_that_failed_and_was_done_again(tmp_path: Path) -> None:
    with SearchLedger(tmp_path / "l") as ledger:
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

    def evaluate(ledger: SearchLedger, most: int) -> dict[int, JobOutcome]:
        def keep(part: Job, outcome: JobOutcome) -> None:
            if len(parts) == most:
                raise Interrupted
            parts.append(keys_of(part))
            ledger.keep(part, outcome)

        return evaluate_all(SerialExecutor(Fake(tmp_path)), jobs, keep, ledger.results())

    with SearchLedger(tmp_path / "whole") as ledger:
        whole = evaluate(ledger, 99)
    in_one_go, parts = parts, []
    assert len(in_one_go) == 4
    with SearchLedger(tmp_path / "l") as ledger:
        ledger.append("asked", stage="s", generation=0, points=[[1.0]])
        with suppress(Interrupted):
            evaluate(ledger, finished)
    with SearchLedger(tmp_path / "l") as ledger:
        assert ledger.results(before=ledger.ask("s", 0, [np.array([1.0])])) == {}
        found = evaluate(ledger, 99)
        assert ledger.spent.evaluations == 7
    again = [part for number, part in enumerate(parts) if part in parts[:number]]
    assert again in ([], [keys_of(jobs[0]._replace(candidates=(table(901),)))])  # a failure that was not told
    assert {tuple(part) for part in parts} == {tuple(part) for part in in_one_go}
    for number, outcome in whole.items():
        np.testing.assert_array_equal(found[number].values, outcome.values)
        assert found[number].kind == outcome.kind


def test_what_is_spent_is_counted_over_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, clock = tmp_path / "l", SimpleNamespace(now=1000.0)
    monkeypatch.setattr("kvsearch.search.ledger.time", SimpleNamespace(monotonic=lambda: clock.now))
    with SearchLedger(path) as ledger:
        ledger.append("result", **result(*KEYS[:2]))
        clock.now += 5
        ledger.append("result", **result(KEYS[1], KEYS[2]))
        first = ledger.spent
        ledger.begin("the end")
    assert first[:2] == (3, 20)
    assert first.seconds == 5
    clock.now += 100  # no work on the run
    with SearchLedger(path) as ledger:
        second = ledger.spent
        assert second[:2] == (3, 20)
        assert second.seconds == 5
        clock.now += 2
        assert ledger.spent.seconds == 7
        ledger.begin("again")
    ats = [json.loads(line)["at"] for line in path.read_text().splitlines()]
    assert ats == [0, 5, 5, 7]


# --- files that are damaged ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{}", "there is no kind None"),
        ('{"kind": "tell", "at": 1}', "there is no kind 'tell'; did you mean 'told'?"),
        ('{"kind": ["stage"], "at": 1}', "there is no kind"),
        ('{"kind": "note", "at": 1, "text": "x"}', "there is no kind"),
        ('{"kind": "stage", "name": "x", "begins": true}', "at: is missing"),
        ('{"kind": "stage", "at": -1, "name": "x", "begins": true}', "at: "),
        ('{"kind": "stage", "at": 1, "name": 5, "begins": true}', "name: "),
        ('{"kind": "stage", "at": 1, "name": "x", "begins": true, "more": 1}', "more: unknown key"),
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
    path.write_text(sealed(['{"kind": "stage", "at": 1, "name": "x", "begins": true}', line]))
    with pytest.raises(UsageError, match="line 2 is damaged") as found:
        SearchLedger(path)
    assert words in str(found.value)
    assert "\n" not in str(found.value)


def test_results_need_a_row_per_candidate(tmp_path: Path) -> None:
    path = tmp_path / "l"
    line = {"kind": "result", "at": 1.0, **result(KEYS[0]), "values": [[1.0], [2.0]]}
    path.write_text(sealed([json.dumps(line)]))
    with pytest.raises(UsageError, match=r"line 1 is damaged \(values: has 2 rows for 1 candidates\)"):
        SearchLedger(path)


@pytest.mark.parametrize(
    ("kind", "data", "words"),
    [
        ("tell", {}, "there is no kind 'tell'; did you mean 'told'?"),
        ("stage", {"name": "s"}, "begins: is missing"),
        ("told", {**told(), "values": [math.nan]}, "values.0: "),
        ("stage", {"name": "s", "begins": True, "settings": {"x": math.inf}}, "Out of range float"),
        ("stage", {"name": "s", "begins": True, "settings": {"x": object()}}, "not JSON serializable"),
    ],
)
def test_what_is_no_line_is_not_written(tmp_path: Path, kind: str, data: dict[str, Any], words: str) -> None:
    with SearchLedger(tmp_path / "l") as ledger:
        with pytest.raises(InternalError, match=f"cannot write a line of kind '{kind}'") as found:
            ledger.append(kind, **data)
        assert words in str(found.value)
        assert (tmp_path / "l").read_bytes() == b""


def test_every_kind_of_line_is_tested() -> None:
    assert set(LINES) == {"asked", "result", "told", "best", "stage"}


def test_a_line_that_does_not_reach_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it held is not known, and not spent."""

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "l"
    with SearchLedger(path) as ledger:
        ledger.append("result", **result(KEYS[0]))
        before = path.read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(EnvironmentFault) as found:
                ledger.append("result", **result(KEYS[1]))
        assert str(found.value) == (
            f"cannot write {path}: no space left on device, free some space, then go on with --resume"
        )
        assert path.read_bytes() == before
        assert list(ledger.results()) == KEYS[:1]
        assert ledger.spent[:2] == (1, 10)
        ledger.append("result", **result(KEYS[2]))
    with SearchLedger(path) as ledger:
        assert list(ledger.results()) == [KEYS[0], KEYS[2]]

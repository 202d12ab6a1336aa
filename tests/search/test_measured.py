"""What a ledger knows of candidates, against a reading of all its lines."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.search.jobs import Result
from kvsearch.search.measured import Measured
from kvsearch.search.records import ComputedLine

KEYS = [sha256(bytes([number])).hexdigest() for number in range(5)]


def line_of(keys: Sequence[str], outcome: str, at: float) -> ComputedLine:
    values = None if outcome == "oom" else [[at]] * len(keys)
    fields = {"at": at, "keys": keys, "outcome": outcome, "values": values, "seconds": 1.0, "tokens": 1}
    return ComputedLine.model_validate(fields)


def by_reading(lines: Sequence[ComputedLine | None]) -> dict[str, Result]:
    """What stands after some lines; None: a generation was told."""
    found: dict[str, Result] = {}
    failed: dict[str, Result] = {}
    for line in lines:
        if line is None:
            found |= failed
            failed = {}
            continue
        for key, result in line.results.items():
            failed.pop(key, None)
            (found if result.kind == "ok" else failed)[key] = result
    return found


def told(result: Result | None) -> object:
    if result is None:
        return None
    return result._replace(values=None), None if result.values is None else result.values.tolist()


@given(st.data())
def test_what_stands_before_every_line(data: st.DataObject) -> None:
    """A candidate that stands is not measured again, so it is not drawn again either."""
    lines: list[ComputedLine | None] = []
    measured, seconds = Measured(lambda number: _computed(lines[number - 1])), count()
    for _ in range(data.draw(st.integers(0, 12))):
        new = [key for key in KEYS if key not in by_reading(lines)]
        if not new or data.draw(st.booleans()):
            lines.append(None)
            measured.tell(len(lines))
        else:
            keys = data.draw(st.lists(st.sampled_from(new), min_size=1, unique=True))
            line = line_of(keys, data.draw(st.sampled_from(["ok", "oom"])), float(next(seconds)))
            lines.append(line)
            measured.take(len(lines), line)
    for number in range(1, len(lines) + 2):
        found, wanted = measured.before(number), by_reading(lines[: number - 1])
        assert set(found) == set(wanted)
        assert len(found) == len(wanted)
        for key in KEYS:
            assert (key in found) == (key in wanted)
            assert told(found.get(key)) == told(wanted.get(key))
    assert measured.count == len({key for line in lines if line is not None for key in line.keys})


def test_a_key_that_nobody_measured() -> None:
    with pytest.raises(KeyError):
        Measured(_computed).before(1)[KEYS[0]]


def _computed(line: object) -> ComputedLine:
    assert isinstance(line, ComputedLine)
    return line

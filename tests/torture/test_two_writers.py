"""Two commands that write to one directory at once: one of them is refused, and the results are the other's."""

from __future__ import annotations

from pathlib import Path

from tests.torture.commands import COMMANDS, end, find_differences, finish, start

REFUSED = 2
SEEDS = "--seed 0", "--seed 1"
REASONS = "another kvsearch is writing to", "holds another run", "already exists"


def test_one_of_two_writers_is_refused(tmp_path: Path) -> None:
    commands = [f"{COMMANDS['evaluate']} {seed}" for seed in SEEDS]
    alone = [finish(tmp_path / f"alone-{number}", words) for number, words in enumerate(commands)]
    assert find_differences(*alone)
    for race in range(2):
        folder = tmp_path / f"race-{race}"
        ends = [end(process) for process in [start(folder, words) for words in commands]]
        assert sorted(code for code, _ in ends) == [0, REFUSED], ends
        winner = [code for code, _ in ends].index(0)
        assert any(reason in ends[1 - winner][1] for reason in REASONS), ends
        assert find_differences(alone[winner], folder / "out") == []

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
    for race in range(3):
        folder = tmp_path / f"race-{race}"
        ends = [end(process) for process in [start(folder, words) for words in commands]]
        assert sorted(code for code, _ in ends) == [0, REFUSED], ends
        winner = [code for code, _ in ends].index(0)
        assert any(reason in ends[1 - winner][1] for reason in REASONS), ends
        assert find_differences(alone[winner], folder / "out") == []


def test_of_two_writers_of_one_file_the_later_wins_or_is_refused(tmp_path: Path) -> None:
    """A plan needs no lock: its file is there in one step."""
    commands = [f"plan uniform bundled --policy knorm --budget {budget}" for budget in (12, 14)]
    alone = [finish(tmp_path / f"alone-{number}", words).read_bytes() for number, words in enumerate(commands)]
    for race in range(3):
        folder = tmp_path / f"race-{race}"
        ends = [end(process) for process in [start(folder, words) for words in commands]]
        assert {code for code, _ in ends} <= {0, REFUSED}
        assert any(code == 0 for code, _ in ends)
        assert (folder / "out").read_bytes() in [text for text, (code, _) in zip(alone, ends, strict=True) if code == 0]
        assert sorted(path.name for path in folder.iterdir()) == ["out", "tasks.jsonl"]

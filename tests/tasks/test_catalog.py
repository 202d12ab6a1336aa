"""Tasks by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvsearch.errors import UsageError
from kvsearch.tasks.catalog import find_tasks
from kvsearch.tasks.jsonl import JsonlTask
from kvsearch.tasks.synthetic.suite import BUILDERS, SyntheticTask, synthetic_suite


def test_the_suite() -> None:
    assert find_tasks("synthetic", 512, "select") == synthetic_suite(512, "select")
    assert [task.name for task in find_tasks("synthetic:")] == list(BUILDERS)


def test_some_of_the_suite() -> None:
    assert find_tasks("synthetic:vote, chain", 2048) == [SyntheticTask("vote", 2048), SyntheticTask("chain", 2048)]
    assert find_tasks("synthetic:vote,vote") == [SyntheticTask("vote")]


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a:b.jsonl"
    path.write_text(json.dumps({"context": "c", "question": "q", "answers": ["a"]}))
    (task,) = find_tasks(f"jsonl:{path}")
    assert isinstance(task, JsonlTask)
    assert task.name == "a:b"


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("synthetik", "unknown task 'synthetik'; did you mean 'synthetic'"),
        ("", r"unknown task '' \(known: synthetic, jsonl\); a file is given as jsonl:FILE"),
        ("jsonl", "a file is given as jsonl:FILE"),
        ("jsonl:", "a file is given as jsonl:FILE"),
        ("mine.jsonl", "a file is given as jsonl:FILE"),
        ("jsonl:/no/such/file", "there is no file /no/such/file"),
        ("synthetic:votes", "unknown synthetic task 'votes'; did you mean 'vote'"),
        ("synthetic:vote,", "unknown synthetic task ''"),
        ("longbench", "unknown task 'longbench'"),
    ],
)
def test_unknown_tasks(spec: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        find_tasks(spec)


def test_the_suite_needs_length() -> None:
    with pytest.raises(UsageError, match="at least 512 tokens"):
        find_tasks("synthetic", 100)

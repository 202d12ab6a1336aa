"""docs/examples/api_questions.py: answers are the signatures' and stand in the text, and both files are apart."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from kvsearch.tasks.user_files import JsonlTask, TextTask

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
HOLDERS = ("numpy", "scipy.signal", "scipy.ndimage", "not_installed")
CHARACTERS = 4100
TITLE = re.compile(r"^((?:numpy|scipy)\.[\w.]+)\n\n", re.MULTILINE)
NAMES = re.compile(r"`(.*?)`")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("api_questions")


@pytest.fixture
def make(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(name: str, *options: str, holders: Any = HOLDERS) -> tuple[Path, list[dict[str, Any]]]:
        folder = tmp_path / name
        monkeypatch.setattr(script, "HOLDERS", holders)
        monkeypatch.setattr(sys, "argv", ["api_questions.py", str(folder), "--contexts", "5", *options])
        script.main()
        return folder, [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]

    return run


def default_of(question: str) -> tuple[str, Any]:
    """Return the function of a question, and the default that its signature has."""
    parameter, function = NAMES.findall(question)
    return function, inspect.signature(pkgutil.resolve_name(function)).parameters[parameter].default


def test_answers_are_defaults_and_files_are_apart(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder, rows = make("first")
    printed = capsys.readouterr().out
    assert "not in what is installed: not_installed" in printed
    assert "questions about 5 contexts" in printed
    task = JsonlTask.load(folder / "questions.jsonl")
    assert len(task.rows) == 5
    titles = [TITLE.findall(example.context) for example in task.rows]
    assert all(len(functions) >= 3 for functions in titles)
    in_contexts = [function for functions in titles for function in functions]
    assert len({*in_contexts}) == len(in_contexts)
    assert all(0.9 * CHARACTERS <= len(example.context) <= CHARACTERS for example in task.rows)
    assert all(2 <= len(example.queries) <= 4 for example in task.rows)
    for row in rows:
        function, default = default_of(row["question"])
        answer = row["answers"][0]
        assert answer == default or ast.literal_eval(answer) == default
        assert re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", row["context"].split(function)[1])
    text = TextTask.load(folder / "documentation.txt")
    assert not {*TITLE.findall(text.text)} & {*in_contexts}
    assert len(TITLE.findall(text.text)) > 50
    again, _ = make("again")
    for name in ("questions.jsonl", "documentation.txt"):
        assert (folder / name).read_bytes() == (again / name).read_bytes()

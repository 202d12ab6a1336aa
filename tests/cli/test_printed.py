"""Every verb shows what it was given as data: texts that act on terminals and in markup, and none passes."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from kvsearch.cli.console import Console
from kvsearch.core.printed import FORMULA, PLAIN
from tests.cli.conftest import Run, done
from tests.payloads import PAYLOADS, file_name, passed, without_surrogates
from tests.tiny import document

NEW = ("-o", "/nowhere/new")
# P is a payload, F a path with it; all of them end before a model is loaded
COMMANDS = [
    ("show", "F"), ("show", "P"), ("show", "--P"), ("P",), ("export", "F", *NEW), ("export", "F", "--ratio", "P", *NEW),
    ("report", "F", *NEW), ("plan", "diff", "F", "F"), ("plan", "P"), ("validate", "F"), ("select", "F"),
    ("policies", "P"), ("tasks", "P"), ("recipes", "P"),
    ("evaluate", "bundled", "--methods", "P", "--budgets", "8"),
    ("evaluate", "bundled", "--methods", "uniform", "--budgets", "8", "--tasks", "P"),
    ("evaluate", "bundled", "--methods", "uniform", "--budgets", "P"), ("evaluate", "bundled", "--recipe", "F"),
    ("generate", "bundled", "--plan", "F"), ("generate", "bundled", "--prompt", "@F"),
    ("compress", "bundled", "--plan", "F"),
    ("calibrate", "bundled", "--policy", "P", *NEW), ("calibrate", "bundled", "--data", "F", *NEW),
    ("calibrate", "bundled", "--set", "P", *NEW), ("evolve", "bundled", "--recipe", "F", *NEW),
    ("evolve", "bundled", "--tasks", "P", *NEW), ("run", "bundled", "--recipe", "P", *NEW),
    ("headroom", "bundled", "--tasks", "P"),
    ("bench", "bundled", "--plan", "F"), ("reproduce", "P"), ("lm-eval", "bundled", "--plan", "F", "--tasks", "P"),
    ("generate", "bundled", "--device", "P"), ("generate", "bundled", "--dtype", "P"),
]  # fmt: skip


def test_complaints_of_every_verb(run: Run) -> None:
    text, place = "".join(PAYLOADS), "/".join(("/nowhere", *map(file_name, PAYLOADS)))
    for words in COMMANDS:
        code, out, talk = run(*(word.replace("P", text).replace("F", place) for word in words))
        assert code in (2, 3, 4), (words, talk)
        assert passed(out) == passed(talk) == set(), words
        assert len([line for line in talk.splitlines() if line.startswith("kvsearch: error:")]) <= 1


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over questions whose categories, names and texts are payloads."""
    from tests.cli.conftest import invoke

    folder = tmp_path_factory.mktemp("printed")
    rows, texts = [], list(map(without_surrogates, PAYLOADS))
    for at in range(2):
        made, half = document(60, at), texts[at::2]
        context, question = " ".join(made.words[1:]) + half[0], made.questions[0].question + half[1]
        told = {"category": "".join(half), "id": f"{at}{''.join(half)}"}
        rows.append({"context": context, "question": question, "answers": ["x"], "max_new_tokens": 2, **told})
    tasks = folder / f"[red]{file_name(PAYLOADS[3])}.jsonl"
    tasks.write_text("\n".join(map(json.dumps, rows)))
    arguments = ("--tasks", f"jsonl:{tasks}", "--methods", "streaming", "--budgets", "16")
    output = folder / f"[bold]{file_name(PAYLOADS[4])}"
    code, out, talk = invoke(
        "evaluate", "bundled", *arguments, "-o", output, "--table", folder / "table.csv", "--log-file",
        folder / "log.txt",
    )  # fmt: skip
    assert code in (0, 4), talk
    assert passed(out) == passed(talk) == set()
    for shown in ("[red]", "[link=http://e.example]", ":warning:", "\\x1b[2J", "\\u202e"):
        assert shown in "".join(out.split())
    assert passed((folder / "log.txt").read_text()) == set()
    return output


def test_evaluate_and_its_tables(asked: Path) -> None:
    for path in (asked.parent / "table.csv", asked / "samples.csv"):
        with path.open(newline="", encoding="utf-8") as file:
            cells = [cell for row in csv.reader(file) for cell in row]
        assert all(cell[:1] not in FORMULA or PLAIN.fullmatch(cell) for cell in cells), path
    written = (asked / "tables.md").read_text()
    assert passed(written) == set()
    assert "<script>" not in written.replace("\\<script>", "")
    widths = {line.replace("\\|", "").count("|") for line in written.splitlines() if line.startswith("|")}
    assert len(widths) <= 3  # a number of columns for every table


def test_show(asked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    out, talk = done("show", asked)
    plain = out.replace("\x1b[3m", "").replace("\x1b[1m", "").replace("\x1b[2;3m", "").replace("\x1b[0m", "")
    assert passed(plain) == passed(talk) == set()
    assert plain != out
    assert "[red]" in plain


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[IO[bytes]]:
    """Put a terminal in the place of a standard stream, and give what it shows."""
    master, slave = os.openpty()
    with os.fdopen(master, "rb", 0) as seen, os.fdopen(slave, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, name, stream)
        yield seen


REPLY = "two\nlines\tand \u6771\u4eac [red]x[/red] \x1b[2J\x1b]52;c;eA==\x07\r\u202e end \ud800"


def test_a_reply_on_a_terminal_is_shown_and_in_a_pipe_is_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch, "stdout") as seen:
        Console().print_reply(REPLY)
        sys.stdout.flush()
        shown = seen.read(4096).decode().replace("\r\n", "\n")
    assert passed(shown, "\n\t") == set()
    assert shown.startswith("two\nlines")
    assert "\u6771\u4eac [red]x[/red] \\x1b[2J\\x1b]52;c;eA==\\x07\\x0d\\u202e end \\ud800" in shown
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stdout", pipe)
    Console().print_reply(REPLY)
    assert pipe.getvalue() == REPLY.replace("\ud800", "\\ud800") + "\n"

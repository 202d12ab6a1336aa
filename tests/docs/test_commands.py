"""Every command that README and the docs print is read by the command line: verbs, flags, values, and together."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvsearch.cli import app
from kvsearch.cli.console import Console
from kvsearch.core.errors import UsageError

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("data/*/README.md")])
FENCE = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)
LEAST = 60  # commands: fewer mean that they are not found


def commands() -> Iterator[tuple[str, str]]:
    """Every command with the page that it is on; lines that end with a backslash go on."""
    for page in PAGES:
        for block in FENCE.findall(page.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                words = line.strip().removeprefix("$ ")
                if words.startswith("kvsearch "):
                    yield page.name, words


FOUND = sorted(set(commands()))


def test_they_are_found() -> None:
    assert len(FOUND) > LEAST


def read(_: Console, action: Callable[[], None]) -> int:
    """Check the options of a command, and do nothing; see `kvsearch.cli.command`."""
    parts = inspect.getclosurevars(action).nonlocals
    parts["options"].of(**parts["typed"])
    return 0


@pytest.mark.parametrize(("page", "line"), FOUND, ids=[f"{page}: {line[:70]}" for page, line in FOUND])
def test_a_command_is_read(page: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Console, "run", read)
    words = shlex.split(line, comments=True)
    result = CliRunner().invoke(app, words[1:])
    of_a_run = (
        any(word.startswith("runs/") for word in words[words.index("--recipe") :]) if "--recipe" in words else False
    )
    if of_a_run and isinstance(result.exception, UsageError):
        assert "config.json" in str(result.exception)  # of a run that is not here
        return
    assert result.exit_code == 0, result.exception or result.output

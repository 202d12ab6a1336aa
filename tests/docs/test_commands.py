"""Commands and Python in the documents are read, and run where that takes no model of others."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kvsearch
from kvsearch.cli import app
from kvsearch.core.errors import UsageError

ROOT = Path(__file__).parents[2]
OF_AGENTS = ROOT / "AGENTS.md"
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", OF_AGENTS, *ROOT.glob("docs/*.md"), *ROOT.glob("data/*/README.md")]
)
FENCE = re.compile(r"^```[^`\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
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


@pytest.mark.usefixtures("idle_verbs")
@pytest.mark.parametrize(("page", "line"), FOUND, ids=[f"{page}: {line[:70]}" for page, line in FOUND])
def test_a_command_is_read(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)
    result = CliRunner().invoke(app, words[1:])
    of_a_run = (
        any(word.startswith("runs/") for word in words[words.index("--recipe") :]) if "--recipe" in words else False
    )
    if of_a_run and result.exit_code == UsageError.exit_code:
        assert "config.json" in result.output  # of a run that is not here
        return
    assert result.exit_code == 0, result.exception or result.output


def test_targets_and_scripts_that_agents_are_told_of_are_there() -> None:
    assert len(FOUND) > LEAST
    text = OF_AGENTS.read_text(encoding="utf-8")
    made = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    asked = re.findall(r"^make (\w+)", text, re.MULTILINE)
    assert len(asked) > 3
    assert set(asked) <= made
    named = re.findall(r"`((?:kvsearch|scripts|tests|docs)/[\w./]*)`", text)
    assert len(named) > 3
    assert [place for place in named if not (ROOT / place).exists()] == []


PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```python( options)?\n(.*?)^```", re.DOTALL | re.MULTILINE)
SIGNATURE = re.compile(r"`(\w+)\(([^`]*?)\) ->", re.DOTALL)


@pytest.mark.slow
@pytest.mark.nightly
def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    session: dict[str, Any] = {}
    for checked, block in BLOCK.findall(PAGE):
        if not checked:
            exec(compile(block, "<docs/python.md>", "exec"), session)
    assert (tmp_path / "report.html").exists()


class Checked:
    """The verbs, which read their options and do nothing."""

    def __getattr__(self, name: str) -> Any:
        parts = inspect.getclosurevars(getattr(kvsearch, name)).nonlocals

        def check(*places: Any, **keywords: Any) -> None:
            parts["options"].of(**dict(zip(parts["places"], places, strict=False)), **keywords)

        return check


def test_options_of_long_verbs_are_read() -> None:
    [block] = [block for checked, block in BLOCK.findall(PAGE) if checked]
    exec(compile(block, "<docs/python.md>", "exec"), {"kvsearch": Checked()})


def test_every_name_has_an_example() -> None:
    code = "".join(block for _, block in BLOCK.findall(PAGE))
    assert [name for name in kvsearch.__all__ if not re.search(rf"\b{name}\b", code) and f"`{name}" not in PAGE] == []


def test_signatures_are_those_of_the_functions() -> None:
    found = SIGNATURE.findall(PAGE)
    assert len(found) > 10
    for name, written in found:
        if hasattr(kvsearch, name):
            known = inspect.signature(getattr(kvsearch, name)).parameters
            for parameter in re.findall(r"(?:^|[,|*])\s*(\w+)(?=\s*(?:[,=|]|$))", written):
                assert parameter in known, f"{name}: {parameter}"

"""docs/python.md: its blocks run as printed, in one session, and every public name is there."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import kvsearch

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


@pytest.mark.parametrize("name", kvsearch.__all__)
def test_every_name_has_an_example(name: str) -> None:
    assert re.search(rf"\b{name}\b", "".join(block for _, block in BLOCK.findall(PAGE))) or f"`{name}" in PAGE


def test_signatures_are_those_of_the_functions() -> None:
    found = SIGNATURE.findall(PAGE)
    assert len(found) > 10
    for name, written in found:
        if hasattr(kvsearch, name):
            known = inspect.signature(getattr(kvsearch, name)).parameters
            for parameter in re.findall(r"(?:^|[,|*])\s*(\w+)(?=\s*(?:[,=|]|$))", written):
                assert parameter in known, f"{name}: {parameter}"

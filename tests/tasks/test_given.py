"""Texts that are given, and the bundled models' own example."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsearch.core.errors import UsageError
from kvsearch.tasks.given import example_for, given_text
from kvsearch.tasks.prompts import PLAIN_PROMPT
from kvsearch.tasks.synthetic.vocabulary import WORDS
from tests.tasks import solver


def test_the_bundled_model_has_an_example() -> None:
    context, prompt, plain = example_for("bundled", None, None, 3)
    assert plain == " {question}"
    assert len(context.split()) + 1 <= 1024
    assert set(context.split()) <= set(WORDS)
    assert solver.answer(context.split(), prompt.split())
    assert example_for("bundled", None, None, 3) == (context, prompt, plain)
    assert example_for("bundled", None, None, 4) != (context, prompt, plain)
    assert example_for("bundled", None, "? vote", 3) == (context, "? vote", plain)
    assert example_for("bundled", "the calm fox .", "? vote", 3) == ("the calm fox .", "? vote", plain)
    assert example_for("bundled", "the calm fox .", None, 3) == ("the calm fox .", "", plain)


def test_other_models_need_a_text() -> None:
    assert example_for("m", "C", "Q", 0) == ("C", "Q", PLAIN_PROMPT)
    assert example_for("m", "C", None, 0) == ("C", "", "{question}")
    assert example_for("m", None, "Q", 0) == ("Q", "", "{question}")
    with pytest.raises(UsageError, match="nothing to read: give --context"):
        example_for("m", None, None, 0)


def test_text_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("été\n", encoding="utf-8")
    assert given_text(f"@{tmp_path / 'text.txt'}") == "été\n"
    assert given_text("me@home") == "me@home"
    assert given_text("") == ""
    with pytest.raises(UsageError, match="there is no file"):
        given_text(f"@{tmp_path / 'gone.txt'}")
    with pytest.raises(UsageError, match="is a folder"):
        given_text(f"@{tmp_path}")

"""Texts that are given, and the bundled models' own example."""

from __future__ import annotations

import pytest

from kvsearch.core.errors import UsageError
from kvsearch.tasks.given import resolve_example
from kvsearch.tasks.prompts import PLAIN_PROMPT
from kvsearch.tasks.synthetic.language import WORDS
from tests.tasks import solver


def test_the_bundled_model_has_an_example() -> None:
    context, prompt, plain = resolve_example("bundled", None, None, 3)
    assert plain == " {question}"
    assert len(context.split()) + 1 <= 1024
    assert set(context.split()) <= set(WORDS)
    assert solver.answer(context.split(), prompt.split())
    assert resolve_example("bundled", None, None, 3) == (context, prompt, plain)
    assert resolve_example("bundled", None, None, 4) != (context, prompt, plain)
    assert resolve_example("bundled", None, "? vote", 3) == (context, "? vote", plain)
    assert resolve_example("bundled", "the calm fox .", "? vote", 3) == ("the calm fox .", "? vote", plain)
    assert resolve_example("bundled", "the calm fox .", None, 3) == ("the calm fox .", "", plain)


def test_other_models_need_a_text() -> None:
    assert resolve_example("m", "C", "Q", 0) == ("C", "Q", PLAIN_PROMPT)
    assert resolve_example("m", "C", None, 0) == ("C", "", "{question}")
    assert resolve_example("m", None, "Q", 0) == ("Q", "", "{question}")
    with pytest.raises(UsageError, match="nothing to read: give --context"):
        resolve_example("m", None, None, 0)

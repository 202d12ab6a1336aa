"""Context and prompt from the command line, or an example of the bundled models where the user gives none."""

from __future__ import annotations

import os
import random

from kvsearch.core.errors import UsageError
from kvsearch.core.files import read_text
from kvsearch.models.loading import BUNDLED
from kvsearch.tasks.fields import is_blank
from kvsearch.tasks.prompts import PLAIN_PROMPT
from kvsearch.tasks.synthetic.language import Document
from kvsearch.tasks.synthetic.suite import SyntheticTask

STDIN = "/dev/stdin"


def read_text_argument(value: str) -> str:
    """Return the text itself, or the content of FILE for "@FILE", of the standard input for "@-".

    Raises:
        UsageError: the path of a file without @, or a file that is empty or that `read_text` refuses.
    """
    if os.path.isfile(value):  # noqa: PTH113 - of a long text, too, which can be no path
        raise UsageError(f"{value} is a file: write @{value} to have it read")
    if not value.startswith("@"):
        return value
    text = read_text(STDIN if value == "@-" else value[1:])
    if is_blank(text):
        raise UsageError(f"{value[1:]} is empty: name a file with text after the @")
    return text


def find_expected_reply(seed: int) -> str:
    """Return the right answer to the bundled models' own example."""
    return _draw_bundled_example(seed).questions[0].answers[0]


def _draw_bundled_example(seed: int) -> Document:
    return SyntheticTask("multikey").document(random.Random(seed))


def resolve_example(model: str, context: str | None, prompt: str | None, seed: int) -> tuple[str, str, str]:
    """Return context, prompt and plain prompt format; for bundled models missing ones come from a built-in example.

    Raises:
        UsageError: another model, and no text to read.
    """
    if model in BUNDLED:
        if context is None:
            document = _draw_bundled_example(seed)
            context = " ".join(document.words[1:])
            return context, prompt or document.questions[0].question, SyntheticTask.prompt
        return context, prompt or "", SyntheticTask.prompt
    if context is None and prompt is None:
        raise UsageError("there is nothing to read: give --context (compressed), --prompt, or both")
    if context is None:
        return str(prompt), "", "{question}"
    return context, prompt or "", PLAIN_PROMPT if prompt else "{question}"

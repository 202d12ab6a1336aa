"""The tutorial prints what its commands print."""

from __future__ import annotations

import re

import pytest

from scripts.tutorial import PAGE, directory_of, rendered, run_here

NUMBER = re.compile(r"\b[0-9a-f]{64}\b|[+-]?\d+(\.\d+)?")


def test_outputs_follow_their_commands() -> None:
    page = "a\n```console\n$ kvsearch one 'two words'\nold\n$ kvsearch three\n```\nb"
    said = {"one": "\n  said  \n", "three": ""}
    asked: list[list[str]] = []

    def run(words: list[str]) -> str:
        asked.append(words)
        return said[words[1]]

    assert rendered(page, run) == "a\n```console\n$ kvsearch one 'two words'\n  said\n\n$ kvsearch three\n```\nb"
    assert asked == [["kvsearch", "one", "two words"], ["kvsearch", "three"]]


@pytest.mark.slow
@pytest.mark.nightly
def test_it_is_that_of_today() -> None:
    """Words are the same; numbers may differ in the last place on another machine, and are those of some machine."""
    with directory_of(PAGE.read_text()):
        today = rendered(PAGE.read_text(), run_here)
    assert NUMBER.sub("#", today).split() == NUMBER.sub("#", PAGE.read_text()).split()

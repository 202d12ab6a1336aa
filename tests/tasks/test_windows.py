"""Plain text in windows."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.errors import UsageError
from kvsearch.tasks.windows import PerplexityText, Window


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_windows_by_hand() -> None:
    text = PerplexityText("t", "abcdefgh")
    a, d = ord("a"), ord("d")
    assert text.windows(encode, 2, 1) == [Window(0, (a, a + 1), (a + 2,)), Window(3, (d, d + 1), (d + 2,))]
    assert [window.start for window in text.windows(encode, 2, 1, stride=2)] == [0, 2, 4]


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 20), st.integers(0, 60))
def test_windows_are_pieces_of_the_text(context: int, continuation: int, stride: int, more: int) -> None:
    size = context + continuation
    ids = list(range(size + more))
    windows = PerplexityText("t", "x").windows(lambda _: ids, context, continuation, stride)
    assert [window.start for window in windows] == list(range(0, more + 1, stride))
    for window in windows:
        assert [*window.context, *window.continuation] == ids[window.start : window.start + size]
        assert len(window.context) == context
    assert windows[-1].start + stride + size > len(ids)


def test_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Köln\n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "one", "more": 1}\n\n{"text": "two"}\n')
    assert PerplexityText.load(tmp_path / "a.txt") == PerplexityText("a", "Köln\n")
    assert PerplexityText.load(str(tmp_path / "b.jsonl")) == PerplexityText("b", "one\n\ntwo")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.txt", b"M\xfcller", r"a.txt is not UTF-8 text: byte 1"),
        ("a.txt", b" \n", "a.txt is empty: perplexity needs text"),
        ("a.jsonl", b"", "a.jsonl is empty"),
        ("a.jsonl", b'{"text": "a"}\n{"question": "a"}', "a.jsonl has rows without a text"),
        ("a.jsonl", b'{"text": 3}', "a.jsonl has rows without a text"),
        ("a.jsonl", b"{}\n[]", "a.jsonl line 2 is not an object"),
    ],
)
def test_files_of_no_use(name: str, content: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=problem):
        PerplexityText.load(tmp_path / name)

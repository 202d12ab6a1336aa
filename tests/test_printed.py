"""What is printed is data: what acts, or cannot be seen, is an escape; formulas and markup are text."""

from __future__ import annotations

import csv
import io
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.printed import (
    FORMULA,
    MAX_LINE_LENGTH,
    PLAIN,
    escape_invisible,
    escape_line,
    escape_markdown,
    escape_reply,
    format_command_line,
    format_csv,
    truncate_lines,
)
from tests.payloads import PAYLOADS, passed

ANY = st.text() | st.text("[]<>|`*_$&;=+-@\t\r\n\\'\" aé0.,")


@given(ANY)
def test_nothing_unseen_is_left_and_what_is_seen_stays(text: str) -> None:
    for keep in ("", "\n"):
        shown = escape_invisible(text, keep)
        assert passed(shown, keep) == set()
        assert escape_invisible(shown, keep) == shown
        if passed(text, "") == set() and text.isascii():
            assert shown == text


@given(ANY)
def test_no_data_begins_a_line_of_its_own(text: str) -> None:
    _, *more = escape_line(f"kvsearch: error: {text} .").split("\n")
    assert all(line.startswith(" ") for line in more)


def test_payloads() -> None:
    for text in PAYLOADS:
        assert passed(escape_invisible(text)) == passed(escape_line(text)) == set()
        assert passed(escape_reply(text), "\n\t\u200c\u200d") == set()
        assert passed(escape_markdown(text), "") == passed(format_command_line([text]), "") == set()


def test_what_replies_are_made_of_stays() -> None:
    for text in ("two\nlines\tand a tab", "東京, größer, 😀", "می\u200cخواهم", "👨\u200d👩\u200d👧 ❤\ufe0f"):
        assert escape_reply(text) == text
    assert escape_reply("a\r\nb\rc\x1b[2J") == "a\nb\\x0dc\\x1b[2J"


def test_what_a_spreadsheet_would_compute_is_text_and_numbers_with_their_intervals_stay() -> None:
    computed = ["=1", "+a", "-a", "@a", "\t1", "\r1", " =1", "\n+cmd", "=", "+1+1", "-1-1", "-2+3", "＝1"]
    assert next(csv.reader(io.StringIO(format_csv([computed]), newline=""))) == [f"'{text}" for text in computed]
    numbers = [
        "-1", "+0.5", "-1.5e-3", "-", "-inf", "+1,234.5", "-12.5%", "-3.0 points [-4.0, -2.0]", "+1 [-1, +3] 2 / 0 / 1",
        "+1.0 [4 contexts: no interval] 2 / 0 / 1", "-1.0 [1 context: no interval]",
    ]  # fmt: skip
    assert next(csv.reader(io.StringIO(format_csv([numbers])))) == numbers
    assert format_csv([("name", -1, -0.25, True, None, "", float("nan"))]) == "name,-1,-0.25,True,,,\n"


@given(st.lists(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=2, max_size=2), max_size=3))
def test_csv_is_read_again(rows: list[list[str]]) -> None:
    read = list(csv.reader(io.StringIO(format_csv(rows), newline="")))
    bare = [[[cell.removeprefix("'") for cell in row] for row in table] for table in (read, rows)]
    assert bare[0] == bare[1]
    assert all(cell[:1] not in FORMULA or PLAIN.fullmatch(cell) for row in read for cell in row)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("task_a: 12.5 [10.0, 15.0]", "task_a: 12.5 [10.0, 15.0]"),
        ("-1.0 [-2.0, +3.0] 2 / 0 / 1", "-1.0 [-2.0, +3.0] 2 / 0 / 1"),
        ("-1.0 [4 contexts: no interval] 2 / 0 / 1", "-1.0 [4 contexts: no interval] 2 / 0 / 1"),
        ("a|b\nc", r"a\|b\\x0ac"),
        ("[x](javascript:alert(1))", r"\[x](javascript:alert(1))"),
        ("<b> & &lt; `c` _d_ $e$", r"\<b> & \&lt; \`c\` \_d\_ \$e\$"),
    ],
)
def test_markdown(text: str, written: str) -> None:
    assert escape_markdown(text) == written


def test_commands_can_be_pasted() -> None:
    words = ["plain", "two words", "it's", "", "größer"]
    ran = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {format_command_line(words)}"], capture_output=True, check=True
    )
    assert ran.stdout.decode().split("\0")[:-1] == words
    assert format_command_line(["a\x1b[2Jb", "\u202e"]) == r"'a\x1b[2Jb' '\u202e'"


def test_lines_without_end_are_cut_where_something_went_wrong() -> None:
    assert truncate_lines("plan.json is not valid:\n  a: is missing") == "plan.json is not valid:\n  a: is missing"
    first, second = truncate_lines(f"{'a' * 9000}\n  {'b' * 9000}").split("\n")
    assert first == f"{'a' * MAX_LINE_LENGTH}..."
    assert second == f"  {'b' * (MAX_LINE_LENGTH - 2)}..."

r"""What is printed is data: no name, reply or path can act where it is shown. One function per place, used by all.

`escape_invisible` is for screens and pages, `format_csv` for CSV, `escape_markdown` for Markdown, and
`format_command_line` for commands to paste. Files of our own formats, --json and ledgers hold texts as they are.
"""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Iterable, Sequence

# control, format (bidirectional and zero-width ones too), private, surrogates, breaks of lines and paragraphs
UNSEEN = frozenset(("Cc", "Cf", "Co", "Cs", "Zl", "Zp"))
# letters and marks without a shape: fillers, joiners of marks, selectors of variants but those of emoji
BLANK = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\uffa0\U000e0100-\U000e01ef]")
PROSE = "\n\t\u200c\u200d"  # what text is made of beside letters: joiners are part of scripts and of emoji
# spreadsheets take a cell for a formula that begins with one of these, their wide forms included
FORMULA = frozenset("=+-@\t\r\uff1d\uff0b\uff0d\uff20")
_NUMBER = r"[+-]?(?:\d+(?:,\d{3})*(?:\.\d*)?|\.\d+|inf|nan)(?:[eE][+-]?\d+)?%?"
# what begins with a sign and is none: "-", a number, or one with its interval and how often it won
_BOUNDS = rf"\[(?:{_NUMBER}, {_NUMBER}|\d+ contexts?: no interval)\]"
PLAIN = re.compile(rf"-|{_NUMBER}(?: points)?(?: {_BOUNDS})?(?: \d+ / \d+ / \d+)?")
MAX_LINE_LENGTH = 2000  # letters of a line that says what went wrong
_BARE = re.compile(r"[A-Za-z0-9][\w .:%/-]*|[-+][\d.eE+-]*|", re.ASCII)  # needs no quotes in CSV
# of Markdown; a bracket around numbers is an interval, and an underscore within a word is part of it
_MARKS = re.compile(r"[\\`*<|~$]|\[(?!(?:[-+\d.,% ]*|\d+ contexts?: no interval)\])|&(?=[#\w]+;)|(?<!\w)_|_(?!\w)")


def escape_invisible(text: str, keep: str = "\n") -> str:
    r"""Escape the invisible characters of a text, such as \u202e, except the ones in `keep`."""
    if text.isascii() and text.isprintable():
        return text
    shown = []
    for character in text:
        is_unseen = unicodedata.category(character) in UNSEEN or BLANK.match(character) is not None
        if character in keep or not is_unseen:
            shown.append(character)
            continue
        code = ord(character)
        shown.append(f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")
    return "".join(shown)


def escape_line(text: str) -> str:
    """Apply `escape_invisible` to a message and indent its further lines, so that no data can begin a line."""
    return re.sub(r"\n(?! |\Z)", r"\\x0a", escape_invisible(text))


def truncate_lines(text: str) -> str:
    """Return `escape_line` of what went wrong, which names what is in files: lines without end are cut."""
    return "\n".join(truncate(line, MAX_LINE_LENGTH) for line in escape_line(text).split("\n"))


def truncate(text: str, max_length: int) -> str:
    """Return a text or, of a longer one, so many letters and three points."""
    return text if len(text) <= max_length else f"{text[:max_length]}..."


def pluralize(number: int, noun: str) -> str:
    """Write a number with its noun, which gets an s unless the number is one."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def escape_reply(text: str) -> str:
    """Return `escape_invisible` of what a model has written: lines, tabs and scripts that need joiners stay."""
    return escape_invisible(text.replace("\r\n", "\n"), PROSE)


def format_csv(rows: Iterable[Sequence[object]]) -> str:
    r"""Return rows as CSV; None and NaN are empty cells.

    Texts are in quotes but for names and numbers: outside of quotes a carriage return, or the separator of another
    language, would end a cell. A text that a spreadsheet would compute has an apostrophe before it, a number has none.
    A lone surrogate, which has no place in UTF-8, is an escape such as `\ud800`.
    """
    return "".join(",".join(map(_format_csv_cell, row)) + "\n" for row in rows)


def escape_markdown(text: str) -> str:
    """Return a text as Markdown that shows it, on one line and in one cell: no link, HTML, formula or emphasis."""
    return _MARKS.sub(r"\\\g<0>", escape_invisible(text, keep=""))


def format_command_line(arguments: Iterable[str]) -> str:
    """Return a command to be pasted, unless there are characters in it that cannot be seen: these are escapes."""
    return escape_invisible(shlex.join(arguments), keep="")


def _format_csv_cell(cell: object) -> str:
    if not isinstance(cell, str):
        return "" if cell is None or cell != cell else str(cell)
    text = cell.encode(errors="backslashreplace").decode()
    begins = {text[:1], text.lstrip()[:1]} & FORMULA
    text = f"'{text}" if begins and not PLAIN.fullmatch(text) else text
    return text if _BARE.fullmatch(text) else '"' + text.replace('"', '""') + '"'

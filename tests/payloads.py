"""Texts that act where they are shown as they are: on terminals, in rich, in HTML, in spreadsheets, in Markdown."""

from __future__ import annotations

import re
import unicodedata

from kvsearch.core.printed import UNSEEN

ATOMS = (
    "\x1b[2J", "\x1b[31m", "\x1b[1;1H", "\x1bc", "\x1b]0;title\x07", "\x1b]52;c;ZWNobyBoaQ==\x1b\\",
    "\x1b]8;;http://e.example\x1b\\here\x1b]8;;\x1b\\", "\x1bP1$r\x1b\\", "\x1b_app\x1b\\", "\x9b2J",
    "\x9d0;title\x9c", "\x90q\x9c", "\x84", "\x85", "\r", "\roverwritten", "\b\b\b", "\x07", "\x0b", "\x0c", "\x0e",
    "\x7f", "\x00", "\t", "\n", "\r\n", "\nkvsearch: error: all is well", "\u202egnp.exe", "\u202d", "\u2066",
    "\u2067\u2069", "\u200e", "\u200b", "\u200d", "\u2060", "\ufeff", "\u00ad", "\u061c", "\u3164", "\U000e0041",
    "\U000e0101", "\ue000", "\u2028", "\u2029", "\ud800", "\udfff", "\udc9b", "[red]", "[/]", "[/red]",
    "[link=http://e.example]", "[bold", ":warning:", "[@click=app.bell]", "\\[red]", "{0}", "%s", "%(x)s",
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "\"><svg/onload=alert(1)>", "'", "&lt;",
    "</style>", "{{ 7 * 7 }}", "=1+1", "+1+1", "-1+1", "@SUM(A1)", "=cmd|' /C calc'!A0", "\t=1", "\uff1d1", "a,b",
    ";=1+1", '"', '""=1', "|", "[x](javascript:alert(1))", "![x](http://e.example)", "`", "**", "$x^{$", "\\",
    "größer", "東京", "می\u200cخواهم",
)  # fmt: skip


PAYLOADS = tuple(f"x{atom}y" for atom in ATOMS)


def file_name(payload: str) -> str:
    """Return what of a payload a file can be called."""
    text = re.sub(r"[/\x00\ud800-\udc7f\udd00-\udfff]", "", payload)
    return f"p{text}"[:60]


def without_surrogates(payload: str) -> str:
    """Return what of a payload is text in UTF-8."""
    return re.sub(r"[\ud800-\udfff]", "", payload)


def passed(shown: str, keep: str = "\n") -> set[str]:
    """Return the characters of an output that nobody can see, or that act on a terminal."""
    return {one for one in shown if one not in keep and unicodedata.category(one) in UNSEEN}

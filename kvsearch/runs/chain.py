"""Lines that are chained by checksums: one that was changed, dropped, moved, added or copied is found, with its number.

The last two fields of a line are its number, from 1, and its checksum:

    {"text": "what the ledger says", "line": 2, "sha256": "9f86d081..."}

The checksum is the SHA-256 of the checksum of the line before it, as text, and of the bytes of its own line up to the
comma before "sha256". In place of a checksum before the first line stands the identity of the run, so that a ledger of
another run does not fit. It is no signature: whoever can write the file can also compute checksums.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, NamedTuple

NUMBER: Final = "line"
CHECKSUM: Final = "sha256"


class Unfit(Exception):
    """A line that is none of its file; the message says why."""


class Link(NamedTuple):
    """The last line of a chain: its number, 0 before the first one, and its checksum."""

    number: int
    checksum: str

    def seal(self, text: str) -> tuple[bytes, Link]:
        """Return the line that follows with the fields of `text`, a JSON object, and the link that it is."""
        body = f'{text[:-1]}{", " if text != "{}" else ""}"{NUMBER}": {self.number + 1}'.encode()
        after = self._after(body)
        return body + after._tail, after

    def check(self, line: bytes, content: Any) -> Link:
        """Return the link that a line is which has the JSON `content`; its number and checksum are taken out of that.

        Raises:
            Unfit: it does not follow on this one.
        """
        if not isinstance(content, dict) or not {NUMBER, CHECKSUM} <= content.keys():
            raise Unfit("it has no number and checksum")
        number = content[NUMBER]
        unchained(content)
        if number != self.number + 1 or type(number) is not int:
            raise Unfit(f"it does not say that it is line {self.number + 1}: one was removed, added or moved")
        body, _, _ = line.rpartition(f', "{CHECKSUM}": '.encode())
        after = self._after(body)
        if line != body + after._tail:
            other = "" if self.number else ", or is that of another run"
            raise Unfit(f"its checksum does not fit: it was changed{other}")
        return after

    def _after(self, body: bytes) -> Link:
        return Link(self.number + 1, hashlib.sha256(self.checksum.encode() + body).hexdigest())

    @property
    def _tail(self) -> bytes:
        return f', "{CHECKSUM}": "{self.checksum}"}}'.encode()


def unchained(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a line, from which number and checksum are taken out."""
    del content[NUMBER], content[CHECKSUM]
    return content

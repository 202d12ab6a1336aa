"""Ledgers by hand: lines that are chained as a run would have chained them, whatever they say."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from kvsearch.runs.chain import Link
from kvsearch.runs.identity import read_identity

SEAL = re.compile(r'(, )?"line": \d+, "sha256": "[0-9a-f]{64}"\}$')


def unsealed(line: str) -> str:
    """A line without its number and checksum, byte for byte what its ledger was given."""
    return SEAL.sub("}", line)


def sealed(texts: Iterable[str], identity: str = "") -> str:
    """The content of a ledger of these JSON objects, which lose the seals that they have."""
    link, lines = Link(0, identity), []
    for text in texts:
        line, link = link.seal(unsealed(text))
        lines.append(f"{line.decode()}\n")
    return "".join(lines)


def reseal(path: Path) -> None:
    """Chain the lines of a ledger anew, for the run in whose directory it is."""
    path.write_text(sealed(path.read_text().split("\n")[:-1], read_identity(path.parent)))

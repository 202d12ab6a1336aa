"""Ledgers by hand: lines with the numbers and checksums that a run would have given them, whatever they say."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvsearch.runs import ledger
from kvsearch.runs.identity import read_identity

SEAL = re.compile(r'(, )?"line": \d+, "checksum": "[0-9a-f]{16}"\}$')


def unsealed(line: str) -> str:
    """A line without its number and checksum, byte for byte what its ledger was given."""
    return SEAL.sub("}", line)


def sealed(texts: Iterable[str], identity: str = "") -> str:
    """The content of a ledger of these JSON objects, which lose the seals that they have."""
    lines = (ledger.with_checksum(unsealed(text), number, identity) for number, text in enumerate(texts, 1))
    return "".join(f"{line.decode()}\n" for line in lines)


def reseal(path: Path) -> None:
    """Seal the lines of a ledger anew, for the run in whose directory it is."""
    path.write_text(sealed(path.read_text().split("\n")[:-1], read_identity(path.parent)))


def lines_of(opened: ledger.Ledger[Any]) -> list[Any]:
    """All lines of a ledger, read again."""
    data = opened.path.read_bytes()
    return [line for line, _ in ledger.parse_lines(data, opened.path, opened.parse, read_identity(opened.path.parent))]

"""The simplest ledger: lines that have a text each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvsearch.runs.ledger import Ledger, LedgerFormatError


class Notes(Ledger[str]):
    def __init__(self, path: Path, identity: str = "") -> None:
        self.lines: list[str] = []
        super().__init__(path, identity)

    @property
    def go_on(self) -> str:
        return f"try again: {len(self.lines)} notes are kept"

    @staticmethod
    def parse(content: dict[str, Any]) -> str:
        if set(content) != {"text"}:
            raise LedgerFormatError("it has no text")
        return str(content["text"])

    def add(self, text: str) -> None:
        self._append(text, json.dumps({"text": text}))

    def _note(self, line: str) -> None:
        self.lines.append(line)

"""The simplest ledger: lines that have a text each."""

from __future__ import annotations

import json
from typing import Any

from kvsearch.runs.ledger import Ledger, Unfit


class Notes(Ledger[str]):
    @property
    def go_on(self) -> str:
        return f"try again: {len(self.lines)} notes are kept"

    @staticmethod
    def parse(content: Any) -> str:
        if not isinstance(content, dict) or set(content) != {"text"}:
            raise Unfit("it has no text")
        return str(content["text"])

    def add(self, text: str) -> None:
        self._append(text, json.dumps({"text": text}))

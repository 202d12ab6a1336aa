"""The simplest ledger: lines that have a text each."""

from __future__ import annotations

import json
from typing import Any

from kvsearch.runs.chain import Unfit
from kvsearch.runs.ledger import Ledger


class Notes(Ledger[str]):
    @property
    def go_on(self) -> str:
        return f"try again: {len(self.lines)} notes are kept"

    @staticmethod
    def parse(content: dict[str, Any]) -> str:
        if set(content) != {"text"}:
            raise Unfit("it has no text")
        return str(content["text"])

    def add(self, text: str) -> None:
        self._append(text, json.dumps({"text": text}))

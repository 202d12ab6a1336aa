"""The directory of a tiny model with the tokenizer of the bundled ones."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tests import tiny


@cache
def folder() -> dict[str, bytes]:
    """Return the files of the directory."""
    made = tiny.loaded("llama", num_hidden_layers=2)
    with TemporaryDirectory() as place:
        made.model.save_pretrained(place)
        made.tokenizer.save_pretrained(place)
        return {path.name: path.read_bytes() for path in Path(place).iterdir()}


def files(name: str) -> list[bytes]:
    """Return the file of this name."""
    return [folder()[name]]

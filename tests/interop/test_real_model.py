"""kvpress and we keep the same entries of a story in the first layers of a model that people use."""

from __future__ import annotations

from importlib import import_module
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from kvsearch.models.loading import LoadedModel

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-kvpress" / "bin" / "python"

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON.exists(), reason="`make interop` installs the tools"),
]


def test_what_sets_policies_apart_is_known(smollm2: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the settings are the same the entries are, exactly: every press, each with its named differences."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    compare_kvpress = import_module("compare_kvpress")
    console = Console(file=StringIO(), width=140)
    model, tokens = compare_kvpress.first_layers(smollm2, layers=6, length=384)
    explained = compare_kvpress.compare_all(console, PYTHON, model, tokens, [0.7])
    tables = console.file.getvalue()
    assert explained, tables
    last = [line for line in tables.splitlines() if "│ exact" in line or "ties:" in line]
    assert len(last) == len(list(compare_kvpress.pairs(Path()))), tables
    # a token that comes again has a key of the same norm in the first layer
    assert {line.split()[1].rstrip(",") for line in last if "ties:" in line} <= {"knorm"}, tables

"""docs/gpu.md is what benchmarks/gpu/tables.py makes of the results that are there."""

from __future__ import annotations

import runpy

import pytest

from tests.docs.test_links import DOCS

FOLDER = DOCS.parent / "benchmarks" / "gpu"


@pytest.mark.slow
def test_the_page_is_made_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    made = runpy.run_path(str(FOLDER / "tables.py"))
    written = (DOCS / "gpu.md").read_text(encoding="utf-8")
    assert written == made["page"](made["results"](made["RESULTS"])), "run python benchmarks/gpu/tables.py"

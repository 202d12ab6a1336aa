"""The site: every page is in it, and every link of it leads somewhere, or it is not built."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.nightly
def test_it_is_built(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    assert "past_key_values" in (tmp_path / "api.html").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        name = "index.html" if page.name == "README.md" else page.with_suffix(".html").name
        assert (tmp_path / name).exists(), "mkdocs.yml names every page in `nav`"

"""The site: it is built, its links lead somewhere, and claims with numbers stand in their files."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

from scripts.claims import missing_texts, read_claims

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
INDEX = ROOT / "llms.txt"
PAGES = sorted([INDEX, *ROOT.glob("*.md"), *DOCS.glob("*.md"), *ROOT.glob("data/*/README.md")])
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
OTHER = ("http://", "https://", "mailto:")


def prose(page: Path) -> str:
    """The text of a page without its code."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


@lru_cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors that GitHub gives to the headings of a page."""
    found: dict[str, int] = {}
    names = set()
    for heading in HEADING.findall(prose(page)):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        names.add(name if name not in found else f"{name}-{found[name]}")
        found[name] = found.get(name, 0) + 1
    return frozenset(names)


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    wrong = []
    for link in LINK.findall(prose(page)):
        if link.startswith(OTHER):
            continue
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    return wrong


def test_links_lead_somewhere() -> None:
    assert {str(page): broken(page) for page in PAGES if broken(page)} == {}


def test_the_index_has_every_page() -> None:
    index = prose(DOCS / "README.md")
    assert [page.name for page in DOCS.glob("*.md") if page.name != "README.md" and f"({page.name})" not in index] == []
    assert "(docs/README.md)" in prose(ROOT / "README.md")


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


def test_claims_stand_in_their_files() -> None:
    assert {name: missing_texts(claim) for name, claim in read_claims().items() if missing_texts(claim)} == {}

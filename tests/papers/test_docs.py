"""The list of tables in docs/reproduce.md is that of the data; `python -m tests.papers.test_docs` writes it."""

from __future__ import annotations

from pathlib import Path

from kvsearch.papers.tables import PAPER_TABLES

DOCS = Path(__file__).parents[2] / "docs" / "reproduce.md"
MARK = "<!-- the list is made by tests/papers/test_docs.py -->"


def listed() -> str:
    lines = ["| paper | tables |", "|---|---|"]
    for paper in dict.fromkeys(table.source for table in PAPER_TABLES.values()):
        names = [f"`{table.name}` ({table.where})" for table in PAPER_TABLES.values() if table.source == paper]
        lines.append(f"| {paper} | {', '.join(names)} |")
    return "\n".join(lines) + "\n"


def test_the_list_is_that_of_the_data() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert text.partition(MARK)[2].strip() == listed().strip(), "run python -m tests.papers.test_docs"


if __name__ == "__main__":
    text = DOCS.read_text(encoding="utf-8")
    DOCS.write_text(f"{text.partition(MARK)[0]}{MARK}\n\n{listed()}", encoding="utf-8")

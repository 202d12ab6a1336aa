"""The list of tables in docs/reproduce.md is that of the data; `python -m tests.papers.test_docs` writes it."""

from __future__ import annotations

from pathlib import Path

from kvsearch.papers.tables import TABLES, numbers

DOCS = Path(__file__).parents[2] / "docs" / "reproduce.md"
MARK = "<!-- the list is made by tests/papers/test_docs.py -->"


def listed() -> str:
    lines = []
    for paper in dict.fromkeys(table.source for table in TABLES.values()):
        lines += [f"\n### {paper}\n", "| table | in the paper | shows | printed numbers |", "|---|---|---|---|"]
        for table in TABLES.values():
            if table.source == paper:
                known = len(numbers(table.name))
                lines.append(f"| `{table.name}` | {table.where} | {table.shows} | {known or '-'} |")
    return "\n".join(lines).lstrip() + "\n"


def test_the_list_is_that_of_the_data() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert text.partition(MARK)[2].strip() == listed().strip(), "run python -m tests.papers.test_docs"


if __name__ == "__main__":
    text = DOCS.read_text(encoding="utf-8")
    DOCS.write_text(f"{text.partition(MARK)[0]}{MARK}\n\n{listed()}", encoding="utf-8")

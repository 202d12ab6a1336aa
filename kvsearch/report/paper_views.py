"""From what the stages of a paper's table found to its cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from kvsearch.papers.table import PaperTable, View
from kvsearch.report import paper_findings, paper_scores
from kvsearch.report.paper_scores import Finished
from kvsearch.report.reproduced import Measured

VIEWS: Mapping[View, Callable[[PaperTable, Sequence[Finished]], Iterator[Measured]]] = {
    "scores": paper_scores.scores, "best": paper_scores.beside_best, "categories": paper_scores.by_category,
    "selections": paper_findings.selections, "signals": paper_findings.signals, "layers": paper_findings.layers,
    "losses": paper_findings.losses, "profiles": paper_findings.profiles,
}  # fmt: skip


def cells(table: PaperTable, found: Sequence[Finished]) -> list[Measured]:
    """Return the cells of a table, row by row."""
    return list(VIEWS[table.view](table, found))

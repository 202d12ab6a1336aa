"""The contract of every task: of those that make their examples, and of datasets by rows in the form of theirs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from kvsearch.tasks.catalog import AIME, ENTRIES, GSM8K, INFINITEBENCH, MATH500, NEEDLE, QA_OPTIONS, Entry
from kvsearch.tasks.longbench import LONGBENCH_SPECS, V2_SPECS
from kvsearch.testing import TaskContract
from tests.tasks.ruler.helpers import hotpot, squad

LENGTH, ROWS = 512, 30
FIRST = {
    "synthetic:single", "synthetic:vote", "ruler:niah_multivalue", "ruler:vt", "ruler:qa_1", "longbench:trec",
    "longbench:hotpotqa", "longbench:passage_retrieval_en", GSM8K, MATH500, NEEDLE, "infinitebench:longbook_choice_eng",
}  # fmt: skip  # others are nightly


def row_of(entry: Entry, number: int) -> dict[str, Any]:
    """A row in the form of a dataset; no two have the same context or question."""
    name = entry.spec.partition(":")[2]
    if entry.spec == GSM8K:
        return {"question": f"What is {number} + 1?", "answer": f"It is {number} + 1.\n#### {number + 1}"}
    if entry.spec == MATH500:
        solution = f"It is $\\boxed{{{number}}}$."
        return {"problem": f"Compute {number}.", "solution": solution, "answer": str(number), "unique_id": str(number)}
    if entry.kind == AIME:
        return {"ID": str(number), "Problem": f"Compute {number}.", "Solution": "So.", "Answer": number}
    if name in V2_SPECS:
        choices = {f"choice_{letter}": f"{letter} of {number}" for letter in "ABCD"}
        about = {"_id": str(number), "domain": "a", "length": name.rpartition("_")[2], "answer": "B"}
        return {**about, **choices, "question": f"Which {number}?", "context": f"Text {number}."}
    if entry.kind == INFINITEBENCH:
        options = {"options": ["Anna", "Ben", "Cleo", "Dora"]}
        answer = ["7"] if entry.metric in ("first_number", "first_integer", "contains_word") else ["Cleo"]
        return {"id": number, "context": f"Text {number}.", "input": f"Who {number}?", "answer": answer, **options}
    metric = LONGBENCH_SPECS[name.removesuffix("_e")].metric
    known = {"classification": "Date", "retrieval": "Paragraph 7", "retrieval_zh": "\u6bb5\u843d7", "count": "7"}
    answer = known.get(metric, "Ann")
    return {
        "input": f"What is {number}?", "context": f"Passage {number}.", "answers": [answer], "length": 9,
        "all_classes": ["Location", "Date"] if metric == "classification" else None,
    }  # fmt: skip


@cache
def rows_of(spec: str) -> Path:
    entry = ENTRIES[spec]
    path = Path(mkdtemp()) / f"{spec.partition(':')[2] or spec}.jsonl"
    path.write_text("\n".join(json.dumps(row_of(entry, number)) for number in range(ROWS)))
    return path


def options_of(spec: str) -> dict[str, Any]:
    entry = ENTRIES[spec]
    if "data" in entry.reads:
        return {"data": rows_of(spec)}
    files = {"squad": squad, "hotpot": hotpot}
    option = QA_OPTIONS.get(spec.partition(":")[2]) if spec.startswith("ruler") else None
    return {"length": (LENGTH,)} | ({} if option is None else {option: files[option](Path(mkdtemp()))})


def contracts() -> Iterator[tuple[str, type[TaskContract]]]:
    """Yield a contract of every task that makes its examples, and of one dataset by each metric of a kind."""
    known = set[Any]()
    for spec in sorted(ENTRIES, key=lambda spec: spec not in FIRST):
        entry = ENTRIES[spec]
        form = (entry.kind, entry.metric) if "data" in entry.reads else spec
        if form in known and spec not in FIRST:
            continue
        known.add(form)
        name = f"Test_{spec.replace(':', '_')}"
        options = property(lambda self: options_of(self.spec))
        about = {"spec": spec, "options": options, "samples": 4, "in_order": spec != NEEDLE}
        kind = type(name, (TaskContract,), about)
        yield name, kind if spec in FIRST else pytest.mark.nightly(kind)


globals().update(contracts())

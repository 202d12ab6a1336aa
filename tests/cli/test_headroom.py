"""kvsearch headroom: intervals are over different contexts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvsearch.evaluation import statistics
from tests import tiny
from tests.cli.conftest import done


@pytest.mark.nightly
def test_contexts_of_one_text_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows about texts that differ by a space, one about another: three keys, two contexts in token ids."""
    rows = []
    for seed, number in ((0, 0), (0, 1), (1, 0)):
        made = tiny.document(120, seed, facts=3)
        question = made.questions[number]
        row = {"context": " ".join(made.words[1:]) + " " * number, "question": question.question}
        rows.append({**row, "answers": question.answers, "metric": "exact", "prompt": " {question}"})
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = []

    def watched(samples: Any, subject: str, contexts: Any = None) -> Any:
        given.append((len({sample.key for sample in samples}), len(set((contexts or {}).values()))))
        return summarize(samples, subject, contexts)

    summarize = statistics.summarize
    monkeypatch.setattr("kvsearch.jobs.evaluate.summarize", watched)
    done("headroom", "bundled", "--tasks", f"jsonl:{tmp_path / 'mine.jsonl'}", "--samples", 3)
    assert given[-1] == (3, 2)

"""LongBench v2: rows of the official file, and what is asked of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvsearch.core.errors import UsageError
from kvsearch.tasks.catalog import find_tasks
from kvsearch.tasks.rows import load_shared_rows


def row(**changes: Any) -> dict[str, Any]:
    choices = {f"choice_{letter}": name for letter, name in zip("ABCD", ("Anna", "Ben", "Cleo", "Dora"), strict=True)}
    told = {"domain": "Long-dialogue History Understanding", "sub_domain": "x", "difficulty": "easy", "length": "short"}
    asked = {"_id": "66f3", "question": "Who?", "answer": "C", "context": "A long text."}
    return {**told, **asked, **choices, **changes}


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    load_shared_rows.cache_clear()
    (folder / "data.json").write_text(json.dumps(rows))
    return folder


def test_a_question_has_its_choices_and_is_scored_by_the_letter(tmp_path: Path) -> None:
    write(tmp_path, row(), row(_id="2", length="long", context="Another."))
    (short, medium, long) = find_tasks("longbench:v2", {"data": tmp_path})
    assert [task.name for task in (short, medium, long)] == ["v2_short", "v2_medium", "v2_long"]
    (example,) = short.examples(5, 0, len)
    (query,) = example.queries
    assert example.context.endswith("<text>\nA long text.")
    assert query.question.startswith("</text>\n\nWho?\nChoices:\n(A) Anna\n(B) Ben\n(C) Cleo\n(D) Dora\n\n")
    assert (query.id, query.category, query.max_new_tokens) == ("66f3", "Long-dialogue History Understanding", 128)
    assert short.score(query.right_reply or "", query) == 1
    assert [example.queries[0].id for example in long.examples(5, 0, len)] == ["2"]
    with pytest.raises(UsageError, match=r"v2_medium of .* has no usable row"):
        medium.examples(5, 0, len)
    assert load_shared_rows.cache_info().misses == 1

"""What all tasks of RULER have in common."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvsearch.core.errors import UsageError
from kvsearch.tasks.catalog import find_tasks
from kvsearch.tasks.ruler import NIAH_TURNS, RulerTask
from tests.combinations import in_turn
from tests.tasks.ruler.helpers import GENERATED, count_of, hotpot, squad, used, words

TOO_SHORT = {("cwe", 512, "bpe")}
TOKENIZERS = ["words", "bpe", "bundled"]
DRAWN = {"task": "vt", "context": "A text.", "question": "\nWhich?", "answer_prefix": " It is", "answer": ["7", "8"],
         "max_new_tokens": 9}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("qa")
    return {"qa_1": squad(folder), "qa_2": hotpot(folder)}


@in_turn(name=[*GENERATED, NIAH_TURNS], tokenizer=TOKENIZERS, length=[512, 2048])
def test_lengths(name: str, length: int, tokenizer: str) -> None:
    """At most `length`, at least 95 percent of it; uuid needles are so long that a short text may lack one more."""
    count = count_of(tokenizer)
    task = RulerTask(name, length)
    if (name, length, tokenizer) in TOO_SHORT:
        with pytest.raises(UsageError, match="tokens are too few"):
            task.examples(2, 0, count)
        return
    for example in task.examples(4, 0, count):
        spare = 0.05 * length
        if name == "niah_multikey_3":
            spare = max(spare, max(map(count, example.context.split("\n"))) + 2)
        assert length - spare <= used(example, count) <= length


@in_turn(name=["qa_1", "qa_2"], tokenizer=TOKENIZERS, length=[512, 1024])
def test_lengths_of_questions(name: str, length: int, tokenizer: str, files: dict[str, Path]) -> None:
    """As many paragraphs as fit."""
    count = count_of(tokenizer)
    for example in RulerTask(name, length, qa_file=files[name]).examples(4, 0, count):
        longest = max(count(text) for text in example.context.split("\n\n"))
        assert length - longest - 5 <= used(example, count) <= length


def test_a_length_that_is_too_short() -> None:
    problem = r"vt: 60 tokens are too few, with this tokenizer a prompt takes \d+ or more: ask for a larger length"
    with pytest.raises(UsageError, match=f"^{problem}$"):
        RulerTask("vt", 60).examples(5, 3, words)


def test_tasks_that_others_have_drawn(tmp_path: Path) -> None:
    """The columns of `simonjegou/ruler`, of which kvpress' numbers are."""
    asked = (("qa_1", 32), ("vt", 30), ("qa_1", 16))
    rows = [DRAWN | {"task": task, "max_new_tokens": tokens} for task, tokens in asked]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tracing, questions = find_tasks(f"ruler:file={tmp_path}")
    assert [tracing.name, questions.name] == ["vt", "qa_1"]
    assert (questions.metric, questions.category) == ("string_match_part", "RULER QA")
    example, other = questions.examples(9, 0, len)
    assert questions.prompt == "{question}"
    (query,) = example.queries
    assert (example.context, query.question, query.prefix) == ("A text.", "\nWhich?", " It is")
    assert (query.answers, query.max_new_tokens) == (("7", "8"), 32)
    assert other.queries[0].max_new_tokens == 16


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"task": "vtt"}, "unknown task 'vtt'; did you mean 'vt'?"),
        ({"answer": "7"}, "answer"),
        ({"answer": [" "]}, "1 without an answer"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_drawn_rows_that_cannot_be_asked(row: dict[str, object], problem: str, tmp_path: Path) -> None:
    file = tmp_path / "test.jsonl"
    file.write_text(json.dumps(DRAWN | row))
    with pytest.raises(UsageError) as error:
        find_tasks(f"ruler:file={file}")[0].examples(1, 0, len)
    assert problem in str(error.value)

"""What all tasks of RULER have in common."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import pytest

from kvsearch.core.errors import UsageError
from kvsearch.tasks.base import Example
from kvsearch.tasks.catalog import find_tasks
from kvsearch.tasks.ruler import NIAH_TURNS, RULER_TASKS, RulerTask
from tests.combinations import every_value
from tests.tasks.ruler.helpers import GENERATED, count_of, hotpot, squad, used, whole, words

TOO_SHORT = {("cwe", 512, "bpe")}
generated = pytest.mark.parametrize("name", [*GENERATED, NIAH_TURNS])
TOKENIZERS = ["words", "bpe", "bundled"]
DRAWN = {"task": "vt", "context": "A text.", "question": "\nWhich?", "answer_prefix": " It is", "answer": ["7", "8"],
         "max_new_tokens": 9}  # fmt: skip


def digest(example: Example) -> str:
    return hashlib.sha256(whole(example).encode()).hexdigest()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("qa")
    return {"qa_1": squad(folder), "qa_2": hotpot(folder)}


@every_value(name=[*GENERATED, NIAH_TURNS], tokenizer=TOKENIZERS, length=[512, 2048, 8192])
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


@every_value(name=["qa_1", "qa_2"], tokenizer=TOKENIZERS, length=[512, 1024])
def test_lengths_of_questions(name: str, length: int, tokenizer: str, files: dict[str, Path]) -> None:
    """As many paragraphs as fit."""
    count = count_of(tokenizer)
    for example in RulerTask(name, length, qa_file=files[name]).examples(4, 0, count):
        longest = max(count(text) for text in example.context.split("\n\n"))
        assert length - longest - 5 <= used(example, count) <= length


@pytest.mark.parametrize("name", RULER_TASKS)
def test_seeds_have_examples_of_their_own(name: str, files: dict[str, Path]) -> None:
    task = RulerTask(name, 1024, qa_file=files.get(name))
    state = random.getstate()
    drawn = [example for seed in (7, 8) for example in task.examples(4, seed, words)]
    assert random.getstate() == state
    assert [example.key for example in drawn[:4]] == ["7-0", "7-1", "7-2", "7-3"]
    assert len({digest(example) for example in drawn}) == 8


@generated
def test_splits_share_no_example(name: str) -> None:
    """40 examples each; no two have the same needles, names or words either."""
    made = [e for split in ("train", "select", "report") for e in RulerTask(name, 512, split).examples(40, 0, words)]
    assert len({digest(example) for example in made}) == 120
    assert len({example.queries[0].answers for example in made}) == 120


def test_a_length_that_is_too_short() -> None:
    problem = r"vt: 60 tokens are too few, with this tokenizer a prompt takes \d+ or more: ask for a larger length"
    with pytest.raises(UsageError, match=f"^{problem}$"):
        RulerTask("vt", 60).examples(5, 3, words)


@pytest.mark.parametrize("name", RULER_TASKS)
def test_the_right_reply_has_all_answers_in_order(name: str, files: dict[str, Path]) -> None:
    task = RulerTask(name, 1024, qa_file=files.get(name))
    (query,) = task.examples(1, 0, words)[0].queries
    reply = query.right_reply or ""
    assert task.score(reply, query) == 1.0
    if not name.startswith("qa"):
        assert [reply.index(answer) for answer in query.answers] == sorted(reply.index(one) for one in query.answers)
    assert len(reply.split()) <= query.max_new_tokens


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
        ({"context": ""}, "1 with an empty context"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_drawn_rows_that_cannot_be_asked(row: dict[str, object], problem: str, tmp_path: Path) -> None:
    file = tmp_path / "test.jsonl"
    file.write_text(json.dumps(DRAWN | row))
    with pytest.raises(UsageError) as error:
        find_tasks(f"ruler:file={file}")[0].examples(1, 0, len)
    assert problem in str(error.value)

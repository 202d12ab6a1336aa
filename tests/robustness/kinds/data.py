"""Questions, texts and datasets of users."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from kvsearch.calibration.data import load_calibration_data
from kvsearch.core.errors import KvsearchError
from kvsearch.tasks.dataset_task import parse_template
from kvsearch.tasks.encode import encode, make_token_counter
from kvsearch.tasks.infinitebench import InfiniteBenchTask
from kvsearch.tasks.jsonl import JsonlTask
from kvsearch.tasks.longbench import LongBenchTask
from kvsearch.tasks.maths import Gsm8kTask
from kvsearch.tasks.niah import NiahTask
from kvsearch.tasks.rows import read_archive
from kvsearch.tasks.ruler import RulerTask
from kvsearch.tasks.ruler.needles import Essay
from kvsearch.tasks.text import TextTask
from scripts.train_bundled import tokenizer
from tests.robustness.forms import Json, JsonLines, Text
from tests.robustness.kinds.kind import Kind, same, taken
from tests.robustness.valid import data as valid


@cache
def _tokenizer() -> Any:
    return tokenizer()


def _ask(task: Any) -> None:
    """Do with the examples of a task what an evaluation does before a model reads them, and score replies."""
    examples = task.examples(3, 0, make_token_counter(_tokenizer()))
    for example in examples:
        for query in example.queries:
            for reply in ("", "seven", query.right_reply or "", "\ud800", "1.5 10"):
                assert 0 <= task.score(reply, query) <= 1
    encoded = encode(_tokenizer(), task, examples, limit=4096)
    assert encoded.prompts


def _task(path: Path) -> None:
    task = JsonlTask.load(path)
    assert all(query.max_new_tokens >= 1 for example in task.rows for query in example.queries)
    _ask(task)


def _calibration(path: Path) -> None:
    problems = []
    for bare in (True, False):
        try:
            found = load_calibration_data(path, bare)
        except KvsearchError as error:
            problems.append(error)
            continue
        _ = found.hashes, found.asked
        for context in found.contexts:
            _tokenizer()(context.text)
            for pair in context.questions:
                _tokenizer()(found.prompt.replace("{question}", pair.question) + pair.prefix + pair.answer)
        if found.questions:
            assert found.limit_questions(1).questions == 1
        contexts = [
            {"text": one.text, "questions": [pair.model_dump(exclude_none=True) for pair in one.questions]}
            for one in found.contexts
        ]
        again = path.with_name("again.json")
        again.write_text(json.dumps({"name": found.name, "prompt": found.prompt, "contexts": contexts}))
        with taken("what was written"):
            same(load_calibration_data(again, bare).sha256, found.sha256, "written and read again")
    if problems:
        raise problems[0]


def _plain_text(path: Path) -> None:
    for context in load_calibration_data(path, bare=True).contexts:
        _tokenizer()(context.text)
    _tokenizer()(TextTask.load(path, length=2).text)
    Essay.load(path).sentences(30)
    _ask(NiahTask(lengths=(300,), depths=(0, 50), haystack=path))


def _text_rows(path: Path) -> None:
    _tokenizer()(TextTask.load(path).text)


def _templates(path: Path) -> None:
    found = LongBenchTask("narrativeqa", source=path.with_name("rows.jsonl"), prompts=path).template
    with taken("a template"):
        again = parse_template("{context} {input}", "here")
    assert found.asks == again.asks
    assert isinstance(found.context("{x}") + found.question("{y}"), str)


def _archive(path: Path) -> None:
    read_archive(path, ["data/narrativeqa.jsonl"])


def _qa(name: str, path: Path) -> None:
    _ask(RulerTask(name, length=900, qa_file=path))


def _longbench(path: Path) -> None:
    _ask(LongBenchTask("narrativeqa", source=path))


def _infinitebench(path: Path) -> None:
    _ask(InfiniteBenchTask("passkey", source=path))


def _gsm8k(path: Path) -> None:
    _ask(Gsm8kTask(source=path, shots=1))


def kinds() -> Iterator[Kind]:
    story = {"beside.txt": b"a story ."}
    yield Kind("tasks", "tasks.jsonl", valid.tasks, JsonLines(), _task)
    yield Kind("tasks-tables", "tasks.csv", valid.task_tables, Text(), _task)
    yield Kind("calibration", "calibration.json", valid.calibrations, Json(), _calibration, lambda: story)
    yield Kind("text", "text.txt", valid.texts, Text(), _plain_text)
    yield Kind("text-rows", "text.jsonl", valid.text_rows, JsonLines(), _text_rows)
    yield Kind("qa-squad", "squad.json", valid.squad, Json(), partial(_qa, "qa_1"))
    yield Kind("qa-hotpot", "hotpot.json", valid.hotpot, Json(), partial(_qa, "qa_2"))
    yield Kind("templates", "prompts.json", valid.templates, Json(), _templates)
    yield Kind("rows-longbench", "narrativeqa.jsonl", valid.longbench, JsonLines(), _longbench)
    yield Kind("rows-infinitebench", "passkey.jsonl", valid.infinitebench, JsonLines(), _infinitebench)
    yield Kind("rows-gsm8k", "test.jsonl", valid.gsm8k, JsonLines(), _gsm8k)
    yield Kind("rows-parquet", "test.parquet", valid.parquet, Text(), _gsm8k)
    yield Kind("rows-archive", "data.zip", valid.archives, Text(), _archive)

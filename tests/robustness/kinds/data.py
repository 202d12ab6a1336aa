"""Questions, texts and datasets of users."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from kvsearch.core.errors import KvsearchError
from tests.robustness.forms import Json, JsonLines, Text
from tests.robustness.kinds.kind import Kind, same, taken
from tests.robustness.valid import data as valid


@cache
def _tokenizer() -> Any:
    from scripts.train_bundled import tokenizer

    return tokenizer()


def _ask(task: Any) -> None:
    """Do with the examples of a task what an evaluation does before a model reads them, and score replies."""
    from kvsearch.tasks.encode import counter, encode

    examples = task.examples(3, 0, counter(_tokenizer()))
    for example in examples:
        for query in example.queries:
            for reply in ("", "seven", query.right_reply or "", "\ud800", "1.5 10"):
                assert 0 <= task.score(reply, query) <= 1
    encoded = encode(_tokenizer(), task, examples, limit=4096)
    assert encoded.prompts


def _task(path: Path) -> None:
    from kvsearch.tasks.jsonl import JsonlTask

    task = JsonlTask.load(path)
    assert all(query.max_new_tokens >= 1 for example in task.rows for query in example.queries)
    _ask(task)


def _calibration(path: Path) -> None:
    from kvsearch.calibration.data import load_calibration_data

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
            assert found.limited(1).questions == 1
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
    from kvsearch.calibration.data import load_calibration_data
    from kvsearch.tasks.niah import NiahTask
    from kvsearch.tasks.ruler.needles import Essay
    from kvsearch.tasks.text import TextTask

    def words(text: str) -> list[int]:
        return list(_tokenizer()(text)["input_ids"])

    for context in load_calibration_data(path, bare=True).contexts:
        words(context.text)
    text = TextTask.load(path, length=2)
    words(text.text)
    Essay.load(path).sentences(30)
    _ask(NiahTask(lengths=(300,), depths=(0, 50), haystack=path))


def _text_rows(path: Path) -> None:
    from kvsearch.tasks.text import TextTask

    _tokenizer()(TextTask.load(path).text)


def _qa(name: str, path: Path) -> None:
    from kvsearch.tasks.ruler import RulerTask

    _ask(RulerTask(name, length=900, qa_file=path))


def _templates(path: Path) -> None:
    from kvsearch.tasks.dataset_task import parse_template
    from kvsearch.tasks.longbench import LongBenchTask

    found = LongBenchTask("narrativeqa", source=path.with_name("rows.jsonl"), prompts=path).template
    with taken("a template"):
        again = parse_template("{context} {input}", "here")
    assert found.asks == again.asks
    assert isinstance(found.context("{x}") + found.question("{y}"), str)


def _dataset(make: Callable[[Path], Any], path: Path) -> None:
    _ask(make(path))


def _longbench(path: Path) -> Any:
    from kvsearch.tasks.longbench import LongBenchTask

    return LongBenchTask("narrativeqa", source=path)


def _infinitebench(path: Path) -> Any:
    from kvsearch.tasks.infinitebench import InfiniteBenchTask

    return InfiniteBenchTask("passkey", source=path)


def _gsm8k(path: Path) -> Any:
    from kvsearch.tasks.maths import Gsm8kTask

    return Gsm8kTask(source=path, shots=1)


def _archive(path: Path) -> None:
    from kvsearch.tasks.rows import read_archive

    read_archive(path, ["data/narrativeqa.jsonl"])


def kinds() -> Iterator[Kind]:
    story = {"beside.txt": b"a story ."}
    yield Kind("tasks", "tasks.jsonl", valid.tasks, JsonLines(), _task)
    yield Kind("calibration", "calibration.json", valid.calibrations, Json(), _calibration, lambda: story)
    yield Kind("text", "text.txt", valid.texts, Text(), _plain_text)
    yield Kind("text-rows", "text.jsonl", valid.text_rows, JsonLines(), _text_rows)
    yield Kind("qa-squad", "squad.json", valid.squad, Json(), partial(_qa, "qa_1"))
    yield Kind("qa-hotpot", "hotpot.json", valid.hotpot, Json(), partial(_qa, "qa_2"))
    yield Kind("templates", "prompts.json", valid.templates, Json(), _templates)
    rows = {
        "longbench": ("narrativeqa.jsonl", valid.longbench, JsonLines(), _longbench),
        "infinitebench": ("passkey.jsonl", valid.infinitebench, JsonLines(), _infinitebench),
        "gsm8k": ("test.jsonl", valid.gsm8k, JsonLines(), _gsm8k),
        "parquet": ("test.parquet", valid.parquet, Text(), _gsm8k),
    }  # fmt: skip
    for name, (file, bases, form, make) in rows.items():
        yield Kind(f"rows-{name}", file, bases, form, partial(_dataset, make))
    yield Kind("rows-archive", "data.zip", valid.archives, Text(), _archive)

"""The examples of docs/serving.md, as printed: contexts that are read once, the server, a pipeline."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import pipeline

from kvsearch import attach
from kvsearch.core.errors import UsageError
from kvsearch.evaluation.answer import answer
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Plan
from kvsearch.tasks.prompts import PLAIN_PROMPT
from tests import tiny

BLOCK = re.compile(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGE = Path(__file__).parents[1] / "docs/serving.md"
TEXT = " ".join(tiny.document(60).words[1:])
QUESTIONS = ["code of ash ?", "? vote"]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    made = tiny.loaded(num_hidden_layers=2)
    made.model.generation_config.eos_token_id = made.tokenizer.eos_token_id
    return made


@pytest.fixture(scope="module")
def plan(model: LoadedModel) -> Plan:
    start = tiny.plan_for(model, [[14, 17], [25, 16]], scaling="fixed")
    return Plan.model_validate({**start.model_dump(), "decode": start.prefill})


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the files of the page, on the path."""
    files = dict(BLOCK.findall(PAGE.read_text()))
    assert list(files) == ["contexts.py", "serve.py"]
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in files:
        sys.modules.pop(name.removesuffix(".py"), None)


def replies(model: LoadedModel, plan: Plan) -> list[str]:
    return [reply.text for reply in answer(model, plan, TEXT, QUESTIONS, PLAIN_PROMPT, 5)]


def test_contexts_are_read_once_and_asked_for_ever(example: Path, model: LoadedModel, plan: Plan) -> None:
    made: Any = importlib.import_module("contexts").Contexts(model.model, model.tokenizer, plan, example, in_memory=1)
    entries, size = made.add("report", TEXT)
    made.add("other", TEXT[: len(TEXT) // 2])
    written = (example / "report.kv").read_bytes()
    assert (entries, size) == (72, len(written))
    expected = replies(model, plan)
    for question, reply in (*zip(QUESTIONS, expected, strict=True), (QUESTIONS[0], expected[0])):
        assert made.ask("report", question, 5) == reply
        made.ask("other", question, 5)
        assert list(made.held) == ["other"]
    assert made.ask_all("report", QUESTIONS, 5) == expected
    assert (example / "report.kv").read_bytes() == written
    with pytest.raises(UsageError, match="there is no file"):
        made.ask("nothing", "? vote")
    with pytest.raises(ValueError, match="a name is letters"):
        made.ask("../report", "? vote")


def test_the_server(example: Path, model: LoadedModel, plan: Plan) -> None:
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    client = pytest.importorskip(
        "fastapi.testclient", reason="FastAPI's test client needs httpx", exc_type=RuntimeError
    )
    contexts = importlib.import_module("contexts").Contexts(model.model, model.tokenizer, plan, example)
    asking = client.TestClient(importlib.import_module("serve").serve(contexts))
    assert asking.put("/contexts/report", json={"text": TEXT}).json()["entries"] == 72
    for question, reply in zip(QUESTIONS, replies(model, plan), strict=True):
        said = asking.post("/contexts/report", json={"question": question, "max_new_tokens": 5})
        assert said.json() == {"reply": reply}
    refused = asking.post("/contexts/nothing", json={"question": "? vote"})
    assert (refused.status_code, "there is no file" in refused.json()["detail"]) == (422, True)


def test_a_planned_model_stands_in_for_the_model(
    model: LoadedModel, plan: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    with attach(model.model, plan) as planned:
        made = pipeline("text-generation", model=planned, tokenizer=model.tokenizer)
        (found,) = made(TEXT, max_new_tokens=5, do_sample=False, return_full_text=False)
        assert planned.cache.entries().sum() == 72
        tokens = planned.generate(tiny.ids_of(TEXT), max_new_tokens=5, do_sample=False)
    assert found["generated_text"] == model.tokenizer.decode(tokens[0, tiny.ids_of(TEXT).shape[1] :])
    assert "not supported" not in caplog.text
    with pytest.raises(UsageError, match="use attach"):
        planned.read(torch.ones(1, 4, dtype=torch.long))


def test_memory_as_the_page_counts_it() -> None:
    """Llama-3.1-8B in bfloat16: 32 layers, 8 kv heads of 128; 516 bytes are an entry with its position."""
    text, entries, tokens = PAGE.read_text(), 32 * 8, 32768
    assert f"{entries * 512:,} bytes per token" in text
    full, kept = tokens * entries * 512 / 1e9, 0.2 * tokens * entries * 516 / 1e9
    assert f"{full:.1f} GB at 32,768 tokens, {kept:.2f} GB with 20%" in text
    assert f"{full / 32:.2f} GB of these {full:.1f} GB" in text

"""docs/examples: every script runs as printed, on the bundled model."""

from __future__ import annotations

import importlib
import runpy
import sys
import threading
from pathlib import Path
from urllib.request import urlopen

import pytest

from kvsearch import attach, load_plan
from kvsearch.models.loading import load
from kvsearch.tasks.prompts import PromptFormat

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.mark.slow
@pytest.mark.nightly
def test_a_model_is_planned_and_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / "plan_model.py"), run_name="__main__")
    scores = capsys.readouterr().out
    assert [line.split()[0] for line in scores.splitlines()[1:]] == ["plan", "uniform", "streaming"]
    serve = importlib.import_module("serve")
    loaded = load(serve.MODEL)
    with attach(loaded.model, load_plan("plan.json")) as planned:
        context = serve.CompressedContext(planned, PromptFormat(loaded.tokenizer, serve.PROMPT), serve.CONTEXT.context)
        with serve.make_server(context, 0) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            for query in serve.CONTEXT.queries:
                reply = urlopen(f"http://localhost:{server.server_port}", query.question.encode()).read().decode()
                assert reply == context.answer(query.question)
            server.shutdown()


@pytest.mark.slow
def test_a_policy_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    importlib.import_module("write_policy").main()
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["value_norm", "snapkv"]

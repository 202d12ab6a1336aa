"""Examples and the tutorial do what they show."""

from __future__ import annotations

import importlib
import re
import runpy
import sys
import threading
from pathlib import Path
from urllib.request import urlopen

import pytest

from kvsearch import attach, load_plan
from kvsearch.models.loading import load
from kvsearch.tasks.prompts import PromptFormat
from scripts.tutorial import PAGE, directory_of, rendered, run_here

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


NUMBER = re.compile(r"\b[0-9a-f]{64}\b|[+-]?\d+(\.\d+)?")


def test_outputs_follow_their_commands() -> None:
    page = "a\n```console\n$ kvsearch one 'two words'\nold\n$ kvsearch three\n```\nb"
    filled = rendered(page, lambda words: {2: "", 3: f"\n  {words[-1]}  \n"}[len(words)])
    assert filled == "a\n```console\n$ kvsearch one 'two words'\n  two words\n\n$ kvsearch three\n```\nb"


@pytest.mark.slow
@pytest.mark.nightly
def test_it_is_that_of_today() -> None:
    """Words are the same; numbers may differ in the last place on another machine, and are those of some machine."""
    with directory_of(PAGE.read_text()):
        today = rendered(PAGE.read_text(), run_here)
    assert NUMBER.sub("#", today).split() == NUMBER.sub("#", PAGE.read_text()).split()

"""kvsearch lm-eval, end to end on the bundled model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import invoke
from tests.cli.test_bad_input import ENVIRONMENT, USAGE, refused
from tests.lm_eval.folder import DOCUMENTS, write_folder

installed = pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs the extra lm-eval")


call = partial(invoke, "lm-eval")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command sets, and pytest takes back."""
    monkeypatch.setenv("TQDM_DISABLE", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tasks"))


@pytest.fixture
def request_of(folder: Path, calibrated: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, ...]]:
    """Arguments that run given tasks, with only the folder's to choose from: indexing the others takes seconds."""
    from kvsearch.lm_eval import tasks as lm_eval_tasks

    own = lm_eval_tasks.TaskManager
    monkeypatch.setattr(lm_eval_tasks, "TaskManager", lambda **given: own(**{**given, "include_defaults": False}))
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    asked = ("bundled", "--plan", calibrated / "plan.json", "--include-path", folder, "--tasks")
    return lambda tasks, *more: (*asked, tasks, *more)


def test_the_harness_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in [name for name in sys.modules if name.startswith("kvsearch.lm_eval")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    asked = ("bundled", "--plan", tmp_path / "plan.json", "--tasks", "arc_easy")
    line = refused(call, ENVIRONMENT, "lm-evaluation-harness cannot be imported", *asked)
    assert line.endswith("run `pip install kvsearch[lm-eval]`\n")


@installed
def test_a_table_and_the_samples(request_of: Callable[..., Any], tmp_path: Path) -> None:
    samples = tmp_path / "samples.jsonl"
    code, out, talk = call(*request_of("small_generate", "--limit", 3, "--log-samples", samples))
    assert code == 0, talk
    assert "warning" not in talk
    for words in ("|small_generate|", "exact_match", "question-aware", "small_generate: ", "entries ("):
        assert words in out
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    assert [(line["task"], line["doc_id"]) for line in lines] == [("small_generate", number) for number in range(3)]
    assert all(line["resps"][0] for line in lines)


@installed
def test_json(request_of: Callable[..., Any], calibrated: Path) -> None:
    from kvsearch.core.canonical import hash_json
    from kvsearch.plan import load_plan

    code, out, talk = call(*request_of("small_choose", "--json", "--num-fewshot", 0, "--max-length", 60, "--seed", 1))
    assert code == 0, talk
    results = json.loads(out)
    assert set(results["results"]["small_choose"]) >= {"acc,none", "acc_mutual_info,none"}
    assert results["config"]["fewshot_seed"] == 1235
    made = results["kvsearch"]
    assert made["plan_sha256"] == hash_json(load_plan(calibrated / "plan.json"))
    assert made["max_length"] == 60
    held = made["held"]["small_choose"]
    assert held["truncated"] > DOCUMENTS
    assert held["entries"] < held["full_entries"]
    assert f"warning: small_choose: {held['truncated']} of {held['prompts']} prompts lost their beginning" in talk
    assert f"warning: small_choose: 1 of {held['prompts']} contexts are one token, nothing to compress" in talk


@installed
def test_a_dry_run_loads_no_tasks(request_of: Callable[..., Any]) -> None:
    code, out, talk = call(*request_of("small_s*,small_remote", "--limit", 2, "--dry-run", "--json"))
    assert code == 0, talk
    names = ["small_sampling", "small_shots", "small_remote"]
    told = json.loads(out)
    assert (told["tasks"], told["limit"], told["estimate"]["seconds"]) == (names, 2, None)


@installed
def test_bad_requests(request_of: Callable[..., Any], tmp_path: Path) -> None:
    for words, asked in (
        ("unknown task 'small_choos'; did you mean 'small_choose'?", request_of("small_choos")),
        ("its folder does not exist", request_of("small_choose", "--log-samples", tmp_path / "no" / "samples.jsonl")),
        ("the tokenizer has no chat template", request_of("small_choose", "--apply-chat-template")),
        ("there is no file", ("bundled", "--plan", tmp_path / "plan.json", "--tasks", "small_choose")),
    ):
        assert refused(call, USAGE, words, *asked).count("\n") == 1

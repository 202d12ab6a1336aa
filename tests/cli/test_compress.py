"""kvsearch compress, and generate from the file, end to end on the bundled model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvsearch.core.resources import find_resource
from kvsearch.evaluation.guarantee import make_guarantee
from kvsearch.plan import load_plan, save_plan
from tests import tiny
from tests.cli.conftest import Run, done
from tests.cli.test_bad_input import USAGE, refused

CONTEXT = " ".join(tiny.document(200, facts=3).words[1:])
QUESTIONS = [question.question for question in tiny.document(200, facts=3).questions]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    done("plan", "uniform", "bundled", "--policy", "snapkv", "--budget", 64, "--phases", "both", "-o", path)
    return path


@pytest.fixture(scope="module")
def saved(plan: Path) -> Path:
    """A context that was read once."""
    path = plan.parent / "report.kv"
    (plan.parent / "report.txt").write_text(CONTEXT)
    arguments = ("--plan", plan, "--context", f"@{plan.parent / 'report.txt'}", "-o", path)
    out, talk = done("compress", "bundled", *arguments)
    assert out == ""
    size = path.stat().st_size
    assert f"{size / 2**20:.2f} MiB on disk" in talk
    assert f"next: kvsearch generate bundled --cache {path} --prompt ..." in talk
    return path


def test_a_file_answers_any_number_of_questions(plan: Path, saved: Path) -> None:
    before = saved.read_bytes()
    asked = [argument for question in QUESTIONS[:2] for argument in ("--prompt", question)]
    out, _ = done("generate", "bundled", "--cache", saved, *asked, "--json", "--max-new-tokens", 4)
    direct, _ = done(
        "generate", "bundled", "--plan", plan, "--context", CONTEXT, *asked, "--json", "--max-new-tokens", 4
    )
    # what has left is measured while a context is read
    assert json.loads(out) == [{**reply, "evicted_mass": None} for reply in json.loads(direct)]
    assert all(0.1 < reply["evicted_mass"] < 1 for reply in json.loads(direct))
    assert len(json.loads(out)) == 2
    out, _ = done("generate", "bundled", "--cache", saved, *asked[2:], "--max-new-tokens", 4, "--plan", plan)
    assert out.strip() == json.loads(direct)[1]["text"]
    assert saved.read_bytes() == before


def test_a_context_beyond_those_of_a_guarantee_is_said(plan: Path, tmp_path: Path) -> None:
    stated = load_plan(plan)
    for most in (0.01, 1.0):
        guarantee = make_guarantee(stated, np.zeros(149), 0.02, 0.95, [], "question-agnostic", [0.0, most])
        origin = stated.provenance.model_copy(update={"guarantee": guarantee})
        save_plan(stated.model_copy(update={"provenance": origin}), tmp_path / f"{most}.json")
        arguments = ("--plan", tmp_path / f"{most}.json", "--context", CONTEXT, "--prompt", QUESTIONS[0])
        _, talk = done("generate", "bundled", *arguments, "--max-new-tokens", 1)
        assert talk.startswith(f"the plan {tmp_path / f'{most}.json'}: it loses at most 2 points to the full cache")
        assert ("beyond those that the plan was shown on: " in talk) == (most < 0.5)


def test_a_file_is_shown_whatever_it_is_called(run: Run, saved: Path, tmp_path: Path) -> None:
    (tmp_path / "report.cache").write_bytes(saved.read_bytes())
    assert "1 artefact: 1 whole" in run("verify", tmp_path)[1]
    code, out, talk = run("show", tmp_path / "report.cache")
    assert (code, talk) == (0, "")
    assert "cache of    1 sequence of " in out
    assert "prefill entries by layer and head" in out
    code, out, _ = run("show", saved, "--json")
    assert json.loads(out)["plan"]["model"]["name"] == "bundled"
    (tmp_path / "cut.kv").write_bytes(saved.read_bytes()[:100])
    refused(run, USAGE, "or not all of one", "show", tmp_path / "cut.kv")
    code, _, talk = run("verify", tmp_path / "cut.kv")
    assert (code, "cut.kv" in talk) == (USAGE, True)


def test_what_is_refused(run: Run, plan: Path, saved: Path, tmp_path: Path) -> None:
    asked = ("--prompt", "? vote")
    from_file = ("generate", "bundled", "--cache", saved)
    refused(run, USAGE, "leave --context out, or --cache", *from_file, *asked, "--context", "the fox .")
    refused(run, USAGE, "is no safetensors file", "generate", "bundled", "--cache", saved.parent / "plan.json", *asked)
    refused(run, USAGE, "there is no file", "generate", "bundled", "--cache", tmp_path / "nothing.kv", *asked)
    refused(run, USAGE, "give a --prompt with --cache", "generate", find_resource("data/bundled"), "--cache", saved)
    refused(run, USAGE, "several prompts are asked of one context", "generate", "bundled", *asked, *asked)
    compress = ("compress", "bundled", "--plan", plan, "--context", "the fox .", "-o")
    refused(run, USAGE, "--force to replace it", *compress, saved)
    refused(run, USAGE, "its folder does not exist", *compress, tmp_path / "no" / "a.kv")
    copied = ("compress", find_resource("data/bundled"), "--plan", plan, "-o", tmp_path / "a.kv")
    refused(run, USAGE, "give --context TEXT or @FILE", *copied)
    code, out, _ = run(*compress, tmp_path / "a.kv", "--dry-run", "--json")
    told = json.loads(out)
    assert (code, told["context"], told["output"]) == (0, "the fox .", str(tmp_path / "a.kv"))
    assert list(tmp_path.iterdir()) == []

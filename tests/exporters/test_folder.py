"""The folder to deploy: loads by itself, from a path and from the hub, and its script answers."""

from __future__ import annotations

import runpy
import shutil
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import kvsearch
from kvsearch.commands.export import write_files
from kvsearch.core.errors import UsageError
from kvsearch.core.resources import find_resource
from kvsearch.exporters.base import ExportInputs
from kvsearch.exporters.folder import Folder
from kvsearch.plan import Plan
from tests.cli.conftest import invoke
from tests.plan.builders import make_plan


def folder(tmp_path: Path, plan: Plan) -> Path:
    path = tmp_path / "deploy"
    write_files(Folder().export(plan, ExportInputs()), path, force=False)
    return path


def test_a_repository_of_the_hub_is_a_plan_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = folder(tmp_path, make_plan()), []

    def snapshot(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert kvsearch.load_plan("somebody/plan") == make_plan()
    assert asked == [("somebody/plan", ["plan.json", "*.safetensors"])]
    with pytest.raises(UsageError, match=r"no file somebody/plan\.json"):
        kvsearch.load_plan("somebody/plan.json")


@pytest.mark.slow
@pytest.mark.nightly
def test_its_script_answers_as_generate_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The context is compressed before the prompts are read, which go through a chat template."""
    model = Path(shutil.copytree(find_resource("data/bundled-redundant"), tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %} recall"
    tokenizer.save_pretrained(model)
    path = tmp_path / "plan.json"
    plan = ("plan", "uniform", model, "--policy", "snapkv:window=8", "--ratio", 0.7, "--length", 256, "-o", path)
    assert invoke(*plan)[0] == 0
    kvsearch.export_to(path, to="folder", output=tmp_path / "made")
    folder = shutil.move(tmp_path / "made", tmp_path / "moved")
    (tmp_path / "text.txt").write_text("the calm fox greets the nurse in barn . silver : helmet trumpet . " * 40)
    asked = ["--context", f"@{tmp_path / 'text.txt'}", "--prompt", "silver :", "--prompt", "the calm"]
    words = [*asked, "--device", "cpu", "--max-new-tokens", "8"]
    monkeypatch.setattr(sys, "argv", [str(Path(folder) / "generate.py"), *words])
    runpy.run_path(sys.argv[0], run_name="__main__")
    said = capsys.readouterr().out
    code, replies, _ = invoke("generate", model, "--plan", folder, *words)
    assert (code, said) == (0, replies)
    assert len(replies.splitlines()) >= 2
    assert "--tasks jsonl:YOUR.jsonl" in (Path(folder) / "README.md").read_text()

"""What only tells something answers at once: nothing that computes is imported for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = (
    "torch", "transformers", "tokenizers", "safetensors", "accelerate", "numpy", "scipy", "sklearn", "pandas",
    "pyarrow", "datasets", "cma", "ray", "matplotlib",
)  # fmt: skip
WATCH = f"""
import atexit, json, sys
atexit.register(lambda: sys.stderr.write(json.dumps([name for name in {HEAVY} if name in sys.modules])))
"""


def loaded(code: str, ends: int = 0) -> tuple[str, list[str]]:
    """Standard output of `code`, which `ends` with that exit code, and which of HEAVY it imports."""
    done = subprocess.run([sys.executable, "-c", WATCH + code], capture_output=True, text=True, check=False)
    assert done.returncode == ends, done.stderr
    found: list[str] = json.loads(done.stderr.splitlines()[-1])
    return done.stdout, found


# commands that list, with a part of what each prints
LISTINGS = {
    "--help": "calibrate",
    "policies": "StreamingLLM",
    "policies snapkv": "last 32 query rows",
    "policies h2o --json": "500 of 1000 stay",
    "policies --json": '"problems"',
    "tasks": "ruler:vt",
    "tasks gsm8k": "openai/gsm8k",
    "tasks math500": "HuggingFaceH4/MATH-500",
    "tasks --json": '"sets"',
}
ONE_BY_ONE = """
from typer.testing import CliRunner
from kvsearch.cli import app
for line in COMMANDS:
    done = CliRunner().invoke(app, line.split())
    print(json.dumps([line, done.exit_code, done.stdout, done.stderr]))
"""


def test_the_package_and_listings_import_nothing_that_computes() -> None:
    out, found = loaded(f"import kvsearch.policies, kvsearch.plan\nCOMMANDS = {list(LISTINGS)}{ONE_BY_ONE}")
    for line, code, said, talk in map(json.loads, out.splitlines()):
        assert code == 0, talk
        assert LISTINGS[line] in said
    assert found == []


# what is refused at once, a command each, in a folder with the files that it names
REFUSED = {
    "generate bundled --plan damaged.json": "damaged.json",
    "bench bundled --ratio 90": "ratio 90.0 is outside (0, 1): it is the share to evict",
    "headroom bundled --ratio 90": "0.8 keeps a fifth; did you mean 0.9?",
    "run bundle --budget 51 -o new": "there is no model 'bundle'; did you mean 'bundled'?",
    "run no/such --budget 51 -o new --offline": "no directory no/such, and no downloaded model of that name: check",
    "run bundled --budget 51 -o new --dtype float61": "unknown dtype 'float61'; did you mean 'float16'?",
    "run bundled --budget 51 -o new --policies snapkw": "unknown policy 'snapkw'; did you mean 'snapkv'?",
    "calibrate bundled -o new --tasks jsonl:none.jsonl": "there is no file none.jsonl",
    "evaluate bundled --plan none.json": "there is no file none.json",
    "evaluate bundled --methods uniform --budgets 64 --tasks jsonl:list.jsonl": "row 1 is not an object: a row has",
    "evolve bundled --budget 48 -o new --tasks rular": "unknown task 'rular'",
    "plan uniform bundled --policy snapkv:windw=8 --budget 64 -o new": "did you mean 'window'?",
    "generate bundled --context text.txt --prompt who": "text.txt is a file: write @text.txt to have it read",
    "export best --ratio 0.8 -o new": "best has no profile but a plan: change its size with `kvsearch plan scale best/",
}


def test_what_is_wrong_is_told_before_anything_that_computes_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("damaged.json", "text.txt", "best/plan.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "list.jsonl").write_text("[1]")
    monkeypatch.chdir(tmp_path)
    out, found = loaded(f"COMMANDS = {list(REFUSED)}{ONE_BY_ONE}")
    for line, code, _, talk in map(json.loads, out.splitlines()):
        assert REFUSED[line] in talk
        assert code == 2, talk
        assert len(talk.splitlines()) == (2 if ":list" in line else 1), talk
    assert not {"torch", "transformers"} & set(found)
    assert not (tmp_path / "new").exists()


def test_results_are_shown_and_drawn_without_what_computed_them() -> None:
    code = "import kvsearch.report.artifacts, kvsearch.report.page, kvsearch.commands.report"
    code += ", kvsearch.report.integrity, kvsearch.selection.from_yaml, kvsearch.budgets.plan_checks"
    _, found = loaded(code)
    assert not {"torch", "transformers", "datasets", "ray", "cma", "sklearn"} & set(found)

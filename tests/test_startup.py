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


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--help", "calibrate"),
        ("policies", "StreamingLLM"),
        ("policies snapkv", "last 32 query rows"),
        ("policies h2o --json", "500 of 1000 stay"),
        ("policies --json", '"problems"'),
        ("tasks", "ruler:vt"),
        ("tasks gsm8k", "openai/gsm8k"),
        ("tasks --json", '"sets"'),
    ],
)
def test_listings_import_nothing_that_computes(arguments: str, told: str) -> None:
    out, found = loaded(f"from kvsearch.cli import app; app({arguments.split()})")
    assert told in out
    assert found == []


def test_the_package_imports_nothing_that_computes() -> None:
    assert loaded("import kvsearch, kvsearch.policies, kvsearch.plan") == ("", [])


@pytest.mark.parametrize("verb", ["generate bundled", "compress bundled -o new.kv", "bench bundled"])
def test_a_damaged_plan_is_refused_before_anything_that_computes_is_imported(verb: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    words = [*verb.split(), "--plan", str(tmp_path / "plan.json")]
    out, found = loaded(f"from kvsearch.cli import app; app({words})", ends=2)
    assert out == ""
    assert not {"torch", "transformers", "scipy"} & set(found)


def test_a_policy_that_computes_imports_torch() -> None:
    code = "from kvsearch.policies.random import uniform; print(uniform(7, 3).shape)"
    out, found = loaded(code)
    assert out == "torch.Size([])\n"
    assert "torch" in found


def test_results_are_shown_and_drawn_without_what_computed_them() -> None:
    code = "import kvsearch.report.artifacts, kvsearch.report.page.page, kvsearch.jobs.report"
    code += ", kvsearch.report.integrity, kvsearch.strategies.from_yaml, kvsearch.budgets.plan_checks"
    _, found = loaded(code)
    assert not {"torch", "transformers", "datasets", "ray", "cma", "sklearn"} & set(found)

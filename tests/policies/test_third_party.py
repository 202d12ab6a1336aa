"""The worked example of CONTRIBUTING.md: a package that adds a policy, built from the page and used as printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvsearch.models.loading import load
from kvsearch.plan import save_plan
from tests.runtime.helpers import plan_for

ROOT = Path(__file__).parents[2]
NAME, PACKAGE, TEST = "value_norm", "kvsearch-value-norm", "test_value_norm.py"
pytestmark = [pytest.mark.slow, pytest.mark.nightly]
BLOCK = re.compile(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds the package as an installer would leave it, and its test."""
    directory = tmp_path_factory.mktemp("site")
    files = dict(BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text()))
    assert list(files) == ["pyproject.toml", "kvsearch_value_norm.py", TEST]
    for name, content in files.items():
        (directory / name).write_text(content)
    project = tomllib.loads(files["pyproject.toml"])["project"]
    installed = directory / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    installed.mkdir()
    header = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (installed / "METADATA").write_text(header)
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (installed / "entry_points.txt").write_text("\n".join(lines))
    return directory


def python(site: Path, *arguments: object) -> str:
    """Standard output of `python -m ARGUMENTS`, with the package on the path."""
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_is_listed_and_shown(site: Path) -> None:
    shown = python(site, "kvsearch", "policies", NAME)
    for words in (f"{PACKAGE} 0.1", "score[i] = |v_i|_p", "scored anew every 8 steps", "order    default 2"):
        assert words in shown
    listed = json.loads(python(site, "kvsearch", "policies", "--json"))
    facts = {policy["name"]: policy for policy in listed["policies"]}[NAME]
    assert facts["package"] == f"{PACKAGE} 0.1"
    assert facts["implementation"] == "kvsearch_value_norm:ValueNorm"
    assert NAME not in {problem["name"] for problem in listed["problems"]}


def test_its_own_test_passes(site: Path) -> None:
    options = ("-c", ROOT / "pyproject.toml", "--rootdir", ROOT, "-p", "no:cacheprovider")
    examples = ("-p", "tests.conftest")
    assert "passed" in python(site, "pytest", *options, *examples, site / TEST)


def test_a_plan_that_names_it_runs(site: Path, tmp_path: Path) -> None:
    model = load("bundled").model
    heads = model.config.num_key_value_heads
    budgets: list[list[int] | None] = [[100] * heads] * model.config.num_hidden_layers
    save_plan(plan_for(model, budgets, policy=NAME, params={"order": 1}), tmp_path / "plan.json")
    arguments = ("--plan", tmp_path / "plan.json", "--max-new-tokens", 2, "--json")
    reply = json.loads(python(site, "kvsearch", "generate", "bundled", *arguments))
    assert reply["entries"] == 100 * heads * model.config.num_hidden_layers

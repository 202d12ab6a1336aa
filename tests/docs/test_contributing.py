"""The worked examples of CONTRIBUTING.md: packages that add a part each, built from the page and used as printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from kvsearch.models.loading import load
from kvsearch.plan import load_plan, save_plan
from tests.families import TINY, TinyModel
from tests.runtime.family_check import check_family
from tests.runtime.helpers import plan_for

ROOT = Path(__file__).parents[2]
PACKAGES = ("policy", "task", "calibration method", "exporter")
SECTION = re.compile(r"^## Add an? ([\w ]+?) in \w+ steps\n(.*?)(?=^## )", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTIONS = dict(SECTION.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
FILES = {part: dict(BLOCK.findall(text)) for part, text in SECTIONS.items()}


def install(part: str, site: Path) -> None:
    """Write the package of a section as an installer would leave it, beside its test."""
    for name, content in FILES[part].items():
        (site / name).write_text(content)
    project = tomllib.loads(FILES[part]["pyproject.toml"])["project"]
    installed = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    installed.mkdir()
    header = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (installed / "METADATA").write_text(header)
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (installed / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with all packages of the page."""
    directory = tmp_path_factory.mktemp("site")
    for part in PACKAGES:
        install(part, directory)
    return directory


def python(site: Path, *arguments: object) -> str:
    """Standard output of `python -m ARGUMENTS`, with the packages on the path."""
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.nightly
def test_the_contracts_hold(site: Path) -> None:
    options = ("-c", ROOT / "pyproject.toml", "--rootdir", ROOT, "-p", "no:cacheprovider", "-p", "tests.conftest")
    tests = {name: text for part in PACKAGES for name, text in FILES[part].items() if name.startswith("test_")}
    classes = re.findall(r"^class (Test\w+)", "\n".join(tests.values()), re.MULTILINE)
    assert len(classes) >= len(tests) == len(PACKAGES)
    shown = python(site, "pytest", "-vv", *options, *(site / name for name in tests))
    assert [name for name in classes if f"::{name}::" not in shown] == []


@pytest.mark.slow
@pytest.mark.nightly
def test_a_policy_is_listed_and_a_plan_that_names_it_runs(site: Path, tmp_path: Path) -> None:
    listed = json.loads(python(site, "kvsearch", "policies", "--json"))
    facts = {policy["name"]: policy for policy in listed["policies"]}["value_norm"]
    assert facts["package"] == "kvsearch-value-norm 0.1"
    assert facts["implementation"] == "kvsearch_value_norm:ValueNorm"
    model = load("bundled").model
    heads = model.config.num_key_value_heads
    budgets: list[list[int] | None] = [[100] * heads] * model.config.num_hidden_layers
    save_plan(plan_for(model, budgets, policy="value_norm", params={"order": 1}), tmp_path / "plan.json")
    arguments = ("--plan", tmp_path / "plan.json", "--max-new-tokens", 2, "--json")
    reply = json.loads(python(site, "kvsearch", "generate", "bundled", *arguments))
    assert reply["entries"] == 100 * heads * model.config.num_hidden_layers


@pytest.mark.slow
@pytest.mark.nightly
def test_a_task_is_asked(site: Path) -> None:
    asked = ("--tasks", "pairs+synthetic:single", "--length", 512, "--samples", 2, "--split", "report", "--json")
    scores = json.loads(
        python(site, "kvsearch", "evaluate", "bundled", "--methods", "streaming", "--budgets", 64, *asked)
    )
    assert "pairs" in json.dumps(scores)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_method_calibrates_and_its_plan_is_exported(site: Path, tmp_path: Path) -> None:
    directory, path, budgets = tmp_path / "run", tmp_path / "plan.json", tmp_path / "budgets.csv"
    options = ("--method", "value_spread", "--power", 2, "--questions", 2, "-o", directory)
    python(site, "kvsearch", "calibrate", "bundled", *options)
    python(site, "kvsearch", "export", directory, "--budget", 64, "-o", path)
    plan = load_plan(path)
    assert plan.total == 64 * plan.model.layers * plan.model.kv_heads
    assert plan.provenance.method == "value_spread"
    python(site, "kvsearch", "export", path, "--to", "layer-csv", "--lossy", "-o", budgets)
    assert len(budgets.read_text().splitlines()) == plan.model.layers


@pytest.mark.nightly
def test_a_family_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    ((name, made),) = yaml.safe_load(FILES["family of models"]["families.yaml"]).items()
    assert name not in TINY
    monkeypatch.setitem(TINY, name, TinyModel(**made))
    report = check_family(name)
    assert report.verdict in ("supported", "partly"), report.why

"""A search from Python: keywords in, the result and the same files out."""

from __future__ import annotations

import json
from pathlib import Path

from kvsearch.jobs.evolve import EvolveOptions, dry_run, evolve, remarks
from kvsearch.jobs.public import run_job
from kvsearch.plan import load_plan
from tests import tiny


def test_a_search_from_python_writes_what_it_returns(tmp_path: Path) -> None:
    tasks, directory = tiny.task_file(tmp_path / "mine.jsonl", 12, length=100, facts=3), tmp_path / "run"
    options = EvolveOptions.of(
        model="bundled", budget=12, params={"window": 4}, group_size=2, generations=1, finalists=1, max_evals=3,
        tasks=f"jsonl:{tasks}", samples=2, output=directory,
    )  # fmt: skip
    found = evolve(options)
    assert found.evaluations == 3
    plan = load_plan(directory / "plan.json")
    assert tuple(layer.budget for layer in plan.prefill.layers) == found.found[12].budgets
    assert found.as_json() == json.loads((directory / "report.json").read_text())
    *_, written, _, following = remarks(options, found)
    assert following.startswith(f"next: kvsearch evaluate bundled --plan {directory / 'plan.json'} ")
    assert written.endswith(f"wrote {directory / 'plan.json'} and {directory / 'report.json'}")
    again = EvolveOptions.of(directory / "config.json", output=tmp_path / "again")
    assert again.recorded() == options.recorded()
    content = json.loads((directory / "config.json").read_text())["content"]
    foretold = run_job(dry_run, again, dry=True).as_json()
    assert foretold.pop("measured_by") == "stored prompts"
    assert foretold.pop("most_candidates") >= 3
    assert foretold.pop("estimate")["measured"]["tokens"] > 0
    assert content.pop("searched_sha256") == plan.provenance.data_sha256
    assert foretold == content
    assert not (tmp_path / "again").exists()

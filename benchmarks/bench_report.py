"""How large a report is and how long it takes, of a model of 32 layers x 8 kv heads and a search of 400 candidates.

    python benchmarks/bench_report.py
    python benchmarks/bench_report.py --layers 80 --keep runs/made-up

The numbers of the runs are made up: a LU-KV calibration, and a finished search with its ledger, finalists and plan. The
time is the processor's, of the whole command with all it imports; the least of three.
"""

from __future__ import annotations

import argparse
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvsearch.core.canonical import hash_json
from kvsearch.plan import ModelFingerprint, Plan, Profile, ProfileMetadata, save_plan, save_profile
from kvsearch.plan.origin import make_provenance
from kvsearch.plan.profile_arrays import GRID_SIZE
from kvsearch.plan.rounding import largest_remainder
from kvsearch.runs.identity import LEDGER, RunConfig
from kvsearch.runs.lock import lock_directory
from kvsearch.runs.run import begin_run, write_json
from kvsearch.search.trials import TrialLog

LENGTH, BUDGET, POPULATION, QUESTIONS = 8192, 512, 8, 24
POLICY = {"name": "snapkv", "params": {}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 32), ("heads", 8), ("candidates", 400), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--keep", type=Path, help="keep runs and report in this directory")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = args.keep or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(args.seed)
        model = ModelFingerprint(
            name=f"{args.layers} x {args.heads}", model_type="llama", config_sha256=hash_json("config"),
            weights_sha256=hash_json("weights"), layers=args.layers, kv_heads=args.heads, head_dim=128,
        )  # fmt: skip
        save_profile(make_profile(rng, model), place / "profile.safetensors", overwrite=True)
        with lock_directory(place / "search"):
            make_search(rng, model, place / "search", args.candidates)
        page = place / "report.html"
        command = ["kvsearch", "report", place / "profile.safetensors", place / "search", "-o", page]
        print(f"{args.layers} layers x {args.heads} kv heads, {args.candidates} candidates")
        whole = min(timed([sys.executable, "-m", *map(str, command)]) for _ in range(3))
        drawing = f"{making(command[2:4]):.1f} of them to read and draw, the rest to import"
        print(f"seconds   {whole:.1f} of the processor, {drawing}")
        text = page.read_text()
        print(f"kilobytes {page.stat().st_size / 1000:.0f}")
        print(f"figures   {text.count('<figure')}, tables {text.count('<table')}")
        links = re.findall('href="data:[^"]*', text)
        print(f"of these  {sum(map(len, links)) / 1000:.0f} kB are CSV")


def timed(command: list[str]) -> float:
    """Return the seconds of the processor that a command takes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def making(paths: Sequence[Path | str]) -> float:
    """Return the seconds of the processor that it takes to read runs and to draw their page."""
    from kvsearch.report.artifacts import open_path
    from kvsearch.report.page import group_by_model, render

    start = time.process_time()
    groups = group_by_model([open_path(Path(path)) for path in paths])
    render(groups)
    return time.process_time() - start


def make_profile(rng: np.random.Generator, model: ModelFingerprint) -> Profile:
    """Return a LU-KV profile of six questions about three texts."""
    shape = model.layers, model.kv_heads
    grid = np.arange(1, GRID_SIZE + 1)[:, None, None] / 100
    spread = rng.uniform(-1, 1, shape)
    table = grid + np.minimum(grid, 1 - grid) * (spread - spread.mean()) / 2
    kept = np.arange(101) / 100
    recall = 1 - (1 - kept) ** rng.uniform(1, 5, (*shape, 1))
    oracle = np.maximum(recall, 1 - (1 - kept) ** 8)
    questions = np.clip(table[9:90:10] + rng.normal(0, 0.02, (6, 9, *shape)), 0, 0.99)
    arrays = {
        "evicted_ratio": table, "recall": recall, "oracle_recall": oracle, "question_ratio": questions,
        "mass": oracle * rng.uniform(0, 100, (*shape, 1)),
    }  # fmt: skip
    metadata = ProfileMetadata.model_validate(
        {
            "format": "kvsearch.profile", "version": 1, "model": model, "method": "lukv", "policy": POLICY,
            "length": LENGTH, "questions": 6, "layers": list(range(model.layers)), "floor": 1,
            "provenance": make_provenance("lukv", 0, None, {"data": "made up"}, None),
        }
    )  # fmt: skip
    found: dict[str, Any] = {name: array.astype(np.float32) for name, array in arrays.items()}
    return Profile(metadata, {**found, "question_context": np.array([0, 0, 1, 1, 2, 2], np.int32)})


def make_search(rng: np.random.Generator, model: ModelFingerprint, directory: Path, candidates: int) -> None:
    """Write a finished search with its ledger, its report and its plan."""
    total = BUDGET * model.layers * model.kv_heads

    def draw() -> np.ndarray:
        shares = rng.exponential(1.0, model.layers * model.kv_heads) + 0.1
        return largest_remainder(total * shares / shares.sum(), total).reshape(model.layers, -1)

    directory.mkdir(exist_ok=True)
    config = RunConfig(
        job="evolve", command=["kvsearch", "evolve", model.name, "--budget", str(BUDGET), "-o", "search"],
        options={"model": model.name, "budget": BUDGET}, content={"model": model.model_dump()},
    )  # fmt: skip
    begin_run(directory, config, (LEDGER,))
    best, least, length = draw(), np.inf, (model.layers + 3) // 4
    with TrialLog(directory / LEDGER) as ledger:
        ledger.begin("group 1")
        for generation in range(candidates // POPULATION):
            points = [rng.normal(size=length) for _ in range(POPULATION)]
            values = [float(1 + 3 * np.exp(-generation / 20) + rng.exponential(0.3)) for _ in points]
            keys = [hash_json([generation, at]) for at in range(POPULATION)]
            samples = [list(value + rng.normal(0, 0.1, QUESTIONS)) for value in values]
            ledger.append("result", keys=keys, outcome="ok", values=samples, message="", seconds=2.5, tokens=4000)
            ledger.tell("group 1", generation, points, values)
            if min(values) < least:
                best, least = draw(), min(values)
                ledger.append("best", candidate=best.tolist(), value=least, where=f"group 1, generation {generation}")
    layers = [{"policy": POLICY, "budget": list(map(int, row))} for row in best]
    plan = Plan.model_validate(
        {
            "model": model, "length": LENGTH, "scaling": "proportional", "floor": 1, "prefill": {"layers": layers},
            "total": total, "provenance": make_provenance("evolve", 0, None, {}, None),
        }
    )  # fmt: skip
    save_plan(plan, directory / "plan.json", overwrite=True)
    write_json(directory / "report.json", made_up_report(model, best, draw(), candidates, least))


def made_up_report(
    model: ModelFingerprint, best: np.ndarray, uniform: np.ndarray, candidates: int, value: float
) -> dict[str, Any]:
    """Return what `evolve --json` prints of such a search."""

    def estimate(mean: float) -> dict[str, float]:
        return {"mean": mean, "low": mean - 0.05, "high": mean + 0.05}

    lead = {**estimate(0.1), "wins": 8, "ties": 14, "losses": 2}
    tables = {"#1": best.tolist(), "uniform": uniform.tolist()}
    finalists = {
        name: {"budgets": table, "value": value, "where": "group 1", "score": estimate(0.6)}
        for name, table in tables.items()
    }
    found = {
        "ended": "all stages are finished", "decision": "chosen: #1", "flat": False,
        "starts": {"uniform": uniform.tolist()},
        "finalists": {**finalists, "#1": {**finalists["#1"], "lead": lead, "chance": 0.02}},
        "start": "uniform", "chosen": "#1", "verdict": "likely", "best": "#1", "budgets": best.tolist(),
        "report": {"evolved": estimate(0.62), "uniform": estimate(0.52), "full": estimate(0.7)},
        "gains": {"uniform": lead}, "recovered": {"uniform": estimate(0.55)}, "ahead": {},
    }  # fmt: skip
    splits = {"search": "train", "choice": "select", "report": "report"}
    asked = {
        name: [
            {
                "task": "needles", "category": "needles", "split": split, "contexts": 24, "questions": 24, "found": 24,
                "wanted": 24, "shortest": 512, "longest": 512, "truncated": 0, "used": 0, "excluded": {},
            }
        ]
        for name, split in splits.items()
    }  # fmt: skip
    return {
        "schema": "kvsearch.evolution/3", "model": model.name, "questions": dict.fromkeys(splits, 24), "asked": asked,
        "evaluations": candidates, "tokens": 500 * candidates, "settings": {
            "phases": "prefill", "protocol": "question-agnostic", "objective": "nll",
        },
        "found": {str(BUDGET): found},
    }  # fmt: skip


if __name__ == "__main__":
    main()

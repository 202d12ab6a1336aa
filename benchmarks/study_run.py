"""How often `kvsearch run` writes a plan that is below the best baseline, over seeds, budgets and models.

    python benchmarks/study_run.py --models bundled,bundled-redundant --seeds 20 --budgets 51,102,204

The best baseline is the one that scores highest on the report split, of those that reached the second stage: it is
picked by the same questions, which favours it. A plan counts as below it where the 95% interval of the paired
difference is below zero. Runs are kept in `--output`, so the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import kvsearch
from kvsearch.evaluation.reply_store import read_replies
from kvsearch.evaluation.statistics import contrast
from kvsearch.report.numbers import interval, percent
from kvsearch.runs.estimates import Difference


def judged(directory: Path, size: str, found: dict[str, Any]) -> tuple[str, Difference | None]:
    """Return the best baseline of the report split, and what the plan scores above it; None where it is the plan."""
    (outcome,) = found["outcomes"]
    kinds = {one["name"]: one["kind"] for one in outcome["standings"]}
    scores = {name: one["mean"] for name, one in found["report"]["scores"].items() if kinds.get(name) == "baseline"}
    best, written = max(scores, key=lambda name: scores[name]), found["written"]["name"]
    if best == written:
        return best, None
    replies = read_replies(directory / "choice" / size / "report" / "ledger.jsonl")
    return best, contrast(list(replies.values()), {written: 1.0, best: -1.0})


def main() -> None:
    """Run all, and print a line for each plan, then the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="bundled,bundled-redundant")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--budgets", default="51,102,204")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--form", default="network", choices=["network", "linear"])
    parser.add_argument("--output", type=Path, default=Path("runs/study-run"))
    args = parser.parse_args()
    plans = below = fallbacks = 0
    for seed in range(args.seeds):
        for model in args.models.split(","):
            directory = args.output / f"{model}-{seed}"
            kvsearch.run(model, output=directory, budgets=args.budgets, seed=seed, samples=args.samples, form=args.form)
            for size, found in json.loads((directory / "run.json").read_bytes())["sizes"].items():
                best, lead = judged(directory, size, found)
                worse = lead is not None and lead.high < 0
                plans, below, fallbacks = plans + 1, below + worse, fallbacks + found["written"]["fallback"]
                score = percent(found["report"]["scores"][found["written"]["name"]]["mean"], 1)
                told = "is it" if lead is None else interval(lead, "+.1f", noun=" points")
                mark = "  BELOW" if worse else ""
                name = found["written"]["name"]
                print(f"{model} seed {seed} budget {size}: {name} {score}, minus {best}: {told}{mark}",
                      flush=True)  # fmt: skip
    print(f"{plans} plans, {fallbacks} of them baselines; below the best baseline of the report split: {below}")


if __name__ == "__main__":
    main()

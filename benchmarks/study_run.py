"""How often `kvsearch run` writes a plan that is below the best baseline, by verdict, over seeds, budgets and models.

    python benchmarks/study_run.py --models bundled,bundled-redundant --seeds 20 --output runs/study-run

What is run is said in a recipe of `kvsearch run`: by default `study_run.yaml` beside this file, with full fits. The
best baseline is the one that scores highest on the report split, of the two best of the choice and even budgets: it is
picked by the same questions, which favours it. A plan counts as below it where the interval of the paired difference is
below zero. The regret is how many points the best method of the report split, candidates among them, is above the plan;
it is picked by the same questions, too. Runs are kept in `--output`: the same command goes on where it stopped, and
`--finished` counts what is there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.stats import beta

import kvsearch
from kvsearch.commands.run import RUN_FILE, RunOptions
from kvsearch.evaluation.reply_store import read_replies
from kvsearch.evaluation.statistics import contrast_scores
from kvsearch.report.table import format_interval, format_percent
from kvsearch.runs.estimates import Difference
from kvsearch.runs.identity import read_config

RECIPE = Path(__file__).with_suffix(".yaml")


@dataclass(frozen=True)
class JudgedPlan:
    """A plan, its verdict, its regret, and what it scores above the best baseline (None: no baseline is above it)."""

    name: str
    verdict: str
    regret: float
    lead: Difference | None
    words: str

    @property
    def is_below(self) -> bool:
        """Whether it is below the best baseline beyond the interval."""
        return self.lead is not None and self.lead.high < 0


def judge(directory: Path, size: str, choice: dict[str, Any]) -> JudgedPlan:
    """Compare the plan of a size with the best baseline, and with the best method, of the report split."""
    outcome = choice["chosen"]
    kinds = {method["name"]: method["kind"] for method in outcome["methods"]}
    scores = {name: score["mean"] for name, score in choice["report"]["scores"].items() if name in kinds}
    written = outcome["winner"] or outcome["best"]
    best = max((name for name in scores if kinds[name] == "baseline"), key=lambda name: scores[name])
    regret = 100 * (max(scores.values()) - scores[written])
    lead = None
    words = f"{format_percent(scores[written], 1)}, no baseline above it"
    if scores[best] > scores[written]:
        replies = read_replies(directory / "choice" / size / "report" / "ledger.jsonl")
        lead = contrast_scores(list(replies.values()), {written: 1.0, best: -1.0})
        words = f"{format_percent(scores[written], 1)}, minus {best}: {format_interval(lead, '+.1f', noun=' points')}"
    return JudgedPlan(written, outcome["verdict"], regret, lead, words)


def runs(args: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    """Yield the finished runs, with what they are called; the others are run first."""
    for seed in range(args.first, args.first + args.seeds):
        for model in args.models.split(","):
            directory = args.output / f"{model}-{seed}"
            options = RunOptions.of(args.recipe, model=model, output=directory, seed=seed)
            config = read_config(directory) if directory.exists() else None
            if config is None or config.options != options.to_recipe() or not (directory / RUN_FILE).exists():
                if args.finished:
                    continue
                kvsearch.run(options)
            yield f"{model} seed {seed}", directory


def main() -> None:
    """Run all, and print a line for each plan, then the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="bundled,bundled-redundant")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="what is run")
    parser.add_argument("--finished", action="store_true", help="count what is finished, run nothing")
    parser.add_argument("--output", type=Path, default=Path("runs/study-run"))
    plans = []
    args = parser.parse_args()
    for name, directory in runs(args):
        for size, choice in json.loads((directory / RUN_FILE).read_bytes())["sizes"].items():
            plan = judge(directory, size, choice)
            plans.append(plan)
            mark = "  BELOW" if plan.is_below else ""
            print(f"{name} budget {size}: {plan.name} ({plan.verdict}) {plan.words}{mark}", flush=True)
    for verdict in ("beats", "likely", "cheaper", "baseline"):
        print(summarize([plan for plan in plans if plan.verdict == verdict], verdict))
    print(summarize(plans, "all"))


def summarize(plans: list[JudgedPlan], verdict: str) -> str:
    """Return how many plans are below the best baseline, with the interval of that share, and the mean regret."""
    below = sum(plan.is_below for plan in plans)
    low = float(beta.ppf(0.025, below, len(plans) - below + 1)) if below else 0.0
    high = float(beta.ppf(0.975, below + 1, len(plans) - below)) if below < len(plans) else 1.0
    regret = sum(plan.regret for plan in plans) / max(len(plans), 1)
    bounds = f"{format_percent(low, 1)} to {format_percent(high, 1)}"
    share = f"{format_percent(below / max(len(plans), 1), 1)}%, 95% interval {bounds}"
    return (
        f"{verdict}: {len(plans)} plans, {below} below the best baseline of the report split ({share}); mean regret "
        f"{regret:.2f} points"
    )


if __name__ == "__main__":
    main()

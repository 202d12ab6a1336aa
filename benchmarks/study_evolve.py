"""The studies of EvolKV (arXiv 2509.08315, sections 4.2 and 5) on the bundled model, one table each.

    python benchmarks/study_evolve.py group-size     # how many layers a group has
    python benchmarks/study_evolve.py repeats        # the same search with other seeds
    python benchmarks/study_evolve.py expansion      # the smallest budget's plan, scaled, against cold searches
    python benchmarks/study_evolve.py transfer       # a plan that was searched on one task, on the others
    python benchmarks/study_evolve.py specialised    # a plan for each task, on all tasks
    python benchmarks/study_evolve.py group-size --parity --objective metric

Scores are those of the report split, which nothing was searched or chosen on, in percent with 95% intervals.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvsearch.evaluation.compare import Settings
from kvsearch.evaluation.plan_comparison import PlanComparison
from kvsearch.models.loading import LoadOptions, load
from kvsearch.plan import Plan
from kvsearch.policies import create_policy
from kvsearch.search.candidates import Candidate
from kvsearch.search.evolve import EVOLVED, Evolved, PreparedSearch, Splits, prepare_search
from kvsearch.search.front import EXPANDED, prepare_front, search_front
from kvsearch.search.ledger import SearchLedger, Spent
from kvsearch.search.settings import EvolveSettings, SearchLimits
from kvsearch.search.start_plans import UNIFORM, Base
from kvsearch.search.workers import make_executor
from kvsearch.tasks.catalog import TaskOptions, find_tasks

SPLITS = "train", "select", "report"


class Unwatched:
    """A watcher that shows nothing."""

    def stage(self, name: str) -> None:
        """See `Watcher`."""

    def generation(self, stage: str, generation: int, values: Sequence[float], best: Candidate) -> None:
        """See `Watcher`."""

    def ended(self, why: str) -> None:
        """See `Watcher`."""


class Studies:
    """All studies; what they share is loaded once."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.loaded = args, load("bundled", LoadOptions())
        self.base = Base.of(self.loaded, create_policy("snapkv", {"window": args.window}))
        self.asked = Settings(args.samples)

    # --- the studies ----------------------------------------------------------------------------------------------

    def group_size(self) -> None:
        rows = []
        for size in (1, 2, 3, self.base.heads[0]):
            _, (evolved, spent) = self.search(group_size=size)
            rows.append([str(size), str(spent.evaluations), f"{spent.seconds:.0f}", *compared(evolved.report)])
        show(["layers of a group", "candidates", "seconds", "evolved", "uniform", "evolved minus uniform"], rows)

    def repeats(self) -> None:
        rows, scores = [], []
        for seed in range(self.args.repeats):
            _, (evolved, spent) = self.search(seed=seed)
            scores.append(100 * evolved.report.score(EVOLVED).mean)
            rows.append([str(seed), str(spent.evaluations), evolved.choice.name, *compared(evolved.report)])
        show(["seed", "candidates", "chosen", "evolved", "uniform", "evolved minus uniform"], rows)
        print(f"mean {statistics.mean(scores):.2f}, standard deviation {statistics.stdev(scores):.2f}")

    def expansion(self) -> None:
        budgets = [self.args.budget, 2 * self.args.budget, 4 * self.args.budget]
        searches = prepare_front(self.base, budgets, self.settings(), self.splits(self.args.tasks), self.asked, {})
        cap = max(search.cap for search in searches)
        with scratch() as ledger, make_executor(searches[0], LoadOptions(), cap=cap) as executor:
            points = search_front(searches, executor, ledger, SearchLimits(), Unwatched())
        rows = []
        for point in points:
            report = point.report
            scaled = [""] * 2 if EXPANDED not in report.labels else [shown(report, EXPANDED), gained(report, EXPANDED)]
            rows.append([str(point.budget), shown(report, EVOLVED), *scaled, shown(report, UNIFORM)])
        show(["budget", "direct", "scaled", "direct minus scaled", "uniform"], rows)

    def transfer(self) -> None:
        names = self.names
        prepared, (evolved, _) = self.search(f"synthetic:{names[0]}")
        plans = {f"searched on {names[0]}": evolved.choice.plan, UNIFORM: self.uniform(prepared)}
        self.across(prepared, plans)

    def specialised(self) -> None:
        plans: dict[str, Plan] = {}
        for tasks in [*(f"synthetic:{name}" for name in self.names), self.args.tasks]:
            prepared, (evolved, _) = self.search(tasks)
            plans[f"for {tasks.removeprefix('synthetic:')}"] = evolved.choice.plan
        self.across(prepared, {**plans, UNIFORM: self.uniform(prepared)})

    # --- their parts ----------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        return [str(task.name) for task in find_tasks(self.args.tasks, TaskOptions(split="train"))]

    def settings(self, **changes: Any) -> EvolveSettings:
        args = self.args
        given = {
            "group_size": 2, "generations": args.generations, "objective": args.objective,
            "parity": args.parity, **changes,
        }  # fmt: skip
        return EvolveSettings.model_validate(given)

    def splits(self, tasks: str) -> Splits:
        lengths = (self.args.length,)
        return Splits(*(find_tasks(tasks, TaskOptions(lengths=lengths, split=split)) for split in SPLITS))

    def search(self, tasks: str | None = None, **changes: Any) -> tuple[PreparedSearch, tuple[Evolved, Spent]]:
        prepared = prepare_search(
            self.base,
            self.args.budget,
            self.settings(**changes),
            self.splits(tasks or self.args.tasks),
            self.asked,
            {},
        )
        return prepared, run(prepared)

    def uniform(self, prepared: PreparedSearch) -> Plan:
        return prepared.plan(prepared.starts[UNIFORM], {})

    def across(self, prepared: PreparedSearch, plans: Mapping[str, Plan]) -> None:
        """Every plan on every task."""
        result = prepared.compare(plans, self.splits(self.args.tasks).report, "report", None)
        columns = list(result.by_task(UNIFORM))
        rows = [
            [name, *(f"{100 * result.by_task(name)[task]:.2f}" for task in columns), shown(result, name)]
            for name in result.labels
        ]
        show(["", *columns, "all"], rows)


@contextmanager
def scratch() -> Iterator[SearchLedger]:
    """A ledger that is thrown away."""
    with tempfile.TemporaryDirectory() as folder, SearchLedger(Path(folder) / "ledger.jsonl") as ledger:
        yield ledger


def run(prepared: PreparedSearch) -> tuple[Evolved, Spent]:
    with scratch() as ledger:
        with make_executor(prepared, LoadOptions()) as executor:
            outcome = prepared.search(executor, ledger, SearchLimits(), Unwatched())
        spent = ledger.spent
    choice = prepared.choose(outcome)
    return Evolved(prepared, outcome, choice, prepared.report(choice)), spent


def compared(report: PlanComparison) -> list[str]:
    return [shown(report, EVOLVED), shown(report, UNIFORM), gained(report, UNIFORM)]


def shown(result: PlanComparison, name: str) -> str:
    one = result.score(name)
    return f"{100 * one.mean:.2f} [{100 * one.low:.2f}, {100 * one.high:.2f}]"


def gained(result: PlanComparison, name: str) -> str:
    one = result.gain(EVOLVED, [name])
    return f"{100 * one.mean:+.2f} [{100 * one.low:+.2f}, {100 * one.high:+.2f}]"


def show(columns: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[place]) for row in [columns, *rows]) for place in range(len(columns))]
    for row in [columns, *rows]:
        print("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)))


def main() -> None:
    names = ["group-size", "repeats", "expansion", "transfer", "specialised"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=names)
    parser.add_argument("--budget", type=int, default=32, help="entries per kv head; expansion: the smallest")
    parser.add_argument("--window", type=int, default=8)
    parser.add_argument("--tasks", default="synthetic:single,multikey")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=10, help="contexts per task in each split")
    parser.add_argument("--generations", type=int, default=8, help="of each group")
    parser.add_argument("--objective", default="nll", choices=["nll", "kl", "metric"])
    parser.add_argument("--parity", action="store_true", help="the paper's literal choices")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    start = time.perf_counter()
    getattr(Studies(args), args.study.replace("-", "_"))()
    print(f"{args.study}: {args.tasks}, {args.samples} contexts per task and split, budget {args.budget}, "
          f"{args.objective}{', parity' * args.parity}; {time.perf_counter() - start:.0f} s")  # fmt: skip


if __name__ == "__main__":
    main()

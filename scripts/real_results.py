"""Measure SmolLM2-135M-Instruct: every step from nothing to the tables of README and docs/results.md.

    python scripts/real_results.py            # what is missing is measured, then the tables are written
    python scripts/real_results.py --jobs 2   # two kinds of questions side by side, each on half of the cores
    python scripts/real_results.py --tables   # the tables alone, of what was measured
    python scripts/real_results.py --steps    # the commands, with what each has cost so far

A step is a command of kvsearch with a directory of its own in runs/real. It goes on where it was stopped, and is not
repeated once it is finished. `kvsearch run` writes plans that serve needles in essays and text going on, and a plan for
defaults that documentation states; then plans, policies with even budgets and the allocations of papers answer the same
questions about contexts that nothing was fitted or chosen on.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from kvsearch.core.errors import KvsearchError
from kvsearch.core.files import write_atomically
from kvsearch.evaluation.reply_store import read_replies
from kvsearch.evaluation.samples import Sample
from kvsearch.evaluation.statistics import contrast_scores, estimate_by_student, group_scores
from kvsearch.report.artifacts import open_path
from kvsearch.report.table import describe_coverage, format_interval, format_percent
from kvsearch.results.evaluation import EvaluationResult, MethodScores, SizeScores
from kvsearch.runs.estimates import Estimate
from kvsearch.runs.identity import LEDGER

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "docs" / "results.md", ROOT / "README.md")
ITEMS = ROOT / "docs" / "results"
MODEL = "smollm2"
SEED = "5"
COSTS = "costs.json"  # processor time of each step
COSTS_LOCK = Lock()
EVEN = ("snapkv", "h2o")  # policies with even budgets, and allocations: the best of each stands in README
ALLOCATIONS = ("pooled", "lukv")
RIVALS = (EVEN, ALLOCATIONS)
LABELS = {"lukv": "LU-KV over snapkv", "pooled": "kvzip, pooled"}
MARK = re.compile(r"<!-- (\S+) -->\n(.*?)<!-- end -->", re.DOTALL)


@dataclass(frozen=True)
class Step:
    """A command of kvsearch, with the directory in which it keeps what it measures."""

    directory: Path
    arguments: tuple[str, ...]

    @property
    def is_finished(self) -> bool:
        """Whether its result is there."""
        return (self.directory / ("run.json" if self.arguments[0] == "run" else "report.json")).exists()

    @property
    def command(self) -> list[str]:
        """The words of the command."""
        verb, *options = self.arguments
        return ["kvsearch", verb, MODEL, "--dtype", "bfloat16", *options, "--seed", SEED, "-o", str(self.directory)]

    def run(self, home: Path, threads: int) -> None:
        """Run it, unless it is finished, and add the processor time that it took to the file of costs.

        What it prints goes to a file beside its directory.
        """
        if self.is_finished:
            return
        log = self.directory.with_name(f"{self.directory.name}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        print(f"$ {shlex.join(self.command)}  # {log}", flush=True)
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *self.command],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            )
            _, status, used = os.wait4(process.pid, 0)  # the processor time of this step alone
        process.returncode = code = os.waitstatus_to_exitcode(status)
        add_cost(home / COSTS, str(self.directory), used.ru_utime + used.ru_stime)
        if code:
            sys.exit(f"{log}: this step ended with exit code {code}; what is finished is kept: give the command again")


@dataclass(frozen=True)
class Kind:
    """A kind of questions that plans of a search, and other methods of their sizes, answer."""

    name: str
    title: str
    search: Step  # the run that writes the plans
    tasks: tuple[str, ...]
    sizes: tuple[str, ...]  # options of the other methods
    plans: tuple[str, ...]  # files of the search, the largest first
    rivals: tuple[str, ...]
    samples: int  # contexts of each task

    def make_step(self, home: Path) -> Step:
        """Return the comparison on contexts that no plan was fitted or chosen on."""
        searched = self.search.directory
        plans = [word for plan in self.plans for word in ("--plan", str(searched / plan))]
        methods = ",".join(f"lukv={searched / 'curves'}" if name == "lukv" else name for name in self.rivals)
        counts = ("--split", "report", "--samples", str(self.samples))
        return Step(home / self.name, ("evaluate", *self.tasks, *counts, "--methods", methods, *self.sizes, *plans))


def list_kinds(home: Path) -> list[Kind]:
    """Return all kinds of questions."""
    text = f"ppl:{home / 'data' / 'text' / 'documentation.txt'}"
    file = ("--tasks", f"jsonl:{home / 'data' / 'questions.jsonl'}")
    needles = "ruler:niah_single_2,niah_multikey_1"
    length = ("--length", "1024")
    sizes = ("--budgets", "102,51")
    both = Step(home / "needles-and-text" / "run", ("run", "--tasks", f"{needles}+{text}", *length, *sizes))
    questions = Step(home / "questions-alone" / "run", ("run", *file, "--ratio", "0.8"))
    plans = ("plan-102.json", "plan-51.json")
    return [
        Kind("needles", "needles, single and among many keys", both, ("--tasks", needles, *length), sizes, plans,
             ("snapkv", "pooled", "lukv"), 50),
        Kind("text", "documentation, nats per token lost", both, ("--tasks", text, *length), sizes, plans,
             ("snapkv", "h2o", "lukv"), 100),
        Kind("questions", "questions about documentation", questions, file, ("--ratios", "0.8"), ("plan.json",),
             ("snapkv", "h2o", "pooled", "lukv"), 100),
    ]  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """The finished comparison of a kind, with every reply."""

    kind: Kind
    result: EvaluationResult
    samples: Sequence[Sample]

    @classmethod
    def read(cls, kind: Kind, home: Path) -> Comparison:
        """Read it from its directory."""
        directory = kind.make_step(home).directory
        samples = tuple(read_replies(directory / LEDGER).values())
        return cls(kind, open_path(directory).content, samples)

    @property
    def format(self) -> tuple[float, str]:
        """What values are multiplied by, and how they are written: percent, or nats per token."""
        return (1, ".3f") if self.result.on_text else (100, ".1f")

    def describe_share(self, block: SizeScores) -> str:
        """Return which part of the entries of the full cache is kept at a size, in percent."""
        return f"{format_percent(find_plan(block).held.entries / self.result.full.held.entries, 0)}%"

    def estimate(self, method: MethodScores) -> Estimate:
        """Return the mean score of a method, or on text its loss above the full cache."""
        if self.result.on_text:
            return self.result.overall.of(method.nats).excess
        return self.result.overall.of(method.scores)

    def find_best(self, block: SizeScores, names: Sequence[str]) -> MethodScores:
        """Return the best of some methods at a size."""
        methods = [method for method in block.methods if method.name in names]
        return (min if self.result.on_text else max)(methods, key=lambda method: self.estimate(method).mean)

    def estimate_lead(self, plan: MethodScores, over: MethodScores) -> Estimate:
        """Return what a plan scores above another method, or loses less on text; paired by context."""
        if self.result.on_text:
            [task] = group_scores(self.samples).values()
            return estimate_by_student(task.losses[over.label][0] - task.losses[plan.label][0])
        return contrast_scores(self.samples, {plan.label: 1, over.label: -1})


def find_plan(block: SizeScores) -> MethodScores:
    """Return the plan of a size."""
    return next(method for method in block.methods if method.name.startswith("plan"))


def main() -> None:
    """Measure what is missing, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, default=Path("runs/real"), help="where the steps are kept")
    parser.add_argument("--jobs", type=int, default=1, help="how many steps are measured side by side")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--tables", action="store_true", help="write the tables of what was measured, measure nothing")
    only.add_argument("--steps", action="store_true", help="list the commands, measure nothing")
    args = parser.parse_args()
    try:
        if args.steps:
            list_steps(args.home)
            return
        if not args.tables:
            measure(args.home, args.jobs)
        write_pages(args.home)
    except KvsearchError as error:
        sys.exit(f"{error}: measure it first" if args.tables else str(error))


def find_steps(home: Path) -> list[list[Step]]:
    """Return all searches, and all comparisons of what they write."""
    kinds = list_kinds(home)
    return [[*dict.fromkeys(kind.search for kind in kinds)], [kind.make_step(home) for kind in kinds]]


def measure(home: Path, jobs: int) -> None:
    """Run every step that is not finished, comparisons after all searches."""
    threads = max(1, (os.cpu_count() or 1) // jobs)
    with ThreadPoolExecutor(jobs) as pool:
        for steps in find_steps(home):
            list(pool.map(lambda step: step.run(home, threads), steps))  # raises what it raised


def list_steps(home: Path) -> None:
    """Print the commands of all steps, with the minutes that each has taken so far."""
    spent = read_costs(home / COSTS)
    for steps in find_steps(home):
        for step in steps:
            print(f"{spent.get(str(step.directory), 0) / 60:6.1f} min  {shlex.join(step.command)}")


def write_pages(home: Path) -> None:
    """Write the tables into the pages, and pack the replies."""
    comparisons = [Comparison.read(kind, home) for kind in list_kinds(home)]
    parts = {"summary": write_summary(comparisons)}
    for comparison in comparisons:
        parts[comparison.kind.name] = write_methods(comparison)
        pack(comparison.kind.make_step(home).directory, ITEMS / f"{comparison.kind.name}.tar.xz")
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        write_atomically(page, MARK.sub(lambda place: fill(place, parts), text).encode())
    pages = ", ".join(str(page.relative_to(ROOT)) for page in PAGES)
    print(f"wrote the tables of {pages}, and {ITEMS.relative_to(ROOT)}/")


def add_cost(path: Path, name: str, seconds: float) -> None:
    """Add the processor time of a step to the file of costs."""
    with COSTS_LOCK:
        spent = read_costs(path)
        write_atomically(path, json.dumps({**spent, name: spent.get(name, 0) + seconds}).encode())


def read_costs(path: Path) -> dict[str, float]:
    """Return the processor time of each step so far, in seconds, by its directory."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


# --- tables -----------------------------------------------------------------------------------------------------------


def write_summary(comparisons: Sequence[Comparison]) -> str:
    """Return the table of README: a row per kind of questions and size."""
    rows = []
    for comparison in comparisons:
        unit, form = comparison.format
        for block in comparison.result.blocks:
            plan = find_plan(block)
            cells = [comparison.kind.title, comparison.describe_share(block)]
            cells.append(f"**{format_interval(comparison.estimate(plan), form, unit)}**")
            for names in RIVALS:
                best = comparison.find_best(block, names)
                cells.append(f"{unit * comparison.estimate(best).mean:{form}} ({label_method(best.name)})")
            cells.append(write_full(comparison))
            rows.append(cells)
    header = ["plan of `kvsearch run`", "policy, even budgets", "allocation of a paper", "full cache"]
    return make_table(["", "kept", *header], rows)


def write_full(comparison: Comparison) -> str:
    """Return the score of the full cache, in percent; it loses nothing on text."""
    result = comparison.result
    return "0" if result.on_text else format_percent(result.overall.of(result.full.scores).mean, 1)


def write_methods(comparison: Comparison) -> str:
    """Say what was asked, and return a table of all methods by size, with the lead of the plan over each."""
    unit, form = comparison.format
    gain = "loses less by" if comparison.result.on_text else "is above by"
    rows = []
    for block in comparison.result.blocks:
        plan = find_plan(block)
        share = comparison.describe_share(block)
        for method in [plan, *(method for method in block.methods if method is not plan)]:
            score = format_interval(comparison.estimate(method), form, unit)
            lead = "" if method is plan else format_interval(comparison.estimate_lead(plan, method), f"+{form}", unit)
            rows.append([share, "plan of `kvsearch run`" if method is plan else label_method(method.name), score, lead])
    words = f"{describe_coverage(comparison.result.tasks)}; full cache {write_full(comparison)}:"
    return f"{words}\n\n{make_table(['kept', 'method', 'score', f'plan {gain}'], rows)}"


def label_method(name: str) -> str:
    """Return how a method is called in tables."""
    return LABELS.get(name, f"{name}, even" if name in EVEN else name)


def make_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fill(place: re.Match[str], parts: dict[str, str]) -> str:
    """Return a place of the page with what belongs there; as it was, where that was not measured."""
    return f"<!-- {place[1]} -->\n\n{parts.get(place[1], place[2]).strip()}\n\n<!-- end -->"


def pack(directory: Path, archive: Path) -> None:
    """Keep a finished comparison with every reply in one compressed file, the same bytes for the same content."""
    archive.parent.mkdir(exist_ok=True)
    with tarfile.open(archive, "w:xz", preset=9) as file:
        for name in ("config.json", "report.json", "samples.csv"):
            member = tarfile.TarInfo(name)
            content = (directory / name).read_bytes()
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))


if __name__ == "__main__":
    main()

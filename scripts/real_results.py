"""Measure SmolLM2-135M-Instruct: every step from nothing to the tables of docs/results.md.

    python scripts/real_results.py            # what is missing is measured, then the tables are written
    python scripts/real_results.py --jobs 2   # two kinds of questions side by side, each on half of the cores
    python scripts/real_results.py --tables   # the tables alone, of what was measured
    python scripts/real_results.py --steps    # the commands, with what each has cost so far

A step is a command of kvsearch with a directory of its own in runs/real. It goes on where it was stopped, and is not
repeated once it is finished. Three kinds of questions are asked: needles in essays, defaults that documentation states,
and plain text, of which the rest is predicted. Needles are RULER's kinds of which the full cache finds about half or
more, on contexts that nothing else uses. For each kind `kvsearch run` writes a plan per size (50, 25, 20, 10 and 5% of
the entries), on contexts of its own; then plans, policies with even budgets and the
allocations of papers answer the same questions about other contexts. Plans for needles answer about longer ones, too,
and they and the policies are asked what they keep of rules that were told before a text (the tasks retain:*).
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
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

from kvsearch.core.errors import KvsearchError, assert_present
from kvsearch.core.files import write_atomically
from kvsearch.evaluation.reply_store import read_replies
from kvsearch.evaluation.samples import Sample
from kvsearch.evaluation.statistics import RETAINED, contrast_scores, estimate_by_student, group_scores
from kvsearch.report.artifacts import open_path
from kvsearch.report.table import describe_coverage, format_interval, format_percent
from kvsearch.results.evaluation import EvaluationResult, MethodScores, SizeScores
from kvsearch.runs.estimates import Estimate
from kvsearch.runs.identity import LEDGER
from kvsearch.tasks.retain import RETAIN, RETAIN_FORMS

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "docs" / "results.md", ROOT / "README.md")
ITEMS = ROOT / "docs" / "results"
MODEL = "smollm2"
# tokens, with the question and the longest reply
LENGTHS = {"needles": 1024, "needles-2048": 2048, "text": 1024, RETAIN: 470}
NEEDLES = (
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multiquery", "niah_multivalue", "niah_turns",
)  # fmt: skip
# of these the full cache has to answer half
GATED = {"needles": ("ruler", NEEDLES), RETAIN: (RETAIN, tuple(RETAIN_FORMS))}
RETAIN_BUDGETS = (208, 83, 42)  # sizes of plans for needles: about half, a fifth and a tenth of such a context
COSTS = "costs.json"  # processor time of each step
COSTS_LOCK = Lock()
GATE = 0.45  # of the questions that the full cache has to answer: half, but for what 12 contexts are off by chance
POLICIES = (
    "snapkv", "h2o", "tova", "vatp", "cam", "d2o", "keydiff", "knorm", "expected_attention", "uniform:cake",
    "criticalkv", "uniform:defensivekv", "kvzip", "streaming",
)  # fmt: skip
CONTROLS = ("streaming:sinks=0", "random")
ALLOCATIONS = ("pyramid", "adakv", "adakv:expected_attention", "cake", "lava", "layer-defensivekv", "pooled")
RIVALS = (POLICIES, (*ALLOCATIONS, "lukv"))  # of which the best of each stands beside the plan
NAMES = {
    "needles": "needles, RULER's kinds that the full cache finds",
    "needles-2048": "the same plans, contexts of twice the length",
    "questions": "questions about documentation",
    "text": "documentation, nats per token lost",
}
KINDS = (*NAMES, RETAIN)
LATER = ("needles-2048", RETAIN)  # asked under plans for needles
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
        return ["kvsearch", verb, MODEL, "--dtype", "bfloat16", *options, "-o", str(self.directory)]

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
    """A kind of questions: its tasks, the sizes of plans, and how many contexts per task are used for what."""

    name: str
    tasks: str
    main_budgets: tuple[int, ...]  # about 20 and 10% of a context: for README, single tasks and controls
    groups: tuple[tuple[int, ...], ...]  # of all sizes, in entries per kv head; each is a search of its own
    fit: int
    measure: int
    choose: int
    report: tuple[int, ...]  # of each group
    plans: Path | None = None  # of another search, in place of one of its own

    @property
    def budgets(self) -> list[int]:
        """All sizes, the largest first."""
        return sorted((budget for group in self.groups for budget in group), reverse=True)

    def searches(self, home: Path) -> list[Step]:
        """Return the search for plans of every group of sizes."""
        if self.plans is not None:
            return []
        return [self._search(home / self.name / name, group) for name, group in self._named("run")]

    def comparisons(self, home: Path) -> list[Step]:
        """Return the comparison of the plans of every group of sizes with methods of the field."""
        searches = [self.plans] if self.plans else [search.directory for search in self.searches(home)]
        return [
            self._comparison(home / self.name / name, group, search, count)
            for search, (name, group), count in zip(searches, self._named("evaluation"), self.report, strict=True)
        ]

    def _named(self, name: str) -> list[tuple[str, tuple[int, ...]]]:
        return [(f"{name}{'-others' * bool(number)}", group) for number, group in enumerate(self.groups)]

    def _search(self, directory: Path, group: tuple[int, ...]) -> Step:
        counts = ("--fit", str(self.fit), "--measure", str(self.measure), "--samples", str(self.choose))
        fitted = ("--rankings", "query_bank", "--no-refine")
        return Step(directory, ("run", *self._asked, "--budgets", ",".join(map(str, group)), *fitted, *counts))

    def _comparison(self, directory: Path, group: tuple[int, ...], search: Path, count: int) -> Step:
        """Return the comparison on `count` contexts of every task that no plan saw."""
        plans = [word for budget in group for word in ("--plan", str(search / f"plan-{budget}.json"))]
        methods = ",".join([*POLICIES, *CONTROLS, *ALLOCATIONS, f"lukv={search / 'curves'}"])
        sizes = ("--methods", methods, "--budgets", ",".join(map(str, group)))
        # many methods of two contexts are rows enough of a batch, and take 3 GB
        asked = (*self._asked, "--split", "report", "--samples", str(count), "--batch", "2")
        return Step(directory, ("evaluate", *asked, *sizes, *plans))

    @property
    def _asked(self) -> tuple[str, ...]:
        length = LENGTHS.get(self.name)  # questions have contexts of their own length
        return ("--tasks", self.tasks, *(() if length is None else ("--length", str(length))))


@dataclass(frozen=True)
class Comparison:
    """The finished comparison of a kind, with every reply, one for each group of sizes."""

    kind: Kind
    results: tuple[EvaluationResult, ...]
    samples: dict[int, Sequence[Sample]]  # by size

    @classmethod
    def read(cls, kind: Kind, home: Path) -> Comparison:
        """Read it from its directories."""
        directories = [step.directory for step in kind.comparisons(home)]
        results = tuple(open_path(directory).content for directory in directories)
        replies = [tuple(read_replies(directory / LEDGER).values()) for directory in directories]
        return cls(
            kind, results, {size: each for sizes, each in zip(kind.groups, replies, strict=True) for size in sizes}
        )

    @property
    def result(self) -> EvaluationResult:
        """The comparison of the first group of sizes."""
        return self.results[0]

    @property
    def blocks(self) -> dict[int, SizeScores]:
        """The methods of every size, by its budget, the largest first."""
        blocks = {
            budget: block
            for group, result in zip(self.kind.groups, self.results, strict=True)
            for budget, block in zip(group, result.blocks, strict=True)
        }
        return {budget: blocks[budget] for budget in self.kind.budgets}

    def result_of(self, budget: int) -> EvaluationResult:
        """Return the comparison of the group that a size is in."""
        return next(result for sizes, result in zip(self.kind.groups, self.results, strict=True) if budget in sizes)

    @property
    def format(self) -> tuple[float, str]:
        """What values are multiplied by, and how they are written: percent, or nats per token."""
        return (1, ".3f") if self.result.on_text else (100, ".1f")

    def share(self, budget: int) -> str:
        """Return which part of the entries of the full cache is kept at a size, in percent."""
        return f"{format_percent(self.plan(budget).held.entries / self.result.full.held.entries, 0)}%"

    def value(self, method: MethodScores) -> Estimate:
        """Return the mean score of a method, or on text its loss above the full cache."""
        if self.result.on_text:
            return self.result.overall.of(method.nats).excess
        return self.result.overall.of(method.scores)

    def write(self, value: Estimate) -> str:
        """Return a value as tables have it: percent, or nats per token."""
        unit, form = self.format
        return f"{unit * value.mean:{form}}"

    def best(self, budget: int, names: Sequence[str]) -> MethodScores:
        """Return the best of some methods at a size."""
        methods = [method for method in self.blocks[budget].methods if method.name in names]
        return (min if self.result.on_text else max)(methods, key=lambda method: self.value(method).mean)

    def plan(self, budget: int) -> MethodScores:
        """Return what the plan of a size scored."""
        return assert_present(self.blocks[budget].method(f"plan-{budget}"), f"no plan of {budget} entries was compared")

    def lead(self, budget: int, over: MethodScores) -> Estimate:
        """Return what the plan of a size scores above another method, or loses less on text; paired by context."""
        plan = self.plan(budget)
        if self.result.on_text:
            [task] = group_scores(self.samples[budget]).values()
            return estimate_by_student(task.losses[over.label][0] - task.losses[plan.label][0])
        return contrast_scores(self.samples[budget], {plan.label: 1, over.label: -1})


def main() -> None:
    """Measure what is missing, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, default=Path("runs/real"), help="where the steps are kept")
    parser.add_argument("--kinds", default=",".join(KINDS), help="which kinds of questions")
    parser.add_argument("--jobs", type=int, default=1, help="how many kinds are measured side by side")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--tables", action="store_true", help="write the tables of what was measured, measure nothing")
    only.add_argument("--steps", action="store_true", help="list the commands, measure nothing")
    args = parser.parse_args()
    names = args.kinds.split(",")
    try:
        if args.steps:
            list_steps(args.home, names)
            return
        if not args.tables:
            measure(args.home, names, args.jobs)
        write_page(args.home, names)
    except KvsearchError as error:
        sys.exit(f"{error}: measure it first" if args.tables else str(error))


def measure(home: Path, names: Sequence[str], jobs: int) -> None:
    """Run every step that is not finished; those of one kind follow each other, those of `LATER` all others."""
    threads = max(1, (os.cpu_count() or 1) // jobs)

    def measure_kind(name: str) -> None:
        for step in find_steps(home, [name]):
            step.run(home, threads)

    with ThreadPoolExecutor(jobs) as pool:
        for later in (False, True):
            list(pool.map(measure_kind, [name for name in names if (name in LATER) == later]))  # raises what it raised


def list_steps(home: Path, names: Sequence[str]) -> None:
    """Print the commands of all steps; those about needles are known once their kinds have been tried."""
    spent = read_costs(home / COSTS)
    for step in find_steps(home, names):
        print(f"{spent.get(str(step.directory), 0) / 60:6.1f} min  {shlex.join(step.command)}")
        if step.directory.name == "gate" and not step.is_finished:
            return


def find_steps(home: Path, names: Sequence[str]) -> Iterator[Step]:
    """Yield the steps of some kinds of questions; those after the first are known once it is finished."""
    for name in names:
        if name in GATED:
            yield gate_step(home, name)
        if name == RETAIN:
            yield retain_step(home)
            continue
        kind = find_kind(home, name)
        yield from kind.searches(home)
        yield from kind.comparisons(home)


def write_page(home: Path, names: Sequence[str]) -> None:
    """Write the tables into the page, pack the replies, and stop with an error if a control came out wrong."""
    comparisons = [Comparison.read(find_kind(home, name), home) for name in names if name != RETAIN]
    parts = {}
    if RETAIN in names:
        directory = home / RETAIN / "evaluation"
        result = open_path(directory).content
        parts = {RETAIN: write_retained(result), f"{RETAIN}-gate": write_gate(home, RETAIN)}
        pack(directory, ITEMS / f"{RETAIN}.tar.xz")
    for comparison in comparisons:
        name = comparison.kind.name
        if name == "needles":
            parts["needles-gate"] = write_gate(home, name)
        parts |= {name: write_methods(comparison), f"{name}-leads": write_leads(comparison)}
        if len(comparison.result.tasks) > 1:
            parts[f"{name}-tasks"] = write_tasks(comparison)
        for step in comparison.kind.comparisons(home):
            pack(step.directory, ITEMS / f"{name}{step.directory.name.removeprefix('evaluation')}.tar.xz")
    controls = [control for comparison in comparisons for control in find_controls(comparison)]
    if {*KINDS} <= {*names}:  # of all kinds together
        parts["controls"] = "\n".join(f"- {words}: {'yes' if holds else '**no**'}" for words, holds in controls)
        parts["summary"] = write_summary(comparisons)
        parts["costs"] = write_costs(find_steps(home, names), read_costs(home / COSTS))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        write_atomically(page, MARK.sub(lambda place: fill(place, parts), text).encode())
    pages = ", ".join(str(page.relative_to(ROOT)) for page in PAGES)
    print(f"wrote the tables of {pages}, and {ITEMS.relative_to(ROOT)}/")
    if failed := [words for words, holds in controls if not holds]:
        sys.exit(f"a control came out wrong: {'; '.join(failed)}")


def gate_step(home: Path, name: str) -> Step:
    """Return the step that asks the full cache, beside a control, all tasks of a kind, on contexts of their own."""
    source, tasks = GATED[name]
    asked = (
        "--tasks",
        f"{source}:{','.join(tasks)}",
        "--length",
        str(LENGTHS[name]),
        "--split",
        "select",
        "--seed",
        "7",
    )
    options = ("--samples", "12", "--methods", "streaming", "--ratios", "0.8")
    return Step(home / name / "gate", ("evaluate", *asked, *options))


def gate_scores(home: Path, name: str) -> dict[str, float]:
    """Return the scores of the full cache by task."""
    scores = open_path(gate_step(home, name).directory).content.full.scores["tasks"]
    return {task: scores[task].mean for task in GATED[name][1]}


def find_passed(home: Path, name: str) -> str:
    """Return the tasks of a kind of which the full cache does enough; the script ends where there are none."""
    passed = [task for task, score in gate_scores(home, name).items() if score >= GATE]
    if not passed:
        sys.exit(f"the full cache does less than {GATE:.0%} of every task of {name}: nothing can be compared on them")
    return f"{GATED[name][0]}:{','.join(passed)}"


def retain_step(home: Path) -> Step:
    """Return the step that asks policies, and plans for needles, what they keep of rules told before a text."""
    needles = find_kind(home, "needles")
    folders = {
        budget: search.directory
        for search, group in zip(needles.searches(home), needles.groups, strict=True)
        for budget in group
    }
    plans = [word for budget in RETAIN_BUDGETS for word in ("--plan", str(folders[budget] / f"plan-{budget}.json"))]
    asked = ("--tasks", find_passed(home, RETAIN), "--length", str(LENGTHS[RETAIN]), "--samples", "20", "--batch", "2")
    sizes = ("--methods", ",".join([*POLICIES, "random"]), "--budgets", ",".join(map(str, RETAIN_BUDGETS)))
    return Step(home / RETAIN / "evaluation", ("evaluate", *asked, "--split", "report", *sizes, *plans))


def find_kind(home: Path, name: str) -> Kind:
    """Return a kind of questions: of needles those that pass the gate, of others what api_questions.py has written."""
    groups: tuple[tuple[int, ...], ...]
    if name == "text":
        tasks = f"ppl:{home / 'data' / 'documentation.txt'}"
        groups = ((512, 256, 205, 102, 51),)
        return Kind(name, tasks, (205, 102), groups, fit=4, measure=4, choose=8, report=(32,))
    if name == "questions":
        tasks = f"jsonl:{home / 'data' / 'questions.jsonl'}"
        groups = ((205, 102), (512, 256, 51))
        return Kind(name, tasks, (205, 102), groups, fit=10, measure=10, choose=12, report=(26, 26))
    tasks = find_passed(home, "needles")
    groups = ((167, 83), (417, 208, 42))
    needles = Kind("needles", tasks, (167, 83), groups, fit=3, measure=3, choose=4, report=(12, 8))
    if name == "needles":
        return needles
    plans = needles.searches(home)[1].directory
    return replace(needles, name=name, main_budgets=(417, 208), groups=((417, 208),), report=(4,), plans=plans)


def add_cost(path: Path, name: str, seconds: float) -> None:
    """Add the processor time of a step to the file of costs."""
    with COSTS_LOCK:
        spent = read_costs(path)
        write_atomically(path, json.dumps({**spent, name: spent.get(name, 0) + seconds}).encode())


def read_costs(path: Path) -> dict[str, float]:
    """Return the processor time of each step so far, in seconds, by its directory."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


# --- tables -----------------------------------------------------------------------------------------------------------


def write_gate(home: Path, name: str) -> str:
    """Say which tasks of a kind are asked, and which are not."""
    scores = gate_scores(home, name)
    passed = {name: score for name, score in scores.items() if score >= GATE}
    asked, left_out = (
        ", ".join(f"{name} {format_percent(score, 0)}" for name, score in some.items())
        for some in (passed, {name: score for name, score in scores.items() if name not in passed})
    )
    how = f"Score of the full cache on 12 contexts each that are used for nothing else; {GATE:.0%} or more is asked."
    return f"{how} Asked: {asked}. Left out: {left_out}."


def write_summary(comparisons: Sequence[Comparison]) -> str:
    """Return the table of README: a row per kind of questions and size."""
    rows = []
    for comparison in comparisons:
        if comparison.kind.plans is not None:  # of other lengths than its plans
            continue
        unit, form = comparison.format
        full = comparison.result.overall
        for budget in comparison.kind.main_budgets:
            cells = [NAMES[comparison.kind.name], comparison.share(budget)]
            cells.append(f"**{format_interval(comparison.value(comparison.plan(budget)), form, unit)}**")
            for names in RIVALS:
                best = comparison.best(budget, names)
                cells.append(f"{comparison.write(comparison.value(best))} ({label_of(best.name)})")
            on_text = comparison.result.on_text
            cells.append("0" if on_text else format_percent(full.of(comparison.result.full.scores).mean, 1))
            rows.append(cells)
    return table(
        ["", "kept", "plan of `kvsearch run`", "best policy, even budgets", "best allocation of a paper", "full cache"],
        rows,
    )


def write_methods(comparison: Comparison) -> str:
    """Say what was asked, and return a table of all methods by size, the best on average first."""
    names = [method.name for method in comparison.result.blocks[0].methods if not method.name.startswith("plan-")]

    def mean(name: str) -> float:
        values = [
            comparison.value(assert_present(block.method(name), name)).mean for block in comparison.blocks.values()
        ]
        return sum(values) if comparison.result.on_text else -sum(values)

    rows = [
        [
            "**plan of `kvsearch run`**",
            *(
                f"**{comparison.write(comparison.value(comparison.plan(budget)))}**"
                for budget in comparison.kind.budgets
            ),
        ]
    ]
    for name in sorted(names, key=mean):
        values = [
            comparison.write(comparison.value(assert_present(block.method(name), name)))
            for block in comparison.blocks.values()
        ]
        rows.append([label_of(name), *values])
    if not comparison.result.on_text:
        results = map(comparison.result_of, comparison.kind.budgets)
        rows.insert(0, ["full cache", *(comparison.write(result.overall.of(result.full.scores)) for result in results)])
    sizes = table(["", *(f"{comparison.share(budget)} kept" for budget in comparison.kind.budgets)], rows)
    asked = [describe_coverage(result.tasks) for result in comparison.results]
    others = [
        f"at {', '.join(map(comparison.share, group))}: {words}"
        for group, words in zip(comparison.kind.groups, asked, strict=True)
        if words != asked[0]
    ]
    return f"{'; '.join([asked[0], *others])}:\n\n{sizes}"


def write_leads(comparison: Comparison) -> str:
    """Return a table of the plans beside the best even policy and the best allocation, with paired intervals."""
    rows = []
    unit, form = comparison.format
    for budget in comparison.kind.budgets:
        plan = comparison.plan(budget)
        row = [comparison.share(budget), format_interval(comparison.value(plan), form, unit)]
        for names in RIVALS:
            best = comparison.best(budget, names)
            row += [
                f"{label_of(best.name)} {comparison.write(comparison.value(best))}",
                format_interval(comparison.lead(budget, best), f"+{form}", unit),
            ]
        rows.append(row)
    gain = "plan loses less by" if comparison.result.on_text else "plan is above it by"
    return table(["kept", "plan", "best policy, even budgets", gain, "best allocation of a paper", gain], rows)


def write_tasks(comparison: Comparison) -> str:
    """Return a table of the tasks at 20 and 10% kept: the full cache, the plan, the best even policy."""
    rows = []
    for row in comparison.result.rows:
        if row.kind != "task":
            continue
        cells = [row.name, str(row.questions), format_percent(row.of(comparison.result.full.scores).mean, 1)]
        for budget in comparison.kind.main_budgets:
            methods = [comparison.plan(budget), comparison.best(budget, POLICIES)]
            cells += [format_percent(row.of(method.scores).mean, 1) for method in methods]
        rows.append(cells)
    header = ["", "questions", "full cache"]
    for share in map(comparison.share, comparison.kind.main_budgets):
        header += [f"plan, {share}", f"best even policy, {share}"]
    return table(header, rows)


def write_retained(result: EvaluationResult) -> str:
    """Return a table of the share that is kept of what the full cache does, by size.

    Methods come with the one that keeps most on average first, plans as one row.
    """
    kept = next((row for row in result.rows if row.name == RETAINED), None)
    if kept is None:
        return "The full cache does less than half of every form: nothing can be kept."
    forms = [row for row in result.rows if row.kind == "task"]
    by_name: dict[str, dict[int, MethodScores]] = {}
    for number, block in enumerate(result.blocks):
        for method in block.methods:
            name = "plan for needles" if method.name.startswith("plan-") else label_of(method.name)
            by_name.setdefault(name, {})[number] = method

    def mean(name: str) -> float:
        return sum(kept.of(method.scores).mean for method in by_name[name].values()) / len(by_name[name])

    names = sorted(by_name, key=mean, reverse=True)
    sizes = range(len(result.blocks))
    shares = [block.methods[0].held.entries / result.full.held.entries for block in result.blocks]
    header = [f"{format_percent(share, 0)}% kept" for share in shares]

    def format_cells(name: str) -> list[str]:
        methods = map(by_name[name].get, sizes)
        return ["" if method is None else format_interval(kept.of(method.scores), ".0f") for method in methods]

    full = [row.of(result.full.scores) for row in forms]
    listed = ", ".join(f"{row.name} {format_interval(score, '.0f')}" for row, score in zip(forms, full, strict=True))
    tables = [
        f"{describe_coverage(result.tasks)}. Scores of the full cache: {listed}.",
        "Share of these that is kept, in percent:",
        table(["", *header], [[name, *format_cells(name)] for name in names]),
    ]
    return "\n\n".join(tables)


def write_costs(steps: Iterable[Step], spent: dict[str, float]) -> str:
    """Return a table of what the steps took."""
    rows = [
        [f"`{step.directory.parent.name}/{step.directory.name}`", f"{spent.get(str(step.directory), 0) / 60:.0f}"]
        for step in steps
    ]
    return table(["step", "minutes of processor time"], rows)


def find_controls(comparison: Comparison) -> Iterator[tuple[str, bool]]:
    """Yield what must come out of any sound measurement, and whether it did."""

    def mean(name: str, budget: int) -> float:
        value = comparison.value(assert_present(comparison.blocks[budget].method(name), name)).mean
        return -value if comparison.result.on_text else value

    def worse(name: str, others: Sequence[str], by: float = 0) -> bool:
        return all(
            mean(name, budget) < mean(other, budget) - by for other in others for budget in comparison.kind.main_budgets
        )

    if comparison.result.on_text:
        yield "text: StreamingLLM loses more than H2O", worse("streaming", ["h2o"])
        yield "text: StreamingLLM without sinks loses half a nat more", worse("streaming:sinks=0", ["streaming"], 0.5)
        informed = ["h2o", "snapkv", "tova", "expected_attention", "streaming"]
        yield f"text: random loses more than {', '.join(informed)}", worse("random", informed)
        return
    best = [comparison.best(budget, POLICIES).name for budget in comparison.kind.main_budgets]
    yield (
        f"{comparison.kind.name}: random scores less than the best policy with even budgets",
        all(
            mean("random", budget) < mean(name, budget)
            for name, budget in zip(best, comparison.kind.main_budgets, strict=True)
        ),
    )


def label_of(name: str) -> str:
    """Return how a method is called in tables."""
    known = {"lukv": "LU-KV over snapkv", "streaming:sinks=0": "streaming without sinks"}
    policy = name.removeprefix("uniform:")
    return known.get(name, name if policy == name else f"{policy}, even budgets")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fill(found: re.Match[str], parts: dict[str, str]) -> str:
    """Return a place of the page with what belongs there; as it was, where that was not measured."""
    return f"<!-- {found[1]} -->\n\n{parts.get(found[1], found[2]).strip()}\n\n<!-- end -->"


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

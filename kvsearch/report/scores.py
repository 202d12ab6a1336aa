"""What else was scored: headroom, perplexity, replies so far, and lm-evaluation-harness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from statistics import fmean
from typing import Any

from kvsearch.evaluation.samples import Sample
from kvsearch.evaluation.statistics import Row
from kvsearch.report.numbers import asked_words, interval, percent
from kvsearch.report.table import Cell, Table
from kvsearch.results.evaluation import HeadroomResult
from kvsearch.results.text_perplexity import PerplexityResult
from kvsearch.strategies.names import FULL

HEADROOM = {
    "best tried": "what scores highest on a context of all that was tried, so it can be kept; more may be possible",
    "true importance, even": "what the questions to come look at, with even budgets",
    "agnostic importance": "what up to 24 questions about other contexts look at, in the allocation that is best there",
}
PERPLEXITY = (
    "method", "perplexity", "nats per token", "minus full", "better / equal / worse windows", "entries", "share", "KiB",
    "most entries",
)  # fmt: skip


def headroom_parts(result: HeadroomResult) -> Iterator[str | Table]:
    """Yield the table of scores, shares of the full cache's score, and what was tried."""
    title = f"{result.model}: score with {100 * result.ratio:g}% evicted, {asked_words(result.asked)}"
    yield plain_scores(title, result.methods, result.rows)
    listed = "; ".join(f"{method} {share:.2f}" for method, share in result.shares.items())
    yield f"share of the full-cache score: {listed}"
    yield from (f"{name}: {words}" for name, words in HEADROOM.items() if name in result.methods)


def plain_scores(title: str, methods: Sequence[str], rows: Sequence[Row]) -> Table:
    """Return mean scores only."""
    lines = []
    for row in rows:
        label = f"{row.task} (mean)" if row.kind == "category" else row.task
        lines.append([label, str(row.questions), *(Cell.number(row.scores[name].mean, ".2f") for name in methods)])
    return Table.plain(title, ["task", "questions", *methods], lines)


def perplexity_table(result: PerplexityResult) -> Table:
    """Return a row per method, with 95% intervals over windows."""
    text = result.perplexity
    what = f"{text.windows} windows of {text.context} + {text.continuation} tokens"
    if result.phases:
        what += f", phases: {result.phases}"
    rows: list[Sequence[str | Cell]] = []
    for name, method in text.rows:
        _, full = text.rows[0]
        lost: list[str | Cell] = ["-", "-"]
        if (found := method.difference) is not None:
            windows = f"{found.better} / {found.equal} / {found.worse}"
            lost = [Cell(interval(found, "+.4f", unit=1), value=found.mean), windows]
        held = method.held
        rows.append([
            name, Cell(interval(method.perplexity, ".3f", unit=1), value=method.perplexity.mean),
            Cell(interval(method.nll, ".4f", unit=1), value=method.nll.mean), *lost, Cell.number(held.entries, ".0f"),
            Cell.number(held.entries / full.held.entries, ".3f"), Cell.number(held.bytes / 1024, ".1f"),
            Cell.number(held.most, ".0f"),
        ])  # fmt: skip
    notes = (
        "entries and KiB: held once a context is compressed; most entries: at a time until its continuation ends",
        *text.notes,
    )
    return Table.plain(f"{text.model}: perplexity of {text.text}, {what}, 95% interval", PERPLEXITY, rows, notes=notes)


def perplexity_headline(result: PerplexityResult) -> str:
    """Say which method loses least per token."""
    losses = {name: method.nll.mean for name, method in result.perplexity.rows if name != FULL}
    if not losses:
        return ""
    best = min(losses, key=lambda name: losses[name])
    return f"{best} loses least: {losses[best]:.4f} nats per token"


def progress_table(samples: Collection[Sample]) -> Table:
    """Return how many questions every method has answered so far, by task, and what it scores on the mean."""
    tasks = list(dict.fromkeys(sample.task for sample in samples))
    rows = []
    for method in dict.fromkeys(sample.method for sample in samples):
        answered = [sample for sample in samples if sample.method == method]
        counts = Counter(sample.task for sample in answered)
        score = fmean(sample.score for sample in answered)
        rows.append([method, *(counts[task] for task in tasks), Cell(percent(score), value=score)])
    replies = f"{len(samples)} {'reply' if len(samples) == 1 else 'replies'}"
    title = f"{replies} so far: questions answered, by task"
    return Table.plain(title, ["method", *tasks, "mean score so far"], rows)


def harness_lines(results: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the harness's own tables, and how much of every task's prompts the cache held."""
    from lm_eval.utils import make_table

    for column in ("results", "groups"):
        if results.get(column):
            yield from make_table(results, column).split("\n")
    ours = results["kvsearch"]
    yield f"plan {ours['plan_sha256'][:12]}, {ours['protocol']}; the cache held, mean per prompt:"
    for task, held in ours["held"].items():
        share = held["entries"] / held["full_entries"]
        yield (
            f"{task}: {held['entries']:.0f} of {held['full_entries']:.0f} entries ({share:.3f}), prompts of "
            f"{held['tokens']:.0f} tokens"
        )

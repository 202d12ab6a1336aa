"""What else was scored: headroom, signals, replies so far, and lm-evaluation-harness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from statistics import fmean
from typing import Any

from kvsearch.evaluation.samples import Sample
from kvsearch.report.table import Cell, Table, describe_coverage, format_bounds, format_percent
from kvsearch.results.evaluation import HeadroomResult
from kvsearch.results.validation import ValidationResult
from kvsearch.selection.verdicts import BudgetVerdicts
from kvsearch.tasks.metrics.likelihood import read_losses

HEADROOM = {
    "best tried": "what scores highest on a context of these and of that allocation by true importance, of 8, under "
    "which teacher-forced right answers lose least; all scores are of replies, so it can be kept; more may be possible",
    "true importance, even": "what the questions to come look at, with even budgets",
    "agnostic importance": "what up to 24 questions about other contexts look at, in the allocation that is best there",
}
SCORE_COLUMNS = ("signal", "kind", "phases", "forward", "inverse", "uniform", "random", "verdict")
GAINS = ("signal", "kind", "phases", "forward minus", "difference", "95% interval")
VERDICT_COLUMNS = ("signal", "kind", "phases", "verdict", "forward minus")


def list_headroom_parts(result: HeadroomResult) -> Iterator[str | Table]:
    """Yield the table of scores, shares of the full cache's score, and what was tried."""
    on_text = bool(result.rows[-1].nats)  # and so are all others
    what = "nats per token above the full cache, lower is better," if on_text else "score"
    title = f"{result.model}: {what} with {100 * result.ratio:g}% evicted, {describe_coverage(result.asked)}"
    lines = []
    for row in result.rows:
        label = f"{row.task} (mean)" if row.kind == "category" else row.task
        if on_text:
            scores = [Cell.number(row.nats[name].excess.mean, ".4f") for name in result.methods]
        else:
            scores = [Cell.number(row.scores[name].mean, ".2f") for name in result.methods]
        lines.append([label, str(row.questions), *scores])
    yield Table.plain(title, ["task", "questions", *result.methods], lines)
    if not on_text:
        listed = "; ".join(f"{method} {share:.2f}" for method, share in result.shares.items())
        yield f"share of the full-cache score: {listed}"
    yield from (f"{name}: {words}" for name, words in HEADROOM.items() if name in result.methods)


def make_progress_table(samples: Collection[Sample]) -> Table:
    """Return how many questions every method has answered so far, by task, and what it scores or loses on the mean."""
    losses = {sample.place: read_losses(sample.reply) for sample in samples}
    on_text = None not in losses.values()
    tasks = list(dict.fromkeys(sample.task for sample in samples))
    rows = []
    for method in dict.fromkeys(sample.method for sample in samples):
        answered = [sample for sample in samples if sample.method == method]
        counts = Counter(sample.task for sample in answered)
        score = fmean(sample.score for sample in answered)
        mean = Cell(format_percent(score), value=score)
        if on_text:
            above = [loss - full for loss, full in filter(None, (losses[sample.place] for sample in answered))]
            mean = Cell.number(fmean(above), ".4f")
        rows.append([method, *(counts[task] for task in tasks), mean])
    replies = f"{len(samples)} {'reply' if len(samples) == 1 else 'replies'}"
    title = f"{replies} so far: questions answered, by task"
    what = "mean nats above full so far" if on_text else "mean score so far"
    return Table.plain(title, ["method", *tasks, what], rows)


def list_harness_lines(results: dict[str, Any]) -> Iterator[str]:
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


def make_validation_tables(result: ValidationResult, at: BudgetVerdicts) -> tuple[Table, Table]:
    """Return scores at one size in percent with the verdicts, and what every strategy gains on its controls.

    They are two, and narrow, so that 80 columns show them whole.
    """
    questions = sum(task.questions for task in result.tasks.values())
    full = format_percent(at.full.mean, 1)
    title = f"{result.model.name}, {at.size}, {result.protocol}: score in percent, full cache {full}"
    scores = []
    gains = list[Sequence[str]]()
    for judged in at.signals:
        means = [score.mean for score in (judged.forward, judged.inverse, judged.uniform)]
        means.append(fmean(score.mean for score in judged.random))
        named: tuple[str, ...] = (judged.signal, judged.kind, judged.phases)
        scores.append((*named, *(format_percent(mean, 1) for mean in means), judged.verdict))
        for control in ("inverse", "uniform", "random"):
            gain = getattr(judged.gains, control)
            gains.append((*named, control, f"{100 * gain.mean:+.1f}", format_bounds(gain, "+.1f")))
            named = ("", "", "")  # what is judged is named in the first row
    note = f"{questions} questions of {', '.join(result.tasks)}; paired differences, 95% intervals over contexts"
    return (
        Table.plain(
            title,
            SCORE_COLUMNS,
            scores,
            notes=("random: mean of the random controls",),
            words=VERDICT_COLUMNS,
            tight=True,
        ),
        Table.plain(
            "forward minus its controls, in points", GAINS, gains, notes=(note,), words=VERDICT_COLUMNS, tight=True
        ),
    )


def list_validation_parts(result: ValidationResult) -> Iterator[str | Table]:
    """Yield both tables, and why every signal got its verdict, at every size."""
    for at in result.budgets:
        yield from make_validation_tables(result, at)
        yield from list_verdict_lines(at)


def list_verdict_lines(at: BudgetVerdicts) -> Iterator[str]:
    """Say why every signal got its verdict, a line each."""
    for judged in at.signals:
        advice = ", do not build strategies of this size on it" if judged.verdict == "harmful" else ""
        scores = [score.mean for score in judged.random]
        spread = f"they score {format_percent(min(scores), 1)} to {format_percent(max(scores), 1)}"
        controls = "other orders of these budgets" if judged.exact else "random controls"
        rank = f"{judged.lower} of {len(judged.random)} {controls} score lower, {spread}"
        yield f"{judged.words} is {judged.verdict}{advice}: {judged.reason}; {rank}"

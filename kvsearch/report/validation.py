"""What a validation found: tables of scores and gains, and a line on every verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from kvsearch.report.numbers import bounds, percent
from kvsearch.report.table import Table
from kvsearch.results.validation import ValidationResult
from kvsearch.selection.verdicts import AtBudget

SCORES = ("signal", "kind", "phases", "forward", "inverse", "uniform", "random", "verdict")
GAINS = ("signal", "kind", "phases", "forward minus", "difference", "95% interval")
WORDS = ("signal", "kind", "phases", "verdict", "forward minus")


def validation_tables(found: ValidationResult, at: AtBudget) -> tuple[Table, Table]:
    """Return scores at one size in percent with the verdicts, and what every strategy gains on its controls.

    They are two, and narrow, so that 80 columns show them whole.
    """
    questions = sum(task.questions for task in found.tasks.values())
    full = percent(at.full.mean, 1)
    title = f"{found.model.name}, {at.size}, {found.protocol}: score in percent, full cache {full}"
    scores = []
    gains = list[Sequence[str]]()
    for judged in at.signals:
        means = [one.mean for one in (judged.forward, judged.inverse, judged.uniform)]
        means.append(fmean(one.mean for one in judged.random))
        named: tuple[str, ...] = (judged.signal, judged.kind, judged.phases)
        scores.append((*named, *(percent(mean, 1) for mean in means), judged.verdict))
        for control in ("inverse", "uniform", "random"):
            gain = getattr(judged.gains, control)
            gains.append((*named, control, f"{100 * gain.mean:+.1f}", bounds(gain, "+.1f")))
            named = ("", "", "")  # what is judged is named in the first row
    note = f"{questions} questions of {', '.join(found.tasks)}; paired differences, 95% intervals over contexts"
    return (
        Table.plain(title, SCORES, scores, notes=("random: mean of the random controls",), words=WORDS, tight=True),
        Table.plain("forward minus its controls, in points", GAINS, gains, notes=(note,), words=WORDS, tight=True),
    )


def parts(found: ValidationResult, sizes: Sequence[AtBudget] | None = None) -> Iterator[str | Table]:
    """Yield both tables, and why every signal got its verdict, at some sizes; by default at every one."""
    for at in found.budgets if sizes is None else sizes:
        yield from validation_tables(found, at)
        yield from verdict_lines(at)


def verdict_lines(at: AtBudget) -> Iterator[str]:
    """Say why every signal got its verdict, a line each."""
    for judged in at.signals:
        advice = ", do not build strategies of this size on it" if judged.verdict == "harmful" else ""
        scores = [one.mean for one in judged.random]
        spread = f"they score {percent(min(scores), 1)} to {percent(max(scores), 1)}"
        controls = "other orders of these budgets" if judged.exact else "random controls"
        rank = f"{judged.lower} of {len(judged.random)} {controls} score lower, {spread}"
        yield f"{judged.words} is {judged.verdict}{advice}: {judged.reason}; {rank}"

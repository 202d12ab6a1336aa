"""The tables of a validation of signals, and its verdicts in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from kvsearch.choose.verdicts import AtBudget, Judged, Validation

if TYPE_CHECKING:
    from rich.console import Group

SCORES = ("signal", "kind", "phases", "forward", "inverse", "uniform", "random", "verdict")
GAINS = ("signal", "kind", "phases", "forward minus", "difference", "95% interval")
TEXTS = ("signal", "kind", "phases", "verdict", "forward minus")


def validation_tables(found: Validation, at: AtBudget) -> tuple[Group, Group]:
    """Scores at one size in percent with the verdicts, and what every strategy gains on its controls.

    They are two, and narrow, so that 80 columns show them whole.
    """
    questions = sum(task.questions for task in found.tasks.values())
    title = f"{found.model.name}, {at.size}, {found.protocol}: score in percent, full cache {100 * at.full.mean:.1f}"
    scores = [tuple(_score_cells(judged)) for judged in at.signals]
    note = f"{questions} questions of {', '.join(found.tasks)}; paired differences, 95% intervals over contexts"
    gains = [row for judged in at.signals for row in _gain_rows(judged)]
    return (
        _titled(title, SCORES, scores, "random: mean of the random controls\n"),
        _titled("forward minus its controls, in points", GAINS, gains, note),
    )


def _titled(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str) -> Group:
    """A table between its title and its note."""
    from rich.box import SIMPLE
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), show_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in TEXTS else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return Group(Text(title, style="italic"), table, Text(note, style="italic"))


def verdict_lines(at: AtBudget) -> Iterator[str]:
    """Why every signal got its verdict, a line each."""
    for judged in at.signals:
        advice = ", do not build strategies of this size on it" if judged.verdict == "harmful" else ""
        scores = [one.mean for one in judged.random]
        spread = f"they score {_percent(min(scores))} to {_percent(max(scores))}"
        rank = f"{judged.lower} of {len(judged.random)} random controls score lower, {spread}"
        yield f"{judged.words} is {judged.verdict}{advice}: {judged.reason}; {rank}"


def _score_cells(judged: Judged) -> Iterator[str]:
    yield from (judged.signal, judged.kind, judged.phases)
    yield from (_percent(one.mean) for one in (judged.forward, judged.inverse, judged.uniform))
    yield from (_percent(fmean(one.mean for one in judged.random)), judged.verdict)


def _gain_rows(judged: Judged) -> Iterator[tuple[str, ...]]:
    """A row for every control; what is judged is named in the first."""
    named: tuple[str, ...] = (judged.signal, judged.kind, judged.phases)
    gains = judged.gains
    for control, gain in (("inverse", gains.inverse), ("uniform", gains.uniform), ("random", gains.random)):
        interval = f"[{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]"
        yield (*named, control, f"{100 * gain.mean:+.1f}", interval)
        named = ("", "", "")


def _percent(score: float) -> str:
    return f"{100 * score:.1f}"

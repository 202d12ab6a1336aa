"""How a search goes, while it goes: a live panel on a terminal, a line per generation elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

    from kvsearch.cli.common import Common
    from kvsearch.search.ledger import Ledger
    from kvsearch.search.loop import Found
    from kvsearch.search.run_directory import SearchRun
    from kvsearch.search.settings import Limits


STARTS = "start"


class Lines:
    """A line per generation; also what the panel shows."""

    def __init__(self, common: Common, ledger: Ledger, limits: Limits) -> None:
        self.common, self.ledger, self.limits = common, ledger, limits
        self.where, self.failures, self.starts = "start plans", 0, float("nan")
        self.best: Found | None = None
        self.number = 0

    def stage(self, name: str, number: int, count: int) -> None:
        self.where = f"{name} ({number} of {count})"

    def generation(self, stage: str, generation: int, values: Sequence[float], best: Found) -> None:
        self.failures += sum(not math.isfinite(value) for value in values)
        self.best, self.number = best, generation
        if stage == STARTS:
            self.starts = best.value
        self._show(f"{self.where}, generation {generation}: {self._words()}")

    def note(self, text: str) -> None:
        self.common.say(text)

    def _words(self) -> str:
        spent, limits = self.ledger.spent, self.limits
        best = (
            "" if self.best is None else f"best {self.best.value:.6g} ({self.best.where}; starts {self.starts:.6g}), "
        )
        left = [
            f"{name} {used:.0f}" + ("" if most is None else f" of {most:.0f}")
            for name, used, most in (
                ("candidates", spent.evaluations, limits.evaluations),
                ("seconds", spent.seconds, limits.seconds),
                ("tokens", spent.tokens, limits.tokens),
            )
        ]
        failed = f", {self.failures} failed" if self.failures else ""
        return f"{best}{', '.join(left)}{failed}"

    def _show(self, line: str) -> None:
        self.common.say(line)


class Panel(Lines):
    """The same in place, on a terminal."""

    live: Live

    def _show(self, line: str) -> None:
        self.live.update(self._table(line))

    def _table(self, line: str) -> Table:
        from rich.box import SIMPLE
        from rich.table import Table

        table = Table(box=SIMPLE, show_header=False, title="kvsearch evolve", title_justify="left")
        for part in line.replace(": ", "\n", 1).replace(", ", "\n").split("\n"):
            table.add_row(part)
        return table


@contextmanager
def watching(common: Common, run: SearchRun, limits: Limits) -> Iterator[Lines]:
    """Show how a search goes; after Ctrl-C say what is best so far, and how to go on."""
    lines = Lines(common, run.ledger, limits)
    try:
        if common.talk.is_terminal and not common.quiet:
            from rich.live import Live

            panel = lines = Panel(common, run.ledger, limits)
            with Live(console=common.talk, transient=True, refresh_per_second=4) as panel.live:
                yield panel
        else:
            yield lines
    except KeyboardInterrupt:
        best = run.ledger.best
        if best is not None:
            run.write_best({"value": best.value, "where": best.where, "budgets": best.candidate})
            common.say(f"best so far: {best.value:.6g} ({best.where}), in {run.directory / 'best.json'}")
        common.say(f"go on with --resume: what was measured is in {run.directory}")
        raise

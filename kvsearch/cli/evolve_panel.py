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
    from kvsearch.search.candidates import Candidate
    from kvsearch.search.ledger import SearchLedger, SearchRun
    from kvsearch.search.settings import SearchLimits


class Lines:
    """A line per generation; also what the panel shows."""

    def __init__(self, common: Common, ledger: SearchLedger, limits: SearchLimits) -> None:
        self.common, self.ledger, self.limits = common, ledger, limits
        self.where, self.failures, self.starts = "", 0, math.nan

    def stage(self, name: str) -> None:
        """See `Watcher`."""
        self.where = name

    def generation(self, stage: str, generation: int, values: Sequence[float], best: Candidate) -> None:
        """See `Watcher`."""
        from kvsearch.search.loop import STARTS

        self.failures += sum(not math.isfinite(value) for value in values)
        place = self.where
        if stage == STARTS:
            self.starts = best.value
        else:
            place += f", generation {generation}"
        found = f"best {best.value:.6g} ({best.where}; best start {self.starts:.6g})"
        self._show([place, found, *self._used(), *([f"{self.failures} failed"] if self.failures else [])])

    def ended(self, why: str) -> None:
        """See `Watcher`."""
        self.common.say(f"search ended: {why}")

    def close(self) -> None:
        """Nothing is left on the screen."""

    def _used(self) -> Iterator[str]:
        spent, limits = self.ledger.spent, self.limits
        for name, used, most in (
            ("candidates", spent.evaluations, limits.evaluations),
            ("seconds", spent.seconds, limits.seconds),
            ("tokens", spent.tokens, limits.tokens),
        ):
            yield f"{name} {used:,.0f}" + ("" if most is None else f" of {most:,.0f}")

    def _show(self, facts: Sequence[str]) -> None:
        self.common.say(f"{facts[0]}: {', '.join(facts[1:])}")


class Panel(Lines):
    """The same in place, on a terminal."""

    live: Live | None = None

    def ended(self, why: str) -> None:
        """See `Watcher`; gives the screen back."""
        self.close()
        super().ended(why)

    def close(self) -> None:
        """Take the panel away."""
        if self.live is not None:
            self.live.stop()
            self.live = None

    def _show(self, facts: Sequence[str]) -> None:
        from rich.live import Live

        if self.live is None:
            self.live = Live(console=self.common.talk, transient=True, refresh_per_second=4)
            self.live.start()
        self.live.update(self._table(facts))

    def _table(self, facts: Sequence[str]) -> Table:
        from rich.box import SIMPLE
        from rich.table import Table

        table = Table(box=SIMPLE, show_header=False, title="kvsearch evolve", title_justify="left")
        for fact in facts:
            table.add_row(fact)
        return table


@contextmanager
def watching(common: Common, run: SearchRun, limits: SearchLimits) -> Iterator[Lines]:
    """Show how a search goes; after Ctrl-C say what is best so far, and how to go on."""
    shown = Panel if common.talk.is_terminal and not common.quiet else Lines
    watcher = shown(common, run.ledger, limits)
    try:
        yield watcher
    except KeyboardInterrupt:
        watcher.close()
        _tell_best(common, run)
        raise
    finally:
        watcher.close()


def _tell_best(common: Common, run: SearchRun) -> None:
    from kvsearch.runs.directory import write_json
    from kvsearch.search.ledger import BEST

    best = run.ledger.best
    if best is not None:
        path = run.directory / BEST
        write_json(path, {"value": best.value, "where": best.where, "budgets": best.candidate})
        common.say(f"best so far: {best.value:.6g} ({best.where}), in {path}")
    common.say(f"go on with --resume: what was measured is in {run.directory}")

"""What a run found: in words, as JSON and as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvsearch.choose.selection import SelectionResult
from kvsearch.report import selection as selections
from kvsearch.report.numbers import bounds, interval, percent
from kvsearch.report.table import Table
from kvsearch.runs.estimates import Difference
from kvsearch.strategies.names import FULL

if TYPE_CHECKING:
    from kvsearch.choose.overall import Overall
    from kvsearch.choose.smallest import Smallest

SCHEMA = "kvsearch.run-report/1"


def as_json(found: Sequence[Overall], files: Sequence[str], smallest: Smallest | None = None) -> dict[str, Any]:
    """Return everything, by size; scores are in [0, 1]. `files` are the names of the plans.

    `smallest` is how the size was found, where it was not given.
    """
    sizes = {
        str(one.selection.size): {
            **selections.as_json(one.selection), "loss": asdict(one.loss), "plan": file, "words": list(sentences(one)),
        }
        for one, file in zip(found, files, strict=True)
    }  # fmt: skip
    tried = {} if smallest is None else {"tried": [asdict(step) for step in smallest.tried]}
    return {"schema": SCHEMA, "sizes": sizes, **tried}


def tables(found: Sequence[SelectionResult]) -> list[Table]:
    """Return both stages and the report of every size."""
    return [table for one in found for table in selections.stage_tables(one)]


def smallest_words(found: Smallest, within: float, loss: Difference) -> str:
    """Say which budget is the smallest that loses at most `within` points, how that was found, and what is in doubt.

    `loss` is what the plan loses on the report split.
    """
    last, longest, judged = found.tried[-1], found.choice.longest, sum(one.confirmed for one in found.tried)
    steps = ", ".join(f"{one.budget}: {100 * one.loss:+.1f}" for one in found.tried)
    asked = "questions that the budget was not found by"
    if judged > 1:
        asked = f"questions that {judged} budgets were judged by, this the first to hold"
    verdict = "leaves that in doubt"
    if 100 * loss.high <= within:
        verdict = "confirms that"
    elif 100 * loss.low > within:
        verdict = "contradicts that: keep more"
    return (
        f"{last.budget} entries per kv head, {percent(last.budget / longest, 0)}% of {longest} tokens, are the fewest "
        f"of those tried at which the chosen plan loses at most {within:g} points: {100 * last.loss:+.1f} on {asked} "
        f"(points lost by what was tried: {steps}); the report split {verdict}"
    )


def sentences(one: Overall, *, several: bool = False) -> Iterator[str]:
    """Say what was chosen and why, then what it scores on the report split beside what it is compared with."""
    chosen, report, size = one.selection.chosen, one.selection.report, one.selection.size
    yield f"{f'{size.words}: ' if several else ''}{selections.decision(chosen)}"
    written, best, full = (report.scores[name] for name in (chosen.written, chosen.best, FULL))
    parts = [f"{chosen.written} {percent(written.mean, 1)} {bounds(written, '.1f')}"]
    if chosen.winner:
        parts.append(f"{chosen.best}, the best baseline, {percent(best.mean, 1)} {bounds(best, '.1f')}")
    parts.append(f"full cache {percent(full.mean, 1)} {bounds(full, '.1f')}")
    behind = interval(one.loss, "+.1f", noun=" points")
    yield f"report split, {selections.asked(report.asked)}: {'; '.join(parts)}; full cache minus plan {behind}"

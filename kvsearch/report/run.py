"""What a run found: in words, as JSON and as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from kvsearch.choose.overall import Overall
from kvsearch.choose.smallest import Smallest
from kvsearch.report import selection as selections
from kvsearch.report.numbers import bounds, interval, percent
from kvsearch.report.table import Table
from kvsearch.strategies.methods import FULL

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


def tables(found: Sequence[Overall]) -> list[Table]:
    """Return both stages and the report of every size."""
    return [table for one in found for table in selections.stage_tables(one.selection)]


def smallest_words(found: Smallest, within: float) -> str:
    """Say which budget is the smallest that loses at most `within` points, and how that was found."""
    last, longest = found.tried[-1], found.choice.longest
    steps = ", ".join(f"{one.budget}: {100 * one.loss:+.1f}" for one in found.tried)
    return (
        f"{last.budget} entries per kv head, {percent(last.budget / longest, 0)}% of {longest} tokens, are the fewest "
        f"of those tried at which the chosen plan loses at most {within:g} points: {100 * last.loss:+.1f} on questions "
        f"that the budget was not found by (points lost by what was tried: {steps})"
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

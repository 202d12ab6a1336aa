"""Whether the files of a run say the same: results and the ledger they were made of, verdicts and their profile."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from kvsearch.choose.verdicts import FILE as VALIDATION
from kvsearch.choose.verdicts import load_validation
from kvsearch.errors import KvsearchError
from kvsearch.evaluation.reply_store import SAMPLES, Finished
from kvsearch.plan.files import read_bytes, read_text
from kvsearch.plan.parsing import parse_json
from kvsearch.plan.saved import FOLDER_PLAN, PROFILE, load_plan
from kvsearch.report.artefacts import ledger_lines
from kvsearch.report.files.search import read_search, trace_of
from kvsearch.report.numbers import counted
from kvsearch.report.reader import FRONT, REPORT
from kvsearch.runs.directory import LEDGER
from kvsearch.runs.identity import Job, read_config
from kvsearch.runs.sums import sha256_of_file
from kvsearch.search.records import Line

MEASURED: Final = (
    "question", "prompt_sha256", "context_tokens", "prompt_tokens", "reply_tokens", "entries", "most",
)  # fmt: skip


def disagreements(path: Path) -> Iterator[str]:
    """Yield where a file says something else than what lies beside it, as far as that can be read.

    Raises:
        UsageError: it cannot be read itself.
    """
    if path.name == VALIDATION and (path.parent / PROFILE).exists():
        found = load_validation(path)
        if found is not None and found.profile_sha256 != sha256_of_file(path.parent / PROFILE):
            yield f"it is about another profile than {PROFILE} beside it"
    if path.name in BY_JOB:
        job, check = BY_JOB[path.name]
        try:
            config = read_config(path.parent)
            lines = [one.line for one in ledger_lines(path.parent / LEDGER)]
        except KvsearchError:  # told of these files
            return
        if config is not None and config.job == job:
            yield from check(path, lines)


def _samples(path: Path, lines: Sequence[Finished]) -> Iterator[str]:
    """Compare the rows of an evaluation with the replies in its ledger, by what they measured of the cache."""
    kept = {sample.place: sample for line in lines for _, sample in line.samples}
    replies = Counter(tuple(str(getattr(one, name)) for name in MEASURED) for one in kept.values())
    try:
        rows = list(csv.DictReader(io.StringIO(read_text(path), newline="")))
    except csv.Error as error:
        yield f"it is no CSV: {error}"
        return
    if len(rows) != replies.total():
        yield f"it has {counted(len(rows), 'row')}, the ledger {replies.total()} replies"
    for number, row in enumerate(rows, 1):
        measured = tuple(row.get(name) or "" for name in MEASURED)
        if not replies[measured]:
            yield f"row {number} is of no reply in the ledger"
        replies[measured] -= 1


def _search(path: Path, lines: Sequence[Line]) -> Iterator[str]:
    """Compare the result of a search with what its ledger says that was done, and with its plans."""
    found = read_search(parse_json(read_bytes(path), str(path)), path)
    trace = trace_of(lines)
    for name in ("evaluations", "tokens"):
        if getattr(found, name) != getattr(trace, name):
            yield f"it has {getattr(found, name)} {name}, the ledger {getattr(trace, name)}"
    for budget, one in found.found.items():
        plan = path.parent / (FOLDER_PLAN if path.name == REPORT else f"plan-{budget}.json")
        if _budgets(plan) not in (None, [list(row) for row in one.budgets]):
            yield f"its budgets are not those of {plan.name}"


def _budgets(path: Path) -> list[list[int]] | None:
    """Return the budgets of a plan as a search has them: rows of the prefill phase, then of decode; None: no plan."""
    try:
        plan = load_plan(path)
    except KvsearchError:
        return None
    phases = [phase for phase in (plan.prefill, plan.decode) if phase is not None]
    return [list(layer.budget) for phase in phases for layer in phase.layers if layer is not None]


BY_JOB: Final[dict[str, tuple[Job, Callable[[Path, Any], Iterator[str]]]]] = {
    SAMPLES: ("evaluate", _samples), REPORT: ("evolve", _search), FRONT: ("evolve", _search),
}  # fmt: skip

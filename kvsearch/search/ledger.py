"""All that a search did, on disk, so that one which is interrupted goes on where it stopped.

A line of the ledger says what it is, the seconds of work on the run before it (`at`, the time between sessions left
out), and the fields of its class in `records`:

    {"kind": "asked", "at": 3.25, "stage": "group 1", "generation": 0, "points": [[1.0, 0.75], [0.5, 1.25]]}

Numbers are read again bit for bit. The state of an optimiser is not kept: it follows from what it was told, which is
replayed. Beside the ledger the directory has what the search found:

best.json      the best plan so far
report.json    the result, as `--json` prints it
plan.json      the plan
front.json     the results of several budgets, with plan-BUDGET.json of each
contexts.json  hashes of the contexts of all splits
choice, report folders of replies
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from pydantic import ValidationError

from kvsearch.arrays import Vector
from kvsearch.errors import InternalError, UsageError
from kvsearch.naming import suggest
from kvsearch.plan.parsing import problems_of
from kvsearch.runs.chain import Unfit
from kvsearch.runs.contexts import CONTEXTS
from kvsearch.runs.directory import LEDGER, begin, check_directory, run_in
from kvsearch.runs.identity import RunConfig
from kvsearch.runs.ledger import Ledger, read_lines
from kvsearch.runs.lock import locked
from kvsearch.search.candidates import Candidate
from kvsearch.search.jobs import Job, JobOutcome, Result, keys_of
from kvsearch.search.measured import Measured
from kvsearch.search.records import LINES, AskedLine, BestLine, ComputedLine, Line, StageLine, ToldLine

BEST, REPORT, PLAN, FRONT = "best.json", "report.json", "plan.json", "front.json"
WRITTEN = (LEDGER, BEST, REPORT, PLAN, FRONT, CONTEXTS, "plan-*.json", "choice", "choice-*", "report")
_OfLine = TypeVar("_OfLine", bound=Line)


class Spent(NamedTuple):
    """What a run has used in all its sessions: different candidates evaluated, tokens, seconds of work."""

    evaluations: int
    tokens: int
    seconds: float


class SearchLedger(Ledger[Line]):
    """The lines of a search; one that is repeated finds there what it asks for, and writes what it does not find."""

    go_on = "go on with --resume"

    def __init__(self, path: Path, identity: str = "") -> None:
        self._begun: dict[str, int] = {}  # numbers of lines, by stage
        self._asked: dict[str, list[int]] = {}
        self._told: dict[str, list[int]] = {}
        self._measured = Measured(lambda number: self._line(number, ComputedLine))
        self._tokens, self._at = 0, 0.0
        self.best: BestLine | None = None  # the best candidate that was written last
        super().__init__(path, identity)
        self._opened, self._before = time.monotonic(), self._at

    @staticmethod
    def parse(content: dict[str, Any]) -> Line:
        """See `Ledger.parse`."""
        return _line(content.pop("kind", None), content)

    def append(self, kind: str, **data: Any) -> int:
        """Write a line of one of the `records.LINES`, arrays as lists; it is on the disk when this returns its number.

        Raises:
            InternalError: there is no such kind of line, or its fields are other ones.
            EnvironmentFault: the disk is full or the file cannot be written; what was written before is kept.
        """
        try:
            line = _line(kind, {"at": self.spent.seconds, **_plain(data)})
            text = json.dumps({"kind": kind, **line.model_dump()}, allow_nan=False)
        except (Unfit, TypeError, ValueError) as error:
            raise InternalError(f"cannot write a line of kind {kind!r} to {self.path}: {error}") from error
        self._append(line, text)
        return self.count

    # --- what a search does; errors as for `append` -----------------------------------------------------------------

    def begin(self, stage: str) -> int:
        """Return the number of the line where a stage began, or begins now."""
        return self._begun.get(stage) or self.append("stage", name=stage, begins=True)

    def ask(self, stage: str, generation: int, points: Sequence[Vector]) -> int:
        """Return the number of the line that says which points [d] a generation has.

        Raises:
            InternalError: the ledger has other ones.
        """
        known = self._asked.get(stage, [])
        if generation >= len(known):
            return self.append("asked", stage=stage, generation=generation, points=list(points))
        if not np.array_equal(self._line(known[generation], AskedLine).vectors, points):
            raise InternalError(
                f"stage {stage!r}, generation {generation}: the search asks for other points than its ledger says"
            )
        return known[generation]

    def keep(self, job: Job, outcome: JobOutcome) -> None:
        """Write what became of a job."""
        self.append(
            "result", keys=keys_of(job), outcome=outcome.kind, values=outcome.values, message=outcome.message,
            seconds=outcome.seconds, tokens=outcome.tokens,
        )  # fmt: skip

    def tell(self, stage: str, generation: int, points: Sequence[Vector], values: Sequence[float]) -> None:
        """Write what the optimiser is told of a generation, unless it is there."""
        if generation >= len(self._told.get(stage, [])):
            self.append("told", stage=stage, generation=generation, points=list(points), values=list(values))

    def keep_best(self, found: Candidate, name: str = "") -> None:
        """Write the best candidate so far if it is better than the one written last; `name` is in front of `where`."""
        if self.best is None or found.value < self.best.value:
            self.append("best", candidate=found.table, value=found.value, where=name + found.where)

    # --- what is known ----------------------------------------------------------------------------------------------

    @property
    def spent(self) -> Spent:
        """What the run has used until now."""
        seconds = self._before + (time.monotonic() - self._opened)
        return Spent(self._measured.count, self._tokens, seconds)

    def results(self, before: int | None = None) -> Mapping[str, Result]:
        """Return what is known of candidates now, by `candidate_key`: a failure once the optimiser was told it.

        `before`: what stood before the line of that number.
        """
        return self._measured.before(self.count + 1 if before is None else before)

    def asked(self, stage: str) -> list[AskedLine]:
        """Return what was asked in a stage, in order."""
        return [self._line(number, AskedLine) for number in self._asked.get(stage, [])]

    def told(self, stage: str) -> list[ToldLine]:
        """Return what was told in a stage, in order."""
        return [self._line(number, ToldLine) for number in self._told.get(stage, [])]

    def _line(self, number: int, kind: type[_OfLine]) -> _OfLine:
        line = self.line(number)
        if not isinstance(line, kind):
            raise InternalError(f"{self.path}, line {number} is no {kind.__name__}")
        return line

    def _note(self, line: Line) -> None:
        number, self._at = self.count, line.at
        if isinstance(line, ComputedLine):
            self._measured.take(number, line)
            self._tokens += line.tokens
        elif isinstance(line, ToldLine):
            self._told.setdefault(line.stage, []).append(number)
            self._measured.tell(number)
        elif isinstance(line, AskedLine):
            self._asked.setdefault(line.stage, []).append(number)
        elif isinstance(line, BestLine):
            self.best = line
        elif isinstance(line, StageLine) and line.begins:
            self._begun.setdefault(line.name, number)


class SearchRun(NamedTuple):
    """The directory of a search, which has the lock, and its ledger."""

    directory: Path
    ledger: SearchLedger


def check_search(directory: Path, resume: bool = False, force: bool = False) -> None:
    """Find out, before a model is loaded, whether a search can be kept in `directory`; see `open_search`."""
    there = check_directory(directory, "evolve")
    _check(directory, there, resume, force)
    if there is not None and resume and (directory / LEDGER).exists():
        deque(read_lines(directory / LEDGER, SearchLedger.parse), maxlen=0)


def is_repeated(directory: Path, options: Mapping[str, Any]) -> bool:
    """Tell whether a finished search that was asked for by the same options is in `directory`."""
    there = run_in(directory, "evolve")
    if there is None or not any((directory / name).exists() for name in (REPORT, FRONT)):
        return False
    return there.options == there.with_options(options).options


def require_same(directory: Path, config: RunConfig, unknown: str = "") -> None:
    """Raise UsageError, naming the first difference, if the search in `directory` is another one.

    `unknown` is of the content what `config` cannot say yet.
    """
    there = run_in(directory, "evolve")
    if there is not None:
        config, there = (
            one.model_copy(update={"content": {key: value for key, value in one.content.items() if key != unknown}})
            for one in (config, there)
        )
    found = None if there is None else config.difference(there)
    if found is not None:
        raise UsageError(
            f"{directory} holds another search: {found}; repeat its command to go on with it, --force to start anew, "
            "or choose another directory"
        )


@contextmanager
def open_search(directory: Path, config: RunConfig, resume: bool = False, force: bool = False) -> Iterator[SearchRun]:
    """Begin a search in `directory`, or go on with the one that is there.

    `resume` goes on where there is something to go on with, and begins where there is nothing yet. `force` starts anew
    whatever search is there.

    Raises:
        UsageError: a search is there and neither `resume` nor `force` is given, or one of another configuration (the
            message names the first difference), or something else than a search; a damaged ledger; another process
            writes to it.
        EnvironmentFault: the disk is full, permissions are missing.
    """
    with locked(directory):
        _check(directory, run_in(directory, "evolve"), resume, force)
        if not force:
            require_same(directory, config)
        begin(directory, config, WRITTEN if force else ())
        with SearchLedger(directory / LEDGER, config.identity) as ledger:
            yield SearchRun(directory, ledger)


def _check(directory: Path, there: RunConfig | None, resume: bool, force: bool) -> None:
    if resume and force:
        raise UsageError("--resume goes on with a search and --force starts it anew: give one of them")
    if there is not None and not resume and not force:
        raise UsageError(
            f"{directory} holds a search already: --resume to go on with it, --force to start anew, "
            "or choose another directory"
        )


def _line(kind: object, fields: Mapping[str, Any]) -> Line:
    if not isinstance(kind, str) or kind not in LINES:
        raise Unfit(f"there is no kind {kind!r}{suggest(str(kind), list(LINES))}")
    try:
        return LINES[kind].model_validate(fields)
    except ValidationError as error:
        raise Unfit(problems_of(error)[0]) from error


def _plain(value: Any) -> Any:
    """Return a value with arrays and numpy numbers as lists and Python numbers."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value

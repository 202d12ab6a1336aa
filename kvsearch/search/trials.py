"""The log of a search on disk: measured candidates and optimiser generations, so that it resumes where it stopped.

A line of the log says what it is, the seconds of work on the run before it (`at`, the time between sessions left
out), and the fields of its class:

    {"kind": "told", "at": 3.25, "stage": "group 1", "generation": 0, "points": [[1.0, 0.75]], "values": [0.5]}

Numbers are read again bit for bit. The state of an optimiser is not kept: it follows from what it is told again.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field, PlainSerializer, ValidationError, model_validator

from kvsearch.core.arrays import Floats, Ints, Vector
from kvsearch.core.canonical import hash_json
from kvsearch.core.errors import EnvironmentFault, IncompatibleError
from kvsearch.core.fields import Floor, Index, Record, Sha256, Text, refuse
from kvsearch.core.limits import MOST_MEASURED
from kvsearch.core.parsing import list_validation_problems
from kvsearch.runs.ledger import Ledger, LedgerFormatError
from kvsearch.workers import base
from kvsearch.workers.base import OutcomeKind

START_PLANS = "start"  # where start plans were found
JOB_SIZE = 4  # candidates that a worker takes at a time, at most
VALUE_DIGITS = 9  # of a value that are told: what differs by less is rounding
MAX_MESSAGES = 3  # of failures that an error names

Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
MeasuredValue = Annotated[float, Field(strict=True, ge=-MOST_MEASURED, le=MOST_MEASURED)]
# JSON has no NaN and no infinity: they are written as texts
JsonNumber = Annotated[float, PlainSerializer(lambda value: value if math.isfinite(value) else str(value))]
Seconds = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]


Tables = tuple[Ints, ...]  # budgets [L, Hkv] of candidates that are evaluated together: values [P, S] on S samples
JobOutcome = base.Outcome[Floats]
Evaluator = base.Evaluator[Tables, Floats]
Executor = base.Executor[Tables, Floats]


@dataclass(frozen=True, eq=False)
class Candidate:
    """A candidate [L, Hkv], its value on all samples (less is better), and where it was found.

    With parity, while the search runs, the value is minus the fitness.
    """

    table: Ints
    value: float
    where: str


def candidate_key(candidate: Ints, objective: str) -> str:
    """Return the SHA-256 of all that decides a candidate's values in a run: budgets and objective."""
    return hash_json({"budgets": candidate.tolist(), "objective": objective})


class TrialRecord(Record):
    """A line of the log; `at` are the seconds of work on the run before it was written."""

    at: Seconds


class StageRecord(TrialRecord):
    """The start of a stage, or of one of its generations."""

    name: Text


class JobRecord(TrialRecord):
    """The outcome (`JobOutcome`) of candidates that were measured together, by `candidate_key`."""

    keys: list[Sha256] = Field(min_length=1)
    outcome: OutcomeKind
    values: list[list[JsonNumber]] | None = None
    message: str = ""
    seconds: Seconds
    tokens: Index

    @model_validator(mode="after")
    def _rows_for_keys(self) -> JobRecord:
        if self.values is not None and len(self.values) != len(self.keys):
            refuse([(("values",), f"must have a row for each of {len(self.keys)} keys, not {len(self.values)}")])
        return self


class GenerationRecord(TrialRecord):
    """The points of a generation and their values (minimised), as passed to `Optimiser.tell`."""

    stage: Text
    generation: Index
    points: list[list[Finite]]
    values: list[MeasuredValue]


class BestRecord(TrialRecord):
    """The best candidate so far: budgets [L, Hkv], its value, and where it was found."""

    candidate: list[list[Floor]]
    value: MeasuredValue
    where: Text


TRIAL_RECORDS: dict[str, type[TrialRecord]] = {
    "stage": StageRecord,
    "result": JobRecord,
    "told": GenerationRecord,
    "best": BestRecord,
}


class LimitReachedError(Exception):
    """A limit of the search (candidates or time) is reached; the message names it."""


class Trial(NamedTuple):
    """The outcome of a candidate on S samples: `values` [S] where it was measured.

    It counts after the line of that number: the one that it was measured in, or that its failure was told in.
    """

    state: OutcomeKind
    values: Floats | None
    message: str
    line: int


class TrialLog(Ledger[TrialRecord]):
    """The log of a search: a repeated search reads known results from it and appends new ones.

    `trials` are by `candidate_key`. A failure is among them once the optimiser was told it: until then it may be that
    of a machine since repaired, and the candidate is measured again. All that writes raises EnvironmentFault if the
    disk is full or the file cannot be written; what was written before is kept.
    """

    go_on = "give the same command again to go on"

    def __init__(self, path: Path) -> None:
        self.trials: dict[str, Trial] = {}
        self.best: BestRecord | None = None  # the best candidate that was written last
        self.failed: dict[str, Trial] = {}  # that the optimiser was not told yet
        self._begun: dict[str, int] = {}  # numbers of lines, by stage
        self._told: set[tuple[str, int]] = set()
        self.tokens = 0  # that were read in all sessions
        self._at = 0.0
        super().__init__(path)
        self._opened = time.monotonic()
        self._before = self._at

    @staticmethod
    def parse(content: dict[str, Any]) -> TrialRecord:
        kind = content.pop("kind", None)
        if not isinstance(kind, str) or kind not in TRIAL_RECORDS:
            raise LedgerFormatError(f"there is no kind {kind!r}")
        try:
            return TRIAL_RECORDS[kind].model_validate(content)
        except ValidationError as error:
            raise LedgerFormatError(list_validation_problems(error)[0]) from error

    def append(self, kind: str, **fields: Any) -> int:
        """Write a line of one of the `TRIAL_RECORDS`; it is on the disk when this returns its number."""
        line = TRIAL_RECORDS[kind](at=self.seconds, **fields)
        self._append(line, json.dumps({"kind": kind, **line.model_dump()}, allow_nan=False))
        return self.count

    def begin(self, stage: str) -> int:
        """Return the number of the line where a stage or generation began; append it if it is new."""
        return self._begun.get(stage) or self.append("stage", name=stage)

    def record(self, keys: Sequence[str], outcome: JobOutcome) -> None:
        """Append the outcome of a job by candidate keys; "non-finite" if a value is NaN or infinite."""
        kind: OutcomeKind = outcome.kind
        message = outcome.message
        bad = [] if outcome.values is None else np.argwhere(~np.isfinite(outcome.values)).tolist()
        if bad:
            kind = "non-finite"
            candidates = len({candidate for candidate, _ in bad})
            first, sample = bad[0]
            message = (
                f"values of {candidates} of {len(keys)} candidates are not finite: candidate {first} of its "
                f"job on sample {sample}"
            )
        values = None if outcome.values is None else outcome.values.tolist()
        self.append(
            "result", keys=list(keys), outcome=kind, values=values, message=message, seconds=outcome.seconds,
            tokens=outcome.tokens,
        )  # fmt: skip

    def tell(self, stage: str, generation: int, points: Sequence[Vector], values: Sequence[float]) -> None:
        """Append a generation with the values passed to the optimiser, unless it is in the log."""
        if (stage, generation) not in self._told:
            rows = [point.tolist() for point in points]
            self.append("told", stage=stage, generation=generation, points=rows, values=list(values))

    def record_best(self, candidate: Candidate, name: str = "") -> None:
        """Append the best candidate so far if it improves on the last one; `name` is put before its `where`."""
        if self.best is None or candidate.value < self.best.value:
            rows = candidate.table.tolist()
            self.append("best", candidate=rows, value=candidate.value, where=name + candidate.where)

    @property
    def evaluations(self) -> int:
        """Number of distinct candidates evaluated in all sessions."""
        return len(self.trials.keys() | self.failed.keys())

    @property
    def seconds(self) -> float:
        """Seconds of work in all sessions."""
        return self._before + (time.monotonic() - self._opened)

    def _note(self, line: TrialRecord) -> None:
        self._at = line.at
        if isinstance(line, JobRecord):
            self.tokens += line.tokens
            for key, trial in read_trials(line, self.count).items():
                self.failed.pop(key, None)
                # A failure may be the machine's: only once the optimiser was told it, it counts.
                (self.trials if trial.state == "ok" else self.failed)[key] = trial
        elif isinstance(line, GenerationRecord):
            self._told.add((line.stage, line.generation))
            for key, trial in self.failed.items():
                self.trials[key] = trial._replace(line=self.count)
            self.failed.clear()
        elif isinstance(line, BestRecord):
            self.best = line
        elif isinstance(line, StageRecord):
            self._begun.setdefault(line.name, self.count)


def read_trials(line: JobRecord, number: int) -> dict[str, Trial]:
    """Read the outcome of each candidate of a job, by key; "ok" for all with finite values."""
    if line.values is None:
        return dict.fromkeys(line.keys, Trial(line.outcome, None, line.message, number))
    trials = {}
    for key, row in zip(line.keys, line.values, strict=True):
        values = np.array(row, dtype=np.float64)
        if np.isfinite(values).all():
            trials[key] = Trial("ok", values, "", number)
        else:
            trials[key] = Trial("non-finite", values, line.message, number)
    return trials


@dataclass
class TrialRunner:
    """Measures candidates: values in the log are reused, all others are measured and logged first.

    Values are means over samples, to be minimised (a metric's with its sign turned), NaN where a candidate failed.
    At most so many different candidates are `allowed` in all (None: any number).
    """

    executor: Executor
    log: TrialLog
    objective: str
    allowed: int | None = None
    job_size: int = JOB_SIZE

    def measure(self, candidates: Sequence[Ints], since: int) -> list[float]:
        """Return the value of each candidate [L, Hkv]; `since` is the number of the line that begins the generation.

        Raises:
            LimitReachedError: not all may be measured; those that could be are in the log.
            IncompatibleError: more than half of the generation failed, all with values that are not finite.
            EnvironmentFault: more than half of the generation failed, or the log cannot be written.
            KvsearchError: an evaluator raised it.
        """
        trials = self.log.trials
        # What was measured since then stays among the jobs: those that are left are then the same as before. Which
        # candidates are measured together decides the last bits of their values.
        new = {
            key: table
            for key, table in zip(self._keys(candidates), candidates, strict=True)
            if key not in trials or trials[key].line >= since
        }
        missing = [key for key in new if key not in trials]
        left = len(missing) if self.allowed is None else max(self.allowed - self.log.evaluations, 0)
        if missing[:left]:
            cut = missing[left:]
            self._run({key: table for key, table in new.items() if key not in cut}, len(candidates))
        if len(missing) > left:
            raise LimitReachedError(f"{self.log.evaluations} candidates were evaluated, as many as allowed")
        return self.values(candidates)

    def values(self, candidates: Sequence[Ints]) -> list[float]:
        """Return the values of candidates that are in the log, NaN for others."""
        sign = -1 if self.objective == "metric" else 1
        values = []
        for key in self._keys(candidates):
            trial = self.log.trials.get(key)
            if trial is None or trial.state != "ok" or trial.values is None:
                values.append(math.nan)
            else:
                # Rounded, so that an optimiser takes the same path where last bits differ.
                values.append(sign * round(float(np.mean(trial.values)), VALUE_DIGITS))
        return values

    def _keys(self, candidates: Sequence[Ints]) -> list[str]:
        return [candidate_key(candidate, self.objective) for candidate in candidates]

    def _run(self, tables: Mapping[str, Ints], generation: int) -> None:
        """Measure candidates by key, and log each job as soon as it is finished, in any order.

        `generation` is the number of candidates that failures are counted against.
        """
        trials = self.log.trials
        failures = [trials[key] for key in tables if key in trials and trials[key].state != "ok"]
        _refuse_failures(failures, generation)
        # jobs of about equal size, so that several workers have about as much to do
        count = math.ceil(len(tables) / self.job_size)
        # Parts follow from the candidates alone: a search that is resumed has the same ones, whatever is known already.
        keys = list(tables)
        parts = [keys[len(keys) * number // count : len(keys) * (number + 1) // count] for number in range(count)]
        unknown = [[key for key in part if key not in trials] for part in parts]
        jobs = [part for part in unknown if part]
        for number, outcome in self.executor.run([tuple(tables[key] for key in part) for part in jobs]):
            self.log.record(jobs[number], outcome)
            failures += [self.log.failed[key] for key in jobs[number] if key in self.log.failed]
            _refuse_failures(failures, generation)


def _refuse_failures(failures: Sequence[Trial], generation: int) -> None:
    """Raise an error if more than half of a generation failed."""
    if 2 * len(failures) <= generation:
        return
    messages = list(dict.fromkeys(f"{trial.state}: {trial.message}" for trial in failures))
    more = f"; and {len(messages) - MAX_MESSAGES} more" if len(messages) > MAX_MESSAGES else ""
    summary = f"{len(failures)} of {generation} candidates failed ({'; '.join(messages[:MAX_MESSAGES])}{more})"
    if all(trial.state == "non-finite" for trial in failures):
        raise IncompatibleError(f"{summary}: the model or the data give no finite values, check them in float32")
    raise EnvironmentFault(f"{summary}: see to it, then give the same command again to go on")

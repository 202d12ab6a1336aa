"""Executors: who evaluates candidates. `SerialExecutor` in this process; `ray.RayExecutor` on several GPUs or nodes."""

from kvsearch.search.executors.base import (
    Evaluator,
    Executor,
    Job,
    JobOutcome,
    OutcomeKind,
    Result,
    candidate_key,
    keys_of,
    results_of,
)
from kvsearch.search.executors.population import evaluate_all, worst_of
from kvsearch.search.executors.serial import SerialExecutor

__all__ = [
    "Evaluator", "Executor", "Job", "JobOutcome", "OutcomeKind", "Result", "SerialExecutor", "candidate_key",
    "evaluate_all", "keys_of", "results_of", "worst_of",
]  # fmt: skip

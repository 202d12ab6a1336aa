"""kvsearch verify: is all that a run has written whole?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from kvsearch.config.options import JobOptions, Option, Repeated
from kvsearch.jobs.public import job
from kvsearch.jobs.reporter import Reporter

if TYPE_CHECKING:
    from kvsearch.report.integrity import Verification


class VerifyOptions(JobOptions):
    """What is verified."""

    paths: Annotated[
        tuple[Path, ...],
        Repeated,
        Field(min_length=1),
        Option("Directories of runs, with all that is in them, or any file that kvsearch wrote.", metavar="PATH...",
               argument=True, repeated=True),
    ]  # fmt: skip


@job(VerifyOptions)
def verify(options: VerifyOptions, reporter: Reporter) -> Verification:  # noqa: ARG001 - there is nothing to say meanwhile
    """Check every artefact of runs: checksums, lines of ledgers, schemas, totals of plans, hashes of weights.

    Nothing is written, and a run that works on is not disturbed. What is not finished is told as that, and not damaged.

    Raises:
        UsageError: nothing is there that kvsearch has written.
        EnvironmentFault: it cannot be read.
    """
    from kvsearch.report.integrity import verify_paths

    return verify_paths(options.paths)

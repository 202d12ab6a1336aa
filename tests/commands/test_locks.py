"""Every job that writes has the lock of its directory, by construction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvsearch.commands.public import job
from kvsearch.commands.reporter import Reporter
from kvsearch.config.options import JobOptions
from kvsearch.core.errors import InternalError
from kvsearch.runs.run import write_json


class MineOptions(JobOptions):
    output: Path


def test_a_job_without_a_lock_does_not_write(tmp_path: Path) -> None:
    """Whoever writes a new job and forgets its directory is told at its first file."""

    @job(MineOptions)
    def mine(options: MineOptions, reporter: Reporter) -> None:
        write_json(options.output / "report.json", {})

    def call(**given: Any) -> None:
        mine(MineOptions.model_validate(given))

    with pytest.raises(InternalError, match="is written without its lock"):
        call(output=tmp_path)
    assert list(tmp_path.iterdir()) == []

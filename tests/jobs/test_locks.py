"""Every job that writes has the lock of its directory, by construction."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import kvsearch.jobs
from kvsearch.config.options import JobOptions
from kvsearch.core.errors import InternalError
from kvsearch.jobs.public import job
from kvsearch.jobs.reporter import Reporter
from kvsearch.runs.run import write_json


def option_models() -> Iterator[type[JobOptions]]:
    """The options of every job."""
    for module in pkgutil.iter_modules(kvsearch.jobs.__path__):
        found = vars(import_module(f"kvsearch.jobs.{module.name}")).values()
        yield from (
            one for one in found if isinstance(one, type) and issubclass(one, JobOptions)
            and one.__module__ == f"kvsearch.jobs.{module.name}"
        )  # fmt: skip


def test_a_directory_that_is_an_output_is_locked() -> None:
    """Whatever `-o` says is a directory is one that its job has the lock of."""
    checked = set()
    for options in option_models():
        _, option = options.list_options().get("output", (None, None))
        if option is not None and ("Directory" in option.help or option.metavar == "DIR"):
            made = options.model_construct(output=Path("place"), model="tiny")
            assert made.directories == (Path("place"),), options
            checked.add(options.__name__)
    assert {"CalibrateOptions", "EvaluateOptions", "EvolveOptions", "RunOptions"} <= checked
    assert "ReproduceOptions" in checked


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

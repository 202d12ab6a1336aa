"""Where the results of `kvsearch evaluate` go: the directory of the run, files, the screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvsearch.errors import UsageError

if TYPE_CHECKING:
    from kvsearch.cli.common import Common, Progress
    from kvsearch.evaluation.compare import Comparison, Evaluation
    from kvsearch.evaluation.losses import LayerLoss
    from kvsearch.evaluation.reply_store import Ledger
    from kvsearch.report.tables import Columns
    from kvsearch.tasks.base import Task


@dataclass(frozen=True)
class Deliveries:
    """What to keep and where; `output` is the directory of the run."""

    output: Path | None = None
    reuse: Path | None = None
    force: bool = False
    samples_file: Path | None = None
    table: Path | None = None
    columns: Columns | None = None

    @property
    def has_losses(self) -> bool:
        """Whether the run has measured output losses already."""
        from kvsearch.evaluation.run_directory import LOSSES

        return self.output is not None and (self.output / LOSSES).exists()

    @classmethod
    def checked(
        cls,
        output: Path | None,
        reuse: Path | None,
        force: bool,
        samples_file: Path | None,
        table: Path | None,
        columns: str | None,
    ) -> Deliveries:
        """What was typed; UsageError or EnvironmentFault if some of it cannot be written."""
        from kvsearch.evaluation.identity import CONFIG_SCHEMA
        from kvsearch.evaluation.run_directory import check_directories
        from kvsearch.evaluation.samples import check_samples_file
        from kvsearch.report.table_files import check_table_file
        from kvsearch.report.tables import find_columns

        check_directories(output, reuse, CONFIG_SCHEMA)
        if force and output is None:
            raise UsageError("--force is for --output: there is no run to start anew")
        if samples_file is not None:
            check_samples_file(samples_file)
        if table is not None:
            check_table_file(table)
        return cls(output, reuse, force, samples_file, table, None if columns is None else find_columns(columns))


@contextmanager
def kept(evaluation: Evaluation, files: Deliveries, common: Common) -> Iterator[Ledger | None]:
    """The ledger of the run, if it is kept; says what is there already, and how to go on after Ctrl-C."""
    from kvsearch.evaluation.run_directory import open_run

    if files.output is None:
        try:
            yield None
        except KeyboardInterrupt:
            common.say("nothing is kept without --output DIR, with which a run can go on where it stopped")
            raise
        return
    with open_run(files.output, evaluation.config(), files.force, files.reuse) as ledger:
        if ledger.samples:
            common.say(f"going on with {files.output}: {len(ledger.samples)} of {evaluation.replies} replies are there")
        try:
            yield ledger
        except KeyboardInterrupt:
            done = f"{len(ledger.samples)} of {evaluation.replies} replies are kept in {files.output}"
            common.say(f"{done}: give the same command again to go on")
            raise


def output_losses(
    evaluation: Evaluation, tasks: Sequence[Task], files: Deliveries, progress: Progress
) -> list[LayerLoss]:
    """Output losses of all methods but the full cache; a kept run measures them once.

    Raises:
        UsageError: what the run has kept of them is damaged; see also `measure_losses`.
    """
    from kvsearch.evaluation.losses import measure_losses
    from kvsearch.evaluation.run_directory import LOSSES
    from kvsearch.plan.canonical import canonical_json
    from kvsearch.plan.files import atomic_write
    from kvsearch.strategies.methods import FULL

    place = None if files.output is None else files.output / LOSSES
    if place is not None and place.exists():
        return _read_losses(place, evaluation)
    how = evaluation.settings
    programs = {one.label: one.program for one in evaluation.contenders if one.name != FULL}
    losses = measure_losses(
        evaluation.loaded, programs, tasks, how.samples, how.seed, progress,
        protocol=how.protocol, max_length=how.max_length,
    )  # fmt: skip
    if place is not None:
        atomic_write(place, canonical_json([asdict(row) for row in losses]))
    return losses


def _read_losses(path: Path, evaluation: Evaluation) -> list[LayerLoss]:
    from pydantic import TypeAdapter, ValidationError

    from kvsearch.evaluation.losses import LayerLoss
    from kvsearch.plan.files import read_bytes
    from kvsearch.strategies.methods import FULL

    remedy = "delete the file and give --losses to measure them again"
    try:
        losses = TypeAdapter(list[LayerLoss]).validate_json(read_bytes(path), strict=True)
    except ValidationError as error:
        raise UsageError(f"{path} is damaged ({error.errors()[0]['msg']}): {remedy}") from error
    asked = {task.task.name for task in evaluation.encoded}, {one.label for one in evaluation.contenders} - {FULL}
    if ({row.task for row in losses}, {row.method for row in losses}) != asked:
        raise UsageError(f"{path} is not of the tasks and methods of this run: {remedy}")
    return losses


def deliver(result: Comparison, losses: Sequence[LayerLoss] | None, files: Deliveries, common: Common) -> None:
    """Write what is to be written, and print tables or JSON."""
    from kvsearch.evaluation.samples import write_samples
    from kvsearch.report.evaluation import as_json
    from kvsearch.report.table_files import write_tables

    told = as_json(result, losses)
    if files.output is not None:
        _keep(result, told, files.output, files.columns)
    if files.samples_file is not None:
        write_samples(result.samples, files.samples_file)
    if files.table is not None:
        write_tables(result, files.table, files.columns or "tasks")
    if result.doubt is not None:
        common.warn(result.doubt)
    if common.as_json:
        common.print_json(told)
    else:
        _show(result, losses, files.columns, common)
    if files.output is not None:
        common.say(f"kept in {files.output}")


def _keep(result: Comparison, told: dict[str, object], directory: Path, columns: Columns | None) -> None:
    from kvsearch.evaluation.run_directory import REPORT, SAMPLES, TABLES
    from kvsearch.evaluation.samples import write_samples
    from kvsearch.plan.canonical import canonical_json
    from kvsearch.plan.files import atomic_write
    from kvsearch.report.table_files import write_tables

    write_samples(result.samples, directory / SAMPLES)
    write_tables(result, directory / TABLES, columns or "tasks")
    atomic_write(directory / REPORT, canonical_json(told))


def _show(result: Comparison, losses: Sequence[LayerLoss] | None, columns: Columns | None, common: Common) -> None:
    from kvsearch.evaluation.grid import grid_table, needle_grids
    from kvsearch.report.losses import losses_table
    from kvsearch.report.table_files import all_tables, on_screen

    for table in all_tables(result, columns):
        common.out.print(on_screen(table))
    for method, grid in needle_grids(result.samples).items():
        common.out.print(grid_table(f"{method} ({result.protocol}, phases: {result.phases})", grid))
    if losses is not None:
        common.out.print(losses_table(f"{result.model}, phases: {result.phases}", result.protocol, losses))

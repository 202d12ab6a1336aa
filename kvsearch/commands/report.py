"""kvsearch show, verify, report: what kvsearch wrote, read again."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvsearch.commands.public import job
from kvsearch.commands.reporter import Reporter
from kvsearch.config.options import JobOptions, Repeated, option
from kvsearch.core.errors import UsageError
from kvsearch.core.files import check_target, require_directory, write_atomically

if TYPE_CHECKING:
    from kvsearch.report.integrity import Verification
    from kvsearch.report.page import PageGroup
    from kvsearch.report.screen import View


class ShowOptions(JobOptions):
    """Options of `show`."""

    path: Path = option(
        ..., "A plan, a profile, the directory of a run, or any other file that kvsearch wrote.", argument=True
    )
    ratio: float = option(0.8, "Global eviction ratio at which a profile is shown.")


@job(ShowOptions)
def show(options: ShowOptions, reporter: Reporter) -> View:  # noqa: ARG001 - there is nothing to say meanwhile
    """Read what kvsearch wrote, and return a view of it.

    Raises:
        UsageError: no such file, a damaged one, or nothing of ours.
    """
    from kvsearch.report.artifacts import open_path

    opened = open_path(options.path)
    if opened.kind != "profile" and "ratio" in options.model_fields_set:
        raise UsageError(f"--ratio is for profiles: {options.path} is a {opened.kind}")
    if opened.kind == "plan":
        from kvsearch.budgets.plan_checks import check_plan

        check_plan(opened.content, str(options.path))
    if opened.kind == "profile":
        from kvsearch.report.profile import list_profile_parts

        opened = replace(opened, view=partial(list_profile_parts, opened.content, options.ratio))
    return opened


class VerifyOptions(JobOptions):
    """Options of `verify`."""

    paths: Annotated[tuple[Path, ...], Repeated] = option(
        ...,
        "Directories of runs, with all that is in them, or any file that kvsearch wrote.",
        metavar="PATH...",
        argument=True,
        repeated=True,
        min_length=1,
    )


@job(VerifyOptions)
def verify(options: VerifyOptions, reporter: Reporter) -> Verification:  # noqa: ARG001 - there is nothing to say meanwhile
    """Check every artefact of runs: checksums, lines of ledgers, schemas, totals of plans, hashes of weights.

    Nothing is written, and a run that works on is not disturbed. What is not finished is told as that, and not damaged.

    Raises:
        UsageError: nothing is there that kvsearch has written.
        EnvironmentFault: it cannot be read.
    """
    from kvsearch.report.integrity import Verification

    return Verification(options.paths)


class ReportOptions(JobOptions):
    """Options of the report: runs and output."""

    runs: Annotated[tuple[Path, ...], Repeated] = option(
        ...,
        "Whatever `show` reads: directories of runs, plans, profiles, results.",
        metavar="RUN...",
        argument=True,
        repeated=True,
        min_length=1,
    )
    output: Path = option(Path("report.html"), "The HTML file.", short="-o", recorded=False)
    figures: Path | None = option(
        None, "A directory for every figure as PDF, PNG and CSV.", recorded=False, locked=True
    )
    force: bool = option(False, "Replace a file that is no report of kvsearch.", recorded=False)

    def check_output(self) -> None:
        """Raise UsageError if the page cannot be written, or would replace what is no page of ours."""
        from kvsearch.report.page import check_page_target

        if self.force:
            check_target(self.output)
        else:
            check_page_target(self.output, "choose another file, or --force to replace it")


@job(ReportOptions)
def write_report(options: ReportOptions, reporter: Reporter) -> dict[str, Any]:  # noqa: ARG001 - nothing to say meanwhile
    """Write one self-contained HTML page about runs, grouped by their models; unfinished runs show what they have.

    Returns what was written: the page, its bytes, how many figures and tables it has, and the files of its figures.

    Raises:
        UsageError: nothing can be read at one of the paths, or the file is something else than a report.
        EnvironmentFault: a file cannot be written.
    """
    from kvsearch.report.artifacts import open_path
    from kvsearch.report.page import group_by_model, render

    options.check_output()
    if options.figures is not None:
        require_directory(options.figures)
    groups = group_by_model([open_path(path) for path in dict.fromkeys(options.runs)])
    files = [] if options.figures is None else _write_figures(groups, options.figures)
    page = render(groups)
    write_atomically(options.output, page)
    sheets = [sheet for *_, sheets in groups for sheet in sheets]
    counts = {what: sum(len(sheet[what]) for sheet in sheets) for what in ("figures", "tables")}
    return {"report": str(options.output), "bytes": len(page), **counts, "files": list(map(str, files))}


def _write_figures(groups: list[PageGroup], directory: Path) -> list[Path]:
    """Write all figures; with several runs, each in its own folder."""
    from kvsearch.report.draw import write_figures

    sheets = [sheet for *_, sheets in groups for sheet in sheets if sheet["figures"]]
    if len(sheets) == 1:
        return write_figures(sheets[0]["figures"], directory)
    return [
        file
        for number, sheet in enumerate(sheets, 1)
        for file in write_figures(sheet["figures"], directory / f"{number}-{Path(sheet['path']).stem}")
    ]

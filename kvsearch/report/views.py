"""The view of anything that kvsearch writes: what `show` prints, of the tables that the commands print themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from kvsearch.choose.verdicts import Validation
from kvsearch.plan import Plan, Profile
from kvsearch.printed import command_line
from kvsearch.report import evaluation, run, search, selection, validation
from kvsearch.report.cache import CacheView
from kvsearch.report.files.evaluation import StoredEvaluation
from kvsearch.report.files.perplexity import StoredPerplexity
from kvsearch.report.files.replies import Replies
from kvsearch.report.files.search import StoredSearch, Trace
from kvsearch.report.files.selection import StoredRun
from kvsearch.report.headroom import HeadroomResult
from kvsearch.report.numbers import counted, percent
from kvsearch.report.perplexity import perplexity_table
from kvsearch.report.plan import PlanView
from kvsearch.report.profile import profile_view
from kvsearch.report.reader import Opened, Recipe
from kvsearch.report.reproduced import Reproduced
from kvsearch.report.screen import View, facts, screen_table
from kvsearch.report.speed import SpeedView
from kvsearch.report.table import on_screen
from kvsearch.runs.contexts import ContextsFile

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvsearch.report.fitting import FittingTable
    from kvsearch.runtime.cache_file import CacheHeader

STEPS = 12  # of a search, at most


def view_of(opened: Opened, ratio: float, plan: Plan | None = None) -> View:
    """Return what to show; a profile at a global eviction ratio, and beside it what a `plan` loses.

    Raises:
        UsageError: see `profile_view`; a plan or a ratio is for profiles.
    """
    content = opened.content
    if isinstance(content, Profile):
        return OpenedView(opened, profile_view(content, ratio, plan))
    if isinstance(content, Plan):
        return OpenedView(opened, PlanView(content))
    if opened.kind == "cache":
        return OpenedView(opened, CacheView(opened.path, cast("CacheHeader", content)))
    return OpenedView(opened)


@dataclass(frozen=True, eq=False)
class OpenedView:
    """What was opened, and what is kept with it; `view` is that of a plan, a profile or a cache."""

    opened: Opened
    view: View | None = None

    def as_json(self) -> dict[str, Any]:
        """See `View.as_json`; the file as it is, or what is there of a run that is not finished."""
        opened = self.opened
        if self.view is not None:
            return self.view.as_json()
        if isinstance(opened.data, dict):
            return opened.data
        config = {} if opened.config is None else opened.config.model_dump(mode="json")
        return {"kind": opened.kind, "note": opened.note, "config": config, **_progress_json(opened.content)}

    def parts(self) -> Iterator[RenderableType]:
        """See `View.parts`."""
        opened = self.opened
        yield from self._content() if self.view is None else self.view.parts()
        if opened.note is not None:
            yield opened.note
        for place in opened.places:
            yield f"next: {command_line(['kvsearch', 'show', str(place)])}"

    def _content(self) -> Iterator[RenderableType]:
        """Yield the tables that the command prints, of what it wrote."""
        config, content = self.opened.config, self.opened.content
        if config is not None and self.opened.kind != "recipe":
            yield from facts({"of": command_line(config.command), "model": self.opened.model or "-"})
        match content:
            case StoredEvaluation():
                yield from evaluation.parts(content, content.grids, content.losses)
            case StoredPerplexity():
                yield perplexity_table(content.result, content.rows, content.phases)
            case HeadroomResult() | SpeedView():
                yield from content.parts()
            case Validation():
                for at in content.budgets:
                    yield from validation.parts(content, at)
            case tuple():
                yield from map(on_screen, selection.tables(*content))
            case StoredSearch():
                yield from _search_parts(content)
            case StoredRun():
                yield from _run_parts(content)
            case Replies():
                yield _replies_table(content)
            case ContextsFile():
                uses = ("fitted", "chosen", "reported")
                yield from facts({use: counted(len(getattr(content, use)), "context hash") for use in uses})
            case Reproduced():
                yield from map(on_screen, content.tables())
            case Recipe():
                yield from facts({"recipe of": content.job or "any command", **content.options})


def _search_parts(content: StoredSearch) -> Iterator[RenderableType]:
    """Yield what was chosen and why, the finalists and the report beside its baselines, and how the search went."""
    if content.result is not None:
        several = len(content.result.found) > 1
        for budget, found in content.result.found.items():
            yield f"{f'{budget} entries per kv head: ' if several else ''}{found.decision or found.ended}"
        yield from map(on_screen, search.tables(content.result))
    if content.trace is not None:
        yield convergence(content.trace)


def convergence(trace: Trace) -> FittingTable:
    """Return the best candidates of a search in the order in which they were found."""
    used = f"{trace.evaluations} candidates, {trace.tokens:,} tokens, {trace.seconds:.0f} s"
    title = f"convergence: {used}, {counted(len(trace.generations), 'generation')}; less is better"
    table = screen_table(title, ["candidates", "seconds", "best value", "found"], left=["found"])
    steps = trace.steps
    if len(steps) > STEPS:
        kept = {round(at * (len(steps) - 1) / (STEPS - 1)) for at in range(STEPS)}
        steps = tuple(step for at, step in enumerate(steps) if at in kept)
    for step in steps:
        table.add_row(str(step.evaluations), f"{step.seconds:.0f}", f"{step.value:.6g}", step.where)
    return table


def _run_parts(content: StoredRun) -> Iterator[RenderableType]:
    """Yield what was chosen at each size, in words and as tables, and what was tried to find the size."""
    for one in content.choices:
        yield from one.words
    yield from map(on_screen, run.tables([one.selection for one in content.choices]))
    if content.tried:
        table = screen_table(
            "budgets that were tried", ["budget", "best", "points lost", "asked"], left=["best", "asked"]
        )
        for step in content.tried:
            stage = "second stage" if step.confirmed else "first stage"
            table.add_row(str(step.budget), step.name, percent(step.loss), stage)
        yield table


def _replies_table(content: Replies) -> FittingTable:
    tasks = list(dict.fromkeys(task for one in content.methods.values() for task in one.questions))
    title = f"{counted(content.count, 'reply').replace('replys', 'replies')} so far: questions answered, by task"
    table = screen_table(title, ["method", *tasks, "mean score so far"], left=["method"])
    for name, one in content.methods.items():
        table.add_row(name, *(str(one.questions.get(task, 0)) for task in tasks), percent(one.score))
    return table


def _progress_json(content: object) -> dict[str, Any]:
    """Return what is there of a run that is not finished."""
    from dataclasses import asdict

    if isinstance(content, Replies):
        return {"replies": {name: asdict(one) for name, one in content.methods.items()}}
    if isinstance(content, StoredSearch) and content.trace is not None:
        return {"trace": asdict(content.trace)}
    return {}

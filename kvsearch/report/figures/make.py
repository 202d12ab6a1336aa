"""The figures that there are of what was opened: everything that a run found and that can be drawn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvsearch.choose.verdicts import Validation
from kvsearch.plan import Plan, Profile
from kvsearch.report.asked import asked_words
from kvsearch.report.figures.data import Axis, Estimated, Figure, Intervals
from kvsearch.report.figures.plans import plan_figures
from kvsearch.report.figures.profiles import profile_figures
from kvsearch.report.figures.scores import row_figure, score_figures, selection_figures, validation_figures
from kvsearch.report.figures.searches import search_figures
from kvsearch.report.figures.speeds import speed_figures
from kvsearch.report.files.evaluation import StoredEvaluation
from kvsearch.report.files.perplexity import StoredPerplexity
from kvsearch.report.files.search import StoredSearch
from kvsearch.report.files.selection import StoredRun
from kvsearch.report.headroom import HeadroomResult
from kvsearch.report.reader import Opened
from kvsearch.report.speed import SpeedView


def figures_of(opened: Opened, *, with_parts: bool = True) -> list[Figure]:
    """Return all figures of what was opened and of its parts; those have the name of the part in front of theirs.

    Raises:
        UsageError: a file of a part is damaged.
    """
    found = list(_own(opened))
    for part in opened.parts if with_parts else ():
        stem = part.path.parent.name if part.kind == "selection" else part.path.stem
        found += [replace(one, name=f"{stem}-{one.name}") for one in figures_of(part)]
    return found


def _own(opened: Opened) -> Iterator[Figure]:
    match opened.content:
        case Plan() as plan:
            yield from plan_figures(plan)
        case Profile() as profile:
            yield from profile_figures(profile)
        case StoredEvaluation() as result:
            yield from score_figures(result, result.losses)
        case StoredPerplexity() as measured:
            yield _perplexity(measured)
        case HeadroomResult() as room:
            title = f"Score with {100 * room.ratio:g}% evicted"
            yield row_figure("headroom", title, f"{room.model}: {asked_words(room.asked)}", room.rows)
        case SpeedView() as speed:
            yield from speed_figures(speed)
        case Validation() as judged:
            yield from validation_figures(judged)
        case tuple() as selections:
            yield from selection_figures(selections)
        case StoredSearch() as search:
            yield from search_figures(search)
        case StoredRun() as run:
            yield from selection_figures([one.selection for one in run.choices])


def _perplexity(found: StoredPerplexity) -> Figure:
    rows = [(row.method, row.difference) for row in found.rows]
    means = tuple(Estimated(name, one.mean, one.low, one.high) for name, one in rows if one is not None)
    about = found.result
    caption = (
        f"{about.model}: {about.text}, {about.windows} windows of {about.context} + {about.continuation} tokens, "
        f"phases: {found.phases}; 95% intervals"
    )
    body = Intervals(Axis("nats per token, minus the full cache"), (("", means),))
    return Figure("perplexity", "What is lost on the continuation of compressed contexts", caption, body)

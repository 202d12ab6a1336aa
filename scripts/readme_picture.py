"""Draw the picture of README: score against entries kept, beside the heat map of the largest plan.

    python scripts/readme_picture.py [docs/images/result.svg]

It is of the needles that `make real` compares, in runs/real: the plans, policies with even budgets and allocations of
papers.

It has the colours of a report, in the light and in the dark as the reader's system has it, on a ground of its own.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from markupsafe import escape
from real_results import ALLOCATIONS, Comparison, find_plan, label_method, list_kinds

from kvsearch.core.errors import KvsearchError, assert_present
from kvsearch.report.artifacts import open_path
from kvsearch.report.charts import SCORE_AXIS, make_full_level, make_series
from kvsearch.report.figures import Figure, LineChart, Role
from kvsearch.report.page import draw_svg
from kvsearch.results.evaluation import MethodScores

PLAN = "plan"
WIDTHS = (6.0, 3.6)  # inches of the two figures
SCALE = 1.15  # pixels per point
EDGE = 24  # pixels around figures
TITLE = 30  # pixels of a line of title
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", "DejaVu Sans", sans-serif'
PAIR = re.compile(r"(--[a-z0-9-]+): light-dark\(([^,]+), ([^)]+)\)")


def main() -> None:
    """Read the arguments and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, nargs="?", default=Path("docs/images/result.svg"))
    parser.add_argument("--home", type=Path, default=Path("runs/real"), help="where the steps are kept")
    args = parser.parse_args()
    try:
        kind = next(kind for kind in list_kinds(args.home) if kind.name == "needles")
        scores = draw_scores(Comparison.read(kind, args.home))
        plan = open_path(kind.search.directory / kind.plans[0])
    except KvsearchError as error:
        sys.exit(f"{error}: measure it first, by `make real`")
    args.picture.parent.mkdir(parents=True, exist_ok=True)
    args.picture.write_text(compose([scores, plan.figures[0]], [scores.title, f"Entries kept by {plan.path.name}"]))


def draw_scores(comparison: Comparison) -> Figure:
    """Return the scores of the plans over their sizes, beside those of other methods."""
    blocks = comparison.result.blocks
    full = comparison.result.full
    series = [make_full_level(comparison.result.overall.of(full.scores))]

    def draw_line(name: str, methods: Iterable[MethodScores], role: Role) -> None:
        points = [(method.held.entries, comparison.estimate(method)) for method in methods]
        series.append(replace(make_series(name, points, role), low=None, high=None))

    plans = [find_plan(block) for block in blocks]
    draw_line(PLAN, plans, "candidate")
    for name in comparison.kind.rivals:
        methods = [assert_present(block.method(name), name) for block in blocks]
        draw_line(label_method(name), methods, "candidate" if name in ALLOCATIONS else "baseline")
    series += [make_series(PLAN, [(plan.held.entries, comparison.estimate(plan))], "written") for plan in plans]
    body = LineChart(
        "entries kept, and their share of the full cache", SCORE_AXIS, tuple(series), log_x=True, full=full.held.entries
    )
    return Figure("scores", "Score against entries kept", "", body, leads=True)


def compose(figures: list[Figure], titles: list[str]) -> str:
    """Return figures side by side under their titles, as one file that needs no other."""
    parts = []
    left = EDGE
    lowest = 0.0
    for at, (figure, title, width) in enumerate(zip(figures, titles, WIDTHS, strict=True)):
        drawing = str(draw_svg(figure, f"readme-{at}", width))
        wide, high = (SCALE * float(end) for end in re.findall(r"[\d.]+", drawing.split('viewBox="')[1])[2:4])
        parts.append(f'<text x="{left}" y="{EDGE + 14}" font-size="15" font-weight="600">{escape(title)}</text>')
        place = f'<svg x="{left}" y="{EDGE + TITLE}" width="{wide:.0f}" height="{high:.0f}" viewBox='
        parts.append(re.sub(r'^<svg viewBox=("[^"]*") width="\d+"', rf"{place}\1", drawing))
        left += round(wide) + EDGE
        lowest = max(lowest, high)
    height = round(lowest) + TITLE + 2 * EDGE
    opening = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return (
        f'{opening} viewBox="0 0 {left} {height}" width="{left}" height="{height}" role="img" '
        f'aria-label="{escape("; ".join(titles))}">\n<style>{style()}</style>\n'
        f'<rect width="100%" height="100%" rx="12" fill="var(--page)"/>\n{"".join(parts)}\n</svg>\n'
    )


def style() -> str:
    """Return the colours of a report's page, those of the dark where the reader's system is dark."""
    page = (files("kvsearch.report") / "templates" / "page.css").read_text(encoding="utf-8")
    colours = PAIR.findall(page)
    light, dark = ("".join(f"{name}:{pair[which]};" for name, *pair in colours) for which in (0, 1))
    ink = f"svg{{font-family:{FONT};color:var(--ink);fill:currentColor}}"
    return f":root{{{light}}} @media (prefers-color-scheme:dark){{:root{{{dark}}}}} {ink}"


if __name__ == "__main__":
    main()

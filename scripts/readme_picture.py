"""Draw the picture of README: score against entries kept, beside the heat map of the smallest plan of a run.

    python scripts/readme_picture.py RUN [docs/images/result.svg]

The picture that is there is of the plans for needles that `make real` makes, in runs/real/needles/run.

It has the colours of a report, in the light and in the dark as the reader's system has it, on a ground of its own.
"""

from __future__ import annotations

import argparse
import re
from importlib.resources import files
from pathlib import Path

from markupsafe import escape

from kvsearch.report.artifacts import open_path
from kvsearch.report.figures import Figure, LineChart
from kvsearch.report.page import draw_svg

WIDTHS = (6.0, 3.6)  # inches of the two figures
SCALE = 1.15  # pixels per point
EDGE = 24  # pixels around figures
TITLE = 30  # pixels of a line of title
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", "DejaVu Sans", sans-serif'
PAIR = re.compile(r"(--[a-z0-9-]+): light-dark\(([^,]+), ([^)]+)\)")


def main() -> None:
    """Read the arguments and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the directory of a finished `kvsearch run`")
    parser.add_argument("picture", type=Path, nargs="?", default=Path("docs/images/result.svg"))
    args = parser.parse_args()
    run = open_path(args.run)
    scores = next((figure for figure in run.figures if isinstance(figure.body, LineChart)), None)
    plans = [part for part in run.inner if part.kind == "plan"]
    if scores is None or not plans:
        parser.error(f"{args.run} is no finished run")
    args.picture.parent.mkdir(parents=True, exist_ok=True)
    args.picture.write_text(
        compose([scores, plans[0].figures[0]], [scores.title, f"Entries kept by {plans[0].path.name}"])
    )


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

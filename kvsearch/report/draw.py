"""Figures as files: PDF and PNG in the style of papers, and the CSV of each."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsearch.core.errors import UsageError
from kvsearch.core.files import check_target, require_directory, write_atomically, write_fault
from kvsearch.core.printed import escape_invisible
from kvsearch.evaluation.names import FULL
from kvsearch.report.figures import RAMP, Figure, HeatMap, LineChart, Series, is_light

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure as Picture

# Okabe and Ito, in an order in which neighbours differ in lightness, too; yellow is too light for lines
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255")
MUTED = "#8C8C8C"  # controls and backgrounds
GRID_COLOUR = "#DDDDDD"
PLATE = "#FEFEFE"  # behind letters that a line would cross
DARK_INK = "#111111"  # on light colours, also where a page is dark
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")  # as matplotlib calls them
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1, 1.5), (5, 2, 1, 2))  # on, off, ..., in widths of the line

INK = "#000000"
KIND_SHIFT = 0.06  # inches between plans of a kind and their size
LOOKS = {"candidate": (COLOURS[0], "o", KIND_SHIFT), "baseline": (COLOURS[1], "s", -KIND_SHIFT)}
MARGIN = 0.8  # inches beside plans: of the axis
NAME_WIDTH = 1.5  # before the smallest size, for names
ENDS = 0.6  # after the largest one
EDGE = 0.25  # between plans and names
GAP = 0.03  # between a name and the line to its plan
LINE = 0.15  # of the height of a name

WIDTH = 5.5  # inches of a figure over both columns of a page
HEIGHT = 3.4
PANEL_WIDTH = 3.6  # of each of several charts side by side
ROW_HEIGHT = 4.2  # of these, with legends below
DPI = 200
CLOSE = 1.15  # two values on a logarithmic axis that are nearer have one name
LONGEST_NAME = 48  # letters
MOST_WORDS = 16  # names of columns that fit side by side
MOST_NUMBERS = 160  # cells of a map that have their number in them
DATED = {".pdf": "CreationDate", ".png": "Software", ".svg": "Date"}  # what would make every file of a kind another
DRAW_SETTINGS = {
    "font.family": "serif", "font.serif": ["STIXGeneral", "DejaVu Serif"], "mathtext.fontset": "stix", "font.size": 9,
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9, "axes.linewidth": 0.6,
    "axes.grid": True, "grid.color": GRID_COLOUR, "grid.linewidth": 0.5, "axes.axisbelow": True, "lines.linewidth": 1.3,
    "lines.markersize": 4.5, "legend.fontsize": 8, "legend.frameon": False, "xtick.labelsize": 8, "ytick.labelsize": 8,
    "pdf.fonttype": 42, "savefig.facecolor": "white",
}  # fmt: skip


def choose_marks(number: int) -> tuple[str, tuple[float, ...]]:
    """Return marker and dashes of a series; where the colours begin again, both are others than in the round before."""
    again = number // len(COLOURS)
    return MARKERS[(number + 3 * again) % len(MARKERS)], DASHES[(number + again) % len(DASHES)]


def write_figures(figures: Iterable[Figure], directory: Path) -> list[Path]:
    """Write NAME.pdf, NAME.png and NAME.csv of every figure; equal figures give equal bytes. Returns the files.

    Raises:
        UsageError: `directory` is a file.
        EnvironmentFault: the disk is full, permissions are missing.
    """
    require_directory(directory)
    import matplotlib

    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_fault(error, directory, "give the same command again") from error
    written = list[Path]()
    with matplotlib.rc_context(DRAW_SETTINGS):
        for figure in figures:
            picture = draw(figure)
            for suffix in ("pdf", "png"):
                written.append(directory / f"{figure.name}.{suffix}")
                write_picture(picture, written[-1])
            written.append(directory / f"{figure.name}.csv")
            write_atomically(written[-1], figure.csv().encode())
    return written


def check_picture_target(path: Path) -> None:
    """Raise UsageError if no picture can be written to `path`: another suffix, or there can be no such file."""
    if path.suffix not in DATED:
        raise UsageError(f"cannot write a picture to {path}: name a {', '.join(DATED)} or .html file")
    check_target(path)


def write_picture(picture: Picture, path: Path) -> None:
    """Write a picture as PDF, PNG or SVG, by the suffix; equal pictures give equal bytes. Errors as `write_figures`."""
    data = io.BytesIO()
    picture.savefig(data, format=path.suffix[1:], dpi=DPI, bbox_inches="tight", metadata={DATED[path.suffix]: None})
    write_atomically(path, data.getvalue())


def write_row(figures: Sequence[Figure], path: Path) -> None:
    """Write line charts side by side as one picture, see `write_picture`."""
    import matplotlib
    from matplotlib.figure import Figure as Picture

    with matplotlib.rc_context(DRAW_SETTINGS | {"svg.hashsalt": figures[0].name}):
        picture = Picture(figsize=(PANEL_WIDTH * len(figures), ROW_HEIGHT), layout="constrained")
        for axes, figure in zip(picture.subplots(1, len(figures), squeeze=False)[0], figures, strict=True):
            _draw_lines(axes, _as_shown(figure.body), loc="upper center", bbox_to_anchor=(0.5, -0.16))
            axes.set_title(_as_shown(figure.title))
        write_picture(picture, path)


def draw(figure: Figure, *, titled: bool = True, width: float = WIDTH) -> Picture:
    """Return the picture of a figure, with its title if `titled`; its caption is for the text below it."""
    from matplotlib.figure import Figure as Picture

    picture = Picture(figsize=(width, HEIGHT), layout="constrained")
    match _as_shown(figure.body):
        case LineChart(full=None) as lines:
            _draw_lines(picture.add_subplot(), lines, loc="center left", bbox_to_anchor=(1.01, 0.5))
        case LineChart() as plans:
            _draw_plans(picture, plans)
        case HeatMap() as maps:
            _draw_maps(picture, maps)
    if titled:
        picture.suptitle(escape_invisible(figure.title, keep="").replace("$", r"\$"), fontsize=10)
    return picture


def _as_shown(data: Any) -> Any:
    """Return data in which every text is shown as it is: nothing in it is a formula of matplotlib, or unseen.

    Of a long one there is the beginning, as letters take the room that the axes need.
    """
    if isinstance(data, str):
        text = escape_invisible(data, keep="")
        text = text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 1]}…"
        return text.replace("$", r"\$")
    if isinstance(data, tuple):
        return tuple(map(_as_shown, data))
    if isinstance(data, Mapping):
        return {_as_shown(name): value for name, value in data.items()}
    if is_dataclass(data) and not isinstance(data, type):
        return replace(data, **{member.name: _as_shown(getattr(data, member.name)) for member in fields(data)})
    return data


# --- lines ------------------------------------------------------------------------------------------------------------


def _draw_lines(axes: Axes, body: LineChart, **legend: Any) -> None:
    """Draw a line chart, with its `legend` at that place where it has several lines."""
    counts = Counter[str]()  # by role
    for series in body.series:
        _draw_series(axes, series, counts[series.role])
        counts[series.role] += series.style != "level"
    _scale(axes, body)
    axes.set_xlabel(body.x)
    _begin_at_tick(axes.yaxis, body)
    if sum(series.style != "level" for series in body.series) > 1:
        axes.legend(**legend)


def _draw_series(axes: Axes, series: Series, number: int) -> None:
    is_muted = series.role == "muted"
    colour = MUTED if is_muted else COLOURS[number % len(COLOURS)]
    look: dict[str, Any] = {"color": colour, "zorder": 1.5 if is_muted else 2.5}
    marker, dashes = choose_marks(number)
    style: Any = (0, dashes) if dashes else "-"
    if series.style == "level":
        axes.axhline(series.y[0], linestyle=(0, (4, 2)), linewidth=1, **look)
        name = "full cache" if series.name == FULL else series.name
        axes.annotate(
            f"{name} {series.y[0]:.4g}", (0, series.y[0]), xycoords=("axes fraction", "data"), xytext=(3, 2),
            textcoords="offset points", va="bottom", fontsize=8, color=colour,
        )  # fmt: skip
        return
    look["label"] = series.name
    if series.style == "steps":
        axes.step(series.x, series.y, where="post", linestyle=style, **look)
    elif series.low is not None and series.high is not None:
        ends = np.abs(np.array([np.subtract(series.y, series.low), np.subtract(series.high, series.y)]))
        axes.errorbar(series.x, series.y, ends, marker=marker, linestyle=style, capsize=2, elinewidth=0.8, **look)
    else:
        few = len(series.x) <= 20
        axes.plot(series.x, series.y, marker=marker if few else "", linestyle=style, **look)


def _scale(axes: Axes, body: LineChart) -> None:
    """Set the scales; on a logarithmic one, few values are named as they are, those that are close by one name."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    if body.log_x:
        axes.set_xscale("log")
        named = _keep_distinct(x for series in body.series for x in series.x)
        if len(named) <= 8:
            axes.set_xticks(named, [f"{x:.0f}" if x >= 10 else f"{x:g}" for x in named])
            axes.xaxis.set_minor_locator(NullLocator())
    elif all(float(x).is_integer() for series in body.series for x in series.x):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if body.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())


def _keep_distinct(values: Iterable[float]) -> list[float]:
    """Return values in ascending order, without those that a logarithmic axis shows at the place of another."""
    distinct = list[float]()
    for value in sorted(values):
        if not distinct or value > CLOSE * distinct[-1]:
            distinct.append(value)
    return distinct


def _begin_at_tick(axis: Axis, body: LineChart) -> None:
    """Begin a linear y axis at a tick, and say in its label where it is cut unless zero is on it."""
    first = axis.get_majorticklocs()[0]
    low, high = axis.get_view_interval()
    is_cut = not body.log_y and low > 0 and first > 0
    if is_cut:
        axis.set_view_interval(first, high, ignore=True)
    axis.set_label_text(f"{body.y} (axis cut at {first:g})" if is_cut else body.y)


# --- plans ------------------------------------------------------------------------------------------------------------


def _draw_plans(picture: Picture, body: LineChart) -> None:
    """Draw scores against entries: plans by kind, with names at the smallest size; what was written is ringed.

    x is in inches. Names stand before their plans; of one size alone, the names of candidates stand after them.
    """
    assert body.full is not None
    axes = picture.add_subplot()
    sizes = _keep_distinct(x for series in body.series for x in series.x)
    is_alone = len(sizes) == 1
    room = picture.get_figwidth() - MARGIN
    before = room / 2 if is_alone else NAME_WIDTH
    inches = 0.0 if is_alone else (room - NAME_WIDTH - ENDS) / math.log(sizes[-1] / sizes[0])
    axes.set_xlim(-before, room - before)
    ticks = [f"{x:,.0f}\n{100 * x / body.full:.2g}%" for x in sizes]
    axes.set_xticks(inches * np.log(np.divide(sizes, sizes[0])), ticks)
    axes.set_xlabel(body.x)
    written = {(series.name, series.x[0]) for series in body.series if series.role == "written"}
    sides = {
        series.name: LOOKS[series.role][2] * (4 if is_alone else 1) for series in body.series if series.role in LOOKS
    }
    points = []
    rings = []

    def named(name: str, y: float) -> str:
        return f"{name}  {body.form.format(y)}"

    for series in body.series:
        if series.style == "level":
            _draw_series(axes, series, 0)
            continue
        places = (inches * np.log(np.divide(series.x, sizes[0])) + sides[series.name]).tolist()
        if series.role == "written":
            rings.append((places[0], series.y[0], series.name))
            axes.vlines(places, series.low or (), series.high or (), color=INK, linewidth=1.1)
            continue
        colour, marker, _ = LOOKS[series.role]
        axes.plot(places, series.y, color=colour, marker=marker, markersize=4, linewidth=0.6, label=f"{series.role}s")
        if series.x[0] < CLOSE * sizes[0]:
            points.append(
                (series.y[0], places[0], series.name, INK if (series.name, series.x[0]) in written else colour)
            )
    axes.plot(
        [x for x, *_ in rings], [y for _, y, _ in rings], "-o", color=INK, linewidth=1.6, markersize=9, zorder=3,
        markerfacecolor="none", markeredgewidth=1.6, label="written plan",
    )  # fmt: skip
    handles, names = axes.get_legend_handles_labels()
    kinds = dict(zip(names, handles, strict=True))
    axes.legend(kinds.values(), kinds.keys(), loc="lower left", bbox_to_anchor=(0, 1), ncols=3, handlelength=1.2)
    _begin_at_tick(axes.yaxis, body)
    low, high = axes.get_ylim()
    axes.set_yticks([tick for tick in axes.get_yticks() if low <= tick <= min(high, 100)])  # others stretch the axis
    line = LINE * (high - low) / (picture.get_figheight() - 1)
    for side in (-1, 1):
        column = sorted(point for point in points if side == (1 if is_alone and point[1] > 0 else -1))
        heights = _spread_apart([y for y, *_ in column], line, low + line / 2, high)
        for (y, x, name, colour), height in zip(column, heights, strict=True):
            edge = side * EDGE + (x if is_alone else 0)
            axes.plot([x, edge - side * GAP], [y, height], color=MUTED, linewidth=0.5, zorder=1, scaley=False)
            axes.text(
                edge, height, named(name, y), va="center", ha="left" if side > 0 else "right", fontsize=8,
                color=colour, fontweight="bold" if colour == INK else "normal",
            )  # fmt: skip
    for x, y, name in rings:
        if x > 2 * EDGE:  # beyond the smallest size
            axes.annotate(
                named(name, y), (x, y), (0, 8), textcoords="offset points", fontsize=8, ha="center", va="bottom",
                fontweight="bold", bbox={"facecolor": PLATE, "edgecolor": "none", "pad": 1},
            )  # fmt: skip


def _spread_apart(places: list[float], gap: float, bottom: float, top: float) -> list[float]:
    """Return ascending places, moved as little as it takes that all are `gap` apart, between `bottom` and `top`."""
    raised = list(places)
    lowered = list(places)
    for at in range(1, len(places)):
        raised[at] = max(raised[at], raised[at - 1] + gap)
        lowered[-at - 1] = min(lowered[-at - 1], lowered[-at] - gap)
    middle = [(low + high) / 2 for low, high in zip(raised, lowered, strict=True)]
    return [
        min(max(place, bottom + gap * (at - 1)), top - gap * (len(places) - at)) for at, place in enumerate(middle, 1)
    ]


# --- maps -------------------------------------------------------------------------------------------------------------


def _draw_maps(picture: Picture, body: HeatMap) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    colours = LinearSegmentedColormap.from_list("kvsearch", [tuple(part / 255 for part in colour) for colour in RAMP])
    norm = Normalize(*body.ends)
    across = len(body.panels) if len(body.panels) <= 3 else 2 if len(body.panels) % 3 else 3
    if across * len(body.columns) > MOST_WORDS and max(map(len, body.columns)) > 3:
        across = 1
    down = -(-len(body.panels) // across)
    tall = min(max(0.16 * len(body.rows), 1.2), 8)
    wide = max(picture.get_figwidth(), across * min(0.14 * len(body.columns) + 0.8, 4))
    picture.set_size_inches(wide, down * (tall + 0.7) + 0.4)
    grid = picture.subplots(down, across, squeeze=False, sharex=across == 1, sharey=True).ravel()
    for axes in grid[len(body.panels) :]:
        axes.set_visible(False)
    for at, (axes, (name, panel)) in enumerate(zip(grid, body.panels.items(), strict=False)):
        values = np.array([[np.nan if value is None else value for value in row] for row in panel])
        axes.imshow(values, cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
        _label_cells(axes, body.rows, body.columns)
        axes.set_title(name)
        axes.set_xlabel(body.column_label if across > 1 or at + 1 == down else "")
        axes.set_ylabel(body.row_label if at % across == 0 else "")
        for (row, column), value in np.ndenumerate(values) if values.size * across <= MOST_NUMBERS else ():
            if value == value:
                red, green, blue = (round(255 * part) for part in colours(norm(value))[:3])
                ink = DARK_INK if is_light((red, green, blue)) else "white"
                axes.text(column, row, body.form.format(value), ha="center", va="center", fontsize=8, color=ink)
    bar = picture.colorbar(ScalarMappable(norm, colours), ax=list(grid), shrink=0.85, aspect=30)
    bar.set_label(body.value_label)
    bar.outline.set_visible(False)


def _label_cells(axes: Axes, rows: tuple[str, ...], columns: tuple[str, ...]) -> None:
    """Name rows and columns, of many every few; a word is turned where columns are many."""
    axes.grid(visible=False)
    for set_ticks, names, room in ((axes.set_yticks, rows, 24), (axes.set_xticks, columns, 16)):
        every = -(-len(names) // room)
        set_ticks(range(0, len(names), every), names[::every])
    if max(map(len, columns)) > 3:
        axes.tick_params(axis="x", rotation=60)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)

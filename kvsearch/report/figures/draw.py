"""Figures as files: PDF and PNG in the style of papers, and the CSV of each."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsearch.core.files import atomic_write, require_directory, write_fault
from kvsearch.core.printed import visible
from kvsearch.report.figures.data import RAMP, Figure, HeatMap, Intervals, LineChart, Series, is_light

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Picture

# Okabe and Ito, in an order in which neighbours differ in lightness, too; yellow is too light for lines
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255")
MUTED = "#8C8C8C"  # controls and backgrounds
GRID = "#DDDDDD"
PLATE = "#FEFEFE"  # behind letters that a line would cross
DARK_INK = "#111111"  # on light colours, also where a page is dark
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")  # as matplotlib calls them
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1, 1.5), (5, 2, 1, 2))  # on, off, ..., in widths of the line

WIDTH = 5.5  # inches of a figure over both columns of a page
HEIGHT = 3.4
DPI = 200
CLOSE = 1.15  # two values on a logarithmic axis that are nearer have one name
LONGEST_NAME = 48  # letters
MOST_NUMBERS = 160  # cells of a map that have their number in them
SETTINGS = {
    "font.family": "serif", "font.serif": ["STIXGeneral", "DejaVu Serif"], "mathtext.fontset": "stix", "font.size": 9,
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9, "axes.linewidth": 0.6,
    "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.5, "axes.axisbelow": True, "lines.linewidth": 1.3,
    "lines.markersize": 4.5, "legend.fontsize": 8, "legend.frameon": False, "xtick.labelsize": 8, "ytick.labelsize": 8,
    "pdf.fonttype": 42, "savefig.facecolor": "white",
}  # fmt: skip


def marks(number: int) -> tuple[str, tuple[float, ...]]:
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
    with matplotlib.rc_context(SETTINGS):
        for figure in figures:
            picture = draw(figure)
            for suffix in ("pdf", "png"):
                data = io.BytesIO()
                # without the date, which would make every file another
                dated: dict[str, Any] = {"CreationDate": None} if suffix == "pdf" else {"Software": None}
                picture.savefig(data, format=suffix, dpi=DPI, bbox_inches="tight", metadata=dated)
                written.append(directory / f"{figure.name}.{suffix}")
                atomic_write(written[-1], data.getvalue())
            written.append(directory / f"{figure.name}.csv")
            atomic_write(written[-1], figure.csv().encode())
    return written


def draw(figure: Figure, *, titled: bool = True) -> Picture:
    """Return the picture of a figure, with its title if `titled`; its caption is for the text below it."""
    from matplotlib.figure import Figure as Picture

    picture = Picture(figsize=(WIDTH, HEIGHT), layout="constrained")
    match _as_shown(figure.body):
        case LineChart() as lines:
            _lines(picture, lines)
        case HeatMap() as maps:
            _maps(picture, maps)
        case Intervals() as intervals:
            _intervals(picture, intervals)
    if titled:
        picture.suptitle(visible(figure.title, keep="").replace("$", r"\$"), fontsize=10)
    return picture


def _as_shown(data: Any) -> Any:
    """Return data in which every text is shown as it is: nothing in it is a formula of matplotlib, or unseen.

    Of a long one there is the beginning, as letters take the room that the axes need.
    """
    if isinstance(data, str):
        text = visible(data, keep="")
        text = text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 1]}…"
        return text.replace("$", r"\$")
    if isinstance(data, tuple):
        items = map(_as_shown, data)
        return type(data)(*items) if hasattr(data, "_fields") else tuple(items)
    if is_dataclass(data) and not isinstance(data, type):
        return replace(data, **{one.name: _as_shown(getattr(data, one.name)) for one in fields(data)})
    return data


# --- lines ------------------------------------------------------------------------------------------------------------


def _lines(picture: Picture, body: LineChart) -> None:
    axes = picture.add_subplot()
    counts = {True: 0, False: 0}  # of muted ones and of others
    for one in body.series:
        _series(axes, one, counts[one.muted])
        counts[one.muted] += one.style != "level"
    _scale(axes, body)
    axes.set_xlabel(body.x.label)
    axes.set_ylabel(body.y.label)
    if sum(one.style != "level" for one in body.series) > 1:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))


def _series(axes: Axes, one: Series, number: int) -> None:
    colour = MUTED if one.muted else COLOURS[number % len(COLOURS)]
    look: dict[str, Any] = {"color": colour, "zorder": 1.5 if one.muted else 2.5}
    marker, dashes = marks(number)
    style: Any = (0, dashes) if dashes else "-"
    if one.style == "level":
        axes.axhline(one.y[0], linestyle=(0, (4, 2)), linewidth=1, **look)
        axes.annotate(
            one.name, (1, one.y[0]), xycoords=("axes fraction", "data"), xytext=(-2, 2), textcoords="offset points",
            ha="right", va="bottom", fontsize=8, color=colour,
        )  # fmt: skip
        return
    look["label"] = one.name
    if one.muted:
        look["markersize"] = 3
    if one.style == "points":
        axes.plot(one.x, one.y, linestyle="none", marker=marker, **look)
    elif one.style == "steps":
        axes.step(one.x, one.y, where="post", linestyle=style, **look)
    elif one.low is not None and one.high is not None:
        ends = np.abs(np.array([np.subtract(one.y, one.low), np.subtract(one.high, one.y)]))
        axes.errorbar(one.x, one.y, ends, marker=marker, linestyle=style, capsize=2, elinewidth=0.8, **look)
    else:
        few = len(one.x) <= 20
        axes.plot(one.x, one.y, marker=marker if few else "", linestyle=style, **look)


def _scale(axes: Axes, body: LineChart) -> None:
    """Set the scales; on a logarithmic one, few values are named as they are, those that are close by one name."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    if body.x.log:
        axes.set_xscale("log")
        named = list[float]()
        for x in sorted({x for one in body.series for x in one.x}):
            if not named or x > CLOSE * named[-1]:
                named.append(x)
        if len(named) <= 8:
            axes.set_xticks(named, [f"{x:.0f}" if x >= 10 else f"{x:g}" for x in named])
            axes.xaxis.set_minor_locator(NullLocator())
    elif all(float(x).is_integer() for one in body.series for x in one.x):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if body.y.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())


# --- maps -------------------------------------------------------------------------------------------------------------


def _maps(picture: Picture, body: HeatMap) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    colours = LinearSegmentedColormap.from_list("kvsearch", [tuple(part / 255 for part in one) for one in RAMP])
    norm = Normalize(*body.ends)
    across = len(body.panels) if len(body.panels) <= 3 else 2 if len(body.panels) % 3 else 3
    down = -(-len(body.panels) // across)
    tall = min(max(0.16 * len(body.rows), 1.2), 8)
    picture.set_size_inches(max(WIDTH, across * min(0.14 * len(body.columns) + 0.8, 4)), down * (tall + 0.7) + 0.4)
    grid = picture.subplots(down, across, squeeze=False, sharey=True).ravel()
    for axes in grid[len(body.panels) :]:
        axes.set_visible(False)
    for at, (axes, panel) in enumerate(zip(grid, body.panels, strict=False)):
        values = np.array([[np.nan if value is None else value for value in row] for row in panel.values])
        axes.imshow(values, cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
        _cell_axes(axes, body.rows, body.columns)
        axes.set_title(panel.name)
        axes.set_xlabel(body.column_label)
        axes.set_ylabel(body.row_label if at % across == 0 else "")
        for (row, column), value in np.ndenumerate(values) if values.size * across <= MOST_NUMBERS else ():
            if value == value:
                red, green, blue = (round(255 * part) for part in colours(norm(value))[:3])
                ink = DARK_INK if is_light((red, green, blue)) else "white"
                axes.text(column, row, body.form.format(value), ha="center", va="center", fontsize=8, color=ink)
    bar = picture.colorbar(ScalarMappable(norm, colours), ax=list(grid), shrink=0.85, aspect=30)
    bar.set_label(body.value_label)
    bar.outline.set_visible(False)


def _cell_axes(axes: Axes, rows: tuple[str, ...], columns: tuple[str, ...]) -> None:
    """Name rows and columns, of many every few; a word is turned where columns are many."""
    axes.grid(visible=False)
    for set_ticks, names, most in ((axes.set_yticks, rows, 24), (axes.set_xticks, columns, 16)):
        every = -(-len(names) // most)
        set_ticks(range(0, len(names), every), names[::every])
    if max(map(len, columns)) > 3:
        axes.tick_params(axis="x", rotation=60)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


# --- intervals --------------------------------------------------------------------------------------------------------


def _intervals(picture: Picture, body: Intervals) -> None:
    axes = picture.add_subplot()
    names = list[tuple[float, str]]()
    place = 0.0
    for number, (group, estimates) in enumerate(body.groups):
        if group:
            axes.annotate(
                group, (0, -place), xycoords=("axes fraction", "data"), xytext=(3, 0), textcoords="offset points",
                fontsize=8, fontstyle="italic", va="center", bbox={"facecolor": PLATE, "edgecolor": "none", "pad": 1},
            )  # fmt: skip
            place += 1
        for name, estimate in estimates:
            colour = MUTED if name == "full" else COLOURS[number % len(COLOURS)]
            ends = [body.unit * estimate.low, body.unit * estimate.high]
            axes.plot(ends, [-place, -place], color=colour, linewidth=1.3)
            axes.plot([body.unit * estimate.mean], [-place], marker="o", color=colour)
            names.append((-place, name))
            place += 1
        place += 0.4
    picture.set_size_inches(WIDTH, min(max(0.22 * place, 1.0), 9) + 0.9)
    if body.has_zero:
        axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks([at for at, _ in names], [name for _, name in names])
    axes.set_ylim(-place + 0.2, 0.8)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(body.x.label)

"""Figures as files: PDF and PNG in the style of papers, and the CSV of each; needs matplotlib, the extra `report`."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsearch.errors import EnvironmentFault, UsageError
from kvsearch.plan.files import atomic_write, write_fault
from kvsearch.printed import visible
from kvsearch.report.figures.data import CategoryMap, Figure, HeatMap, Intervals, Lines, Series
from kvsearch.report.figures.style import COLOURS, MUTED, RAMP, is_light, marks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Picture

HOW = 'figures need matplotlib: pip install "kvsearch[report]"'
WIDTH, HEIGHT, DPI = 5.5, 3.4, 200  # inches of a figure over both columns of a page
CLOSE = 1.15  # two values on a logarithmic axis that are nearer have one name
MOST_NUMBERS = 160  # cells of a map that have their number in them
SETTINGS = {
    "font.family": "serif", "font.serif": ["STIXGeneral", "DejaVu Serif"], "mathtext.fontset": "stix", "font.size": 9,
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9, "axes.linewidth": 0.6,
    "axes.grid": True, "grid.color": "#DDDDDD", "grid.linewidth": 0.5, "axes.axisbelow": True, "lines.linewidth": 1.3,
    "lines.markersize": 4.5, "legend.fontsize": 8, "legend.frameon": False, "xtick.labelsize": 8, "ytick.labelsize": 8,
    "pdf.fonttype": 42, "savefig.facecolor": "white",
}  # fmt: skip


def check_figures(directory: Path) -> None:
    """Find out, before anything is read, whether figures can be written to `directory`.

    Raises:
        UsageError: it is a file.
        EnvironmentFault: matplotlib is missing.
    """
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory} is a file: give a directory to write figures to")
    if find_spec("matplotlib") is None:
        raise EnvironmentFault(HOW)


def write_figures(figures: Iterable[Figure], directory: Path) -> list[Path]:
    """Write NAME.pdf, NAME.png and NAME.csv of every figure; equal figures give equal bytes. Returns the files.

    Raises:
        UsageError, EnvironmentFault: see `check_figures`; the disk is full, permissions are missing.
    """
    check_figures(directory)
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


def draw(figure: Figure) -> Picture:
    """Return the picture of a figure, with its title; its caption is for the text below it."""
    from matplotlib.figure import Figure as Picture

    picture = Picture(figsize=(WIDTH, HEIGHT), layout="constrained")
    match _as_shown(figure.body):
        case Lines() as lines:
            _lines(picture, lines)
        case HeatMap() as maps:
            _maps(picture, maps)
        case CategoryMap() as names:
            _names(picture, names)
        case Intervals() as intervals:
            _intervals(picture, intervals)
    picture.suptitle(_as_shown(figure.title), fontsize=10)
    return picture


def _as_shown(data: Any) -> Any:
    """Return data in which every text is shown as it is: nothing in it is a formula of matplotlib, or unseen."""
    if isinstance(data, str):
        return visible(data, keep="").replace("$", r"\$")
    if isinstance(data, tuple):
        items = map(_as_shown, data)
        return type(data)(*items) if hasattr(data, "_fields") else tuple(items)
    if is_dataclass(data) and not isinstance(data, type):
        return replace(data, **{one.name: _as_shown(getattr(data, one.name)) for one in fields(data)})
    return data


# --- lines ------------------------------------------------------------------------------------------------------------


def _lines(picture: Picture, body: Lines) -> None:
    axes, counts = picture.add_subplot(), {True: 0, False: 0}  # of muted ones and of others
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
            ha="right", va="bottom", fontsize=7, color=colour,
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


def _scale(axes: Axes, body: Lines) -> None:
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
    known = [value for panel in body.panels for row in panel.values for value in row if value is not None]
    norm = Normalize(min(known, default=0.0), max(known, default=1.0))
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
        if values.size * across <= MOST_NUMBERS:
            _numbers(axes, values, colours, norm, body.form)
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


def _numbers(axes: Axes, values: np.ndarray, colours: Any, norm: Any, form: str) -> None:
    for (row, column), value in np.ndenumerate(values):
        if value == value:
            red, green, blue = (round(255 * part) for part in colours(norm(value))[:3])
            ink = "black" if is_light((red, green, blue)) else "white"
            axes.text(column, row, form.format(value), ha="center", va="center", fontsize=7, color=ink)


def _names(picture: Picture, body: CategoryMap) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    names, axes = body.names, picture.add_subplot()
    colours = [COLOURS[at % len(COLOURS)] for at in range(len(names))]
    picture.set_size_inches(WIDTH, min(max(0.2 * len(body.rows), 1.6), 8) + 0.8)
    numbers = np.array([[names.index(name) if name else np.nan for name in row] for row in body.values])
    axes.imshow(numbers, cmap=ListedColormap(colours), vmin=-0.5, vmax=len(names) - 0.5, aspect="auto")
    _cell_axes(axes, body.rows, body.columns)
    axes.tick_params(axis="x", rotation=0)
    axes.set_xlabel(body.column_label)
    axes.set_ylabel(body.row_label)
    if len(body.rows) * len(body.columns) <= MOST_NUMBERS:
        for (row, column), value in np.ndenumerate(numbers):
            if value == value:
                axes.text(column, row, names[int(value)], ha="center", va="center", fontsize=7, color="white")
    patches = [Patch(color=colour, label=name) for colour, name in zip(colours, names, strict=True)]
    axes.legend(handles=patches, loc="center left", bbox_to_anchor=(1.01, 0.5))


# --- intervals --------------------------------------------------------------------------------------------------------


def _intervals(picture: Picture, body: Intervals) -> None:
    axes, names, place = picture.add_subplot(), list[tuple[float, str]](), 0.0
    for number, (group, found) in enumerate(body.groups):
        if group:
            axes.annotate(
                group, (0, -place), xycoords=("axes fraction", "data"), xytext=(3, 0), textcoords="offset points",
                fontsize=8, fontstyle="italic", va="center", bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            )  # fmt: skip
            place += 1
        for one in found:
            colour = MUTED if one.name == "full" else COLOURS[number % len(COLOURS)]
            axes.plot([one.low, one.high], [-place, -place], color=colour, linewidth=1.3)
            axes.plot([one.mean], [-place], marker="o", color=colour)
            names.append((-place, one.name))
            place += 1
        place += 0.4
    picture.set_size_inches(WIDTH, min(max(0.22 * place, 1.0), 9) + 0.9)
    if body.reference is not None:
        axes.axvline(body.reference, color="black", linewidth=0.8)
    axes.set_yticks([at for at, _ in names], [name for _, name in names])
    axes.set_ylim(-place + 0.2, 0.8)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(body.x.label)

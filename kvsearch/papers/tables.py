"""Every table and figure that kvsearch makes again: its tasks, its stages, its rows, and the paper's numbers.

A table is described in `PAPER.yaml` beside this file: where it is, what it shows and for what models, the tasks to ask
in the paper's form and in the short one, its stages, the `rows` by method, and the `columns` as paths into what the
last stages have written. In the `rows` {size} and {block} stand for size and block of each evaluation. `pictures` are
drawn of the cells.

A stage is a job of kvsearch (its `verb`) with its options. Text in it may hold `$NAME`, for what the form that is made
has under that name, or for a variable of `each`, by which there are several stages: one for each of its values. Where
that is an `ask`, its tasks are among the stage's options, and its fields have names, too. {NAME} stands for the file or
directory of an earlier stage. A mapping of `each` and `item` is a list: the item for each of the values.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from string import Template
from typing import Any, Literal

import yaml

from kvsearch.core.naming import require_known

Side = Literal["block", "row", "column"]  # of a table: a cell has a name on each
STAGES = "stages"  # in the directory of tables: a directory of every stage
ASKING: frozenset[str] = frozenset({"evolve", "select", "validate", "evaluate"})  # jobs that ask tasks


# tasks, samples of each, perhaps length; block: what the paper calls it, where several are asked
Ask = Mapping[str, Any]
Scale = Mapping[str, Any]  # asks, searches (what budgets are searched on), budgets, ratios, other numbers of stages


@dataclass(frozen=True)
class Stage:
    """A job under a name that is unique in its table; `words` say what it does.

    `methods` are those that an evaluation compares, one by one, so that one that a model cannot run is left out.
    `block` is the block of its `Ask`. A finished stage has a `result`, the plan, profile or record that it has written;
    `left_out` says which methods the model cannot run, and why; `remarks` are what the job says of its options, such as
    patterns that cannot be tried. `trace` is how a search went.
    """

    name: str
    job: str  # a verb, of `kvsearch.commands.reproduce.RESULTS` or a plan's
    words: str
    options: Mapping[str, Any]
    methods: tuple[str, ...] = ()
    block: str = ""
    result: Any = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    remarks: Sequence[str] = ()
    trace: Any = None


@dataclass(frozen=True)
class Picture:
    """A picture of the cells of a table: lines over the numbers in names such as "128 entries", or maps.

    What has no number in its name is a level, but totals of columns are left out.

    Args:
        name: the stem of its files.
        lines: the side whose names are the lines, or the rows of a map.
        over: the side whose names are on the axis x, or the columns of a map.
        each: the third side: there is one picture, or panel of a map, for each of its names that `of` matches.
        labels: of the axes x and y; of a map, of its rows, columns and values.
        of: a regular expression of whole names.
        relative: values of a map are shares of the largest of their row.
        log: the axis x is logarithmic.
    """

    name: str
    title: str
    lines: Side
    over: Side
    each: Side
    labels: tuple[str, ...]
    of: str = ".*"
    relative: bool = False
    log: bool = False


@dataclass(frozen=True)
class PaperTable:
    """A table or figure of a paper, and how kvsearch makes it.

    `models` are the paper's: the last part of a hub id, and what the file of the paper's numbers calls it. `changed`
    says what is not as in the paper at any scale, `smaller` what the short form has in place of what the paper has.
    """

    name: str
    source: str  # the paper
    where: str  # "Table 2"
    shows: str
    models: Mapping[str, str]
    paper: Scale
    bundled: Scale
    templates: tuple[Mapping[str, Any], ...]
    rows: Mapping[str, str]  # what the paper calls a method
    columns: tuple[str, ...]
    changed: tuple[str, ...]
    smaller: tuple[str, ...]
    view: str = "scores"  # which of its results the cells are, see `kvsearch.report.paper_table.VIEWS`
    pictures: tuple[Picture, ...] = ()

    def stages(self, scale: Scale) -> tuple[Stage, ...]:
        """Return the stages of a form, in their order."""
        names = _names(scale)
        return tuple(stage for template in self.templates for stage in _stages(template, names))


def _names(scale: Scale) -> Mapping[str, Any]:
    """Return what $NAME stands for in stages; `searched` are the budgets that have a search of their own."""
    if not scale["budgets"]:
        return scale
    least, *larger = scale["budgets"]
    searched = [least, *(budget for budget in larger if budget in scale.get("own", ()))]
    return {**scale, "least": least, "larger": larger, "searched": searched}


def _stages(template: Mapping[str, Any], names: Mapping[str, Any]) -> Iterator[Stage]:
    """Yield the stages of a template, one for each of the values that it is for."""
    for bound in _bindings(template.get("each", {}), names):
        verb = template["verb"]
        options = _filled(template["options"], bound)
        block = ""
        if verb in ASKING:
            ask = dict(bound["ask"])
            block = ask.pop("block", "")
            options = {**ask, **options}
        if verb == "evaluate":  # it takes sizes as they are typed
            sizes = {name: options[name] for name in ("budgets", "ratios") if name in options}
            options |= {name: ",".join(map(str, values)) for name, values in sizes.items()}
        name, words, methods = (_filled(template.get(part, []), bound) for part in ("name", "words", "methods"))
        yield Stage(name, verb, words, options, methods, block)


def _bindings(each: Mapping[str, Any], names: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the names with every choice of values of the variables; the last variable changes fastest."""
    if not each:
        yield names
        return
    (variable, values), *others = each.items()
    for value in _filled(values, names):
        bound = {**names, variable: value}
        if variable == "ask":
            block = value.get("block", "")
            bound |= {**value, "block": block, "suffix": f"-{block}" if block else ""}
        if variable == "budget":  # the search whose result is scaled to it
            bound["source"] = value if value in names["searched"] else names["least"]
        yield from _bindings(dict(others), bound)


def _filled(value: Any, names: Mapping[str, Any]) -> Any:
    """Return a part of a description with what its names stand for: a lone $NAME keeps the kind of its value."""
    if isinstance(value, str):
        return names[value[1:]] if value[1:] in names and value[0] == "$" else Template(value).substitute(names)
    if isinstance(value, Mapping):
        if value.keys() == {"each", "item"}:
            return tuple(_filled(value["item"], bound) for bound in _bindings(value["each"], names))
        return {name: _filled(inner, names) for name, inner in value.items()}
    if isinstance(value, list):
        return tuple(_filled(inner, names) for inner in value)
    return value


# --- all tables -------------------------------------------------------------------------------------------------------

PAPERS = ("polykv", "lukv", "lava", "evolkv")
FOLDER = files(__package__)
CellKey = tuple[str, str, str, str]  # model, block ("128", "0.8", "4K 1024"), row, column


def _read_tables(paper: str) -> Iterator[PaperTable]:
    """Yield what the file of a paper describes."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    described = yaml.load(FOLDER.joinpath(f"{paper}.yaml").read_text(encoding="utf-8"), loader)
    for name, table in described["tables"].items():
        fields = dict(table)
        for form in ("paper", "bundled"):
            fields[form] = {"asks": [], "searches": [], "budgets": [], "ratios": [], **table[form]}
        for part in ("columns", "changed", "smaller"):
            fields[part] = tuple(_flat(table[part]))
        fields["pictures"] = tuple(Picture(**picture) for picture in table.get("pictures", ()))
        yield PaperTable(name=name, source=described["paper"], templates=tuple(fields.pop("stages")), **fields)


def _flat(parts: list[Any]) -> Iterator[str]:
    """Yield the texts of a list in which some stand together as lists of their own."""
    for part in parts:
        yield from _flat(part) if isinstance(part, list) else (part,)


PAPER_TABLES: dict[str, PaperTable] = {table.name: table for paper in PAPERS for table in _read_tables(paper)}


def find_table(name: str) -> PaperTable:
    """Return a table by its name; UsageError if there is none."""
    require_known("table", name, list(PAPER_TABLES))
    return PAPER_TABLES[name]


def model_of(table: PaperTable, model: str) -> str | None:
    """Return what the paper calls a model, by the last part of its hub id or directory; None if it is not there."""
    last = model.rstrip("/").rpartition("/")[2].lower()
    return next((label for name, label in table.models.items() if name.lower() == last), None)


@cache
def numbers(table: str) -> Mapping[CellKey, float]:
    """Return what the paper prints in a table, in points of 100 unless it says otherwise; nothing without a file.

    There is one CSV file per table, a line per model, block and row. A table is there only where its text can be read
    beyond doubt; what the text garbles is left out.
    """
    file = FOLDER.joinpath("numbers", f"{table}.csv")
    if not file.is_file():
        return {}
    printed: dict[CellKey, float] = {}
    for line in csv.DictReader(file.read_text(encoding="utf-8").splitlines()):
        place = line.pop("model"), line.pop("block"), line.pop("row")
        printed.update({(*place, column): float(value) for column, value in line.items() if value})
    return printed

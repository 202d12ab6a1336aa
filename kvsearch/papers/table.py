"""What a paper's table is made of: what is asked, in which stages it is made, and which row is which method.

A stage is a job of kvsearch with its options. Text among these has {NAME} where the file or directory of the earlier
stage of that name stands. A description computes nothing: `kvsearch.jobs.reproduce` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

StageJob = Literal["calibrate", "evolve", "export", "scale", "select", "validate", "evaluate"]
View = Literal["scores", "best", "categories", "selections", "signals", "layers", "losses", "profiles"]
Columns = Literal["tasks", "categories", "averages"]
STAGES = "stages"  # in the directory of tables: a directory of every stage
ASKING: frozenset[StageJob] = frozenset({"evolve", "select", "validate", "evaluate"})  # jobs that ask tasks

PAPERS = {
    "polykv": "PolyKV (arXiv 2606.15157)",
    "lukv": "LU-KV (arXiv 2602.08585)",
    "lava": "LAVa (Findings of EMNLP 2025)",
    "evolkv": "EvolKV (arXiv 2509.08315)",
}


@dataclass(frozen=True)
class Ask:
    """Tasks, how many contexts of each, and how long these are.

    `tokens` is about how long a prompt is where `length` does not say so: for the cost alone. `block` is what the paper
    calls it, where a table asks several.
    """

    tasks: str
    samples: int
    length: tuple[int, ...] = ()
    tokens: int = 0
    block: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """As options of the jobs that ask."""
        return {"tasks": self.tasks, "samples": self.samples} | ({"length": self.length} if self.length else {})


@dataclass(frozen=True)
class Scale:
    """How much is asked, and how much is kept: by the paper, or in the short form for the bundled models.

    `window` is of the policies; `questions` are those of the calibration file to measure on (None: all). `searches` are
    what budgets are searched on, for `generations` of every group of `group` layers.
    """

    asks: tuple[Ask, ...]
    budgets: tuple[int, ...] = ()
    ratios: tuple[float, ...] = ()
    window: int = 32
    questions: int | None = None
    searches: tuple[Ask, ...] = ()
    generations: int = 10
    group: int = 8
    objective: str = "metric"

    @property
    def sizes(self) -> dict[str, str]:
        """The sizes as options of `evaluate`."""
        given = {"budgets": self.budgets, "ratios": self.ratios}
        return {name: ",".join(map(str, values)) for name, values in given.items() if values}


@dataclass(frozen=True)
class Stage:
    """A job under a name that is unique in its table; `words` say what it does.

    `methods` are those that an evaluation compares, one by one, so that one that a model cannot run is left out.
    `block` is what the paper calls what is asked, where a table asks several.
    """

    name: str
    job: StageJob
    words: str
    options: Mapping[str, Any]
    methods: tuple[str, ...] = ()
    block: str = ""
    tokens: int = 0


@dataclass(frozen=True)
class Row:
    """A row of the table: what the paper calls it, and the method; {size} and {block} are those of the evaluation."""

    label: str
    method: str


@dataclass(frozen=True)
class PaperTable:
    """A table or figure of a paper, and how kvsearch makes it.

    `models` are the paper's: the last part of a hub id, and what the file of the paper's numbers calls it. `average` is
    the mean over tasks that the paper takes. `changed` says what is not as in the paper at any scale, `smaller` what
    the short form has in place of what the paper has.
    """

    name: str
    where: str  # "Table 2"
    shows: str
    models: Mapping[str, str]
    paper: Scale
    bundled: Scale
    stages: Callable[[Scale], Sequence[Stage]]
    rows: tuple[Row, ...] = ()
    view: View = "scores"
    columns: Columns = "tasks"
    average: str = "macro"
    changed: tuple[str, ...] = ()
    smaller: tuple[str, ...] = field(default=())

    @property
    def source(self) -> str:
        """The paper."""
        return PAPERS[self.name.partition("-")[0]]

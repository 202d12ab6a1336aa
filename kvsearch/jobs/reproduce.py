"""kvsearch reproduce: make a table of a paper again, on any model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from kvsearch.config.options import Option
from kvsearch.errors import UsageError
from kvsearch.jobs.following import following
from kvsearch.jobs.groups import ASKED, BUDGET, TASKS, Batches, Numbers, WithTasks, WithWorkers
from kvsearch.jobs.public import job
from kvsearch.jobs.reproduce_cost import told, work
from kvsearch.jobs.reproduce_stages import Stages, options_read
from kvsearch.jobs.run_progress import overall
from kvsearch.jobs.stages import FINISHED, on_interruption
from kvsearch.jobs.talk import Talk
from kvsearch.papers.catalog import find_table, model_of
from kvsearch.papers.table import Ask, PaperTable, Scale
from kvsearch.plan.fields import Entries, Samples

if TYPE_CHECKING:
    from kvsearch.report.reproduced import Reproduced
    from kvsearch.report.table import Table

RUNS = Path("runs") / "reproduce"
FORMS = ".json", ".csv", ".md", ".tex"


class ReproduceOptions(WithTasks, WithWorkers, Batches):
    """Which table, of which model, and what is not as in the paper."""

    job: ClassVar[str] = "reproduce"

    table: Annotated[
        str, Option("A table, such as lukv-table1; --list has them all.", metavar="TABLE", argument=True)
    ] = ""
    model: Annotated[
        str,
        Option("A hub id, a local directory, `bundled` or `bundled-redundant`.", metavar="MODEL", argument=True),
    ] = ""
    output: Annotated[
        Path | None,
        Option(
            "Directory of the tables and their stages, which tables share.",
            short="-o",
            metavar="DIR",
            shown=f"{RUNS}/MODEL",
            recorded=False,
        ),
    ] = None
    listed: Annotated[bool, Option("List the tables, or say all of one, and stop.", flag="--list", recorded=False)] = (
        False
    )
    tasks: Annotated[
        str | None,
        Option("Ask these, and search on them, in place of the table's own: as for evaluate.", metavar="SPEC",
               panel=TASKS, shown="those of the table"),
    ] = None  # fmt: skip
    samples: Annotated[Samples | None, Option("Contexts per task.", panel=ASKED, shown="those of the table")] = None
    budgets: Annotated[
        tuple[Entries, ...] | None,
        Numbers,
        replace(BUDGET, help="Entries per kv head.", metavar="N,N...", panel=ASKED, shown="those of the table"),
    ] = None

    @property
    def place(self) -> Path:
        """The directory of the tables."""
        return self.output or RUNS / self.model.rstrip("/").rpartition("/")[2]

    @property
    def directories(self) -> tuple[Path, ...]:
        """See `JobOptions.directories`."""
        return (self.place,) if self.model else ()

    @property
    def is_short(self) -> bool:
        """Whether the table has its short form: that is for the bundled models."""
        from kvsearch.models.loading import BUNDLED

        return self.model in BUNDLED

    def chosen_table(self) -> PaperTable:
        """Return the table; UsageError if there is none of that name, or no model."""
        if not self.table:
            raise UsageError("which table? Give its name and a model; kvsearch reproduce --list names all")
        found = find_table(self.table)
        if not self.model:
            raise UsageError(
                f"{found.name} of which model? Give a hub id, a local directory or bundled; --list says all of it"
            )
        return found

    def scale(self, table: PaperTable) -> Scale:
        """Return how much is asked: as the table has it for this model, but for what was given."""
        scale = table.bundled if self.is_short else table.paper
        asks, searches = self._asks(scale.asks), self._asks(scale.searches, search=True)
        if self.budgets is None:
            return replace(scale, asks=asks, searches=searches)
        if not scale.budgets:
            raise UsageError(f"{table.name} evicts shares of the prompts: leave --budgets out")
        if len(self.budgets) != len(scale.budgets) and len(scale.budgets) == 1:
            raise UsageError(f"{table.name} has one budget: give one with --budgets")
        return replace(scale, asks=asks, searches=searches, budgets=tuple(sorted(self.budgets)))

    def _asks(self, asks: Sequence[Ask], search: bool = False) -> tuple[Ask, ...]:
        """Return what is asked in place of `asks`, each once; a search keeps its own number of samples."""
        given: dict[str, Any] = {}
        if self.tasks is not None:
            given |= {"tasks": self.tasks, "length": (), "tokens": 0}
        if self.length is not None:
            given |= {"length": self.length}
        if self.samples is not None and not search:
            given |= {"samples": self.samples}
        return tuple(dict.fromkeys(self._fitting(ask, given) for ask in asks))

    def _fitting(self, ask: Ask, given: Mapping[str, Any]) -> Ask:
        """Return what is asked with what was given of it; a length only where tasks have one."""
        changed = replace(ask, **given)
        return changed if "length" in options_read(changed.tasks) else replace(changed, length=())


@dataclass(frozen=True, eq=False)
class Reproduction:
    """A table that was made again, and the files that it is in."""

    options: ReproduceOptions
    found: Reproduced
    files: tuple[Path, ...]

    def as_json(self) -> dict[str, Any]:
        """Return all of it."""
        return self.found.as_json()

    def tables(self) -> list[Table]:
        """Return it as tables, more than one where its blocks have nothing in common."""
        return self.found.tables()

    def remarks(self) -> Iterator[str]:
        """Say where it is, and how it is shown again."""
        yield f"wrote {', '.join(map(str, self.files))}"
        yield following("show", self.files[0])


@job(ReproduceOptions, dry=True)
def dry_run(options: ReproduceOptions, talk: Talk) -> dict[str, Any]:
    """Return the stages with what they cost, as JSON.

    Of the model its configuration and tokenizer are read, of all tasks a context; errors as `reproduce`.
    """
    table = options.chosen_table()
    stages = Stages(options, table.stages(options.scale(table)))
    stages.require_data(options.without_weights(options.model).load(options.model, talk))
    return {
        "table": table.name, "model": options.model, "directory": str(options.place),
        "paper_numbers": model_of(table, options.model) is not None,
        "stages": [told(stages, stage) for stage in stages.all],
    }  # fmt: skip


@job(ReproduceOptions)
def reproduce(options: ReproduceOptions, talk: Talk) -> Reproduction:
    """Make a table of a paper again: calibrate, search and ask as it did, as far as that is known, on any model.

    Writes TABLE.json, .csv, .md and .tex to the directory; every stage has a directory of its own there, named by its
    options, so that the same call goes on where it stopped and tables share what they have in common. Beside the values
    are the paper's numbers where the model is the paper's.

    Raises:
        UsageError: an unknown table or task, or data that is missing.
        IncompatibleError: the model computes NaN, or it can run none of the methods.
        EnvironmentFault: the disk is full, or the model cannot be loaded here.
    """
    from kvsearch.report.paper_captions import reproduced
    from kvsearch.runs.sums import finish, unfinish

    table = options.chosen_table()
    stages, files = Stages(options, table.stages(options.scale(table))), tuple(map(table.name.__add__, FORMS))
    loaded = options.load(options.model, talk)
    stages.require_data(loaded)
    unfinish(options.place, files)
    again = f"what is finished is kept in {options.place}: give the same command again to go on"
    with on_interruption(talk, lambda: again), overall(talk, work(stages)) as whole:
        for stage in stages.all:
            with whole.stage(stage.name, stage.words) as part:
                stages.run(stage, loaded, part)
    stated = {"model": options.model, "options": options.recorded(), "stages": stages.as_json()}
    found = reproduced(table, options.model, options.is_short, stages.finished, stated, options.tasks is not None)
    place = options.place / f"{found.name}.json"
    before = place.read_bytes() if place.exists() else None
    written = write(options.place, found)
    finish(options.place, files)
    if before == place.read_bytes():
        talk.say(FINISHED)
    return Reproduction(options, found, written)


def write(place: Path, found: Reproduced) -> tuple[Path, ...]:
    """Write a table in all its forms, in place of what an earlier call has left; return the files, the last first."""
    from kvsearch.plan.canonical import canonical_json
    from kvsearch.plan.files import atomic_write
    from kvsearch.report.table import latex, markdown

    made = found.tables()
    texts = (
        canonical_json(found.as_json()), found.csv().encode(),
        "\n".join(map(markdown, made)).encode(), "\n".join(map(latex, made)).encode(),
    )  # fmt: skip
    files = {place / f"{found.name}{suffix}": text for suffix, text in zip(FORMS, texts, strict=True)}
    for path, text in reversed(files.items()):
        atomic_write(path, text)
    return tuple(files)

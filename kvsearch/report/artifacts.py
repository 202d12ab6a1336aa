"""All that kvsearch writes: what a file or a directory is, how it is read, shown, drawn and told in a sentence.

The directory of a run stands for its result or, unfinished, for what it has so far. So does a file that the run keeps
beside its report, such as the ledger; any other file stands for itself.
"""

from __future__ import annotations

import lzma
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from kvsearch.calibration.steps import find_profile_file
from kvsearch.core.errors import KvsearchError, UsageError
from kvsearch.core.files import open_file, read_text
from kvsearch.core.parsing import read_json
from kvsearch.core.printed import format_command_line, pluralize
from kvsearch.evaluation.names import FULL
from kvsearch.evaluation.reply_store import read_replies
from kvsearch.exporters.base import PlanScores
from kvsearch.papers.tables import PAPER_TABLES, STAGES
from kvsearch.plan import Plan, Profile
from kvsearch.plan.origin import USES
from kvsearch.plan.profile import load_profile
from kvsearch.plan.saved import FOLDER_PLAN, PROFILE, load_plan
from kvsearch.plan.schema import PLAN_FORMAT
from kvsearch.plan.yaml import STRATEGY_FORMAT
from kvsearch.report import charts, evaluation, scores, search, selections
from kvsearch.report.break_even import BreakEvenView, make_break_even_figures
from kvsearch.report.charts import make_profile_figures
from kvsearch.report.costs import SpeedView
from kvsearch.report.figures import Figure, ReportPart
from kvsearch.report.paper_table import ReproducedTable
from kvsearch.report.plans import list_cache_parts, list_plan_parts, plan_headline
from kvsearch.report.profile import describe_profile, list_profile_parts
from kvsearch.report.table import Table, format_bounds, to_markdown
from kvsearch.results import Result, damaged_file_error, read_content, report_damage
from kvsearch.results.evaluation import EvaluationResult, HeadroomResult
from kvsearch.results.search import SearchResult, read_trace
from kvsearch.results.selection import RunResult, SelectionResult, SelectionsResult
from kvsearch.results.validation import VALIDATION_FILE as VALIDATION
from kvsearch.results.validation import ValidationResult
from kvsearch.runs.identity import (
    CONFIG,
    CONTEXTS,
    LEDGER,
    METRICS,
    REPORT,
    SAMPLES,
    SELECTION,
    SUMS,
    TABLES,
    RunConfig,
    read_config,
)
from kvsearch.runs.identity import SCHEMA as RUN
from kvsearch.runs.run import CONTEXTS_FORMAT, read_contexts
from kvsearch.tasks.catalog import list_public_datasets

WHOLE_RUN = "run.json"
CACHE_SUFFIX = ".kv"  # the usual suffix of a compressed cache
CACHE_MARK = b"kvsearch.cache"  # in its header
PACKED = ".tar.xz"  # of the directory of a finished run
RUN_FILES = (LEDGER, SAMPLES, TABLES)  # what a run keeps beside its report
KNOWN_FILES = (
    "a plan, a strategy or recipe in YAML, a profile, the directory of a calibration, evaluation, validation, "
    "selection, search, run or reproduction, such a directory packed as .tar.xz, a folder of these, the files in them, "
    "a compressed cache (.kv), and what evaluate, bench and others print with --json"
)
UNFINISHED = "this run is not finished: give its command again to go on"


def name_of_model(content: Any) -> Any:
    """Return the name of the model that most contents state, by itself or with its hashes; None where there is none."""
    model = getattr(content, "model", None)
    return getattr(model, "name", model)


@dataclass(frozen=True)
class ArtifactKind:
    """What can be done with the content of a file.

    Args:
        parts: what `show` prints of it.
        records: what a file of JSON may hold, told by its schema.
        model: the name of the model that it is about.
        figures: the figures of the page, beside the maps among its parts.
        headline: what was found, in a sentence; empty: the first line among its parts says it.
    """

    parts: Callable[[Any], Iterable[ReportPart]]
    records: tuple[type[Result], ...] = ()
    model: Callable[[Any], Any] = name_of_model
    figures: Callable[[Any], Iterable[Figure]] = lambda _: ()
    headline: Callable[[Any], str] = lambda _: ""


ARTIFACT_KINDS: Mapping[str, ArtifactKind] = {
    "plan": ArtifactKind(list_plan_parts, headline=plan_headline),
    "profile": ArtifactKind(
        list_profile_parts,
        model=lambda profile: profile.metadata.model.name,
        figures=make_profile_figures,
        headline=describe_profile,
    ),
    "evaluation": ArtifactKind(
        evaluation.list_parts, (EvaluationResult,), figures=charts.make_score_figures, headline=evaluation.describe_best
    ),
    "headroom": ArtifactKind(scores.list_headroom_parts, (HeadroomResult,)),
    "speed": ArtifactKind(
        SpeedView.parts, (SpeedView,), model=lambda view: view.machine.get("model"), figures=charts.make_speed_figures
    ),
    "break-even": ArtifactKind(
        BreakEvenView.parts,
        (BreakEvenView,),
        model=lambda view: view.machine.get("model"),
        figures=make_break_even_figures,
        headline=BreakEvenView.headline,
    ),
    "validation": ArtifactKind(scores.list_validation_parts, (ValidationResult,)),
    "selection": ArtifactKind(
        lambda result: selections.make_tables(*result.choices),
        (SelectionResult, SelectionsResult),
        figures=charts.make_selection_figures,
        headline=selections.describe_results,
    ),
    "search": ArtifactKind(search.list_parts, (SearchResult,), figures=charts.make_search_figures),
    "run": ArtifactKind(
        selections.list_run_parts,
        (RunResult,),
        figures=charts.make_selection_figures,
        headline=selections.describe_results,
    ),
    "replies": ArtifactKind(lambda content: [scores.make_progress_table(content)]),
    "contexts": ArtifactKind(
        lambda content: [{use: pluralize(len(getattr(content, use)), "context hash") for use in USES}]
    ),
    "recipe": ArtifactKind(lambda options: [options], model=lambda options: options.get("model")),
    "reproduction": ArtifactKind(ReproducedTable.tables, (ReproducedTable,), figures=charts.make_table_figures),
    "runs": ArtifactKind(lambda runs: [_make_runs_table(runs)]),
    "cache": ArtifactKind(list_cache_parts, model=lambda header: header.plan.model.name),
}
RECORDS = {
    record.SCHEMA.partition("/")[0]: (kind, record)
    for kind, artifact in ARTIFACT_KINDS.items()
    for record in artifact.records
}


@dataclass(frozen=True, eq=False)
class LoadedArtifact:
    """A file or run directory that was opened: its kind and content, and the files that belong to it.

    Args:
        kind: its kind, a key of `ARTIFACT_KINDS`.
        content: the record it holds; None for several stages or tables with no result yet or more than one.
        data: the file as parsed JSON, where it is one.
        config: the configuration of the run that wrote it, where that is there.
        note: why the result is incomplete; None if it is complete.
        places: what is kept with it and can be opened by itself.
        view: what `show` prints, where options ask for something else than for its kind.
    """

    path: Path
    kind: str
    content: Any
    data: Any = None
    config: RunConfig | None = None
    note: str | None = None
    places: tuple[Path, ...] = ()
    view: Callable[[], Iterable[ReportPart]] | None = None

    @property
    def model(self) -> str | None:
        """The name of the model that it is about; None where it is about none, or does not say it."""
        name = None if self.content is None else ARTIFACT_KINDS[self.kind].model(self.content)
        if name is None and self.config is not None:
            name = self.config.options.get("model")
        return name if isinstance(name, str) else None

    @cached_property
    def inner(self) -> tuple[LoadedArtifact, ...]:
        """What is kept with it, opened; errors as for `open_path`."""
        return tuple(map(open_path, self.places))

    @cached_property
    def shown(self) -> list[ReportPart]:
        """What is shown of its content.

        Raises:
            UsageError: the content does not fit together.
        """
        if self.content is None:
            return []
        with report_damage(self.path):
            return list(ARTIFACT_KINDS[self.kind].parts(self.content) if self.view is None else self.view())

    @cached_property
    def figures(self) -> list[Figure]:
        """All figures of its content; errors as for `shown`."""
        if self.content is None:
            return []
        with report_damage(self.path):
            maps = [part for part in self.shown if isinstance(part, Figure)]
            return [*maps, *ARTIFACT_KINDS[self.kind].figures(self.content)]

    @cached_property
    def headline(self) -> str:
        """What was found, in a sentence; errors as for `shown`."""
        if self.content is None:
            return ""
        with report_damage(self.path):
            lines = [part for part in self.shown if isinstance(part, str)]
            return ARTIFACT_KINDS[self.kind].headline(self.content) or next(iter(lines), "")

    def as_json(self) -> dict[str, Any]:
        """Return the file as it is or, where that is not JSON, all that is shown of it."""
        if self.data is not None:
            return dict(self.data)
        parts = self.shown
        return {
            "kind": self.kind,
            "note": self.note,
            "config": None if self.config is None else self.config.model_dump(mode="json"),
            "metadata": self.content.metadata.model_dump(mode="json") if isinstance(self.content, Profile) else None,
            "facts": [dict(part) for part in parts if isinstance(part, Mapping)],
            "tables": [part.as_json() for part in parts if isinstance(part, Table)],
            "figures": [part.as_json() for part in parts if isinstance(part, Figure)],
            "lines": [part for part in parts if isinstance(part, str)],
        }

    def parts(self) -> Iterator[ReportPart]:
        """Yield what is shown, why it is not all, and what to show next."""
        if self.config is not None and self.kind != "recipe":
            yield {"of": format_command_line(self.config.command), "model": self.model or "-"}
        yield from self.shown
        if self.note is not None:
            yield self.note
        for place in self.places:
            yield f"next: {format_command_line(['kvsearch', 'show', str(place)])}"


def open_path(path: Path) -> LoadedArtifact:
    """Read a file or a directory that kvsearch has written.

    Raises:
        UsageError: there is nothing, it is damaged, or is nothing of ours; the message lists what can be read. A
            calibration that is not finished, as its samples say nothing before it is.
        EnvironmentFault: it cannot be read.
    """
    if path.is_dir():
        return _load_directory(path)
    if path.name in RUN_FILES and read_config(path.parent) is not None:
        return replace(_load_directory(path.parent), path=path)
    if path.suffix in (".yaml", ".yml"):
        return _load_yaml(path)
    if path.name.endswith(PACKED):
        return _load_archive(path)
    if path.suffix == ".json":
        return _load_json(path)
    if is_cache(path):
        from kvsearch.runtime.store.cache_file import read_header

        header = read_header(path)
        return LoadedArtifact(path, "cache", header, header.model_dump(mode="json"))
    if path.suffix == ".safetensors" or not path.exists():
        return LoadedArtifact(path, "profile", load_profile(path))
    raise _unknown_file_error(path)


def is_cache(path: Path) -> bool:
    """Return whether a file is a compressed cache, by its suffix or its header; errors as `open_file`."""
    if path.suffix == CACHE_SUFFIX or not path.is_file():
        return path.suffix == CACHE_SUFFIX
    with open_file(path) as file:
        head = file.read(256)
    return head[8:].startswith(b'{"__metadata__"') and CACHE_MARK in head


def run_scores(place: Path, plan: Plan) -> PlanScores | None:
    """Return what the run in a directory measured of a plan; None if it wrote no such plan.

    Raises:
        UsageError: a file of the run is damaged.
        EnvironmentFault: it cannot be read.
    """
    content = open_path(place / WHOLE_RUN).content if (place / WHOLE_RUN).exists() else None
    for choice in content.choices if isinstance(content, RunResult) else ():
        if load_plan(place / str(choice.plan)) == plan:
            with report_damage(place / WHOLE_RUN):
                return _plan_scores(choice, read_config(place))
    return None


def _plan_scores(choice: SelectionResult, config: RunConfig | None) -> PlanScores:
    """Return the scores in the report of a choice, and the tasks from the configuration of its run."""
    report = choice.report
    chosen = choice.chosen
    text = [
        *(f"{line}\n" for line in selections.describe_selection(choice)),
        to_markdown(selections.make_report_table(choice)),
    ]
    best = [chosen.best] if chosen.winner else []
    if report.nats:
        losses = {name: report.nats[name].excess for name in [chosen.written, *best]}
        named = {"loss above the full cache": losses[chosen.written], "loss of the full cache": report.nats[FULL].loss}
        named |= {f"loss above the full cache of {name}, the best baseline": losses[name] for name in best}
        form = ("nats per token", ".4f", 1.0)
    else:
        named = {"score": report.scores[chosen.written], "score of the full cache": report.scores[FULL]}
        named |= {f"score of {name}, the best baseline": report.scores[name] for name in best}
        named["full cache minus plan"] = choice.loss
        form = ("percent", ".1f", 100.0)
    unit, digits, factor = form
    scorers: Mapping[str, str] = {} if config is None else config.content.get(METRICS, {})
    options = {} if config is None else config.options
    spec = options.get("tasks")
    return PlanScores(
        text="\n".join(text),
        metrics={
            f"{name}, {unit} {format_bounds(value, digits, factor)}": replace(
                value, mean=factor * value.mean, low=factor * value.low, high=factor * value.high
            )
            for name, value in named.items()
        },
        metric=next(iter(scorers.values())) if len(set(scorers.values())) == 1 else "score",
        tasks=tuple(scorers) or ("questions",),
        datasets=list_public_datasets(spec) if spec is not None and options.get("data") is None else (),
        questions=report.asked.questions,
    )


# --- directories ------------------------------------------------------------------------------------------------------


def _load_directory(path: Path) -> LoadedArtifact:
    config = read_config(path)
    if config is not None and config.job != "calibrate":
        return replace(_load_run(path, config), path=path, config=config)
    if (path / PROFILE).exists() or config is not None:
        below = [path / VALIDATION, *sorted(path.glob(f"selection/*/{SELECTION}"))]
        return LoadedArtifact(
            path, "profile", load_profile(find_profile_file(path)), config=config, places=_keep_existing(below)
        )
    if (path / FOLDER_PLAN).is_file():
        return replace(_load_json(path / FOLDER_PLAN), path=path)
    tables = _keep_existing([path / f"{name}.json" for name in PAPER_TABLES])
    if tables or (path / STAGES).is_dir():
        ends = (PROFILE, REPORT, SELECTION)
        stages = [place for place in sorted((path / STAGES).glob("*")) if any((place / end).exists() for end in ends)]
        if len(tables) == 1:
            return replace(_load_json(tables[0]), path=path, places=tuple(stages))
        note = None if tables else "no table is finished here: give the command of `kvsearch reproduce` again to go on"
        return LoadedArtifact(path, "reproduction", None, note=note, places=(*tables, *stages))
    runs = sorted(file.parent for file in path.glob(f"*/{CONFIG}") if read_config(file.parent) is not None)
    if runs:
        return LoadedArtifact(path, "runs", runs)
    raise _unknown_file_error(path)


def _load_archive(path: Path) -> LoadedArtifact:
    """Open the directory of a run that was packed into one file, with all that is in it."""
    with tempfile.TemporaryDirectory() as place:
        try:
            with open_file(path) as file, tarfile.open(fileobj=file, mode="r:xz") as archive:
                archive.extractall(place, filter="data")
        except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
            raise damaged_file_error(path, str(error)) from error
        if read_config(Path(place)) is None:
            raise _unknown_file_error(path)
        return replace(_load_directory(Path(place)), path=path)


def _make_runs_table(runs: Sequence[Path]) -> Table:
    """Make a table with a row per run: command, model, time of the last write, and result."""
    rows = []
    for run in runs:
        written = max((run / name).stat().st_mtime for name in (CONFIG, SUMS) if (run / name).exists())
        date = f"{datetime.fromtimestamp(written):%Y-%m-%d %H:%M}"
        try:
            opened = open_path(run)
            rows.append([run.name, opened.kind, opened.model or "-", date, opened.note or opened.headline])
        except KvsearchError as error:
            rows.append([run.name, "-", "-", date, str(error)])
    columns = ["run", "kind", "model", "date", "result"]
    return Table.plain(f"{pluralize(len(runs), 'run')} in {runs[0].parent}", columns, rows, words=columns)


def _load_run(path: Path, config: RunConfig) -> LoadedArtifact:
    """Open the directory of a run other than a calibration."""
    if config.job == "evolve":
        trace = read_trace(path / LEDGER) if (path / LEDGER).exists() else None
        if not (path / REPORT).exists():
            return LoadedArtifact(path, "search", trace, note=UNFINISHED)
        opened = _load_json(path / REPORT)
        content = opened.content.model_copy(update={"trace": trace})
        return replace(opened, content=content, places=_keep_existing(sorted(path.glob("plan*.json"))))
    results = {"headroom": REPORT, "evaluate": REPORT, "select": SELECTION, "validate": Path(VALIDATION).name}
    if config.job in results and (path / results[config.job]).exists():
        return _load_json(path / results[config.job])
    is_stage = not config.options  # whose directory has replies alone
    if config.job in ("headroom", "evaluate") or is_stage:
        note = None if is_stage else UNFINISHED
        replies = read_replies(path / LEDGER) if (path / LEDGER).exists() else {}
        return LoadedArtifact(path, "replies", list(replies.values()), note=note)
    plans = sorted(path.glob("plan*.json"), key=lambda plan: (len(plan.name), plan.name))
    stages = [*sorted(path.glob("fit/*")), path / "curves"]
    places = _keep_existing([*plans, *(stage for stage in stages if (stage / PROFILE).exists())])
    if (path / WHOLE_RUN).exists():
        return replace(_load_json(path / WHOLE_RUN), places=places)
    return LoadedArtifact(path, "run", None, note=UNFINISHED, places=places)


def _keep_existing(places: list[Path]) -> tuple[Path, ...]:
    return tuple(place for place in places if place.exists())


# --- files ------------------------------------------------------------------------------------------------------------


def _load_yaml(path: Path) -> LoadedArtifact:
    from kvsearch.core.limits import MOST_YAML
    from kvsearch.core.yaml_document import YamlDocument
    from kvsearch.selection.from_yaml import plan_of_document

    document = YamlDocument(read_text(path, max_bytes=MOST_YAML), str(path))
    content = document.data
    if not isinstance(content, dict):
        raise _unknown_file_error(path)
    if content.get("format") != STRATEGY_FORMAT:
        return LoadedArtifact(path, "recipe", {"recipe of": "any command", **content}, content)
    plan = plan_of_document(document)
    return LoadedArtifact(path, "plan", plan, plan.model_dump(mode="json"))


def _load_json(path: Path) -> LoadedArtifact:
    data = read_json(path)
    if not isinstance(data, dict):
        raise _unknown_file_error(path)
    if data.get("format") == PLAN_FORMAT:
        plan = load_plan(path)
        return LoadedArtifact(path, "plan", plan, plan.model_dump(mode="json"))
    if data.get("format") == CONTEXTS_FORMAT and path.name == CONTEXTS:
        return LoadedArtifact(path, "contexts", read_contexts(path.parent), data)
    schema = data.get("schema")
    if schema == RUN and path.name == CONFIG:
        config = read_config(path.parent)
        assert config is not None
        return LoadedArtifact(path, "recipe", {"recipe of": config.job, **config.options}, data, config)
    name, _, _ = str(schema).partition("/")
    if name not in RECORDS:
        raise _unknown_file_error(path)
    kind, record = RECORDS[name]
    return LoadedArtifact(path, kind, read_content(record, data, path), data)


def _unknown_file_error(path: Path) -> UsageError:
    return UsageError(f"{path} is nothing that kvsearch can show, which is: {KNOWN_FILES}")

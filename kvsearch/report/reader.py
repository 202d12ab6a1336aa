"""One reader for all that kvsearch writes: what a file or a directory is, where it comes from, and what is in it.

The directory of a run stands for its result or, unfinished, for what is there of it. So does a file that the run keeps
beside its report, such as the ledger; any other file stands for itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvsearch.calibration.directory import profile_file
from kvsearch.choose.verdicts import FILE as VALIDATION
from kvsearch.errors import UsageError
from kvsearch.papers.catalog import TABLES
from kvsearch.papers.table import STAGES
from kvsearch.plan import Plan, Profile
from kvsearch.plan.files import read_bytes
from kvsearch.plan.parsing import read_json
from kvsearch.plan.profile import load_profile
from kvsearch.plan.saved import FOLDER_PLAN, PROFILE, load_plan
from kvsearch.plan.schema import PLAN_FORMAT
from kvsearch.plan.yaml import STRATEGY_FORMAT
from kvsearch.runs.contexts import CONTEXTS, CONTEXTS_FORMAT, ContextsFile, read_contexts
from kvsearch.runs.directory import LEDGER
from kvsearch.runs.identity import CONFIG, RunConfig, read_config
from kvsearch.runs.identity import SCHEMA as RUN

if TYPE_CHECKING:
    from kvsearch.choose.selection import SelectionResult
    from kvsearch.choose.verdicts import Validation
    from kvsearch.report.files.evaluation import StoredEvaluation
    from kvsearch.report.files.perplexity import StoredPerplexity
    from kvsearch.report.files.replies import Replies
    from kvsearch.report.files.search import StoredSearch
    from kvsearch.report.files.selection import StoredRun
    from kvsearch.report.headroom import HeadroomResult
    from kvsearch.report.reproduced import Reproduced
    from kvsearch.report.speed import SpeedView
    from kvsearch.runtime.cache_file import CacheHeader

Kind = Literal[
    "plan", "profile", "evaluation", "perplexity", "headroom", "validation", "selection", "search", "run", "replies",
    "contexts", "recipe", "reproduction", "cache", "speed",
]  # fmt: skip
REPORT, FRONT, SELECTION, WHOLE_RUN = "report.json", "front.json", "selection.json", "run.json"
CACHE = ".kv"  # the suffix of a compressed cache
BESIDE = (LEDGER, "samples.csv", "tables.md")  # what a run keeps beside its report
KNOWN = (
    "a plan, a strategy or recipe in YAML, a profile, the directory of a calibration, evaluation, validation, "
    "selection, search, run or reproduction, the files in these, a compressed cache (.kv), and what evaluate, bench "
    "and others print with --json"
)


@dataclass(frozen=True)
class Recipe:
    """Options as a recipe or the configuration of a run has them; `job` is None where the file does not say it."""

    job: str | None
    options: dict[str, Any]


if TYPE_CHECKING:
    Content = (
        Plan | Profile | StoredEvaluation | StoredPerplexity | HeadroomResult | Validation | tuple[SelectionResult, ...]
        | StoredSearch | StoredRun | Replies | ContextsFile | Recipe | Reproduced | CacheHeader | SpeedView
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Opened:
    """What there is at `path`.

    Args:
        kind: what it is; see `Kind`.
        content: what is in it; None of what has several stages or tables, and no result yet or more than one.
        model: the name of the model that it is about; None where it is about none, or does not say it.
        data: the file as parsed JSON, where it is one.
        config: the configuration of the run that wrote it, where that is there.
        note: why it is not all there; None: it is.
        places: what is kept with it and can be opened by itself.
    """

    path: Path
    kind: Kind
    content: Content | None
    model: str | None = None
    data: Any = None
    config: RunConfig | None = None
    note: str | None = None
    places: tuple[Path, ...] = ()

    @cached_property
    def parts(self) -> tuple[Opened, ...]:
        """What is kept with it, opened; errors as for `open_path`."""
        return tuple(map(open_path, self.places))


def open_path(path: Path) -> Opened:
    """Read a file or a directory that kvsearch has written.

    Raises:
        UsageError: there is nothing, it is damaged, or is nothing of ours; the message lists what can be read. A
            calibration that is not finished, as its samples say nothing before it is.
        EnvironmentFault: it cannot be read.
    """
    if path.is_dir():
        return _directory(path)
    if path.name in BESIDE and read_config(path.parent) is not None:
        return replace(_directory(path.parent), path=path)
    if path.suffix in (".yaml", ".yml"):
        return _yaml(path)
    if path.suffix == ".json":
        return _json(path)
    if path.suffix == CACHE:
        return _cache(path)
    if path.suffix == ".safetensors" or not path.exists():
        return _profile(path)
    raise _unknown(path)


# --- directories ------------------------------------------------------------------------------------------------------


def _directory(path: Path) -> Opened:
    config = read_config(path)
    if config is not None and config.job != "calibrate":
        return replace(_of_run(path, config), path=path, config=config)
    if (path / PROFILE).exists() or config is not None:
        below = [path / VALIDATION, *sorted(path.glob(f"selection/*/{SELECTION}"))]
        return replace(_profile(profile_file(path)), path=path, config=config, places=_there(below))
    for name in (FOLDER_PLAN, SELECTION, VALIDATION):
        if (path / name).is_file():
            return replace(_json(path / name), path=path)
    tables = _there([path / f"{name}.json" for name in TABLES])
    if tables or (path / STAGES).is_dir():
        return _reproduction(path, tables)
    raise _unknown(path)


def _reproduction(path: Path, tables: tuple[Path, ...]) -> Opened:
    """Open a directory of papers' tables: the only one there is, or which there are, and the stages of both."""
    ends = (PROFILE, REPORT, SELECTION)
    stages = [place for place in sorted((path / STAGES).glob("*")) if any((place / end).exists() for end in ends)]
    if len(tables) == 1:
        return replace(_json(tables[0]), path=path, places=tuple(stages))
    note = None if tables else "no table is finished here: give the command of `kvsearch reproduce` again to go on"
    return Opened(path, "reproduction", None, note=note, places=(*tables, *stages))


def _of_run(path: Path, config: RunConfig) -> Opened:
    """Open the directory of a run other than a calibration."""
    model = config.options.get("model")
    begun = Opened(path, "replies", None, model if isinstance(model, str) else None, config=config)
    if config.job == "evaluate" and (path / REPORT).exists():
        return _json(path / REPORT)
    is_stage = config.job in ("validate", "select") or not config.options  # whose directory has replies alone
    if config.job == "evaluate" or is_stage:
        from kvsearch.report.files.replies import read_answered

        note = None if is_stage else "this evaluation is not finished: give its command again to go on"
        return replace(begun, content=read_answered(path), note=note)
    if config.job == "evolve":
        return _search(path, begun)
    plans, stages = sorted(path.glob("plan*.json")), [*sorted(path.glob("fit/*")), path / "curves"]
    places = _there([*plans, *(stage for stage in stages if (stage / PROFILE).exists())])
    if (path / WHOLE_RUN).exists():
        return replace(_json(path / WHOLE_RUN), places=places)
    note = "this run is not finished: give its command again to go on"
    return replace(begun, kind="run", note=note, places=places)


def _search(path: Path, begun: Opened) -> Opened:
    from kvsearch.report.files.search import StoredSearch, read_search, read_trace

    trace = read_trace(path / LEDGER) if (path / LEDGER).exists() else None
    for name in (REPORT, FRONT):
        if (path / name).exists():
            data = read_json(path / name)
            result, plans = read_search(data, path / name), _there(sorted(path.glob("plan*.json")))
            content = StoredSearch(result, trace)
            return replace(begun, kind="search", content=content, model=result.model, data=data, places=plans)
    note = "this search is not finished: give its command with --resume to go on"
    return replace(begun, kind="search", content=StoredSearch(None, trace), note=note)


def _there(places: list[Path]) -> tuple[Path, ...]:
    return tuple(place for place in places if place.exists())


# --- files ------------------------------------------------------------------------------------------------------------


def _profile(path: Path) -> Opened:
    from kvsearch.report.files.profile import require_shown

    profile = load_profile(path)
    require_shown(profile, path)
    return Opened(path, "profile", profile, profile.metadata.model.name)


def _cache(path: Path) -> Opened:
    from kvsearch.runtime.cache_file import read_header

    header = read_header(path)
    return Opened(path, "cache", header, header.plan.model.name)


def _yaml(path: Path) -> Opened:
    from kvsearch.plan.limits import MOST_YAML
    from kvsearch.plan.yaml_document import parse_yaml
    from kvsearch.strategies.from_yaml import plan_of_document

    document = parse_yaml(read_bytes(path, MOST_YAML), str(path))
    found = document.data
    if not isinstance(found, dict):
        raise _unknown(path)
    if found.get("format") != STRATEGY_FORMAT:
        for place in () if document.problems else tuple(document.lines):
            value: Any = reduce(lambda inner, key: inner[key], place, found)
            if isinstance(value, float) and not math.isfinite(value):  # JSON has no such numbers
                document.tell(place, f"must be a finite number, not {value}")
        if document.problems:
            raise document.refusal()
        return Opened(path, "recipe", Recipe(None, found), _text(found.get("model")), found)
    plan = plan_of_document(document)
    return Opened(path, "plan", plan, plan.model.name)


def _json(path: Path) -> Opened:
    data = read_json(path)
    if not isinstance(data, dict):
        raise _unknown(path)
    if data.get("format") == PLAN_FORMAT:
        plan = load_plan(path)
        return Opened(path, "plan", plan, plan.model.name, data)
    if data.get("format") == CONTEXTS_FORMAT and path.name == CONTEXTS:
        return Opened(path, "contexts", read_contexts(path.parent), data=data)
    schema = data.get("schema")
    if schema == RUN and path.name == CONFIG:
        config = read_config(path.parent)
        assert config is not None
        return Opened(
            path, "recipe", Recipe(config.job, config.options), _text(config.options.get("model")), data, config
        )
    name, _, _ = str(schema).partition("/")
    if name not in READERS:
        raise _unknown(path)
    return READERS[name](data, path)


def _evaluation(data: dict[str, Any], path: Path) -> Opened:
    from kvsearch.report.files.evaluation import StoredEvaluation
    from kvsearch.report.files.stored import stored

    found = stored(StoredEvaluation, data, path)
    return Opened(path, "evaluation", found, found.model, data)


def _perplexity(data: dict[str, Any], path: Path) -> Opened:
    from kvsearch.report.files.perplexity import read_perplexity

    found = read_perplexity(data, path)
    return Opened(path, "perplexity", found, found.result.model, data)


def _headroom(data: dict[str, Any], path: Path) -> Opened:
    from kvsearch.report.files.stored import stored
    from kvsearch.report.headroom import HeadroomResult

    found = stored(HeadroomResult, data, path)
    return Opened(path, "headroom", found, found.model, data)


def _speed(data: dict[str, Any], path: Path) -> Opened:
    from kvsearch.report.files.stored import stored
    from kvsearch.report.speed import SpeedView

    found = stored(SpeedView, data, path)
    return Opened(path, "speed", found, _text(found.machine.get("model")), data)


def _validation(data: dict[str, Any], path: Path) -> Opened:
    from kvsearch.choose.verdicts import load_validation

    found = load_validation(path)
    if found is None:  # it was there a moment ago
        raise _unknown(path)
    return Opened(path, "validation", found, found.model.name, data)


def _selection(data: dict[str, Any], path: Path) -> Opened:
    from kvsearch.report.files.selection import read_selections

    found = read_selections(data, path)
    return Opened(path, "selection", found, found[0].model, data)


def _found_by_search(data: dict[str, Any], path: Path) -> Opened:
    from kvsearch.report.files.search import StoredSearch, read_search

    found = read_search(data, path)
    return Opened(path, "search", StoredSearch(found, None), found.model, data)


def _run(data: dict[str, Any], path: Path) -> Opened:
    from kvsearch.report.files.selection import read_run

    found = read_run(data, path)
    return Opened(path, "run", found, found.choices[0].selection.model, data)


def _reproduced(data: dict[str, Any], path: Path) -> Opened:
    from kvsearch.report.reproduced import Reproduced

    found = Reproduced.read(data, path)
    return Opened(path, "reproduction", found, _text(found.content.get("model")), data)


READERS: Mapping[str, Callable[[dict[str, Any], Path], Opened]] = {
    "kvsearch.evaluation": _evaluation,
    "kvsearch.perplexity": _perplexity,
    "kvsearch.headroom": _headroom,
    "kvsearch.speed": _speed,
    "kvsearch.validation": _validation,
    "kvsearch.selection": _selection,
    "kvsearch.selections": _selection,
    "kvsearch.evolution": _found_by_search,
    "kvsearch.front": _found_by_search,
    "kvsearch.run-report": _run,
    "kvsearch.reproduction": _reproduced,
}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _unknown(path: Path) -> UsageError:
    return UsageError(f"{path} is nothing that kvsearch can show, which is: {KNOWN}")

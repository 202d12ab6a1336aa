"""The stages of a paper's table, each run by the job that it names and kept under a name of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsearch.errors import IncompatibleError, UsageError
from kvsearch.jobs.groups import Loading, TaskDetails
from kvsearch.jobs.talk import Talk
from kvsearch.papers.table import ASKING, STAGES, Stage, StageJob
from kvsearch.plan.canonical import canonical_json
from kvsearch.plan.parsing import read_json
from kvsearch.runs.lock import require_lock

if TYPE_CHECKING:
    from kvsearch.jobs.reproduce import ReproduceOptions
    from kvsearch.models.loading import LoadedModel
    from kvsearch.report.paper_scores import Finished
    from kvsearch.tasks.base import Task

PLAN, REPORT, SELECTION = "plan.json", "report.json", "selection.json"
DECIDING = ("model", "seed", "max_length", "dtype", "revision")  # what every stage depends on
MADE: frozenset[StageJob] = frozenset({"export", "scale"})  # a file, made in a moment


def options_read(spec: str) -> set[str]:
    """Return which options the tasks of a spec read, by the names of fields; UsageError for an unknown task."""
    from kvsearch.tasks.catalog import find_entries

    return {"length" if option == "lengths" else option for entry in find_entries(spec) for option in entry.reads}


class Stages:
    """The stages of a table on one model, in their order; `finished` are those that were run.

    Raises:
        UsageError: unknown tasks, or details of tasks that none of the stages reads.
    """

    def __init__(self, options: ReproduceOptions, stages: Sequence[Stage]) -> None:
        self.options, self.all = options, tuple(stages)
        self.keys: dict[str, str] = {}
        for stage in self.all:
            self.keys[stage.name] = self._key(stage)
        self.finished: list[Finished] = []
        self.impossible: dict[str, str] = {}  # why the model has none of a stage, by its name
        self._check()

    # --- what there is ------------------------------------------------------------------------------------------------

    @property
    def asking(self) -> list[Stage]:
        """The stages that ask tasks."""
        return [stage for stage in self.all if stage.job in ASKING]

    def tasks_of(self, stage: Stage) -> list[Task]:
        """Return what a stage asks: of its split, or of one where it has several."""
        from kvsearch.tasks.catalog import TaskOptions, find_tasks

        asked = stage.options
        more = {name: value for name, value in self._details(stage).items() if name != "length"}
        return find_tasks(asked["tasks"], TaskOptions(asked.get("length"), asked.get("split"), **more))

    def _details(self, stage: Stage) -> dict[str, Any]:
        """Return the options that say what tasks are made of, those that these tasks read."""
        read = options_read(stage.options["tasks"])
        given = {name: getattr(self.options, name) for name in TaskDetails.model_fields if name in read - {"length"}}
        return {name: value for name, value in given.items() if value is not None}

    def _check(self) -> None:
        read: set[str] = set()
        for stage in self.asking:
            read |= options_read(stage.options["tasks"])
            self.tasks_of(stage)
        for name in TaskDetails.model_fields:
            if getattr(self.options, name) is not None and name not in read:
                raise UsageError(f"--{name.replace('_', '-')}: no task of {self.options.table} reads it, leave it out")

    def require_data(self, loaded: LoadedModel) -> None:
        """Find out before the first stage whether the rows of all tasks are here: a context of each is read."""
        from kvsearch.tasks.encode import counter

        for stage in self.asking:
            for task in self.tasks_of(stage):
                task.examples(1, self.options.seed, counter(loaded.tokenizer))

    def _key(self, stage: Stage) -> str:
        """Return a short hash of all that a stage is asked for, those before it included."""
        content = {
            "job": stage.job, "options": _filled(stage.options, self.keys),
            "methods": _filled(stage.methods, self.keys),
            "details": self._details(stage) if stage.job in ASKING else {},
            **{name: getattr(self.options, name) for name in DECIDING},
        }  # fmt: skip
        return sha256(canonical_json(json.loads(json.dumps(content, default=str)))).hexdigest()[:8]

    def place(self, stage: Stage) -> Path:
        """Return the directory of a stage, or its file."""
        root, key = self.options.place, self.keys[stage.name]
        if stage.job in MADE:
            return self.plan_file(stage)
        if stage.job == "validate":
            return root / STAGES / f"polykv-{self.keys['polykv']}"
        return root / STAGES / f"{stage.name}-{key}"

    def output(self, stage: Stage) -> Path:
        """Return what a stage gives to later ones: the directory of a profile, or a plan."""
        if stage.job == "select":
            return self.plan_file(stage)
        return self.place(stage) / (PLAN if stage.job == "evolve" else "")

    def plan_file(self, stage: Stage) -> Path:
        """Return the file of a plan that has the name of its stage, by which an evaluation calls it."""
        return self.options.place / "plans" / self.keys[stage.name] / f"{stage.name}.json"

    @property
    def outputs(self) -> dict[str, str]:
        """What stages give, by their names."""
        return {stage.name: str(self.output(stage)) for stage in self.all}

    def as_json(self) -> list[dict[str, Any]]:
        """Return what every stage did and where it is kept."""
        return [
            {"name": stage.name, "job": stage.job, "options": dict(stage.options), "kept": str(self.place(stage))}
            for stage in self.all
        ]

    # --- running ------------------------------------------------------------------------------------------------------

    def run(self, stage: Stage, loaded: LoadedModel, talk: Talk) -> None:
        """Run a stage, or read what it has left; one whose model cannot do it is noted in `impossible`."""
        from kvsearch.report.paper_scores import Finished

        needed = [name for name in self._needs(stage.options) if name in self.impossible]
        if needed and stage.job != "evaluate":
            self.impossible[stage.name] = self.impossible[needed[0]]
            return
        try:
            found = RUNNERS[stage.job](self, stage, loaded, talk)
        except IncompatibleError as error:
            if stage.job != "calibrate":
                raise
            self.impossible[stage.name] = str(error)
            return
        self.finished.append(Finished(stage, **found))

    def _needs(self, value: object) -> list[str]:
        """Return the earlier stages that options name."""
        text = json.dumps(value, default=str)
        return [name for name in self.keys if f"{{{name}}}" in text]

    def made(self, stage: Stage) -> dict[str, Any]:
        """Return the options of a stage that makes a plan in a moment, and makes it again; its folder is there."""
        path = self.place(stage)
        self.make_folder(path)
        return {**_filled(stage.options, self.outputs), "output": path, "force": True}

    def make_folder(self, path: Path) -> None:
        """Make the folder of a file, in the directory that is there; errors as for `require_lock`."""
        require_lock(self.options.place)
        path.parent.mkdir(parents=True, exist_ok=True)

    def shared(self, stage: Stage, **more: Any) -> dict[str, Any]:
        """Return the options of a stage with those that all have, and where earlier stages are."""
        mine, loading = self.options, Loading.model_fields
        given = {name: getattr(mine, name) for name in (*loading, "model", "seed", "max_length")}
        return {**given, **_filled(stage.options, self.outputs), **more}

    def asked(self, stage: Stage, **more: Any) -> dict[str, Any]:
        """Return the options of a stage that asks tasks."""
        mine = self.options
        return self.shared(stage, **self._details(stage), batch=mine.batch, max_memory=mine.max_memory, **more)

    def usable(self, stage: Stage, loaded: LoadedModel) -> tuple[Stage, dict[str, str]]:
        """Return an evaluation without the methods that the model cannot run, and why it cannot, by their names.

        Raises:
            IncompatibleError: it can run none of them.
        """
        from kvsearch.runtime.cache import check_rotary
        from kvsearch.strategies.method_list import find_methods, find_sizes

        left = {
            method.partition("=")[0]: self.impossible[name]
            for method in stage.methods
            for name in self._needs(method)
            if name in self.impossible
        }
        kept = [method for method in stage.methods if not set(self._needs(method)) & self.impossible.keys()]
        plans = tuple(
            plan for plan in stage.options.get("plan", ()) if not set(self._needs(plan)) & self.impossible.keys()
        )
        found = find_methods(",".join(_filled(kept, self.outputs)), stage.options.get("settings", ())) if kept else []
        sizes = find_sizes(stage.options.get("budgets"), stage.options.get("ratios"))
        for method in found:
            try:
                method.check(sizes)
                check_rotary(loaded.model, [method.policy])
                for size in sizes:
                    method.program(loaded, size, stage.options.get("phases", "prefill"))
            except UsageError as error:
                left[method.name] = str(error)
        usable = tuple(text for text, method in zip(kept, found, strict=True) if method.name not in left)
        if not usable:
            raise IncompatibleError(f"this model can run none of the methods: {next(iter(left.values()))}")
        return replace(stage, methods=usable, options={**stage.options, "plan": plans}), left


def _filled(value: Any, outputs: Mapping[str, str]) -> Any:
    """Return options with what earlier stages give in the place of their names in braces."""
    if isinstance(value, str):
        for name, path in outputs.items():
            value = value.replace(f"{{{name}}}", path)
        return value
    if isinstance(value, Mapping):
        return {key: _filled(one, outputs) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_filled(one, outputs) for one in value)
    return value


# --- a runner for every kind of job ----------------------------------------------------------------------------------


def _calibrate(stages: Stages, stage: Stage, loaded: LoadedModel, talk: Talk) -> dict[str, Any]:
    from kvsearch.calibration.polykv.options import PolykvOptions
    from kvsearch.jobs.calibrate import CalibrateOptions, calibrate

    options = CalibrateOptions.of(**stages.shared(stage, output=stages.place(stage)))
    remarks = options.remarks() if isinstance(options, PolykvOptions) else ()
    return {"profile": calibrate(options.with_model(loaded), talk=talk), "remarks": remarks}


def _evolve(stages: Stages, stage: Stage, loaded: LoadedModel, talk: Talk) -> dict[str, Any]:
    from kvsearch.jobs.evolve import EvolveOptions, evolve
    from kvsearch.plan import load_plan
    from kvsearch.runs.directory import CONFIG

    place = stages.place(stage)
    if not (place / REPORT).exists():
        resume = (place / CONFIG).exists()
        options = EvolveOptions.of(**stages.asked(stage, output=place, resume=resume))
        evolve(options.with_model(loaded), talk=talk)
    return {"plan": load_plan(place / PLAN)}


def _export(stages: Stages, stage: Stage, loaded: LoadedModel, talk: Talk) -> dict[str, Any]:  # noqa: ARG001
    from kvsearch.jobs.export import ExportOptions, export

    options = ExportOptions.of(**stages.made(stage))
    return {"plan": export(options, talk=talk)}


def _scale(stages: Stages, stage: Stage, loaded: LoadedModel, talk: Talk) -> dict[str, Any]:  # noqa: ARG001
    from kvsearch.jobs.plan import ScaleOptions, scale

    scale(ScaleOptions.of(**stages.made(stage)), talk=talk)
    return {}


def _select(stages: Stages, stage: Stage, loaded: LoadedModel, talk: Talk) -> dict[str, Any]:
    from kvsearch.jobs.select import SelectOptions, select
    from kvsearch.report.files.selection import read_selections

    place, plan = stages.place(stage), stages.output(stage)
    if not (place / SELECTION).exists() or not plan.exists():
        stages.make_folder(plan)
        given = stages.asked(stage, output=plan, run=place, force=plan.exists())
        select(SelectOptions.of(**given).with_model(loaded), talk=talk)
    found = read_json(place / SELECTION)
    read_selections(found, place / SELECTION)
    return {"selection": found}


def _validate(stages: Stages, stage: Stage, loaded: LoadedModel, talk: Talk) -> dict[str, Any]:
    from kvsearch.jobs.validate import ValidateOptions, validate

    return {"validation": validate(ValidateOptions.of(**stages.asked(stage)).with_model(loaded), talk=talk).found}


def _evaluate(stages: Stages, stage: Stage, loaded: LoadedModel, talk: Talk) -> dict[str, Any]:
    from kvsearch.jobs.evaluate import Evaluated, EvaluateOptions, evaluate

    usable, left = stages.usable(stage, loaded)
    methods = ",".join(_filled(usable.methods, stages.outputs))
    options = EvaluateOptions.of(**stages.asked(usable, methods=methods, output=stages.place(stage)))
    found = evaluate(options.with_model(loaded), talk=talk)
    assert isinstance(found, Evaluated)
    return {"comparison": found.comparison, "losses": found.losses or (), "left_out": left}


RUNNERS: Mapping[StageJob, Any] = {
    "calibrate": _calibrate, "evolve": _evolve, "export": _export, "scale": _scale, "select": _select,
    "validate": _validate, "evaluate": _evaluate,
}  # fmt: skip

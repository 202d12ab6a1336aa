"""Every kind of file that users write or pass on: valid ones, and what reads one as the commands do."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from io import StringIO
from pathlib import Path
from typing import Any

from kvsearch.calibration.data import load_calibration_data
from kvsearch.cli.console import Screen
from kvsearch.commands import report as report_job
from kvsearch.commands.calibrate import CalibrateOptions
from kvsearch.commands.evaluate import EvaluateOptions
from kvsearch.commands.evolve import EvolveOptions
from kvsearch.commands.run import RunOptions
from kvsearch.core.canonical import canonical_json
from kvsearch.core.errors import KvsearchError
from kvsearch.core.resources import find_resource
from kvsearch.plan import Plan, load_plan, save_plan
from kvsearch.plan.yaml import plan_to_yaml
from kvsearch.report.artifacts import open_path
from kvsearch.report.integrity import Verification
from kvsearch.report.page import group_by_model, render
from kvsearch.selection.from_yaml import plan_from_yaml
from kvsearch.tasks.base import Task
from kvsearch.tasks.encode import encode, make_token_counter
from kvsearch.tasks.longbench import LongBenchTask
from kvsearch.tasks.maths import Gsm8kTask
from kvsearch.tasks.niah import NiahTask
from kvsearch.tasks.rows import read_archive
from kvsearch.tasks.ruler import RulerTask
from kvsearch.tasks.user_files import JsonlTask, TextTask
from scripts.train_bundled import tokenizer
from tests.plan.builders import make_plan, phase_dict
from tests.torture import valid_data

SEEDS = Path(__file__).parents[1] / "seeds"  # what commands wrote on the bundled model
OPTIONS = {"calibrate": CalibrateOptions, "evaluate": EvaluateOptions, "evolve": EvolveOptions, "run": RunOptions}


@dataclass(frozen=True)
class Reader:
    """A kind of file: the name that it has, valid ones, and a function that raises `KvsearchError` for a bad one."""

    file: str
    valid: Callable[[], Sequence[bytes]]
    read: Callable[[Path], object]
    beside: str = ""  # the name of a text that lies beside it


def show(path: Path) -> None:
    """Do what `show`, `verify` and `report` do with a file; raises as `show`."""
    with suppress(KvsearchError):  # as of what is none of our files
        assert list(Verification([path]).parts())
    view = report_job.show(report_job.ShowOptions(path=path))
    Screen(file=StringIO(), width=100).print_parts(view.parts())
    json.dumps(view.as_json(), sort_keys=True, allow_nan=False).encode()
    render(group_by_model([open_path(path)]))


def read_plan(path: Path) -> None:
    show(path)
    plan = load_plan(path)
    save_plan(plan, path.with_name("again.json"), overwrite=True)
    assert load_plan(path.with_name("again.json")) == plan
    assert plan_from_yaml(plan_to_yaml(plan), "again") == plan


def read_strategy(path: Path) -> None:
    show(path)
    plan = plan_from_yaml(path.read_text(), str(path))
    assert plan_from_yaml(plan_to_yaml(plan), "again") == plan


def read_recipe(job: str, path: Path) -> None:
    show(path)
    options: Any = OPTIONS[job].of(recipe=path, model="bundled", output=Path("runs/new"))
    assert options.to_recipe()


@cache
def make_tokenizer() -> Any:
    return tokenizer()


def read_task(load: Callable[[Path], Task], path: Path) -> None:
    """Do with a task what an evaluation does before a model reads it, and score replies."""
    task = load(path)
    examples = task.examples(3, 0, make_token_counter(make_tokenizer()))
    for example in examples:
        for query in example.queries:
            for reply in ("", "seven", query.right_reply or "", "\ud800", "1.5 10"):
                assert 0 <= task.score(reply, query) <= 1
    assert encode(make_tokenizer(), task, examples, limit=4096).prompts


def read_calibration(path: Path) -> None:
    data = load_calibration_data(path, bare=False)
    assert data.hashes
    for context in data.contexts:
        for pair in context.questions:
            make_tokenizer()(context.text + data.prompt.replace("{question}", pair.question) + pair.answer)


def read_text(path: Path) -> None:
    make_tokenizer()(TextTask.load(path, length=2).text)
    read_task(lambda haystack: NiahTask(lengths=(300,), depths=(0, 50), haystack=haystack), path)


def read_templates(path: Path) -> None:
    template = LongBenchTask("narrativeqa", source=path.with_name("rows.jsonl"), prompts=path).template
    assert isinstance(template.context("{x}") + template.question("{y}"), str)


@cache
def make_streaming_plan() -> Plan:
    budgets = [[10, 6], [8, 8], [4, 12]]
    return make_plan(budgets, prefill=phase_dict(budgets, {"name": "streaming", "params": {"sinks": 2}}))


def list_recipes(job: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted(find_resource(f"recipes/{job}").glob("*.yaml"))]


def read_seeds(*names: str) -> list[bytes]:
    return [(SEEDS / name).read_bytes() for name in names]


HAND_WRITTEN = {
    "plan": Reader("plan.json", lambda: [canonical_json(make_streaming_plan())], read_plan),
    "strategy": Reader("strategy.yaml", lambda: [plan_to_yaml(make_streaming_plan()).encode()], read_strategy),
    **{
        f"recipe-{job}": Reader("recipe.yaml", partial(list_recipes, job), partial(read_recipe, job)) for job in OPTIONS
    },
    "tasks": Reader("tasks.jsonl", valid_data.tasks, partial(read_task, JsonlTask.load)),
    "tasks-tables": Reader("tasks.csv", valid_data.task_tables, partial(read_task, JsonlTask.load)),
    "calibration": Reader("calibration.json", valid_data.calibrations, read_calibration, "beside.txt"),
    "text": Reader("text.txt", valid_data.texts, read_text),
    "templates": Reader("prompts.json", valid_data.templates, read_templates),
}


def read_questions(name: str, path: Path) -> None:
    read_task(lambda file: RulerTask(name, length=900, qa_file=file), path)


def read_rows(make: Callable[..., Task], path: Path) -> None:
    read_task(lambda source: make(source=source), path)


COPIED = {
    "qa-squad": Reader("squad.json", valid_data.squad, partial(read_questions, "qa_1")),
    "qa-hotpot": Reader("hotpot.json", valid_data.hotpot, partial(read_questions, "qa_2")),
    "rows-longbench": Reader(
        "narrativeqa.jsonl", valid_data.longbench, partial(read_rows, partial(LongBenchTask, "narrativeqa"))
    ),
    "rows-gsm8k": Reader("test.jsonl", valid_data.gsm8k, partial(read_rows, partial(Gsm8kTask, shots=1))),
    "rows-parquet": Reader("test.parquet", valid_data.parquet, partial(read_rows, partial(Gsm8kTask, shots=1))),
    "rows-archive": Reader(
        "data.zip", valid_data.archives, lambda path: read_archive(path, ["data/narrativeqa.jsonl"])
    ),
}


def is_report(path: Path) -> bool:
    return path.suffix == ".json" and not path.name.startswith(("config-", "contexts", "losses", "validation"))


WRITTEN = {
    **{
        f"profile-{path.stem}": Reader("profile.safetensors", partial(read_seeds, path.name), show)
        for path in sorted(SEEDS.glob("*.safetensors"))
    },
    **{
        f"result-{path.stem}": Reader("report.json", partial(read_seeds, path.name), show)
        for path in filter(is_report, sorted(SEEDS.iterdir()))
    },
}

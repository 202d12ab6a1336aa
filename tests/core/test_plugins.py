"""Parts of other packages: found by entry points, refused where they are broken, in the lists that they ask for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvsearch.core import plugins
from kvsearch.core.errors import EnvironmentFault, UsageError
from kvsearch.methods.base import CalibrationMethod
from kvsearch.methods.ratio_tables import LukvMethod
from kvsearch.plan.methods import CALIBRATION_METHODS, create_method, find_writer
from kvsearch.policies.snapkv import SnapKV
from kvsearch.tasks.catalog import describe_tasks, find_tasks, load_catalog
from kvsearch.tasks.described import read_task
from kvsearch.tasks.niah import NiahTask
from tests.cli.conftest import done

Install = Callable[..., None]


@dataclass(frozen=True)
class Loud(SnapKV):
    name: ClassVar[str] = "loud"
    is_baseline: ClassVar[bool] = True


@dataclass(frozen=True)
class Hay(NiahTask):
    name: str = "hay"


class Mine(LukvMethod):
    name = "mine"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Register entry points of a group, NAME=VALUE, in place of the installed ones."""

    def register(group: str, **points: str) -> None:
        found = [EntryPoint(name, value, group) for name, value in points.items()]
        monkeypatch.setattr(plugins, "entry_points", lambda group: [point for point in found if point.group == group])

    return register


def test_a_task_of_another_package(install: Install) -> None:
    install("kvsearch.tasks", hay=f"{__name__}:Hay", gone="no.such.module:X")
    (entry,) = describe_tasks("hay")
    assert (entry.spec, entry.category, entry.metric) == ("hay", "retrieval", "niah_recall")
    assert find_tasks("hay+synthetic:vote", {"length": (512,), "split": "select"})[0] == Hay((512,), split="select")
    with pytest.raises(EnvironmentFault, match=r"task gone of no.such.module cannot be imported .*: repair or"):
        find_tasks("gone")
    with pytest.raises(UsageError, match="hay is a single task, name it alone"):
        find_tasks("hay:easy")
    entries, faults = load_catalog()
    assert "hay" in {entry.spec for entry in entries}
    assert [fault["name"] for fault in faults] == ["gone"]
    out, _ = done("tasks")
    assert [line for line in out.splitlines() if line.startswith("gone (no.such.module): ")]
    assert json.loads(done("tasks", "--json")[0])["problems"] == faults


def test_a_method_of_another_package(install: Install) -> None:
    install("kvsearch.calibration_methods", mine=f"{__name__}:Mine", wrong=f"{__name__}:Loud")
    assert CALIBRATION_METHODS.list_names()[-2:] == ["mine", "wrong"]
    assert type(find_writer("mine")) is Mine
    with pytest.raises(EnvironmentFault, match=r"method wrong of .* is no CalibrationMethod"):
        create_method("wrong")
    assert type(find_writer("uninstalled")) is CalibrationMethod


MINE = """
category: extraction
metric: contains
max_new_tokens: 8
prompt: "Read.\\n{context}\\nAsked: {input}"
rows: {hub: me/mine}
columns: {context: passage, input: question, answers: answer}
"""


@pytest.fixture
def described(tmp_path: Path) -> Callable[[str], type[Any]]:
    def read(text: str) -> type[Any]:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return read_task(path)

    return read


def test_a_task_that_a_yaml_file_describes(described: Callable[[str], type[Any]], tmp_path: Path) -> None:
    kind = described(MINE)
    rows = [{"passage": f"Text {number}.", "question": f"What {number}?", "answer": number} for number in range(9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = kind(source=tmp_path / "rows.jsonl")
    (example,) = task.examples(1, 0)
    number = example.key
    assert (task.name, task.metric, example.task) == ("mine", "contains", "mine")
    assert example.context == f"Read.\nText {number}."
    assert example.queries[0].question == f"Asked: What {number}?"
    assert example.queries[0].answers == (number,)
    splits = [
        {one.key for one in kind(source=task.source, split=split).rows} for split in ("train", "select", "report")
    ]
    assert sum(map(len, splits)) == len(set.union(*splits)) == len(rows)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (("metric: contains", "metrik: contains"), "metrik"),
        (("{hub: me/mine}", "{huub: me/mine}"), "rows: "),
        (("answers: answer", "reply: answer"), "columns: 'reply' is none of context, input, answers"),
        (("max_new_tokens: 8", "max_new_tokens: many"), "max_new_tokens"),
    ],
)
def test_a_description_that_cannot_be_used(
    described: Callable[[str], type[Any]], changed: tuple[str, str], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        described(MINE.replace(*changed))

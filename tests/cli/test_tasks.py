"""`kvsearch tasks`, and the options that say which tasks are asked and what they are made of."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, ClassVar

import pytest
import typer
from typer.testing import CliRunner

from kvsearch.cli.command import command
from kvsearch.cli.console import Console
from kvsearch.cli.tasks import tasks
from kvsearch.config.options import Option
from kvsearch.jobs.groups import TaskDetails, WithTasks
from kvsearch.tasks.catalog import TaskOptions, flag
from kvsearch.tasks.entries import ENTRIES, SETS

USAGE = 2


class Probe(WithTasks):
    """Which tasks are asked."""

    job: ClassVar[str] = "probe"

    split: Annotated[str | None, Option("Part of the examples.")] = None


@command(Probe)
def probe(options: Probe, console: Console) -> None:
    """Print what was typed."""
    made = asdict(options.task_options(options.split))
    told = {name: _plain(value) for name, value in made.items() if value is not None}
    console.print_json({"tasks": options.tasks, **told})


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


def invoke(verb: object, *arguments: str, width: int = 160) -> tuple[int, str, str]:
    app = typer.Typer()
    app.command()(verb)  # type: ignore[type-var]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": str(width)})
    return result.exit_code, result.stdout, result.stderr


# --- options ------------------------------------------------------------------------------------------------------


def test_every_option_of_tasks_has_its_flag() -> None:
    known = [field.name for field in fields(TaskOptions)]
    taken = ["lengths" if name == "length" else name for name in TaskDetails.model_fields]
    assert sorted([*taken, "split"]) == sorted(known)
    _, out, _ = invoke(probe, "--help")
    assert [option for option in known if flag(option) not in out] == []


def test_what_is_typed_arrives() -> None:
    assert json.loads(invoke(probe)[1]) == {"tasks": None}  # which are then those of the model
    typed = [
        "--tasks", "ruler+gsm8k", "--length", "4096, 8192", "--split", "select", "--data", "me/it", "--data-revision",
        "v1", "--prompts", "p", "--haystack", "h", "--squad", "s", "--hotpot", "q", "--depths", "0,50", "--shots", "0",
        "--shots-from", "t", "--metric", "gsm8k",
    ]  # fmt: skip
    assert json.loads(invoke(probe, *typed)[1]) == {
        "tasks": "ruler+gsm8k", "lengths": [4096, 8192], "split": "select", "data": "me/it", "data_revision": "v1",
        "prompts": "p", "haystack": "h", "squad": "s", "hotpot": "q", "depths": [0, 50], "shots": 0, "shots_from": "t",
        "metric": "gsm8k",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flag", "typed", "words"),
    [
        ("--length", "4k", "--length: takes whole numbers with commas between them, got '4k'"),
        ("--length", "", "--length: takes whole numbers"),
        ("--depths", "0,,100", "--depths: takes whole numbers with commas between them, got '0,,100'"),
        ("--depths", "0.5", "got '0.5'"),
    ],
)
def test_numbers_that_are_none(flag: str, typed: str, words: str) -> None:
    code, out, talk = invoke(probe, flag, typed)
    assert (code, out) == (USAGE, "")
    assert words in talk


# --- the listing --------------------------------------------------------------------------------------------------


def test_the_listing_names_every_task() -> None:
    code, out, talk = invoke(tasks)
    assert code == 0
    listed = [line.split()[0] for line in out.splitlines() if line.strip()]
    assert [spec for spec in (*ENTRIES, "jsonl:FILE") if spec not in listed] == []
    assert [name for name, members in SETS.items() if f"{name} ({len(members)})" not in talk] == []
    assert "\x1b" not in out


def test_some_of_them() -> None:
    _, out, _ = invoke(tasks, "longbench:trec,samsum+gsm8k")
    rows = [line.split() for line in out.splitlines() if ":" in line or "gsm8k" in line]
    assert [row[0] for row in rows] == ["longbench:trec", "longbench:samsum", "gsm8k"]
    assert rows[1] == "longbench:samsum few-shot rouge_l rouge==1.0.1 zai-org/LongBench, or --data".split()


def test_one_in_full() -> None:
    code, out, _ = invoke(tasks, "ruler:qa_1")
    assert code == 0
    shown = {line[:10].strip(): line[10:].strip() for line in out.splitlines()}
    assert shown["needs"] == "--squad FILE, SQuAD's JSON"
    assert shown["splits"] == "train, select, report, all; default report"
    assert shown["options"] == "--length --split --squad"


def test_as_json() -> None:
    code, out, _ = invoke(tasks, "--json")
    assert code == 0
    told = json.loads(out)
    assert told["sets"] == {name: list(members) for name, members in SETS.items()}
    assert [one["spec"] for one in told["tasks"]] == [*ENTRIES, "jsonl:FILE"]
    (one,) = json.loads(invoke(tasks, "niah", "--json")[1])["tasks"]
    assert one == told["tasks"][-2]
    _, text, _ = invoke(tasks, "--help")
    assert [key for key in one if key not in text] == []


def test_an_unknown_one() -> None:
    code, out, talk = invoke(tasks, "longbench:trek")
    assert (code, out) == (USAGE, "")
    assert talk.startswith("kvsearch: error: unknown longbench task 'trek'; did you mean 'trec'?")


def test_options_load_nothing_heavy() -> None:
    code = "import sys, kvsearch.cli.tasks, kvsearch.jobs.groups; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0

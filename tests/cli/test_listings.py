"""`kvsearch policies`, `tasks` and `recipes`; the options that say what tasks are made of."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from kvsearch.cli.command import describe_flags
from kvsearch.commands.evaluate import EvaluateOptions
from kvsearch.commands.groups import TASK_DETAILS
from kvsearch.config.recipes import list_shipped_recipes
from kvsearch.core import plugins
from kvsearch.policies import registry
from kvsearch.tasks.catalog import ENTRIES, SETS, format_flag
from tests.cli.conftest import Run, done
from tests.cli.test_bad_input import ENVIRONMENT, refused


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["policies"], [*registry.BUILT_IN]),
        (["tasks"], [*ENTRIES, "jsonl:FILE", "ppl:FILE"]),
        (["tasks", "longbench:trec,samsum+gsm8k"], ["longbench:trec", "longbench:samsum", "gsm8k"]),
        (["recipes"], [*list_shipped_recipes()]),
        (["recipes", "run"], [name for name in list_shipped_recipes() if name.startswith("run/")]),
    ],
)
def test_a_listing_names_everything(words: list[str], names: list[str]) -> None:
    out, _ = done(*words)
    first = [line.split()[0] for line in out.splitlines() if line.strip()]
    assert [name for name in names if name not in first] == []
    assert "\x1b" not in out
    told, _ = done(*words, "--json")
    listed = json.loads(told)[words[0]]
    assert [one.get("name") or one["spec"] for one in listed] == (sorted(names) if words == ["policies"] else names)


def test_a_recipe_is_printed_whole() -> None:
    assert list_shipped_recipes()["run/bundled"].read_text().strip() in done("recipes", "run/bundled")[0]


def test_the_help_documents_every_key_of_the_json(run: Run) -> None:
    _, out, _ = run("policies", "--help")
    policy = json.loads(run("policies", "snapkv", "--json")[1])
    assert policy["parameters"]["window"] == 32
    for key in (*policy, "policies", "problems", "error"):
        assert key in out, key
    _, out, _ = run("tasks", "--help")
    tasks = json.loads(run("tasks", "niah", "--json")[1])
    assert tasks["sets"] == {name: list(members) for name, members in SETS.items()}
    assert [key for key in tasks["tasks"][0] if key not in out] == []


def test_a_broken_package_does_not_break_the_listing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("theirs", "no_such_module_here:X", registry.GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: EntryPoints([point]))
    out, _ = done("policies")
    assert "snapkv" in out
    assert [line for line in out.splitlines() if line.startswith("theirs (no_such_module_here): ")]
    refused(run, ENVIRONMENT, "repair or uninstall", "policies", "theirs")
    out, _ = done("policies", "--json")
    assert {"name", "package", "error"} == set(json.loads(out)["problems"][-1])


def test_every_option_of_tasks_has_its_flag_and_arrives() -> None:
    known = {option for entry in ENTRIES.values() for option in entry.reads}
    assert {*TASK_DETAILS, "split"} == known
    flags = [typed for offered in describe_flags(EvaluateOptions) for typed in offered.flags]
    assert [option for option in known if format_flag(option) not in flags] == []
    typed = {
        "length": "4096, 8192", "data": "me/it", "data_revision": "v1", "prompts": "p", "haystack": "h", "squad": "s",
        "hotpot": "q", "depths": "0,50", "shots": "0", "metric": "gsm8k",
    }  # fmt: skip
    details = EvaluateOptions.of(model="bundled", **typed).task_options("select")
    arrived = {
        "split": "select",
        **typed,
        "max_new_tokens": None,
        "length": (4096, 8192),
        "depths": (0, 50),
        "shots": 0,
    }
    assert {name: str(value) if isinstance(value, Path) else value for name, value in details.items()} == arrived

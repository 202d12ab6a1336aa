"""Tasks by name, the options they read, and what is told of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.errors import UsageError
from kvsearch.tasks.catalog import ENTRIES, SETS, describe_tasks, find_tasks
from kvsearch.tasks.longbench import LONGBENCH_E, LONGBENCH_ENGLISH, LONGBENCH_TASKS, LongBenchTask
from kvsearch.tasks.maths import Gsm8kTask, TracedTask
from kvsearch.tasks.niah import NiahTask
from kvsearch.tasks.ruler import RULER_TASKS, RulerTask
from kvsearch.tasks.user_files import JsonlTask
from tests.examples import at_most

ESSAYS = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery", "niah_turns")


def names(spec: str, **options: Any) -> list[str]:
    return [task.name for task in find_tasks(spec, options)]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """A file for every option that takes one; their content is looked at later, but for the haystack and prompts."""
    contents = {
        "haystack": "A story.", "squad": "{}", "hotpot": "[]", "prompts": '{"trec": "Read.\\n{context}\\n{input}"}',
    }  # fmt: skip
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    return {name: tmp_path / name for name in contents}


def test_whole_kinds_and_sets(files: dict[str, Path]) -> None:
    assert names("ruler", squad=files["squad"], hotpot=files["hotpot"]) == list(RULER_TASKS)
    assert names("ruler:no-qa") == [name for name in RULER_TASKS if not name.startswith("qa")]
    assert names("longbench") == list(LONGBENCH_TASKS)
    assert names("longbench:english") == list(LONGBENCH_ENGLISH)
    assert names("longbench:e") == list(LONGBENCH_E)
    assert names("longbench:trec_e,english,lsht") == ["trec_e", *LONGBENCH_ENGLISH, "lsht"]
    assert find_tasks("gsm8k") == [Gsm8kTask()]
    assert find_tasks("aime:25,24+math500") == [TracedTask(name) for name in ("aime25", "aime24", "math500")]
    assert names("aime") == ["aime24", "aime25"]
    assert find_tasks("niah") == [NiahTask()]


def write(path: Path) -> Path:
    path.write_text(json.dumps({"context": "c", "question": "q", "answers": ["a"]}))
    return path


@pytest.mark.parametrize("name", ["a:b.jsonl", "a+b.jsonl", "a,b.jsonl", "gsm8k.jsonl"])
def test_a_file(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name)
    (task, other) = find_tasks(f"jsonl:{path}+niah")
    assert isinstance(task, JsonlTask)
    assert (task.name, other.name) == (path.stem, "niah")


@at_most(15)
@given(st.lists(st.sampled_from([spec for spec in (*ENTRIES, *SETS) if "ruler:qa_" not in spec and spec != "ruler"])))
def test_any_specs_joined(specs: list[str]) -> None:
    expected = [member for spec in specs or ["gsm8k"] for member in SETS.get(spec, (spec,))]
    found = describe_tasks("+".join(specs) or "gsm8k")
    assert [facts.spec for facts in found] == list(dict.fromkeys(expected))


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("synthetik", "unknown task 'synthetik'; did you mean 'synthetic'"),
        ("", r"unknown task '' \(known: synthetic, ruler, longbench, .*\); a file is given as jsonl:FILE"),
        ("jsonl", "names no file: a file is given as jsonl:FILE"),
        ("mine.jsonl", "a file is given as jsonl:FILE: write jsonl:mine.jsonl"),
        ("jsonl:/no/such/file+longbnch", r"there is no file /no/such/file\+longbnch"),
        ("synthetic:votes", "unknown synthetic task 'votes'; did you mean 'vote'"),
        ("synthetic:vote,", "unknown synthetic task ''"),
        ("qa_1", "unknown task 'qa_1'; did you mean 'synthetic:qa_1' or 'ruler:qa_1'"),
        ("aime:26", "unknown aime task '26'; did you mean '25'"),
        ("gsm8k:easy", "unknown task 'gsm8k:easy': gsm8k is a single task, name it alone"),
        ("ppl:a.txt,ruler:vt", r"no file a.txt,ruler:vt: several tasks are joined by \+, as in ppl:FILE\+ruler"),
        ("ruler:vt,gsm8k", r"unknown ruler task 'gsm8k': several tasks are joined by \+, as in ruler\+gsm8k"),
        ("gsm8k+", "unknown task ''"),
        ("ruler", r"ruler:qa_1 needs questions: give --squad FILE, SQuAD's JSON, or choose ruler:no"),
        ("ruler:qa_2", "give --hotpot FILE"),
    ],
)
def test_unknown_tasks(spec: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem) as caught:
        find_tasks(spec)
    assert "\n" not in str(caught.value)


def test_options_reach_their_tasks(files: dict[str, Path]) -> None:
    common = {"split": "select"}
    hay, squad, hotpot = files["haystack"], files["squad"], files["hotpot"]
    assert find_tasks("ruler:niah_single_2,vt", dict(haystack=hay, length=(512,), **common)) == [
        RulerTask("niah_single_2", 512, "select", haystack=hay), RulerTask("vt", 512, "select"),
    ]  # fmt: skip
    assert find_tasks("ruler:qa_1,qa_2", {"squad": squad, "hotpot": hotpot}) == [
        RulerTask("qa_1", qa_file=squad), RulerTask("qa_2", qa_file=hotpot),
    ]  # fmt: skip
    rows = dict(data="me/mine", data_revision="v2", prompts=files["prompts"], **common)
    expected = LongBenchTask("trec", "me/mine", "v2", "select", prompts=files["prompts"])
    assert find_tasks("longbench:trec", rows) == [expected]
    maths = dict(data="a", data_revision="v", shots=2, metric="gsm8k_official", **common)
    expected = Gsm8kTask(source="a", revision="v", shots=2, metric="gsm8k_official", split="select")
    assert find_tasks("gsm8k", maths) == [expected]
    grid = dict(length=(500, 900), depths=(0, 99), haystack=hay, metric="niah_recall_lava", **common)
    assert find_tasks("niah", grid) == [NiahTask((500, 900), (0, 99), hay, metric="niah_recall_lava", split="select")]


@pytest.mark.parametrize(
    ("spec", "options", "problem"),
    [
        ("gsm8k", {"length": (9,)}, "reads --length: --length is for synthetic, ruler, niah, retain$"),
        ("ruler:vt", {"haystack": Path("h")}, f"for {', '.join(f'ruler:{name}' for name in ESSAYS)}, niah, retain$"),
        ("ruler:qa_1", {"squad": Path("s"), "hotpot": Path("h")}, "reads --hotpot: --hotpot is for ruler:qa_2"),
        (
            "niah",
            {"data": "d", "data_revision": "r"},
            "reads --data, --data-revision: --data is for longbench, infinitebench, gsm8k, math500, aime; ",
        ),
        ("ruler:vt", {"length": (1, 2)}, "ruler tasks take one length, got 1, 2: evaluate one length after the other"),
        ("synthetic+niah", {"length": ()}, "synthetic tasks take one length, got none"),
        ("synthetic", {"length": (100,)}, "at least 512 tokens"),
        ("gsm8k", {"max_new_tokens": 9}, "reads --max-new-tokens: --max-new-tokens is for math500, aime$"),
        ("gsm8k", {"metric": "niah_recall"}, "unknown GSM8K metric 'niah_recall'"),
        ("niah", {"metric": "niah_recal"}, "unknown metric 'niah_recal'; did you mean 'niah_recall'"),
        ("niah", {"depths": (50, 10)}, "depths must be rising whole numbers from 0 to 100, got 50, 10"),
        ("niah", {"haystack": Path("/no/such/hay")}, "there is no file /no/such/hay"),
        ("niah", {"length": (2000, 1000)}, "lengths must be rising whole numbers from 1, got 2000, 1000"),
        ("gsm8k", {"shots": 9}, "9 worked examples were asked for: ask for 0 to 8"),
    ],
)
def test_options_that_do_not_fit(spec: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem) as caught:
        find_tasks(spec, options)
    assert "\n" not in str(caught.value)

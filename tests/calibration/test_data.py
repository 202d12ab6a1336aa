"""Calibration files: the shipped ones, and everything that can be wrong with one's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvsearch.calibration.data import CalibrationData, find_default_data, load_calibration_data
from kvsearch.core.errors import UsageError
from kvsearch.core.resources import find_resource
from kvsearch.tasks.prompts import PLAIN_PROMPT
from scripts.bundled_calibration import calibration_file

PAIR = {"question": "Who came?", "answer": "Nobody."}


def text(number: int = 1, count: int = 1, **changes: Any) -> dict[str, Any]:
    pairs = [{"question": f"q{number}{i}", "answer": f"a{number}{i}"} for i in range(count)]
    return {"text": f"text {number}", "questions": pairs, **changes}


def write(folder: Path, content: Any) -> Path:
    path = folder / "data.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def load(folder: Path, *contexts: dict[str, Any], **changes: Any) -> CalibrationData:
    return load_calibration_data(write(folder, {"name": "mine", "contexts": list(contexts), **changes}))


def refusal(folder: Path, content: Any) -> str:
    path = write(folder, content)
    with pytest.raises(UsageError) as caught:
        load_calibration_data(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_file_with_texts_inside_and_beside_it(tmp_path: Path) -> None:
    (tmp_path / "novel.txt").write_text("\n  Once upon a time.\n")
    data = load(tmp_path, text(1, 2), {"text_file": "novel.txt", "questions": [PAIR]}, prompt="Q {question} A")
    assert (data.name, data.prompt, data.questions) == ("mine", "Q {question} A", 3)
    assert [context.text for context in data.contexts] == ["text 1", "Once upon a time."]
    assert data.contexts[1].questions[0].answer == "Nobody."
    assert load(tmp_path, text()).prompt == PLAIN_PROMPT


def test_the_hash_is_that_of_the_content(tmp_path: Path) -> None:
    first = load(tmp_path, text())
    (tmp_path / "elsewhere.txt").write_text("text 1")
    moved = load(tmp_path, text(text_file="elsewhere.txt", text=None, kind="codes"), name="another name")
    assert first.sha256 == moved.sha256
    others = [load(tmp_path, text(2)), load(tmp_path, text(count=2)), load(tmp_path, text(), prompt="{question}!")]
    assert len({first.sha256, *(other.sha256 for other in others)}) == 4


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "is not valid JSON at line 1"),
        ("[]", "the whole: "),
        ({"name": "x", "contexts": []}, "contexts: must not be empty"),
        ({"name": "x", "contexts": [text(1, 0)]}, "contexts.0.questions: must not be empty"),
        ({"name": "x", "contexts": [text(text=None)]}, "contexts.0: give either text or text_file"),
        ({"name": "x", "contexts": [text(questions=[{**PAIR, "answer": ""}])]}, "answer: must not be blank"),
        ({"name": "x", "contexts": [text(kind=" ")]}, "kind: must not be blank"),
        ({"name": "x", "contexts": [text(text_file="blank.txt", text=None)]}, "blank.txt is empty"),
        ({"name": "x", "contexts": [text(text_file="latin.txt", text=None)]}, "latin.txt is not UTF-8 text: byte 1"),
    ],
)
def test_what_can_be_wrong(content: Any, problem: str, tmp_path: Path) -> None:
    (tmp_path / "blank.txt").write_text(" \n ")
    (tmp_path / "latin.txt").write_bytes(b"M\xfcller")
    assert problem in refusal(tmp_path, content)
    with pytest.raises(UsageError, match="there is no file"):
        load_calibration_data(tmp_path / "nothing.json")


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    contexts = [
        text(questions=[{"question": "q"}], note=1),
        text(text_file="gone.txt", text=None),
        text(text_file="gone too.txt", text=None),
        text(),
    ]
    message = refusal(tmp_path, {"contexts": contexts, "prompt": "?"})
    head, *problems = message.splitlines()
    assert head.endswith("is not valid, 6 problems:")
    for words in (
        "name: is missing", "prompt: needs {question}", "contexts.0.questions.0.answer: is missing",
        "contexts.0.note: unknown key", "contexts.1.text_file: there is no file",
    ):  # fmt: skip
        assert any(line.strip().startswith(words) for line in problems), words
    assert "gone too.txt" in message


def test_limited(tmp_path: Path) -> None:
    data = load(tmp_path, text(1, 3), text(2, 2), text(3, 2))
    for limit, expected in ((None, [3, 2, 2]), (1, [1]), (3, [3]), (4, [3, 1]), (99, [3, 2, 2])):
        some = data.limit_questions(limit)
        assert [len(context.questions) for context in some.contexts] == expected
        assert [pair.question for pair in some.contexts[0].questions] == ["q10", "q11", "q12"][: expected[0]]
        assert some.sha256 == data.sha256


def test_the_texts_of_other_models() -> None:
    """Five kinds of text, none of which is what needles are hidden in."""
    assert find_default_data("bundled-redundant") == find_default_data("bundled") != find_default_data("./bundled")
    data = load_calibration_data(find_default_data("some/model"))
    assert (len(data.contexts), data.questions, data.prompt) == (5, 65, PLAIN_PROMPT)
    assert all(len(context.text.split()) >= 1700 and context.text.isascii() for context in data.contexts)
    assert find_resource("data/calibration/novel.txt").read_text() not in {context.text for context in data.contexts}


def test_the_bundled_data_is_what_the_generator_writes() -> None:
    written = find_default_data("bundled").read_text()
    assert written == json.dumps(calibration_file(), indent=1) + "\n"


def test_contexts_may_be_without_questions_and_plain_text_files_are_a_context_each(tmp_path: Path) -> None:
    path = write(tmp_path, {"name": "mine", "contexts": [{"text": "a"}, text(), text(questions=[])]})
    assert [len(one.questions) for one in load_calibration_data(path, bare=True).contexts] == [0, 1, 0]
    path.unlink()
    for name in ("b", "a"):
        (tmp_path / f"{name}.txt").write_text(f"text {name}\n")
    (tmp_path / "notes.md").write_text("no context")
    folder = load_calibration_data(tmp_path, bare=True)
    assert [(one.text, one.questions) for one in folder.contexts] == [("text a", ()), ("text b", ())]
    listed = load_calibration_data(f"{tmp_path}/a.txt,{tmp_path}/b.txt", bare=True)
    assert (listed.contexts, listed.sha256) == (folder.contexts, folder.sha256)
    with pytest.raises(UsageError, match="is plain text, without questions, which only --method probe and query_b"):
        load_calibration_data(tmp_path)
    with pytest.raises(UsageError, match=r"there is no file .*c\.txt"):
        load_calibration_data(f"{tmp_path}/a.txt,{tmp_path}/c.txt", bare=True)
    with pytest.raises(UsageError, match="have no questions to limit: leave --questions out"):
        folder.limit_questions(3)

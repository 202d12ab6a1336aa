"""Runs that are kept: whatever moment one is cut short at, it goes on to the same report, and nothing is done twice."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvsearch.core.canonical import canonical_json
from kvsearch.core.errors import KvsearchWarning, UsageError
from kvsearch.evaluation.compare import Evaluation, Split, prepare
from kvsearch.evaluation.methods import parse_methods
from kvsearch.evaluation.ready_methods import prepare_methods
from kvsearch.evaluation.reply_store import ReplyStore, open_run, read_replies
from kvsearch.evaluation.runner import KeptReplies
from kvsearch.evaluation.samples import Sample
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Size
from kvsearch.plan.schema import QUESTION_AGNOSTIC, QUESTION_AWARE, Protocol
from kvsearch.runs.identity import CONFIG, LEDGER
from kvsearch.tasks.base import Query
from kvsearch.tasks.encode import Reading
from tests import tiny
from tests.evaluation.results import json_of

ONE = Sample(
    "qa", "c", "lava@8", QUESTION_AGNOSTIC, "0-1", 2, 'he said "a, b"\nand left \u2028', 0.25, "ab", True, 100, 120, 7,
    40, 1024.5, 47, 0.125, 0.1 + 0.2,
)  # fmt: skip

TASKS = [tiny.listed((60, 3), (48, 1), (70, 2), name="one"), tiny.listed((90, 1), (66, 2), name="two")]
METHODS = "pyramid,lava,streaming"


def evaluation(
    model: LoadedModel, methods: str = METHODS, phases: str = "prefill", tasks: Sequence[Any] = TASKS, **settings: Any
) -> Evaluation:
    ready = prepare_methods(model, parse_methods(methods, ["window=3"]), [Size(8), Size(ratio=0.6)], phases)
    return prepare(model, ready, ready[1].name, Split(tasks, **{"seed": 3, "batch": 2, **settings}))


def report(comparison: Evaluation) -> bytes:
    return canonical_json(json_of(comparison))


def kept(one: Evaluation, directory: Path, **how: Any) -> Evaluation:
    with open_run(directory, one.config(), **how) as (_, store):
        return one.run(store=store)


def begin(directory: Path, one: Evaluation) -> None:
    with open_run(directory, one.config()):
        pass


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    two = replace(ONE, key="0-2", reply="", score=1.0)
    with ReplyStore(tmp_path / "l") as ledger:
        ledger.add([("k1", ONE), ("k2", two)])
        ledger.add([("k1", replace(ONE, task="again"))])
    with ReplyStore(tmp_path / "l") as ledger:
        assert list(ledger.samples.values()) == [ONE, two, replace(ONE, task="again")]
        assert ledger.samples[ONE.place, "k1"].reply_seconds == ONE.reply_seconds
    assert read_replies(tmp_path / "l") == {"k1": replace(ONE, task="again"), "k2": two}
    assert (tmp_path / "l").read_bytes().count(b"\n") == 2


@pytest.mark.slow
def test_a_run_goes_on_to_the_same_report(model: LoadedModel, tmp_path: Path) -> None:
    """Cut between lines of the ledger, and in the middle of them."""
    one = evaluation(model, "pyramid,lava")
    whole = report(one.run())
    assert report(kept(one, tmp_path / "run")) == whole
    data = (tmp_path / "run" / LEDGER).read_bytes()
    lines = data.splitlines(keepends=True)
    assert len(lines) > 2
    for number in {1, len(lines) // 2}:
        line = lines[number]
        (tmp_path / "run" / LEDGER).write_bytes(b"".join(lines[:number]) + line[: len(line) // 2 * (number % 2)])
        assert report(kept(one, tmp_path / "run")) == whole
        again = (tmp_path / "run" / LEDGER).read_bytes().splitlines()
        assert [told(item) for item in again] == [told(item) for item in lines]


def told(line: bytes) -> list[Any]:
    """A line but for what depends on the clock."""
    samples = json.loads(line)["samples"]
    return [{name: value for name, value in item.items() if "seconds" not in name} for item in samples]


def test_scores_are_those_of_the_task_at_hand(model: LoadedModel, tmp_path: Path) -> None:
    """Another metric makes no other run: replies from the ledger are scored anew, and a warning says so once."""

    @dataclass(frozen=True)
    class Generous(tiny.Listed):
        metric: str = "generous"

        def score(self, reply: str, query: Query) -> float:
            return 0.75

    one = evaluation(model, tasks=TASKS[:1])
    kept(one, tmp_path / "run")
    generous = evaluation(model, tasks=[Generous(TASKS[0].name, TASKS[0].rows)])
    with pytest.warns(KvsearchWarning, match="task one by exact: all its replies are now scored by generous"):
        again = kept(generous, tmp_path / "run")
    assert {sample.score for sample in again.samples} == {0.75}
    assert json_of(again)["tasks"][0]["metric"] == "generous"
    config = json.loads((tmp_path / "run" / CONFIG).read_text())
    assert config["execution"]["metrics"] == {"one": "generous"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept(generous, tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 4}, "seed is 3 there, 4 here"),
        ({"phases": "both"}, "methods.lava@0.6.phases is 'prefill' there, 'both' here"),
        ({"methods": "pyramid,lava,streaming,tova"}, "methods.tova@0.6 is only here"),
        ({"tasks": [TASKS[0], tiny.listed((80, 1), (66, 2), name="two")]}, "tasks.two.rows_sha256 is "),
    ],
)
def test_another_run_is_refused(model: LoadedModel, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    begin(tmp_path, evaluation(model))
    with pytest.raises(UsageError, match="holds another run") as found:
        begin(tmp_path, evaluation(model, **changes))
    message = str(found.value)
    assert words in message
    assert "\n" not in message


def test_a_key_depends_on_everything_that_decides_a_reply(model: LoadedModel) -> None:
    one = evaluation(model)
    (task, other), ready = one.encoded, one.methods
    prompt = task.prompts[0]
    question, second = prompt.questions[:2]

    def key(
        loaded: LoadedModel, protocol: Protocol, task: Any, prompt: Any, question: Any, method: str = "lava@8"
    ) -> str:
        reading = Reading(prompt, (question,), protocol)
        replies = KeptReplies(None, loaded, ready, protocol)  # type: ignore[arg-type]
        return next(iter(replies.keys(task, [reading], method).values()))

    asked = (task, prompt, question)
    one_key = key(model, QUESTION_AGNOSTIC, *asked)
    stopping = replace(task, task=replace(TASKS[0], stops=("x",)))
    longer = replace(question, query=replace(question.query, max_new_tokens=9))
    moved = replace(prompt, context=prompt.context[:-1])
    joined = replace(question, ids=prompt.with_question(question)[len(moved.context) :])
    assert moved.with_question(joined).tolist() == prompt.with_question(question).tolist()
    named = LoadedModel("tiny", model.model, model.tokenizer, model.fingerprint.model_copy(update={"name": "other"}))
    assert key(named, QUESTION_AGNOSTIC, *asked) == one_key
    chatty = LoadedModel("tiny", model.model, tiny.chat_tokenizer(), model.fingerprint)
    penalising = tiny.loaded()
    assert key(penalising, QUESTION_AGNOSTIC, *asked) == one_key
    penalising.model.generation_config.repetition_penalty = 1.3
    others = [
        key(model, QUESTION_AGNOSTIC, *asked, method="full"),
        key(penalising, QUESTION_AGNOSTIC, *asked),
        key(model, QUESTION_AWARE, *asked),
        key(tiny.loaded(num_hidden_layers=3), QUESTION_AGNOSTIC, *asked),
        key(chatty, QUESTION_AGNOSTIC, *asked),
        key(model, QUESTION_AGNOSTIC, task, prompt, second),
        key(model, QUESTION_AGNOSTIC, stopping, prompt, question),
        key(model, QUESTION_AGNOSTIC, task, prompt, longer),
        key(model, QUESTION_AGNOSTIC, task, moved, joined),
        key(model, QUESTION_AGNOSTIC, other, other.prompts[0], other.prompts[0].questions[0]),
    ]
    assert one_key not in others
    assert len(set(others)) == len(others)

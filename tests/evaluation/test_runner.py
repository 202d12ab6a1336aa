"""Tasks under several programs: every question once, the same at any batch size, with all that is said of a reply."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvsearch.budgets.lava import LAVaAllocation
from kvsearch.core.errors import IncompatibleError, KvsearchWarning, UsageError
from kvsearch.evaluation import runner
from kvsearch.evaluation.ready_methods import make_full_cache_method
from kvsearch.evaluation.reply_store import ReplyStore
from kvsearch.evaluation.runner import KeptReplies, run_encoded
from kvsearch.evaluation.samples import Sample
from kvsearch.models.loading import LoadedModel
from kvsearch.plan.schema import PROTOCOLS, QUESTION_AGNOSTIC, QUESTION_AWARE, Protocol
from kvsearch.policies import create_policy
from kvsearch.runtime import Program
from kvsearch.runtime.program import estimate_prompt_bytes, make_full_program
from kvsearch.tasks.base import Query
from kvsearch.tasks.encode import encode_tasks, force_replies
from kvsearch.tasks.metrics.likelihood import FORCED, read_loss
from kvsearch.tasks.synthetic.language import WORDS
from tests import tiny
from tests.combinations import first_value, in_turn
from tests.evaluation.results import PLACE
from tests.tiny import run


def third(model: Any, window: int = 4) -> Program:
    policy = create_policy("snapkv", {"window": window, "kernel": 3, "sinks": 2})
    return Program.uniform(model, policy, lambda length: max(7, length // 3))


TASK = tiny.listed((60, 3), (90, 1), (75, 2), (64, 4))


def programs(model: LoadedModel) -> dict[str, Program]:
    return {"full": make_full_program(model.model), "third": third(model.model)}


def test_what_a_sample_says_about_memory(model: LoadedModel) -> None:
    heads = 4 * 2
    for sample in run(model, programs(model), [TASK], 4, batch=1):
        length = len(TASK.rows[int(sample.key)].context.split()) + 1
        assert sample.context_tokens == length
        assert sample.entries == heads * (length if sample.method == "full" else length // 3)
        # 16 fp32 numbers for a key and for a value, an int32 position; uniform budgets need no padding
        assert sample.bytes == sample.entries * (2 * 16 * 4 + 4)
        assert type(sample.entries) is int
        assert type(sample.score) is float


LONG = dataclasses.replace(
    TASK,
    rows=tuple(
        dataclasses.replace(row, queries=tuple(dataclasses.replace(q, max_new_tokens=12) for q in row.queries))
        for row in TASK.rows
    ),
)


def by_question(samples: Sequence[Sample]) -> dict[tuple[str, str, int], Sample]:
    return {(sample.method, sample.key, sample.question): sample for sample in samples}


def test_a_reply_is_cut_at_the_first_stop_text(model: LoadedModel) -> None:
    """Of two words, so that no single token is one; some replies have it, some do not."""
    whole = by_question(run(model, programs(model), [LONG], 4))
    told = whole["third", "3", 1].reply.split()
    stop, never = f"{told[2]} {told[3]}", "anchor bell anchor"
    stopped = run(model, programs(model), [dataclasses.replace(LONG, stops=(never, stop))], 4)
    ended = 0
    for key, sample in by_question(stopped).items():
        before, found, _ = whole[key].reply.partition(stop)
        assert sample.reply == before
        ended += bool(found)
        assert sample.reply_tokens == (len((before + found).split()) if found else whole[key].reply_tokens)
    assert 0 < ended < len(stopped)


def test_a_reply_ends_once_nothing_can_take_its_score_back(model: LoadedModel) -> None:
    """With its last answer, whatever the others in the batch do; not where what follows may change the score."""
    whole = by_question(run(model, programs(model), [LONG], 4))
    rows = []
    for row in LONG.rows:
        queries = []
        for number, query in enumerate(row.queries):
            words = whole["third", row.key, number].reply.split()
            queries.append(dataclasses.replace(query, answers=(words[1], words[3])))
        rows.append(dataclasses.replace(row, queries=tuple(queries)))
    right = dataclasses.replace(LONG, rows=tuple(rows), metric="string_match_all")
    settled = 0
    for key, sample in by_question(run(model, programs(model), [right], 4)).items():
        reply = whole[key].reply
        query = next(row for row in rows if row.key == key[1]).queries[key[2]]
        assert sample.score == right.score(reply, query)
        assert reply.startswith(sample.reply)
        settled += sample.score == 1
        words = reply.split()
        ends = max(words.index(answer) for answer in query.answers) + 1 if sample.score == 1 else len(words)
        assert sample.reply.split() == words[:ends]
    assert settled >= len(rows)
    taking_back = dataclasses.replace(right, metric="niah_recall")
    for key, sample in by_question(run(model, programs(model), [taking_back], 4)).items():
        assert sample.reply == whole[key].reply


@in_turn(
    protocol=PROTOCOLS, place=["context", "question", "question", "context"], method=["full", "third", "third", "full"]
)
def test_a_sample_that_breaks_the_model_is_named(protocol: Protocol, place: str, method: str) -> None:
    broken = tiny.loaded()
    with torch.no_grad():
        broken.model.model.embed_tokens.weight[WORDS.index("navy")] = float("nan")
    clean = [
        dataclasses.replace(
            row,
            context=row.context.replace("navy", "red"),
            queries=tuple(dataclasses.replace(q, question=q.question.replace("navy", "red")) for q in row.queries),
        )
        for row in TASK.rows
    ]
    row = clean[2]
    if place == "context":
        clean[2], asked = dataclasses.replace(row, context=row.context + " navy"), 0
    else:
        queries = (row.queries[0], dataclasses.replace(row.queries[1], question="? navy"))
        clean[2], asked = dataclasses.replace(row, queries=queries), 1
    compressed = place == "context" or protocol == QUESTION_AWARE
    where = "" if compressed else f", method {method}"
    problem = "layer 0: the scores of snapkv" if compressed and method == "third" else "the model emits NaN"
    with pytest.raises(IncompatibleError, match=f"task listed{where}, example 2, question {asked}: {problem}"):
        run(broken, {method: programs(broken)[method]}, [tiny.Listed("listed", tuple(clean))], 4, protocol=protocol)


class Failing(tiny.Listed):
    """Its metric cannot judge a reply that says anything."""

    def score(self, reply: str, query: Query) -> float:
        if reply:
            raise UsageError("what is this?")
        return 0.0


def test_replies_that_cannot_be_scored_are_kept(model: LoadedModel, tmp_path: Path) -> None:
    full = make_full_cache_method(model)

    def run_kept(task: tiny.Listed, store: ReplyStore) -> list[Sample]:
        encoded, kept = encode_tasks(model, [task], 2), KeptReplies(store, model, [full], QUESTION_AGNOSTIC)
        return run_encoded(model, {full.label: full.program}, encoded, QUESTION_AGNOSTIC, kept=kept)

    with ReplyStore(tmp_path / "good") as good, ReplyStore(tmp_path / "bad") as bad:
        samples = run_kept(TASK, good)
        assert list(good.samples.values()) == samples
        with pytest.raises(UsageError, match=r"^task listed, example 0, question 0: what is this\?$"):
            run_kept(Failing("listed", TASK.rows), bad)
        assert list(bad.samples.values()) == [dataclasses.replace(sample, score=0.0) for sample in samples]


def test_a_score_outside_0_and_1_is_refused(model: LoadedModel) -> None:
    class Wrong(tiny.Listed):
        def score(self, reply: str, query: Query) -> float:
            return float("nan")

    with pytest.raises(UsageError, match=r"^task odd, example 0, question 0: its metric gives nan, scores are"):
        run(model, {"full": make_full_program(model.model)}, [Wrong("odd", TASK.rows)], 1)


def many(model: LoadedModel) -> dict[str, Program]:
    """Programs that can and that cannot reply together."""
    snapkv, h2o = create_policy("snapkv", {"window": 4}), create_policy("h2o")
    lava = create_policy("lava", {"window": 3})
    some = {f"snapkv {n}": Program.uniform(model.model, snapkv, lambda _, n=n: n) for n in (6, 9, 12)}  # type: ignore[misc]
    phase = Program.uniform(model.model, h2o, lambda _: 8).prefill
    return {
        "full": make_full_program(model.model),
        "h2o, both": Program(phase, phase),
        **some,
        "lava": Program.uniform(model.model, lava, lambda _: 8, LAVaAllocation()),
    }


@pytest.mark.slow
@first_value("protocol", PROTOCOLS)
def test_all_methods_together_equal_each_alone(model: LoadedModel, protocol: Protocol) -> None:
    """However short memory is."""
    programs = many(model)
    encoded = encode_tasks(model, [TASK], 2)
    alone = {method: run_encoded(model, {method: one}, encoded, protocol, 3) for method, one in programs.items()}
    expected = sorted([sample for samples in alone.values() for sample in samples], key=PLACE)
    for memory in (None, 1, 40_000):
        together = run_encoded(model, programs, encoded, protocol, 3, memory=memory)
        assert sorted(together, key=PLACE) == expected
    assert len(expected) == len(programs) * len(alone["full"])


def test_logits_of_right_answers_count_as_memory(model: LoadedModel) -> None:
    """They are of every method, text and token over the whole vocabulary: of many methods more than their caches."""
    read: list[int] = []
    handle = model.model.register_forward_pre_hook(
        lambda _, __, given: read.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    encoded = encode_tasks(model, [dataclasses.replace(TASK, metric=FORCED)], 4)
    lengths = [len(prompt.context) for prompt in encoded[0].prompts]
    longest = max(len(question.right) for prompt in encoded[0].prompts for question in prompt.questions)
    logits = len(lengths) * longest * model.model.config.vocab_size * 4
    programs = {name: program for name, program in many(model).items() if "snapkv" in name or name == "full"}
    caches = sum(2 * estimate_prompt_bytes(model.model, program, lengths) for program in programs.values())
    whole = caches + len(programs) * logits
    for memory, times in ((None, 1), (whole, 1), (whole - 1, 2), (1, len(programs))):
        read.clear()
        run_encoded(model, programs, encoded, QUESTION_AGNOSTIC, 4, memory=memory)
        assert read.count(max(lengths)) == times
    handle.remove()


def test_a_batch_that_does_not_fit_spares_the_next_ones_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are as long: a shorter one is tried whole."""
    model, tried, real = tiny.loaded(), list[int](), runner.reply_to_batch

    def small(loaded: Any, task: Any, batch: Any, *more: Any) -> Any:
        tried.append(len(batch))
        if len(batch) > 2 and max(len(reading.ids) for reading in batch) > 30:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return real(loaded, task, batch, *more)

    tasks = [tiny.listed(*[(50, 1)] * 7, *[(20, 1)] * 4)]
    whole = run(model, {"third": third(model.model)}, tasks, 11, batch=4)
    monkeypatch.setattr(runner, "reply_to_batch", small)
    with pytest.warns(
        KvsearchWarning, match=r"too short for 4 contexts at a time, so 2 are read \(--batch 2 spares"
    ) as told:
        parts = run(model, {"third": third(model.model)}, tasks, 11, batch=4)
    assert len(told) == 1
    assert tried == [4, 2, 2, 2, 2, 3]
    assert [one.reply for one in parts] == [one.reply for one in whole]


def test_replies_that_may_pass_a_change_of_rotary_factors_are_refused_before_any_is_made() -> None:
    """Sequences of both sides share no batch, in which the short ones would have the factors of the long ones."""
    rope = {
        "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "rope_theta": 10000.0,
        "original_max_position_embeddings": 80, "factor": 8.0,
    }  # fmt: skip
    model = tiny.loaded(rope_parameters=rope)
    methods = {"full": make_full_program(model.model), "third": third(model.model)}
    sides = encode_tasks(model, [tiny.listed((60, 2), (100, 2))], 2)
    together, alone = (
        {PLACE(sample): (sample.context_tokens, sample.reply, sample.entries) for sample in samples}
        for samples in (run_encoded(model, methods, sides, QUESTION_AWARE, size) for size in (4, 1))
    )
    assert together == alone
    assert {tokens > 80 for tokens, _, _ in alone.values()} == {False, True}
    crossing = encode_tasks(model, [tiny.listed((60, 1), (87, 1))], 2)
    with pytest.raises(IncompatibleError, match=r"example 1, question 0: .* beyond 80 tokens .*--max-length"):
        run_encoded(model, methods, crossing, QUESTION_AGNOSTIC, 4)


def test_own_replies_of_the_full_cache_are_teacher_forced_where_they_are_right() -> None:
    """A model may find the given wording unlikely where it says the same in its own words."""
    model = tiny.loaded("gemma3")
    full = {"full": make_full_program(model.model)}
    own = {(sample.key, sample.question): sample.reply for sample in run(model, full, [TASK], 4)}

    def losses(task: tiny.Listed, beside: bool) -> dict[tuple[str, str, int], float]:
        (encoded,) = encode_tasks(model, [task], 4)
        tasks = [dataclasses.replace(encoded, forced_tokens=8)] if beside else force_replies([encoded], 8) or []
        samples = run_encoded(model, programs(model), tasks, QUESTION_AGNOSTIC)
        return {
            (sample.method, sample.key, sample.question): read_loss(sample.reply)
            if sample.loss is None
            else sample.loss
            for sample in samples
        }

    def written(answer: Callable[[str, int], str]) -> tiny.Listed:
        """Make a task whose right replies are `WORDS`, and whose answers are others."""
        rows = tuple(
            dataclasses.replace(
                row,
                queries=tuple(
                    dataclasses.replace(query, answers=(answer(row.key, number),), written=" ".join(WORDS[:3]))
                    for number, query in enumerate(row.queries)
                ),
            )
            for row in TASK.rows
        )
        return dataclasses.replace(TASK, rows=rows)

    given = losses(written(lambda *_: "nothing says this"), beside=True)
    said = written(lambda *place: own[place] if place[0] != "2" else "nothing says this")
    forced = losses(said, beside=True)
    assert losses(said, beside=False) == pytest.approx(forced, abs=1e-5)
    for (method, key, number), loss in forced.items():
        if key == "2":
            assert loss == given[method, key, number]
        elif method == "full":  # its own greedy reply is likelier than other words
            assert loss < given[method, key, number]
        else:
            assert loss != given[method, key, number]

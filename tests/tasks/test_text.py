"""Texts without questions: windows, what they are read from, and what predicts them."""

from __future__ import annotations

import pytest
import torch

from kvsearch.evaluation.names import FULL
from kvsearch.evaluation.runner import reply_to_batch, run_encoded
from kvsearch.models.architecture import describe
from kvsearch.plan.schema import QUESTION_AGNOSTIC
from kvsearch.runtime import Program
from kvsearch.runtime.attention import run_attention
from kvsearch.runtime.program import make_full_program
from kvsearch.runtime.replay.forced_answers import forced_answers
from kvsearch.signals.predictions import token_losses
from kvsearch.tasks.encode import encode_tasks, make_readings
from kvsearch.tasks.metrics.likelihood import read_losses
from kvsearch.tasks.user_files import CONTINUATION, TextTask
from tests import tiny

WORDS = " ".join(f"w{number}" for number in range(2000))


TEXT = " ".join(tiny.document(900).words[1:])


def test_windows_follow_each_other_and_end_with_words() -> None:
    windows = TextTask("t", WORDS, length=100).examples(1000, 0, len)
    whole = ""
    for window in windows:
        (query,) = window.queries
        assert len(window.context) >= 100
        assert query.question.startswith(" ") and query.answers[0].startswith(" ")
        whole += window.context + query.question + query.answers[0]
    assert WORDS.startswith(whole)
    assert len(WORDS) - len(whole) < 300


@pytest.mark.parametrize("text", [WORDS, f"{WORDS} " * 3])
def test_splits_share_no_window_even_where_a_text_repeats_itself(text: str) -> None:
    drawn = [TextTask("t", text, 100, split).examples(1000, 0, len) for split in ("train", "select", "report")]
    contexts = [{window.context for window in part} for part in drawn]
    assert sum(map(len, contexts)) == len(set.union(*contexts))
    assert sum(map(len, drawn)) == len(TextTask("t", text, 100).examples(1000, 0, len))


def test_losses_are_those_of_the_continuation_after_what_is_kept() -> None:
    """Nothing is generated; under the full cache the loss is that of one dense pass over context and continuation."""
    loaded = tiny.loaded()
    task = TextTask("t", TEXT, length=60)
    (encoded,) = encode_tasks(loaded, [task], samples=3)
    few = Program.from_plan(loaded.model, tiny.plan_for(loaded, [[12, 12]] * describe(loaded.model).layers))
    programs: dict[str, Program] = {"few": few, FULL: make_full_program(loaded.model)}
    samples = run_encoded(loaded, programs, [encoded], QUESTION_AGNOSTIC, batch=2)
    by_method = {name: [sample for sample in samples if sample.method == name] for name in programs}
    assert [sample.score for sample in by_method[FULL]] == [1.0] * 3
    for prompt, full, sample in zip(encoded.prompts, by_method[FULL], by_method["few"], strict=True):
        (question,) = prompt.questions
        assert len(question.right) == CONTINUATION == full.reply_tokens
        ids = torch.cat([prompt.context, question.ids, question.right])[None]
        with torch.no_grad():
            logits = loaded.model(input_ids=ids).logits[0]
        dense = float(token_losses(logits[-CONTINUATION - 1 : -1], question.right).mean())
        assert read_losses(full.reply) == pytest.approx((dense, dense), abs=1e-4)
        lost = read_losses(sample.reply)
        assert lost[1] == pytest.approx(dense, abs=1e-4)
    read = make_readings(encoded.prompts, QUESTION_AGNOSTIC)
    with run_attention(loaded.model):
        assert list(reply_to_batch(loaded, encoded, read, {"few": few}, finished=["few"])) == []
    alone = run_encoded(loaded, {"few": few}, [encoded], QUESTION_AGNOSTIC, batch=2)
    assert [sample.reply for sample in alone] == [sample.reply for sample in by_method["few"]]


def test_what_is_forced_is_the_text_itself() -> None:
    loaded = tiny.loaded()
    (encoded,) = encode_tasks(loaded, [TextTask("t", TEXT, length=60)], samples=2)

    def refuse(*_: object) -> None:
        raise AssertionError("a text was read for a reply")

    with loaded.model.register_forward_pre_hook(refuse):
        forced = forced_answers(loaded, [encoded], QUESTION_AGNOSTIC, "own")
    assert [answer.own for answer in forced.values()] == [False, False]

"""Rules before a long text: what is told, what is asked, and that a reply is scored by what it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

import kvsearch
from kvsearch.calibration.prompts import encode_prompts, make_task_data
from kvsearch.core.errors import IncompatibleError
from kvsearch.models.loading import load
from kvsearch.tasks.base import Example
from kvsearch.tasks.encode import encode, hash_example, make_token_counter
from kvsearch.tasks.retain import GROUPS, RETAIN_FORMS, RetainTask
from kvsearch.tasks.splits import ALL, SPLITS
from tests.families import build
from tests.tasks.ruler.helpers import bpe_tokenizer, count_of, words

forms = pytest.mark.parametrize("name", RETAIN_FORMS)
NOT_KEPT = {
    "json": ("{person} lives in {place}.", ""),
    "capitals": ("{person} has a {answer}.", "I DO NOT KNOW."),
    "banned-word": ("The thing is {banned}, or {answer}.", "The thing is nice."),
    "closing": ("{person} has a {answer}.", "I do not know, {banned}."),
    "subject": ("It is made of air. I cannot say more.", "", "..."),
    "secret": ("I cannot tell you that it is {banned}.", "The password is amber.", ""),
}


def examples(name: str, samples: int = 3, length: int = 256, split: str = "report", seed: int = 0) -> list[Example]:
    return RetainTask(name, length, split).examples(samples, seed, words)


@forms
def test_the_reply_that_is_shown_keeps_the_rule_and_others_do_not(name: str) -> None:
    task = RetainTask(name)
    for example in examples(name):
        (query,) = example.queries
        assert task.score(query.written, query) == 1
        assert task.score(f"\n{query.written}\n", query) == 1
        banned = next(iter(query.options), "")
        for reply in NOT_KEPT[name]:
            said = reply.format(person="Tom", place="Rome", banned=banned, answer=query.answers[0])
            assert task.score(said, query) == 0, said


@forms
def test_the_rule_comes_first_and_the_answer_is_in_the_question(name: str) -> None:
    for example in examples(name):
        (query,) = example.queries
        rule, shown = example.system.split("\n\n")
        assert query.prefix == "A:"
        assert shown.count(f"\n{query.prefix} ") >= 2
        assert query.question not in example.system
        assert not any(f" {word} " in f" {query.question} " for word in query.options) or name == "banned-word"
        if name in GROUPS["format"] or name == "closing":
            assert query.answers[0] in query.question
        if name != "capitals":
            assert any(word in rule for word in query.options or (query.answers[0].split()[-1].strip("."),))


@forms
def test_lengths(name: str) -> None:
    """At most `length`, and no whole sentence less."""
    count = count_of("bpe")
    for example in RetainTask(name, 600).examples(2, 0, count):
        (query,) = example.queries
        used = sum(map(count, (example.system, example.context, query.question, query.prefix))) + query.max_new_tokens
        assert 500 <= used <= 600


@forms
def test_examples_are_those_of_split_and_seed_and_more_begin_with_fewer(name: str) -> None:
    assert examples(name, 4)[:2] == examples(name, 2)
    known = set[str]()
    for split in (*SPLITS, ALL):
        for seed in (0, 1):
            hashes = {hash_example(example)[0] for example in examples(name, 4, split=split, seed=seed)}
            assert len(hashes) == 4
            assert not hashes & known
            known |= hashes


# --- prompts ----------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WITHOUT_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE
DROPS_SYSTEM = TEMPLATE.replace("messages %}", "messages if message.role != 'system' %}", 1)


def chat_tokenizer(template: str | None) -> Any:
    made = PreTrainedTokenizerFast(tokenizer_object=bpe_tokenizer(), eos_token="0")
    made.chat_template = template
    return made


@pytest.mark.parametrize(
    ("template", "head"),
    [(TEMPLATE, "<system>{}<user>{}"), (WITHOUT_SYSTEM, "<user>{}\n\n{}"), (DROPS_SYSTEM, "<user>{}\n\n{}")],
)
def test_the_rule_is_the_system_prompt_or_begins_the_message(template: str, head: str) -> None:
    tokenizer = chat_tokenizer(template)
    both = examples("secret", 2)
    for example, prompt in zip(both, encode(tokenizer, RetainTask("secret"), both).prompts, strict=True):
        assert prompt.hashes == hash_example(example)
        (question,) = prompt.questions
        opening = head.format(example.system, example.context)
        assert tokenizer.decode(prompt.context) == opening
        asked = f"{opening}\n\n{example.queries[0].question}<assistant>A:"
        assert tokenizer.decode(prompt.with_question(question)) == asked
        assert tokenizer.decode(question.right) == f" {example.queries[0].written}"


def test_the_rule_stays_where_a_context_is_cut() -> None:
    tokenizer = chat_tokenizer(TEMPLATE)
    (example,) = RetainTask("json", 600).examples(1, 0, count_of("bpe"))
    (prompt,) = encode(tokenizer, RetainTask("json"), [example], limit=400).prompts
    assert prompt.truncated
    assert tokenizer.decode(prompt.context).startswith(f"<system>{example.system}<user>")


def save_model(path: Path, template: str | None) -> Path:
    shape = {"num_hidden_layers": 2, "hidden_size": 32, "max_position_embeddings": 600}
    build("llama", vocab_size=3000, **shape).save_pretrained(path)
    chat_tokenizer(template).save_pretrained(path)
    return path


ASKED: dict[str, Any] = {"length": 300, "samples": 2, "methods": "snapkv", "ratios": "0.5"}


def test_a_calibration_reads_the_rule_too(tmp_path: Path) -> None:
    loaded = load(str(save_model(tmp_path / "model", TEMPLATE)))
    data = make_task_data(loaded, [RetainTask("json", 400)], 2, 0)
    examples_of_it = RetainTask("json", 400).examples(2, 0, make_token_counter(loaded.tokenizer))
    assert data.hashes == [hash_example(example)[0] for example in examples_of_it]
    for prompt, example in zip(encode_prompts(loaded, data), examples_of_it, strict=True):
        assert loaded.tokenizer.decode(prompt.ids[0]) == f"<system>{example.system}<user>{example.context}"


def test_a_model_without_a_chat_template(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", None)
    with pytest.raises(
        IncompatibleError, match="task json begins with a system prompt, and the model's tokenizer has no"
    ):
        kvsearch.evaluate(model, tasks="retain:json", **ASKED)

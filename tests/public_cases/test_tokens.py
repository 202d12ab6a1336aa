"""Context, question and answer have the tokens of the whole text, whatever a tokenizer does at its ends."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvsearch
from kvsearch.calibration.prompts import encode_prompts, make_task_data
from kvsearch.core.errors import IncompatibleError
from kvsearch.models.fingerprint import compute_fingerprint
from kvsearch.models.loading import LoadedModel
from kvsearch.tasks.base import Example, Query
from kvsearch.tasks.encode import encode, make_token_counter
from kvsearch.tasks.prompts import PLAIN_PROMPT, PromptFormat, QuestionText
from kvsearch.tasks.user_files import TextTask
from tests.families import build
from tests.public_cases.tokenizers_in_use import KINDS, TEXT, byte_level
from tests.tiny import Listed

TEMPLATES = {
    "plain": "{% for m in messages %}<|end|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|end|>assistant\n{% endif %}",
    "trims": "{% for m in messages %}[INST] {{ m.content | trim }} [/INST]{% endfor %}",
}
PIECES = [
    "The code",
    " is",
    " 4711",
    ".",
    "!",
    "\n",
    "\n\n",
    " ",
    "会议",
    "市长",
    "，",
    "เก้า",
    "who",
    "?",
    " (",
    "é",
    "mayor",
]
texts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=12).map("".join).filter(lambda text: text.strip())


@cache
def tokenizer(kind: str) -> Any:
    return KINDS[kind]()


def tokens(kind: str, text: str) -> list[int]:
    """The tokens of a text as the tokenizer has them, but for the one that says it has ended."""
    made = tokenizer(kind)
    ids = made(text)["input_ids"]
    return ids[:-1] if ids[-1] == made.eos_token_id else ids


@pytest.mark.parametrize("kind", KINDS)
@given(texts, st.lists(st.tuples(texts, st.sampled_from(["", " It is", "\n", "是"]), texts), min_size=1, max_size=3))
def test_pieces_joined_are_the_whole_text(kind: str, context: str, asked: list[tuple[str, str, str]]) -> None:
    for plain in (PLAIN_PROMPT, "{question}"):
        form = PromptFormat(tokenizer(kind), plain)
        ids, encoded = form.encode(context, [QuestionText(*text) for text in asked])
        for (question, prefix, answer), (own, right) in zip(asked, encoded, strict=True):
            prompt = context + plain.replace("{question}", question) + prefix
            joined = [*ids[0].tolist(), *own[0].tolist()]
            if len(ids[0]) > form.lead:
                assert joined == tokens(kind, prompt)
            gap = form._find_gap(question, prefix, answer)
            whole = tokens(kind, prompt + gap + answer)
            if whole[: len(joined)] == joined:  # else a token reaches from the prompt into the answer
                assert [*joined, *right[0].tolist()] == whole


@pytest.mark.parametrize("kind", KINDS)
@given(texts, texts, texts)
def test_parts_of_a_text_joined_are_its_tokens_even_within_a_token(
    kind: str, context: str, question: str, answer: str
) -> None:
    form = PromptFormat(tokenizer(kind), "{question}", verbatim=True)
    ids, [(own, right)] = form.encode(context, [QuestionText(question, answer=answer)])
    if len(ids[0]) > form.lead and own.shape[1]:
        joined = [token for part in (ids, own, right) for token in part[0].tolist()]
        assert joined == tokens(kind, context + question + answer)


@pytest.mark.parametrize("kind", KINDS)
@given(texts, texts, texts, st.integers(0, 40))
def test_long_contexts_are_not_encoded_anew_for_every_question(
    kind: str, ending: str, question: str, answer: str, rolled: int
) -> None:
    context = TEXT[rolled:] * 3 + ending
    form = PromptFormat(tokenizer(kind))
    ids, [(own, right)] = form.encode(context, [QuestionText(question, answer=answer)])
    joined = [token for part in (ids, own, right) for token in part[0].tolist()]
    gap = form._find_gap(question, "", answer)
    assert joined == tokens(kind, f"{context}\n\nQuestion: {question}\nAnswer:{gap}{answer}")


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "bytes in Python"])
@given(texts, st.lists(texts, min_size=1, max_size=2))
def test_chat_templates(kind: str, template: str, context: str, asked: list[str]) -> None:
    made = KINDS[kind]()
    made.chat_template = TEMPLATES[template]
    ids, encoded = PromptFormat(made).encode(context, [QuestionText(question) for question in asked])
    for question, (own, _) in zip(asked, encoded, strict=True):
        messages = [{"role": "user", "content": f"{context}\n\n{question}"}]
        rendered = made.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert [*ids[0].tolist(), *own[0].tolist()] == made(rendered, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_calibration_forces_the_tokens_that_an_evaluation_scores(kind: str) -> None:
    made = tokenizer(kind)
    model = build("llama", vocab_size=len(made))
    loaded = LoadedModel("tiny", model, made, compute_fingerprint(model, "tiny"))
    task = TextTask("t", TEXT * 20, 24)
    scored = encode(made, task, task.examples(3, 0, make_token_counter(made))).prompts
    forced = encode_prompts(loaded, make_task_data(loaded, [task], 3, 0))
    assert len(forced) == len(scored) == 3
    for calibrated, prompt in zip(forced, scored, strict=True):
        [question] = prompt.questions
        [after] = calibrated.continuations
        assert calibrated.ids[0].tolist() == prompt.context.tolist()
        assert after.tokens[0].tolist() == [*question.ids.tolist(), *question.right.tolist()]


@pytest.mark.parametrize("kind", ["bytes, Llama 3", "SentencePiece, Llama 2", "Unigram"])
def test_replies_from_a_file_are_those_to_the_whole_text(kind: str, tmp_path: Path) -> None:
    made = tokenizer(kind)
    model = build("llama", vocab_size=len(made))
    plan, file = tmp_path / "plan.json", tmp_path / "context.kv"
    kvsearch.plans.uniform(model, tokenizer=made, policy="streaming:sinks=2", budget=12, output=plan)
    context, prompt = TEXT[:101], "who was there?"
    assert context.endswith(".")
    asked: dict[str, Any] = {"tokenizer": made, "prompt": prompt, "max_new_tokens": 6}
    [direct] = kvsearch.generate(model, plan=plan, context=context, **asked)
    kvsearch.compress(model, tokenizer=made, plan=plan, context=context, output=file)
    cache = kvsearch.PlanCache.load(file, model)
    cache.save(file, cache.tokens, overwrite=True)  # what is not among its tokens stays with them
    [kept] = kvsearch.generate(model, cache=file, **asked)
    assert (kept.text, kept.context_tokens) == (direct.text, direct.context_tokens)
    whole = made(f"{context}\n\nQuestion: {prompt}\nAnswer:", return_tensors="pt").input_ids
    ids = whole[:, : whole.shape[1] - int(whole[0, -1] == made.eos_token_id)]
    [full] = kvsearch.generate(model, context=context, **asked)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, pad_token_id=3)
    assert full.text == made.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("template", [None, *TEMPLATES])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "bytes in Python"])
def test_a_context_that_is_kept_is_asked_as_one_that_is_known(kind: str, template: str | None) -> None:
    """`compress` does not know what will be asked."""
    made = KINDS[kind]()
    made.chat_template = None if template is None else TEMPLATES[template]
    form = PromptFormat(made)
    contexts = ["The code of the red door is 4711.", "The code!", "Costs rose from 120 to", "会议于上午九点"]
    for context in [*contexts, "Notes.  ", "Notes\n", "Notes.\n\n"]:
        ids, [(question, _)] = form.encode(context, [QuestionText("who was there?")])
        kept, rest = form.open_context(context)
        assert kept.tolist() == ids.tolist()
        assert form.question("who was there?", rest=rest).tolist() == question.tolist()


CHANGES = {
    "twice": "{% for m in messages %}U:{{ m.content }} again: {{ m.content }}E{% endfor %}A:",
    "replaces": "{% for m in messages %}U:{{ m.content.replace('\n\n', '\n') }}E{% endfor %}A:",
    "escapes": "{% for m in messages %}U:{{ m.content | e }}E{% endfor %}A:",
    "quotes": "{% for m in messages %}U:{{ m.content | tojson }}E{% endfor %}A:",
}


@pytest.mark.parametrize("change", CHANGES)
def test_templates_that_change_a_message_are_refused(change: str) -> None:
    made = byte_level()
    made.chat_template = CHANGES[change]
    form = PromptFormat(made)
    for encode_context in (lambda text: form.encode(text, [QuestionText("who?")]), form.open_context):
        with pytest.raises(
            IncompatibleError, match=r"template (repeats the user's message|changes the text of a mess)"
        ):
            encode_context('He said "yes" & left.')


def test_a_prompt_alone_is_the_whole_message() -> None:
    made = byte_level()
    made.chat_template = TEMPLATES["plain"]
    for text in ("Who was there?", "Who was there? "):
        ids, [(question, _)] = PromptFormat(made, "{question}").encode(text, [QuestionText("")])
        whole = made.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        joined = [*ids[0].tolist(), *question[0].tolist()]
        assert joined == made(whole, add_special_tokens=False)["input_ids"]


def test_line_breaks_that_join_a_full_stop_go_with_the_question() -> None:
    form = PromptFormat(tokenizer("bytes, Llama 3"))
    ids, [(question, answer)] = form.encode("The code is 4711.", [QuestionText("who?", answer="the mayor")])
    as_tokens = form.tokenizer.convert_ids_to_tokens
    assert as_tokens(ids[0].tolist())[-1] == "1"
    assert as_tokens(question[0].tolist())[0] == ".ĊĊ"
    assert as_tokens(answer[0].tolist()) == ["Ġthe", "Ġmayor"]
    assert form.open_context("The code is 4711.")[1] == "."


@pytest.mark.parametrize("kind", ["bytes, ends texts", "SentencePiece, ends texts", "Unigram", "WordPiece"])
def test_a_context_has_not_ended(kind: str) -> None:
    form = PromptFormat(tokenizer(kind))
    assert form.tokenizer.eos_token_id not in form.context("The red door")[0].tolist()
    assert form.lead == (kind != "Unigram")


@pytest.mark.parametrize("kind", KINDS)
def test_tasks_have_the_tokens_of_their_texts(kind: str) -> None:
    made = tokenizer(kind)
    query = Query("who was there?", ("the mayor", "the engineer"), 8)
    task = Listed("t", (Example("t", "0", TEXT, (query, query)),), PLAIN_PROMPT)
    [prompt] = encode(made, task, task.rows).prompts
    whole = tokens(kind, f"{TEXT}\n\nQuestion: who was there?\nAnswer: the mayor")
    for question in prompt.questions:
        before = prompt.with_question(question).tolist()
        assert before == tokens(kind, f"{TEXT}\n\nQuestion: who was there?\nAnswer:")
        assert question.right.tolist() == whole[len(before) :][:8]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [24, 37])
def test_windows_of_a_text_have_its_tokens(kind: str, length: int) -> None:
    made = tokenizer(kind)
    text = TEXT * 20
    task = TextTask("t", text, length)
    examples = task.examples(3, 0, make_token_counter(made))
    for example, prompt in zip(examples, encode(made, task, examples).prompts, strict=True):
        [query] = example.queries
        [question] = prompt.questions
        whole = tokens(kind, example.context + query.question + query.answers[0])
        ids = [*prompt.with_question(question).tolist(), *question.right.tolist()]
        assert ids == whole[: len(ids)] and len(question.right) >= 16

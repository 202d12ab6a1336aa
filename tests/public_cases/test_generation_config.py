"""What a checkpoint's generation config and chat template say of replies holds in every way of making them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvsearch
from kvsearch.core.errors import KvsearchWarning, UsageError
from kvsearch.models.fingerprint import hash_tokenizer
from kvsearch.models.loading import from_loaded
from kvsearch.runtime.decode.replies import find_stop_tokens
from kvsearch.runtime.program import make_full_program
from kvsearch.tasks.prompts import PromptFormat
from tests.families import build
from tests.public_cases.tokenizers_in_use import byte_level

TEXT = (
    "The meeting began at nine. Ms Okafor took the minutes and Mr Lindqvist spoke first about the harbour. "
    "Who was there? The mayor, the engineer and seven fishermen. Costs rose from 120 to 180 crowns in March. "
) * 4
TURN = "<|eot|>"
CHAT = (
    "{% for message in messages %}<s>{{ message.role }}: {{ message.content }}" + TURN + "\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said once in a process is said in each test."""
    monkeypatch.setattr("kvsearch.core.errors._said", set())


def llama(tokenizer: Any, **changes: Any) -> Any:
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return build("llama", vocab_size=len(tokenizer), max_position_embeddings=4096, **ends, **changes)


def saying(tokenizer: Any, chain: Sequence[int]) -> Any:
    """A model that says the tokens of `chain`, one after the other, whatever was read before."""
    width = 1 << (len(tokenizer) - 1).bit_length()
    made = llama(tokenizer, hidden_size=width, intermediate_size=16, num_hidden_layers=2)
    with torch.no_grad():
        for layer in made.model.layers:  # they add nothing
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        made.model.embed_tokens.weight.copy_(torch.eye(width)[: len(tokenizer)])
        made.lm_head.weight.zero_()
        for before, after in pairwise(chain):
            made.lm_head.weight[after, before] = 1.0
    return made


def chatting(template: str = CHAT, special: bool = True) -> tuple[Any, Any]:
    """A model that replies "the mayor", ends its turn, and would go on; and its tokenizer."""
    tokenizer = byte_level()
    tokenizer.add_tokens([TURN], special_tokens=special)
    tokenizer.chat_template = template

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    said = ids(" the mayor")
    after = [token for token in ids(" engineer in March") if token not in said]
    return saying(tokenizer, [*ids(":"), *said, *ids(TURN), *after, tokenizer.eos_token_id]), tokenizer


@pytest.mark.parametrize("penalty", [1.3, 1.8])
def test_generate_says_what_the_model_says_with_its_own_configuration(tmp_path: Path, penalty: float) -> None:
    tokenizer = byte_level()
    model = llama(tokenizer)
    plain = kvsearch.generate(model, tokenizer=tokenizer, prompt=[TEXT[:300]], max_new_tokens=12)[0].text
    model.generation_config.repetition_penalty = penalty
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    inputs = tokenizer(TEXT[:300], return_tensors="pt")
    output = loaded.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs.input_ids.shape[1] :]
    expected = tokenizer.decode(output, skip_special_tokens=True)
    assert expected != plain
    assert kvsearch.generate(str(tmp_path), prompt=[TEXT[:300]], max_new_tokens=12)[0].text == expected


def test_a_saved_cache_replies_as_the_context_does(tmp_path: Path) -> None:
    """The penalty is of the context's tokens, which the file has."""
    tokenizer = byte_level()
    model = llama(tokenizer)
    model.generation_config.repetition_penalty = 3.0
    plan = tmp_path / "plan.json"
    kvsearch.plans.uniform(model, tokenizer=tokenizer, policy="snapkv:window=8", budget=40, output=str(plan))
    asked: dict[str, Any] = {"tokenizer": tokenizer, "prompt": ["Who was there?"], "max_new_tokens": 40}
    read = kvsearch.generate(model, plan=str(plan), context=TEXT[:300], **asked)[0].text
    kvsearch.compress(model, tokenizer=tokenizer, plan=str(plan), context=TEXT[:300], output=str(tmp_path / "c.kv"))
    assert kvsearch.generate(model, cache=str(tmp_path / "c.kv"), **asked)[0].text == read
    model.generation_config.repetition_penalty = None
    assert kvsearch.generate(model, cache=str(tmp_path / "c.kv"), **asked)[0].text != read


def test_evaluations_follow_the_configuration_and_say_so(tmp_path: Path) -> None:
    tokenizer = byte_level()
    model = llama(tokenizer)
    rows = [{"context": TEXT[at : at + 200], "question": "who?", "answers": ["x"], "metric": "qa_f1"} for at in (0, 9)]
    (tmp_path / "q.jsonl").write_text("\n".join(json.dumps({**row, "max_new_tokens": 8}) for row in rows))

    def evaluated() -> Any:
        return kvsearch.evaluate(
            model, tokenizer=tokenizer, methods=["uniform:snapkv"], budgets=[40], samples=2,
            tasks=[f"jsonl:{tmp_path}/q.jsonl"], output=str(tmp_path / "run"),
        )  # fmt: skip

    words = "replies follow the checkpoint's generation config: no_repeat_ngram_size 1"
    assert words not in evaluated().notes
    model.generation_config.no_repeat_ngram_size = 1
    with pytest.raises(UsageError, match="generation"):  # another run than the one that is there
        evaluated()
    model.generation_config.no_repeat_ngram_size = None
    evaluated()


@pytest.mark.parametrize("special", [True, False])
def test_a_reply_ends_where_the_chat_template_ends_the_turn(special: bool) -> None:
    model, tokenizer = chatting(special=special)
    asked: dict[str, Any] = {"context": TEXT[:200], "prompt": ["who?"], "max_new_tokens": 30}
    with pytest.warns(KvsearchWarning, match=r"ends a turn with <\|eot\|>, which neither .* replies end there"):
        text = kvsearch.generate(model, tokenizer=tokenizer, **asked)[0].text
    assert text.strip() == "the mayor"
    ids = tokenizer("assistant:", return_tensors="pt").input_ids
    with kvsearch.attach(model, make_full_program(model)) as planned:  # transformers' own, which goes on
        assert "engineer" in tokenizer.decode(planned.generate(ids, max_new_tokens=30, do_sample=False)[0])


def test_evaluated_replies_end_with_the_turn(tmp_path: Path) -> None:
    model, tokenizer = chatting()
    row = {"context": TEXT[:300], "question": "who?", "answers": ["the mayor"], "metric": "qa_f1", "max_new_tokens": 30}
    (tmp_path / "q.jsonl").write_text(json.dumps(row))
    with pytest.warns(KvsearchWarning, match="replies end there"):
        result = kvsearch.evaluate(
            model, tokenizer=tokenizer, methods=["uniform:snapkv"], budgets=[40], samples=1,
            tasks=[f"jsonl:{tmp_path}/q.jsonl"],
        )  # fmt: skip
    assert result.full.scores["tasks"]["q"].mean == 1.0


ENDS = {
    "none at all": (CHAT.replace(TURN, ""), None),
    "the tokenizer's own": (CHAT.replace(TURN, "</s>"), "</s>"),
    "behind white space": (CHAT.replace(TURN, " \n" + TURN), TURN),
    "words come first": (CHAT.replace(TURN, " end " + TURN), None),
    "another one behind it": (CHAT.replace(TURN, TURN + "</s>"), TURN),
    "a template without replies": (
        "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('users only') }}{% endif %}"
        "{{ m.content }}" + TURN + "{% endfor %}",
        None,
    ),
    "a template that drops replies": ("{{ messages[0].content }}" + TURN, None),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_token_that_ends_a_turn(name: str) -> None:
    template, expected = ENDS[name]
    _, tokenizer = chatting(template)
    token = None if expected is None else tokenizer.convert_tokens_to_ids(expected)
    assert PromptFormat(tokenizer).end_of_turn == token
    assert PromptFormat(tokenizer, template=False).end_of_turn is None


def test_stop_tokens_of_every_place() -> None:
    model, tokenizer = chatting()
    end = tokenizer.convert_tokens_to_ids(TURN)
    loaded = from_loaded(model, tokenizer)
    assert find_stop_tokens(loaded) == find_stop_tokens(loaded, PromptFormat(tokenizer, template=False)) == {2}
    with pytest.warns(KvsearchWarning, match="replies end there"):
        assert find_stop_tokens(loaded, PromptFormat(tokenizer)) == {2, end}
    model.generation_config.eos_token_id = [2, 7]
    model.generation_config.stop_strings = [TURN, "and so on"]
    with pytest.warns(KvsearchWarning, match="the stop string 'and so on', no added token"):
        assert find_stop_tokens(loaded) == {2, 7, end}


def test_truncation_and_padding_in_a_tokenizer_file_cut_and_add_nothing(tmp_path: Path) -> None:
    """`tokenizers` keeps in the file what was set last, and transformers undoes it only at the first call."""
    tokenizer = byte_level()
    tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 32, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 2, "pad_type_id": 0,
        "pad_token": "</s>",
    }  # fmt: skip
    file.write_text(json.dumps(content))
    read = AutoTokenizer.from_pretrained(tmp_path)
    before = hash_tokenizer(read)
    for text in (TEXT, "a"):
        assert PromptFormat(read).context(text).tolist() == PromptFormat(tokenizer).context(text).tolist()
    assert hash_tokenizer(read) == before == hash_tokenizer(AutoTokenizer.from_pretrained(tmp_path))

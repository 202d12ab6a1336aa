"""lm-evaluation-harness under plans: against its own model, against kvsearch's replies, and what is refused."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from kvsearch.core.errors import IncompatibleError, KvsearchError, UsageError
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Plan
from kvsearch.runtime import Program
from tests.combinations import in_turn
from tests.lm_eval.folder import DOCUMENTS, rows, write_folder
from tests.tiny import chat_tokenizer, document, loaded, plan_for

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from kvsearch.lm_eval.model import PlannedLM
from kvsearch.lm_eval.tasks import TaskManager, as_plain, evaluate_tasks, load_tasks

CLOSE = 1e-4
LAYERS, HEADS = 4, 2
NAMES = ("small_generate", "small_choose", "small_likelihood")
CHAT = "{{ bos_token }} {% for message in messages %}recall {{ message['content'] }} . {% endfor %}"
WORDS = "code amber set vote bell recall mark alpha beta gamma"


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    """The tasks of a folder, without those of the harness."""
    folder = write_folder(tmp_path_factory.mktemp("tasks"))
    return TaskManager(include_path=[str(folder)], include_defaults=False)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Describing the machine takes the harness a second each time."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return loaded("llama", tie_word_embeddings=False)


def full_plan(model: LoadedModel) -> Plan:
    return plan_for(model, [[40, 40]] * LAYERS)


def small_plan(model: LoadedModel) -> Plan:
    return plan_for(model, [[9, 7], None, [8, 8], [6, 10]])


def program(model: LoadedModel) -> Program:
    return Program.from_plan(model.model, small_plan(model))


def request(text: str, second: Any, kind: str = "loglikelihood", document: int = 3) -> Instance:
    return Instance(kind, {}, (text, second), 0, metadata=("toy", document, 1))


def prompt(text: str = WORDS, **options: Any) -> Instance:
    return request(text, {"until": [], "max_gen_toks": 6, **options}, "generate_until")


def planned(model: LoadedModel, **options: Any) -> PlannedLM:
    return PlannedLM(model, program(model), **options)


@in_turn(
    options=[{"max_length": 70}, {"batch": 1}],
    chat=[True, False],
)
def test_a_full_plan_gives_what_the_harness_own_model_gives(
    model: LoadedModel, manager: TaskManager, options: dict[str, int], chat: bool
) -> None:
    if chat:
        model = replace(model, tokenizer=chat_tokenizer(CHAT))
    names = [*NAMES, "small_shots"]
    tasks = load_tasks(manager, names)
    ours = evaluate_tasks(model, full_plan(model), manager, tasks, chat_template=chat, samples=True, **options)
    own = HFLM(model.model, tokenizer=model.tokenizer, batch_size=1, max_length=options.get("max_length"))
    results = simple_evaluate(
        model=own, tasks=load_tasks(manager, names), task_manager=manager, apply_chat_template=chat
    )
    theirs = as_plain(results)
    assert ours["samples"].keys() == theirs["samples"].keys()
    for task, samples in ours["samples"].items():
        for mine, other in zip(samples, theirs["samples"][task], strict=True):
            assert mine["arguments"] == other["arguments"]
            assert_equal(mine["resps"], other["resps"])
    assert ours["results"] == theirs["results"]
    cut = {task: found["truncated"] for task, found in ours["kvsearch"]["held"].items()}
    assert all(cut.values()) if "max_length" in options else not any(cut.values())


def assert_equal(ours: list[Any], theirs: list[Any]) -> None:
    """Replies in every letter, log-likelihoods closely."""
    for mine, other in zip(ours, theirs, strict=True):
        if isinstance(mine[0], str):
            assert mine == other
            assert mine[0]
        else:
            assert mine[0][0] == pytest.approx(other[0][0], abs=CLOSE)
            assert mine[0][1] == other[0][1]


def test_what_the_cache_held_is_counted(model: LoadedModel, manager: TaskManager) -> None:
    tasks = load_tasks(manager, ["small_generate", "small_choose"])
    results = evaluate_tasks(model, small_plan(model), manager, tasks, seed=2)
    assert results["config"]["random_seed"] == 2
    assert results["kvsearch"]["model"] == model.fingerprint.model_dump()
    assert "samples" not in results
    prefill = program(model).prefill
    lengths = [1 + len(f"{row['context']} {row['question']}".split()) for row in rows()]
    entries = [prefill.entries(length) + HEADS * length for length in lengths]  # one layer is not planned
    generated = results["kvsearch"]["held"]["small_generate"]
    assert generated == {
        "prompts": DOCUMENTS, "truncated": 0, "single_tokens": 0, "tokens": pytest.approx(sum(lengths) / DOCUMENTS),
        "entries": pytest.approx(sum(entries) / DOCUMENTS),
        "full_entries": pytest.approx(LAYERS * HEADS * sum(lengths) / DOCUMENTS),
    }  # fmt: skip
    assert generated["entries"] < generated["full_entries"] / 2
    chosen = results["kvsearch"]["held"]["small_choose"]
    assert chosen["prompts"] == DOCUMENTS + 1  # five choices share a context, all documents the empty one
    assert chosen["single_tokens"] == 1
    assert chosen["tokens"] == pytest.approx((sum(lengths) - DOCUMENTS + 1) / (DOCUMENTS + 1))


def test_requests_are_answered_in_their_order(model: LoadedModel) -> None:
    texts = [" ".join(document(20 + 9 * seed, seed).words[1:]) for seed in range(7)]
    prompts = [prompt(text, until=["bell"] if number % 2 else []) for number, text in enumerate(texts)]
    pairs = [request(text, f" {word}") for text in texts for word in ("amber", "alpha beta")]
    order = random.Random(0).sample(range(7), 7)
    replies = planned(model, batch=3).generate_until(prompts)
    assert planned(model, batch=2).generate_until([prompts[at] for at in order]) == [replies[at] for at in order]
    answers = planned(model, batch=3).loglikelihood(pairs)
    backwards = planned(model, batch=2).loglikelihood(pairs[::-1])[::-1]
    assert [logprob for logprob, _ in answers] == pytest.approx([logprob for logprob, _ in backwards], abs=CLOSE)
    assert len(set(replies)) == len(replies)
    assert len(set(answers)) == len(answers)


def test_replies_end_where_they_are_told_to(model: LoadedModel) -> None:
    whole = planned(model).generate_until([prompt()])[0].split()
    assert len(whole) == len(set(whole)) == 6
    for options, expected in [
        ({"max_gen_toks": 2}, whole[:2]),
        ({"max_gen_toks": None, "max_new_tokens": 3}, whole[:3]),
        ({"until": [whole[3], whole[2]]}, whole[:2]),
        ({"until": whole[4]}, whole[:4]),
        ({"until": ["", "nothing"]}, whole),
        ({"do_sample": False, "temperature": 1.0, "top_p": 0.9, "num_beams": 1}, whole),
    ]:
        assert planned(model).generate_until([prompt(**options)])[0].split() == expected


def test_replies_are_drawn_as_a_task_says(model: LoadedModel) -> None:
    """By a seed of document and repeat, whatever else is in the batch."""
    drawn = {"do_sample": True, "temperature": 3.0}
    requests = [prompt(**drawn), prompt(), prompt(temperature=3.0), prompt(temperature=3.0)]
    first, greedy, second, third = planned(model, batch=4).generate_until(requests)
    assert planned(model, batch=1).generate_until(requests) == [first, greedy, second, third]
    assert len({first, second, third, greedy}) == 4
    assert greedy == planned(model).generate_until([prompt(do_sample=True, temperature=0.0)])[0]
    assert greedy == planned(model).generate_until([prompt(temperature=5.0, top_p=1e-6)])[0]
    other = planned(model, seed=1).generate_until(requests)
    assert other[0] != first
    assert other[1] == greedy


def test_a_special_token_ends_a_reply(model: LoadedModel) -> None:
    """The text of a reply has no special tokens, so that a stop of that kind must be seen before."""
    lm = planned(model)
    ids = model.tokenizer(lm.generate_until([prompt()])[0], add_special_tokens=False)["input_ids"]
    head = model.model.lm_head.weight
    with torch.no_grad():
        before = head[3].clone()
        head[3] = 1.01 * head[ids[2]]  # <unk> takes the place of the third word
        try:
            assert planned(model).generate_until([prompt(until=["<unk>"])])[0].split() == [
                model.tokenizer.decode([token]) for token in ids[:2]
            ]
        finally:
            head[3] = before


def spaced_tokenizer() -> Any:
    """Words with the space before them as one token, " " where no word follows; nothing is put in front."""
    words = Tokenizer(WordLevel({"<end>": 0, "code": 1, " amber": 2, " ": 3, "amber": 4, "?": 5}, unk_token="?"))
    words.pre_tokenizer = Split(Regex(r"<end>| ?\w+| "), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="?")


@pytest.mark.parametrize(
    ("context", "continuation", "ids", "text"),
    [
        ("code", " amber", (1,), (2,)),
        ("code ", "amber", (1,), (2,)),  # the space begins the continuation
        ("code code", "", (1, 5), ()),
        ("", "amber", (0,), (4,)),  # nothing precedes: the end of a text stands for the start of the next
        ("", "<end>code", (0,), (1,)),
    ],
)
def test_where_a_context_ends(
    model: LoadedModel, context: str, continuation: str, ids: tuple[int, ...], text: tuple[int, ...]
) -> None:
    lm, asked = planned(replace(model, tokenizer=spaced_tokenizer())), request(context, continuation)
    if text:
        assert lm.encode_pair(asked) == (("toy", ids, False), text)
    else:
        with pytest.raises(IncompatibleError, match="the continuation is empty"):
            lm.encode_pair(asked)


def test_the_response_cache_is_refused(model: LoadedModel, manager: TaskManager, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"response cache \(use_cache\) does not know the plan"):
        tasks = load_tasks(manager, ["small_choose"])
        simple_evaluate(model=planned(model), tasks=tasks, task_manager=manager, use_cache=str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("name", "fault", "message"),
    [
        ("small_rolling", UsageError, "task small_rolling: .*no context before them that a plan could compress"),
        ("small_unsafe", UsageError, "task small_unsafe runs the code that a model writes"),
        ("small_sampling", UsageError, "task small_sampling: replies are drawn at a temperature above 0"),
        ("small_broken", UsageError, "task 'small_broken' cannot be loaded .*'guess'"),
    ],
)
def test_tasks_that_cannot_run_are_refused_when_they_are_loaded(
    manager: TaskManager, name: str, fault: type[KvsearchError], message: str
) -> None:
    with pytest.raises(fault, match=message) as caught:
        load_tasks(manager, [name])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"do_sample": True, "temperature": -0.7}, "replies are drawn at a temperature above 0, from a top-p above 0"),
        ({"do_sample": True, "top_k": 5}, "options that drawn replies cannot honour: top_k"),
        ({"max_gen_toks": 0}, "replies of 0 tokens"),
        ({"max_gen_toks": 512}, "a reply of up to 512 tokens leaves no room for its prompt within 512"),
    ],
)
def test_replies_that_cannot_be_made(model: LoadedModel, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"task toy, document 3.*{message}"):
        planned(model).generate_until([prompt(**options)])


def test_texts_without_tokens_or_room(model: LoadedModel) -> None:
    lm = planned(model, max_length=8)
    for text in ("", " "):
        with pytest.raises(IncompatibleError, match="task toy, document 3: the continuation is empty"):
            lm.loglikelihood([request(WORDS, text)])
    with pytest.raises(IncompatibleError, match="a continuation of 10 tokens is longer than the 8"):
        lm.loglikelihood([request("code", f" {WORDS}")])
    assert lm.loglikelihood([request(WORDS, " a b c d e f g h")])[0][0] < 0
    assert [lm.held["toy"][name] for name in ("prompts", "truncated", "single_tokens")] == [1, 1, 1]


def test_the_document_that_breaks_a_model_is_named() -> None:
    broken = loaded("llama", tie_word_embeddings=False)
    lm = planned(broken)
    with torch.no_grad():
        broken.model.model.embed_tokens.weight[3] = float("nan")  # unknown words
    asked = [request(WORDS, " amber", document=1), request(f"{WORDS} quark", " amber", document=7)]
    with pytest.raises(IncompatibleError, match="task toy, document 7: the model emits NaN"):
        lm.loglikelihood(asked)
    asked = [prompt(), replace(prompt(f"{WORDS} quark"), metadata=("toy", 7, 1), doc_id=7)]
    with pytest.raises(IncompatibleError, match=r"task toy, document 7: .* the model computes NaN"):
        lm.generate_until(asked)


def test_a_task_that_fails_is_not_our_bug(model: LoadedModel, manager: TaskManager) -> None:
    with pytest.raises(UsageError, match=r"lm-evaluation-harness gave up \(RuntimeError: no such luck\)"):
        evaluate_tasks(model, small_plan(model), manager, load_tasks(manager, ["small_failing"]), limit=1)

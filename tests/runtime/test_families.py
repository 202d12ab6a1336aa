"""Every family of the table does under plans what it should, and what is special about some of them is done right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvsearch.errors import IncompatibleError, UsageError
from kvsearch.models.architecture import describe
from kvsearch.policies import create_policy
from kvsearch.runtime import PlanCache, Program, attach
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.family_check import check_family
from kvsearch.runtime.fork import joined, prefill_all
from kvsearch.runtime.logits import Logits
from kvsearch.runtime.observe import DensePass
from tests.families import ALL, SPECIAL, build, prompts
from tests.runtime.helpers import (
    assert_close,
    feed,
    keep_everything,
    one_by_one,
    plan_for,
    random_eviction,
    running,
)

WINDOWS = ("gemma2", "gemma3")
INTERLEAVED = ("cohere", "ernie4_5", "glm", "glm4", "helium", "hunyuan_v1_dense")
GATED = ("bitnet", "qwen3_5", "qwen3_next")
REFUSED = ("bloom", "falcon", "mpt")
CONTINUING = ("lfm2", "minimax", "qwen3_5", "qwen3_next")
STATEFUL = ("jamba", *CONTINUING)


@pytest.mark.parametrize("family", ALL)
def test_a_family_does_what_it_should(family: str) -> None:
    report = check_family(family)
    partly = (*WINDOWS, *INTERLEAVED, *GATED, *SPECIAL)
    verdict = "refused" if family in REFUSED else "partly" if family in partly else "supported"
    assert (report.verdict, report.transformers.split(".")[0]) == (verdict, "5"), report.why
    assert ("are left alone" in report.why) == (family in (*WINDOWS, *SPECIAL))
    assert ("turned back" in report.why) == (family in INTERLEAVED)
    assert ("gate or norm" in report.why) == (family in GATED)


# --- the check would notice -----------------------------------------------------------------------------------------


def test_the_check_notices_lost_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Logits, "softmax", lambda _, scores, heads: scores.softmax(-1))
    report = check_family("gpt_oss")
    assert report.verdict == "FAILED"
    assert "off those of masked entries" in report.why


def test_the_check_notices_entries_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsearch.runtime.family_check._ragged", keep_everything)
    assert check_family("llama").why == "a head holds more entries than its budget"


@pytest.mark.parametrize(
    ("family", "other", "why"),
    [
        ("llama", "cohere", "queries turn back to position 0: True, the table says False"),
        ("cohere", "llama", "queries turn back to position 0: False, the table says True"),
        ("bloom", "llama", "BloomForCausalLM is not supported: its code computes attention itself, with a bias"),
        ("llama", "bloom", "it runs, and the table says that it is refused"),
    ],
)
def test_the_check_notices_what_the_table_says_wrongly(
    family: str, other: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(family)
    monkeypatch.setitem(ALL, "odd", ALL[other])
    report = check_family("odd", model)
    assert report.verdict == "FAILED"
    assert report.why.startswith(why)


# --- layers with a running state ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", CONTINUING)
def test_several_turns_equal_a_full_recomputation(family: str) -> None:
    model = build(family)
    ids, mask = prompts(1, 34)
    pieces = [(ids[:, :20], mask[:, :20]), (ids[:, 20:27], mask[:, 20:27]), *one_by_one(ids[:, 27:])]
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    with running(model, NAME):
        planned = feed(model, PlanCache(model, keep_everything(model)), pieces)
    assert_close(torch.cat(planned, 1), expected, 1e-4)


@pytest.mark.parametrize("family", CONTINUING)
def test_a_question_leaves_no_trace(family: str) -> None:
    model = build(family)
    ids, mask = prompts(1, 30)
    first, second = (prompts(1, 6, seed=seed)[0] for seed in (1, 2))
    with running(model, NAME), torch.no_grad():
        cache = PlanCache(model, random_eviction(model, mask).program)
        feed(model, cache, [(ids, mask)])
        mark, said = cache.mark(), []
        for question in (first, second, first):
            positions = torch.arange(30, 36)[None]
            said.append(model(question, position_ids=positions, past_key_values=cache).logits)
            cache.rewind(mark)
    assert torch.equal(said[0], said[2])
    assert not torch.allclose(said[0], said[1])


@pytest.mark.parametrize("family", STATEFUL)
def test_one_prompt_serves_many_plans(family: str) -> None:
    """Each goes its own way afterwards, alone or as a row of one batch."""
    model = build(family)
    ids, mask = prompts(1, 30)
    programs = [random_eviction(model, mask, seed=seed).program for seed in (0, 1)]
    after = one_by_one(prompts(1, 4, seed=1)[0])
    positions = torch.arange(30, 34)[None]

    def go_on(cache: PlanCache, rows: int = 1) -> Any:
        steps = [
            model(ids.repeat(rows, 1), position_ids=positions[:, i : i + 1], past_key_values=cache).logits
            for i, (ids, _) in enumerate(after)
        ]
        return torch.cat(steps, 1)

    with running(model, NAME), torch.no_grad():
        alone = []
        for program in programs:
            cache = PlanCache(model, program)
            model(ids, past_key_values=cache)
            alone.append(go_on(cache))
        for together in (False, True):
            caches = [PlanCache(model, program) for program in programs]
            prefill_all(model, caches, ids, mask)
            found = [*go_on(joined(caches), 2).split(1)] if together else [go_on(cache) for cache in caches]
            for actual, expected in zip(found, alone, strict=True):
                assert_close(actual, expected, 1e-4)


def test_a_family_that_forgets_its_state() -> None:
    """Several tokens at once after a prompt are refused where transformers' own code answers them wrongly."""
    model = build("jamba")
    ids, mask = prompts(1, 12)
    refusal = "transformers' code for jamba forgets its running state"
    with running(model, NAME), torch.no_grad():
        cache = PlanCache(model, keep_everything(model))
        feed(model, cache, [(ids, mask), *one_by_one(ids[:, :2])])
        with pytest.raises(IncompatibleError, match=refusal):
            model(ids[:, :2], past_key_values=cache)
        with pytest.raises(IncompatibleError, match=refusal):
            model(ids[:, 2:], past_key_values=_begun(model, ids[:, :2]))
        observed = DensePass(model, {1: [], 3: []}, lambda prompt: prompt, ids)
        with pytest.raises(IncompatibleError, match=refusal), observed.following(ids[:, :3]):
            pass


def _begun(model: Any, ids: Any) -> PlanCache:
    cache = PlanCache(model, keep_everything(model), prompt_length=12)
    model(ids, past_key_values=cache)
    return cache


def test_what_a_running_state_rules_out() -> None:
    model = build("qwen3_next")
    ids, _ = prompts(1, 12)
    with running(model, NAME), torch.no_grad():
        cache = PlanCache(model, keep_everything(model))
        model(ids, past_key_values=cache)
        model(ids[:, :2], past_key_values=cache)
        with pytest.raises(UsageError, match="cannot take tokens back: layers 0, 2 carry a running state"):
            cache.crop(-1)
    assert cache.get_seq_length() == 14


def test_their_memory_is_counted() -> None:
    model = build("jamba")
    ids, _ = prompts(1, 12)
    with running(model, NAME), torch.no_grad():
        cache = PlanCache(model, keep_everything(model))
        assert cache.nbytes() == 0
        model(ids, past_key_values=cache)
    conv, recurrent = 128 * 4 * 4, 128 * 4 * 4  # twice the width, kernel and state of 4, fp32
    assert cache.layer_nbytes(0) == conv + recurrent
    assert cache.nbytes() == sum(cache.layer_nbytes(index) for index in range(4))


@pytest.mark.parametrize("family", SPECIAL)
def test_plans_keep_the_indices_of_the_model(family: str) -> None:
    model = build(family)
    layers = describe(model).full_layers
    budgets = [[5, 9] if index in layers else None for index in range(4)]
    ids, mask = prompts(1, 30)
    with attach(model, plan_for(model, budgets)) as planned:
        planned.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
        assert planned.cache is not None
        assert planned.cache.entries().squeeze(1).tolist() == [[7, 11]] * 2
        assert tuple(planned.cache.planned) == layers
    elsewhere = [None if index in layers else [5, 9] for index in range(4)]
    kind = next(kind for kind in describe(model).kinds if kind != "full_attention")
    with pytest.raises(IncompatibleError, match=f"the plan budgets layers .*{kind}"):
        attach(model, plan_for(model, elsewhere))


# --- sinks in the softmax -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["tova", "h2o", "snapkv", "cake"])
def test_sinks_stay_while_decoding(policy: str) -> None:
    """With budgets that are never reached a decode phase says what the model says."""
    model = build("gpt_oss")
    ids, mask = prompts(2, 30, pads=6)
    pieces = [(ids, mask), *one_by_one(prompts(2, 5, seed=1)[0])]
    tables = {"decode": lambda _: torch.full((2, 2), 50).numpy()}
    program = Program.of_policy(model, create_policy(policy), tables)
    with running(model, NAME):
        planned = feed(model, PlanCache(model, program), pieces)
    stock = feed(model, DynamicCache(config=model.config), pieces)
    for actual, expected in zip(planned[1:], stock[1:], strict=True):
        assert_close(actual, expected)


def test_long_prompts_are_attended_to_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager attention of some rows at a time is that of all rows."""
    for family in ("gpt_oss", "gemma2"):
        model = build(family)
        for pads in (0, 5):
            ids, mask = prompts(2, 30, pads=pads)
            given = {"attention_mask": mask} if pads else {}
            with torch.no_grad():
                expected = model(ids, **given).logits
                with running(model, NAME), monkeypatch.context() as patch:
                    patch.setattr("kvsearch.runtime.attention.EAGER_LOGITS", 2 * 8 * 30 * 7)
                    actual = model(ids, **given, past_key_values=PlanCache(model, keep_everything(model))).logits
            assert_close(actual[mask.bool()], expected[mask.bool()])

"""`attach` as people call it: the plan is what runs, or the call is refused in words."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from kvsearch import attach
from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.evaluation.likelihood import score
from kvsearch.models.architecture import find_rotary_switch
from kvsearch.policies import create_policy
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import run_attention
from kvsearch.runtime.observe import DensePass
from kvsearch.runtime.program import make_full_program
from kvsearch.runtime.shared_prefill import compress_prompts, prefill_all, read
from tests.families import build

SWITCH = 64  # tokens, beyond which rotary factors are others
SHAPE = {
    "vocab_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "eos_token_id": 2, "pad_token_id": 3,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "rope_theta": 10000.0,
    "original_max_position_embeddings": SWITCH, "factor": 8.0,
}  # fmt: skip
ASK: dict[str, Any] = {"do_sample": False, "min_new_tokens": 1}
BEYOND = "has other rotary factors beyond 64 tokens"


def llama(**changes: Any) -> Any:
    return build("llama", **{**SHAPE, **changes})


def phi3() -> Any:
    return build("phi3", **SHAPE, original_max_position_embeddings=SWITCH, rope_parameters=dict(LONGROPE))


def phimoe() -> Any:
    rope = {**LONGROPE, "short_mscale": 1.0, "long_mscale": 1.3}
    return build("phimoe", **SHAPE, original_max_position_embeddings=SWITCH, rope_parameters=rope)


def longrope_llama() -> Any:
    """A model whose code in transformers goes on with its cache where the factors change."""
    return llama(rope_parameters=dict(LONGROPE))


def dynamic_llama() -> Any:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    return llama(rope_parameters=rope, max_position_embeddings=SWITCH)


def prompts(length: int, batch: int = 1, seed: int = 0) -> Tensor:
    return torch.randint(4, 128, (batch, length), generator=torch.Generator().manual_seed(seed))


def holding(model: Any, entries: int = 20, policy: str = "snapkv") -> Program:
    return Program.uniform(model, create_policy(policy), lambda _: entries)


def generated(model: Any, ids: Tensor, new: int, **options: Any) -> list[int]:
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, **ASK, **options)[0, ids.shape[1] :].tolist()


# --- rotary factors that change with the length -----------------------------------------------------------------------

LONG = [pytest.param(make, id=make.__name__) for make in (phi3, phimoe, longrope_llama)]


@pytest.mark.parametrize("make", LONG)
@pytest.mark.parametrize(("length", "new"), [(40, 25), (65, 8), (70, 8)])
def test_on_one_side_of_the_switch_the_plan_runs_to_the_end(make: Callable[[], Any], length: int, new: int) -> None:
    model = make()
    ids = prompts(length)
    own = generated(model, ids, new)
    with attach(model, make_full_program(model)) as planned:
        assert generated(planned, ids, new) == own
        assert planned.cache.get_seq_length() == length + len(own) - 1
    with attach(model, holding(model)) as planned:
        said = generated(planned, ids, new)
        assert planned.cache.get_seq_length() == length + len(said) - 1
        assert planned.cache.entries().tolist() == [[[20 + len(said) - 1] * 2]] * 3
        with run_attention(model):  # the same plan in kvsearch's own loop
            replies = read(model, PlanCache(model, holding(model)), [ids[0]], {2})
            assert replies.reply([new])[0] == [token for token in said if token != 2]


@pytest.mark.parametrize("make", [*LONG, pytest.param(dynamic_llama, id="dynamic_llama")])
@pytest.mark.parametrize("options", [{"max_new_tokens": 6}, {"max_length": 66}, {}], ids=["new", "length", "default"])
def test_a_reply_that_may_pass_the_switch_is_refused_before_it_begins(make: Callable[[], Any], options: Any) -> None:
    model = make()
    with attach(model, holding(model)) as planned:
        with pytest.raises(IncompatibleError, match=f"{BEYOND}.*shorten prompt or reply by 1" if options else BEYOND):
            planned.generate(prompts(60), **options)
        assert planned.cache.get_seq_length() == 0
        planned.generate(prompts(60), max_new_tokens=5, **ASK)
        with pytest.raises(IncompatibleError, match=BEYOND):  # the conversation goes on
            planned.generate(prompts(66), past_key_values=planned.cache, max_new_tokens=1)


def test_factors_of_their_own_for_every_length_are_refused_beyond_the_first() -> None:
    model = dynamic_llama()
    with attach(model, holding(model)) as planned:
        with pytest.raises(IncompatibleError, match="dynamic NTK"):
            planned.generate(prompts(70), max_new_tokens=1)
        assert len(generated(planned, prompts(40), 8)) == 8


@pytest.mark.parametrize("make", LONG)
def test_batches(make: Callable[[], Any]) -> None:
    """Sequences of both sides share no batch; those of one side answer as alone."""
    model = make()
    short, long = prompts(50), prompts(80, seed=1)

    def batch(*rows: Tensor) -> dict[str, Tensor]:
        width = max(row.shape[1] for row in rows)
        pads = [torch.full((1, width - row.shape[1]), 3) for row in rows]
        ids = torch.cat([torch.cat([pad, row], 1) for pad, row in zip(pads, rows, strict=True)])
        masks = [torch.cat([pad * 0, row * 0 + 1], 1) for pad, row in zip(pads, rows, strict=True)]
        return {"input_ids": ids, "attention_mask": torch.cat(masks)}

    with attach(model, holding(model)) as planned:
        with pytest.raises(IncompatibleError, match="of 50 and of 80 tokens cannot share a batch"):
            planned.generate(**batch(short, long), max_new_tokens=4)
        for rows in ((long, prompts(70, seed=2)), (short, prompts(44, seed=2))):
            alone = [generated(planned, row, 4, eos_token_id=None) for row in rows]
            given = batch(*rows)
            together = planned.generate(**given, max_new_tokens=4, eos_token_id=None, **ASK)
            assert together[:, given["input_ids"].shape[1] :].tolist() == alone
            beams = planned.generate(**given, max_new_tokens=4, num_beams=2, num_return_sequences=2, **ASK)
            assert len(beams) == 4


@pytest.mark.nightly
def test_ways_of_generating_beyond_the_switch() -> None:
    model = phi3()
    ids = prompts(80)
    with attach(model, holding(model)) as planned:
        said = generated(planned, ids, 8)
        assert generated(planned, ids, 8, prompt_lookup_num_tokens=3) == said
        assert generated(planned, ids, 8, assistant_model=model) == said
        embeds = model.get_input_embeddings()(ids)
        assert planned.generate(inputs_embeds=embeds, max_new_tokens=8, **ASK)[0].tolist() == said
        assert planned.cache.get_seq_length() == 80 + len(said) - 1
        more = torch.cat([ids, prompts(5)], 1)
        cache = planned.read(ids)
        again = planned.read(ids, chunk=16)  # as if it were read at once
        assert generated(planned, more, 4, past_key_values=cache) == generated(planned, more, 4, past_key_values=again)
        with pytest.raises(IncompatibleError, match=r"prefill_chunk_size=16: .*planned.read\(ids, chunk=\.\.\.\)"):
            planned.generate(ids, prefill_chunk_size=16, max_new_tokens=2)
    assert find_rotary_switch(model) is not None
    assert not model.model.rotary_emb._forward_pre_hooks  # nothing stays behind


def test_a_model_whose_factors_stay_is_read_anew_by_its_code_all_the_same() -> None:
    model = build("phi3", **SHAPE, original_max_position_embeddings=SWITCH)
    with attach(model, holding(model)) as planned:
        with pytest.raises(IncompatibleError, match="drops the cache when a sequence passes 64 tokens"):
            planned.generate(prompts(60), max_new_tokens=6)
        for length in (60, 70):
            said = generated(planned, prompts(length), 5)
            assert planned.cache.get_seq_length() == length + len(said) - 1


@pytest.mark.parametrize("make", [longrope_llama, dynamic_llama])
def test_loops_of_ones_own(make: Callable[[], Any], tmp_path: Path) -> None:
    model = make()
    ids = prompts(66)
    with attach(model, holding(model)) as planned, torch.no_grad():
        cache = planned.new_cache()
        model(ids[:, :63], past_key_values=cache)
        model(ids[:, 63:64], past_key_values=cache)
        with pytest.raises(IncompatibleError, match="do not fit 1 more"):
            model(ids[:, 64:65], past_key_values=cache)
        assert cache.get_seq_length() == 64
        chunks = planned.new_cache(prompt_length=66)
        model(ids[:, :40], past_key_values=chunks)
        with pytest.raises(IncompatibleError, match="do not fit 26 more"):
            model(ids[:, 40:], past_key_values=chunks)
        with pytest.raises(IncompatibleError, match=BEYOND):
            planned(ids[:, 64:65], past_key_values=cache)
        whole = planned.new_cache()
        model(ids[:, :65], past_key_values=whole)
        if make is dynamic_llama:  # every length has factors of its own
            with pytest.raises(IncompatibleError, match=r"do not fit 1 more: read the prompt anew$"):
                model(ids[:, 65:], past_key_values=whole)
        else:
            model(ids[:, 65:], past_key_values=whole)


def test_loops_of_kvsearch() -> None:
    """What is asked, forced or scored after a prompt is refused before the prompt is gone on with, or read."""
    model = longrope_llama()
    full = {"full": make_full_program(model)}
    kvzip = holding(model, policy="kvzip")
    short, long = prompts(60)[0], prompts(70)[0]
    with run_attention(model), torch.no_grad():
        replies = read(model, PlanCache(model, full["full"]), [short], {2})
        for refused in (
            lambda: replies.ask([short[:5]], [1]),
            lambda: replies.ask([short[:2]], [4]),
            lambda: replies.force([short[:5]], 1),
            lambda: replies.reply([6]),
            lambda: next(compress_prompts(model, full, [short, long], {2})),
            lambda: score(model, full["full"], [short.tolist()], [[long[:6].tolist()]]),
            lambda: prefill_all(model, [PlanCache(model, kvzip)], long[None, :62], torch.ones(1, 62).long()),
        ):
            with pytest.raises(IncompatibleError):
                refused()
        assert len(replies.ask([short[:2]], [3])[0]) <= 3
        passed = DensePass(model, {}, lambda prompt: prompt, short[None])
        with pytest.raises(IncompatibleError, match=BEYOND), passed.following(short[None, :5]):
            pass
        # a prompt is read again by the factors it was read with
        for ids in (short[None, :40], long[None]):
            cache = PlanCache(model, kvzip)
            prefill_all(model, [cache], ids, torch.ones_like(ids))
            assert cache.entries().tolist() == [[[20, 20]]] * 3


# --- the plan is what runs --------------------------------------------------------------------------------------------


@pytest.fixture
def model() -> Any:
    return llama()


@pytest.fixture
def planned(model: Any) -> Iterator[Any]:
    with attach(model, holding(model)) as entered:
        yield entered


def test_the_model_itself_refuses_other_caches_while_it_is_attached(model: Any) -> None:
    ids = prompts(60)
    own = generated(model, ids, 4)
    with attach(model, holding(model)) as planned:
        for refused in (
            lambda: model.generate(ids, max_new_tokens=4),
            lambda: model(ids),
            lambda: model.model(ids),
            lambda: model(ids, past_key_values=DynamicCache()),
        ):
            with pytest.raises(UsageError, match=r"planned.generate\(...\)"):
                refused()
        said = generated(planned, ids, 4)
        with attach(model, make_full_program(model)) as inner:
            assert generated(inner, ids, 4) == own
        with pytest.raises(UsageError, match="attached to a plan"):
            model.generate(ids, max_new_tokens=4)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(generated(planned, ids, 4)))
        thread.start()
        thread.join()
        assert found == [said]
    assert generated(model, ids, 4) == own != said


def test_where_a_model_returns_itself_the_planned_one_is_returned(model: Any, planned: Any) -> None:
    ids = prompts(60)
    said = generated(planned, ids, 4)
    for same in (planned.to("cpu"), planned.eval(), planned.float(), planned.cpu(), planned.requires_grad_(False)):
        assert same is planned
    assert generated(planned.train().eval(), ids, 4) == said
    assert planned.half() is planned
    assert model.dtype == torch.float16
    planned.bfloat16().generate(ids, max_new_tokens=2)
    assert planned.cache.entries().unique().tolist() == [21]
    assert planned.get_input_embeddings() is model.get_input_embeddings()


def test_a_call_is_a_forward_pass_under_the_plan(model: Any) -> None:
    ids = prompts(60)
    with torch.no_grad():
        full = model(ids, labels=ids)
    with attach(model, holding(model)) as planned, torch.no_grad():
        output = planned(ids, labels=ids)
        torch.testing.assert_close(output.logits, full.logits)
        torch.testing.assert_close(output.loss, full.loss)
        assert isinstance(output.past_key_values, PlanCache)
        assert planned.cache is output.past_key_values
        assert planned.cache.entries().unique().tolist() == [20]
        token = output.logits[:, -1:].argmax(-1)
        following = planned(token, past_key_values=output.past_key_values).logits
        assert planned.cache.get_seq_length() == 61
        assert planned.cache.entries().unique().tolist() == [21]
        said = planned.generate(ids, max_new_tokens=2, **ASK)[0, 60:].tolist()
        assert said == [int(token), int(following.argmax())]
        plain = planned(ids, use_cache=False)
        torch.testing.assert_close(plain.logits, full.logits)
        assert plain.past_key_values is None
        with pytest.raises(UsageError, match="not a DynamicCache"):
            planned(ids, past_key_values=DynamicCache())
        positional = planned(ids, torch.ones_like(ids))
        torch.testing.assert_close(positional.logits, full.logits)
    with pytest.raises(UsageError, match="as a context manager"):
        planned(ids)


def test_a_call_that_leaves_the_cache_alone_is_refused(model: Any) -> None:
    model.gradient_checkpointing_enable()
    with attach(model, holding(model)) as planned, pytest.raises(IncompatibleError, match="has read 0 of 60 tokens"):
        planned.train()(prompts(60))


def test_what_is_set_is_set_on_the_model(model: Any, planned: Any) -> None:
    planned.generation_config = GenerationConfig(max_new_tokens=3, eos_token_id=None)
    assert model.generation_config.max_new_tokens == 3
    assert planned.generate(prompts(20)).shape == (1, 23)


# --- what a checkpoint says of caches ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "option",
    [{"cache_implementation": "hybrid"}, {"cache_implementation": "static"}, {"use_cache": False}],
    ids=["hybrid", "static", "use_cache"],
)
def test_cache_options_of_a_checkpoint_are_defaults(option: dict[str, Any]) -> None:
    model = llama()
    ids = prompts(60)
    with attach(model, holding(model)) as planned:
        said = planned.generate(ids, max_new_tokens=4, **ASK).tolist()
    for name, value in option.items():
        setattr(model.generation_config, name, value)
        if name == "use_cache":
            setattr(model.config, name, value)
    before = copy.deepcopy(model.generation_config)
    tuned = copy.deepcopy(model.generation_config)
    tuned.max_new_tokens = 4
    with attach(model, holding(model)) as planned:
        assert planned.generate(ids, max_new_tokens=4, **ASK).tolist() == said
        assert planned.generate(ids, generation_config=tuned, **ASK).tolist() == said
        plain = GenerationConfig(max_new_tokens=4, do_sample=False, min_new_tokens=1)
        assert planned.generate(ids, generation_config=plain).tolist() == said
        assert planned.cache.entries().unique().tolist() == [23]
        other = "offloaded" if "cache_implementation" in option else "static"
        for wish in ({"cache_implementation": other}, {"use_cache": False}):
            (named,) = (f"{name}={value!r}" for name, value in wish.items())
            with pytest.raises(UsageError, match=f"^{named} and a plan exclude each other: drop the option$"):
                planned.generate(ids, **wish)
            if wish != option:  # what a configuration took over from the checkpoint is no wish
                with pytest.raises(UsageError, match=f"^{named} and a plan exclude each other"):
                    planned.generate(ids, generation_config=GenerationConfig(**wish))
        assert planned.generate(ids, use_cache=True, max_new_tokens=4, **ASK).tolist() == said
    assert model.generation_config == before


# --- caches in files --------------------------------------------------------------------------------------------------


def test_a_cache_is_not_pickled(model: Any, planned: Any, tmp_path: Path) -> None:
    cache = planned.read(prompts(30))
    for refused in (lambda: pickle.dumps(cache), lambda: torch.save(cache, tmp_path / "cache.pt")):
        with pytest.raises(UsageError, match=r"cache.save\(path\) writes it"):
            refused()
    more = prompts(33)
    more[:, :30] = prompts(30)
    copies = [generated(planned, more, 4, past_key_values=copied) for copied in (copy.deepcopy(cache), cache)]
    assert copies[0] == copies[1]


def test_wrappers_of_torch() -> None:
    model = llama()
    ids = prompts(40)
    with attach(model, holding(model)) as planned:
        expected = generated(planned, ids, 4)
    with attach(torch.compile(model), holding(model)) as planned:
        assert generated(planned, ids, 4) == expected
        assert planned(ids).logits.shape[:2] == ids.shape
    with pytest.raises(UsageError, match="a DataParallel is no model of transformers: give the one that it wraps"):
        attach(torch.nn.DataParallel(model), holding(model))

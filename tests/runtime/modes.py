"""Ways of generating, each written once and run twice: over a stock cache, and over that of a plan."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvsearch.runtime import PlannedModel
from tests.families import prompts

BATCH, LENGTH, PADS, REPLY = 2, 24, 5, 5
PAD = 0


@dataclass
class Side:
    """A model with its stock cache, or under a plan (`planned`, which is attached)."""

    model: Any
    planned: PlannedModel | None = None

    def cache(self, prompt_length: int | None = None) -> Any:
        if self.planned is None:
            return DynamicCache(config=self.model.config)
        return self.planned.new_cache(prompt_length)

    def forward(self, cache: Any, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        """Logits [B, q, V] of tokens that come, at the positions that the mask makes of them."""
        if mask is not None and mask.dim() == 2:
            options.setdefault("position_ids", (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :])
        logits: Tensor = self.model(ids, attention_mask=mask, past_key_values=cache, **options).logits
        return logits

    def generate(self, ids: Tensor | None, **options: Any) -> Any:
        """Sequences, and the logits of every step, as `generate` gives them; its cache as `past_key_values`."""
        torch.manual_seed(3)
        made = {"max_new_tokens": REPLY, "do_sample": False, **options}
        target = self.model if self.planned is None else self.planned
        return target.generate(ids, return_dict_in_generate=True, output_logits=True, **made)


Mode = Callable[[Side], Iterator[Tensor]]
MODES: dict[str, Mode] = {}


def mode(function: Mode) -> Mode:
    MODES[function.__name__] = function
    return function


def batch(pads: int = PADS) -> tuple[Tensor, Tensor]:
    return prompts(BATCH, LENGTH, pads=pads)


def more(count: int, seed: int = 1, rows: int = BATCH) -> Tensor:
    return prompts(rows, count, seed=seed)[0]


def ones(count: int, rows: int = BATCH) -> Tensor:
    return torch.ones(rows, count, dtype=torch.long)


def said(output: Any) -> Iterator[Tensor]:
    yield output.sequences
    yield from output.logits


def _generating(name: str, **options: Any) -> None:
    def run(side: Side) -> Iterator[Tensor]:
        ids, mask = batch()
        yield from said(side.generate(ids, attention_mask=mask, **options))

    run.__name__ = name
    mode(run)


_generating("greedy")
_generating("sampling", do_sample=True, temperature=1.5, top_k=20)
_generating("beams", num_beams=3)
_generating("beam_sampling", num_beams=3, do_sample=True)
_generating("several_sequences", do_sample=True, num_return_sequences=3)
_generating("several_beams", num_beams=4, num_return_sequences=2)
_generating("replies_that_end_early", eos_token_id=list(range(3, 60)), pad_token_id=PAD)
_generating("repetition_penalty", repetition_penalty=1.3, no_repeat_ngram_size=2)
_generating("min_length_and_processors", min_new_tokens=REPLY, eos_token_id=7, pad_token_id=PAD)
_generating("in_chunks", prefill_chunk_size=7)
_generating("in_chunks_with_a_last_token", prefill_chunk_size=23)
_generating("dynamic_by_name", cache_implementation="dynamic")


# what only `generate` reads: the model is called as in other modes
OPTIONS = (
    "sampling", "beam_sampling", "several_sequences", "several_beams", "repetition_penalty", "dynamic_by_name",
    "min_length_and_processors", "in_chunks_with_a_last_token", "prompt_named_inputs",
)  # fmt: skip


@mode
def prompt_named_inputs(side: Side) -> Iterator[Tensor]:
    ids, mask = batch()
    yield from said(side.generate(None, inputs=ids, attention_mask=mask))


@mode
def embeddings(side: Side) -> Iterator[Tensor]:
    ids, mask = batch()
    embedded = side.model.get_input_embeddings()(ids)
    yield from said(side.generate(None, inputs_embeds=embedded, attention_mask=mask))


@mode
def prompt_lookup(side: Side) -> Iterator[Tensor]:
    ids = batch(pads=0)[0][:1].repeat(1, 2)
    yield from said(side.generate(ids, attention_mask=torch.ones_like(ids), prompt_lookup_num_tokens=3))


@mode
def assistant(side: Side) -> Iterator[Tensor]:
    ids = batch(pads=0)[0][:1]
    helper = copy.deepcopy(side.model)
    helper.set_attn_implementation("eager")
    yield from said(side.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=helper))


def _conversation(side: Side, hide: Callable[[Tensor, Tensor], Tensor] | None, **options: Any) -> Iterator[Tensor]:
    """Three turns through generate; `hide` (ids, mask) -> what the turns after the first are shown."""
    ids, mask = batch()
    cache = side.cache()
    for turn in range(3):
        if turn:
            ids, mask = torch.cat([ids, more(4, seed=turn)], 1), torch.cat([mask, ones(4)], 1)
        shown = hide(ids, mask) if turn and hide is not None else mask
        output = side.generate(ids, attention_mask=shown, past_key_values=cache, **options)
        yield from said(output)
        ids = output.sequences
        mask = torch.cat([mask, ones(ids.shape[1] - mask.shape[1])], 1)


@mode
def turns(side: Side) -> Iterator[Tensor]:
    yield from _conversation(side, None)


@mode
def turns_in_which_replies_end_early(side: Side) -> Iterator[Tensor]:
    """Pads of shorter replies stand in the middle, and the next turn's mask hides them."""

    def hide(ids: Tensor, mask: Tensor) -> Tensor:
        return mask * (ids != PAD).long()

    yield from _conversation(side, hide, eos_token_id=list(range(3, 60)), pad_token_id=PAD)


@mode
def turns_with_an_inferred_mask(side: Side) -> Iterator[Tensor]:
    """transformers makes the mask of a pad token that a reply happens to have."""
    ids, cache = batch(pads=0)[0], side.cache()
    ids[1, 9] = 5
    for turn in range(2):
        output = side.generate(ids, past_key_values=cache, pad_token_id=5 if turn else None)
        yield from said(output)
        ids = torch.cat([output.sequences, more(3, seed=turn)], 1)


@mode
def turns_that_hide_other_tokens_each(side: Side) -> Iterator[Tensor]:
    def hide(ids: Tensor, mask: Tensor) -> Tensor:
        hidden = mask.clone()
        first = ids.shape[1] % 7 + PADS
        hidden[0, first : first + 6] = 0
        hidden[1, 2:4] = 0
        return hidden

    yield from _conversation(side, hide)


@mode
def beams_after_a_mask_that_hides(side: Side) -> Iterator[Tensor]:
    ids, mask = batch()
    cache = side.cache()
    yield side.forward(cache, ids, mask)
    cache.batch_repeat_interleave(3)
    ids, mask = torch.cat([ids, more(4)], 1), torch.cat([mask, ones(4)], 1)
    mask[:, 8:12] = 0
    yield from said(side.generate(ids, attention_mask=mask, past_key_values=cache, num_beams=3))


@mode
def drafts_after_a_mask_that_hides(side: Side) -> Iterator[Tensor]:
    ids = batch(pads=0)[0][:1].repeat(1, 2)
    cache, mask = side.cache(ids.shape[1]), torch.ones_like(ids)
    yield side.forward(cache, ids, mask)
    ids, mask = torch.cat([ids, ids[:, :5]], 1), torch.cat([mask, ones(5, 1)], 1)
    mask[:, 8:12] = 0
    yield from said(side.generate(ids, attention_mask=mask, past_key_values=cache, prompt_lookup_num_tokens=3))


@mode
def token_by_token_without_masks(side: Side) -> Iterator[Tensor]:
    ids, cache = batch(pads=0)[0], side.cache()
    yield side.forward(cache, ids)
    for step in range(REPLY):
        yield side.forward(cache, more(1, seed=step))


@mode
def masks_that_hide_what_was_read(side: Side) -> Iterator[Tensor]:
    """Other columns at every step, for one token and for several, none, and all that was hidden again."""
    ids, mask = batch()
    cache = side.cache()
    yield side.forward(cache, ids, mask)
    for step, count in enumerate((1, 4, 1, 3, 1)):
        mask = torch.cat([mask, ones(count)], 1)
        shown = mask.clone()
        if step != 3:
            shown[0, 7 + step : 12 + step] = 0
            shown[1, : 2 * step] = 0
        yield side.forward(cache, more(count, seed=step), shown)


@mode
def masks_that_hide_before_none_is_given(side: Side) -> Iterator[Tensor]:
    ids, cache = batch(pads=0)[0], side.cache()
    yield side.forward(cache, ids)
    mask = ones(LENGTH + 3)
    mask[:, 4:9] = 0
    yield side.forward(cache, more(3), mask)
    yield side.forward(cache, more(1), position_ids=torch.full((BATCH, 1), LENGTH + 3))


@mode
def masks_of_four_dimensions(side: Side) -> Iterator[Tensor]:
    """As bool, and as what is added to logits."""
    ids, mask = batch()
    cache = side.cache()
    yield side.forward(cache, ids, mask)
    for step, count in enumerate((3, 1)):
        mask = torch.cat([mask, ones(count)], 1)
        mask[:, 10 : 12 + step] = 0
        shown = mask[:, None, None].bool() & torch.ones(count, mask.shape[1], dtype=torch.bool).tril(
            mask.shape[1] - count
        )
        if step:
            shown = torch.zeros(shown.shape).masked_fill(~shown, torch.finfo(torch.float32).min)
        positions = (mask.cumsum(-1) - 1)[:, -count:]
        yield side.forward(cache, more(count, seed=step), shown, position_ids=positions)


@mode
def padded_questions(side: Side) -> Iterator[Tensor]:
    """Pads between the context and a shorter question."""
    ids, mask = batch()
    cache = side.cache()
    yield side.forward(cache, ids, mask)
    question, asked = prompts(BATCH, 5, pads=2, seed=2)
    mask = torch.cat([mask, asked], 1)
    yield side.forward(cache, question, mask)[:, -1:]
    mask = torch.cat([mask, ones(1)], 1)
    yield side.forward(cache, more(1), mask)


@mode
def questions_padded_behind(side: Side) -> Iterator[Tensor]:
    ids, mask = batch()
    cache = side.cache()
    yield side.forward(cache, ids, mask)
    asked = ones(4)
    asked[0, 2:] = 0
    mask = torch.cat([mask, asked], 1)
    yield side.forward(cache, more(4), mask)[1:]
    yield side.forward(cache, more(1), torch.cat([mask, ones(1)], 1))


@mode
def finished_sequences_are_fed_pads(side: Side) -> Iterator[Tensor]:
    ids, mask = batch()
    cache = side.cache()
    yield side.forward(cache, ids, mask)
    for step in range(4):
        mask = torch.cat([mask, torch.tensor([[1], [step < 1]]).long()], 1)
        yield side.forward(cache, more(1, seed=step), mask)[:1]


def _changing(name: str, rows: list[int], change: Callable[[Any], Any]) -> None:
    """A prompt and a hidden token, a change of the cache, and a question to the sequences that are there then."""

    def run(side: Side) -> Iterator[Tensor]:
        ids, mask = batch()
        cache = side.cache()
        yield side.forward(cache, ids, mask)
        mask = torch.cat([mask, ones(2)], 1)
        mask[:, 9] = 0
        yield side.forward(cache, more(2), mask)
        cache = change(cache)
        mask = mask[rows]
        for step, count in enumerate((1, 3)):
            mask = torch.cat([mask, ones(count, len(rows))], 1)
            yield side.forward(cache, more(count, seed=step, rows=len(rows)), mask)

    run.__name__ = name
    mode(run)


def _called(method: str, argument: Any) -> Callable[[Any], Any]:
    def change(cache: Any) -> Any:
        getattr(cache, method)(argument)
        return cache

    return change


_changing("sequences_reordered", [1, 0], _called("reorder_cache", torch.tensor([1, 0])))
_changing("sequences_selected", [1], _called("batch_select_indices", torch.tensor([1])))
_changing("sequences_repeated", [0, 0, 1, 1], _called("batch_repeat_interleave", 2))
_changing("copied", [0, 1], copy.deepcopy)


@mode
def taken_back(side: Side) -> Iterator[Tensor]:
    ids, mask = batch()
    cache = side.cache()
    yield side.forward(cache, ids, mask)
    hidden = torch.cat([mask, ones(4)], 1)
    hidden[:, 8:11] = 0
    question, asked = prompts(BATCH, 4, pads=2, seed=2)
    yield side.forward(cache, more(4), hidden)
    cache.crop(-4)
    yield side.forward(cache, question, torch.cat([mask, asked], 1))[:, -1:]
    cache.crop(-4)
    yield side.forward(cache, more(2), torch.cat([mask, ones(2)], 1))


@mode
def iterated(side: Side) -> Iterator[Tensor]:
    ids, cache = batch(pads=0)[0], side.cache()
    side.forward(cache, ids)
    for keys, values, _ in cache:
        yield keys
        yield values


@mode
def reset(side: Side) -> Iterator[Tensor]:
    ids, mask = batch()
    cache = side.cache()
    side.forward(cache, ids, mask)
    cache.reset()
    yield side.forward(cache, ids[:, 6:])
    yield side.forward(cache, more(2))


@mode
def gradients(side: Side) -> Iterator[Tensor]:
    """Of a loss over several steps, with respect to what was read and the weights of a layer."""
    ids, cache = batch(pads=0)[0], side.cache()
    weights = list(side.model.parameters())
    with torch.enable_grad():
        parts = [
            side.forward(cache, ids)[:, -1],
            *(side.forward(cache, more(1, seed=step))[:, -1] for step in range(3)),
        ]
        total = sum(part.float().log_softmax(-1)[:, 5].sum() for part in parts)
        found = torch.autograd.grad(total, weights, allow_unused=True)
    yield from (gradient for gradient in found if gradient is not None)

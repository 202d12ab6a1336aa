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


def more(count: int, seed: int = 1) -> Tensor:
    return prompts(BATCH, count, seed=seed)[0]


def ones(count: int) -> Tensor:
    return torch.ones(BATCH, count, dtype=torch.long)


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
_generating("replies_that_end_early", eos_token_id=list(range(3, 60)), pad_token_id=PAD)


@mode
def embeddings(side: Side) -> Iterator[Tensor]:
    ids, mask = batch()
    embedded = side.model.get_input_embeddings()(ids)
    yield from said(side.generate(None, inputs_embeds=embedded, attention_mask=mask))


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
def turns_that_hide_other_tokens_each(side: Side) -> Iterator[Tensor]:
    def hide(ids: Tensor, mask: Tensor) -> Tensor:
        hidden = mask.clone()
        first = ids.shape[1] % 7 + PADS
        hidden[0, first : first + 6] = 0
        hidden[1, 2:4] = 0
        return hidden

    yield from _conversation(side, hide)


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
def finished_sequences_are_fed_pads(side: Side) -> Iterator[Tensor]:
    ids, mask = batch()
    cache = side.cache()
    yield side.forward(cache, ids, mask)
    for step in range(4):
        mask = torch.cat([mask, torch.tensor([[1], [step < 1]]).long()], 1)
        yield side.forward(cache, more(1, seed=step), mask)[:1]


@mode
def copied(side: Side) -> Iterator[Tensor]:
    """A prompt and a hidden token, a copy in other rows, and a question to it."""
    ids, mask = batch()
    cache = side.cache()
    yield side.forward(cache, ids, mask)
    mask = torch.cat([mask, ones(2)], 1)
    mask[:, 9] = 0
    yield side.forward(cache, more(2), mask)
    cache = copy.deepcopy(cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    mask = mask.flip(0)
    for step, count in enumerate((1, 3)):
        mask = torch.cat([mask, ones(count)], 1)
        yield side.forward(cache, more(count, seed=step), mask)


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

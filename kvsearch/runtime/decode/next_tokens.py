"""The next tokens of replies, chosen as `model.generate` chooses them: by the processors of its generation config."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvsearch.core.errors import IncompatibleError, warn_once
from kvsearch.core.items import group_by_key
from kvsearch.core.parsing import describe_fault
from kvsearch.models.memory import is_out_of_memory
from kvsearch.tasks.base import Sampling

# options of a generation config that change which token comes next, with the values at which they do nothing
PROCESSORS: dict[str, Any] = {
    "guidance_scale": 1, "sequence_bias": None, "encoder_repetition_penalty": 1, "repetition_penalty": 1,
    "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None, "min_length": 0,
    "min_new_tokens": 0, "forced_bos_token_id": None, "forced_eos_token_id": None, "remove_invalid_values": False,
    "exponential_decay_length_penalty": None, "suppress_tokens": None, "begin_suppress_tokens": None,
    "watermarking_config": None, "renormalize_logits": False,
}  # fmt: skip
# the same, of drawn replies alone; temperature and top-p are those of a `Sampling`
WARPERS: dict[str, Any] = {
    "top_k": 0, "min_p": None, "top_h": None, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0,
}  # fmt: skip
# options that would make a reply neither greedy nor drawn, or end it by the clock, with the values given in their place
UNFOLLOWED: dict[str, Any] = {
    "num_beams": 1, "num_beam_groups": 1, "penalty_alpha": None, "dola_layers": None, "constraints": None,
    "force_words_ids": None, "token_healing": False, "max_time": None,
}  # fmt: skip
# options of how fast replies are made, and of what comes with them
_ASIDE: dict[str, Any] = {
    "num_return_sequences": 1, "diversity_penalty": 0.0, "prompt_lookup_num_tokens": None, "assistant_early_exit": None,
    "stop_strings": None, "cache_implementation": None, "use_cache": False, "return_dict_in_generate": False,
}  # fmt: skip


def read_generation_settings(model: Any, *, drawn: bool = False) -> dict[str, Any]:
    """Return the options of a model's generation config that change which token comes next, often none.

    `drawn`: of replies that are drawn, else of greedy ones.
    """
    config = getattr(model, "generation_config", None)
    options = PROCESSORS | WARPERS if drawn else PROCESSORS
    settings = {name: getattr(config, name, None) for name in options}
    return {name: value for name, value in settings.items() if value is not None and value != options[name]}


def record_generation_settings(model: Any, *, drawn: bool = False) -> dict[str, Any]:
    """Return `read_generation_settings` as JSON."""
    if not (settings := read_generation_settings(model, drawn=drawn)):
        return {}
    plain = json.loads(model.generation_config.to_json_string(use_diff=False))
    return {name: plain[name] for name in settings}


def describe_generation_settings(model: Any, *, drawn: bool = False) -> str | None:
    """Describe which settings of the generation config apply to replies; None if replies use the logits alone."""
    settings = read_generation_settings(model, drawn=drawn)
    if not settings:
        return None
    listed = (f"{name} {value}" if isinstance(value, int | float) else name for name, value in settings.items())
    return f"replies follow the checkpoint's generation config: {', '.join(listed)}"


class Draws:
    """Draws the next token of every row from a random stream of its own."""

    def __init__(self, sampling: Sampling, seeds: Sequence[int]) -> None:
        self.sampling = sampling
        self._numbers = [np.random.default_rng(seed) for seed in seeds]

    def of_rows(self, rows: Sequence[int]) -> Draws:
        """Return the draws of `rows` alone, each going on with its own random stream."""
        chosen = copy(self)
        chosen._numbers = [self._numbers[row] for row in rows]
        return chosen

    def __call__(self, scores: Tensor) -> Tensor:
        """Return a token [B, 1] of each row by processed logits [B, V], -inf for tokens that cannot come.

        Tokens share a number line by their chances, the likeliest first, and a random number points at one of them.
        """
        # In float64, and with ties in a fixed order, so that a number points at the same token on every device.
        chances, tokens = scores.double().softmax(-1).sort(stable=True, dim=-1, descending=True)
        ends = chances.cumsum(-1)
        # A row has numbers of its own: its reply does not depend on which others are in the batch, or have left it.
        points = torch.tensor([[numbers.random()] for numbers in self._numbers], device=scores.device)
        # Rounding at the end of the line must not draw a token without a chance, nor run beyond the last one; the last
        # sum is not quite 1 either.
        final = (chances > 0).sum(-1, keepdim=True) - 1
        places = (ends <= points * ends[:, -1:]).sum(-1, keepdim=True)
        drawn: Tensor = tokens.gather(-1, places.minimum(final))
        return drawn


@dataclass
class _Alike:
    """Rows of a batch with equally long prompts and limits: token ids [n, T] so far, and logits processors.

    Processors may remember how many rows they had: one that has left the batch goes on here, without a meaning.
    """

    lines: Tensor  # [m] which of the n are left,
    rows: Tensor  # [m] and which rows of the batch they are
    ids: Tensor
    process: Callable[[Tensor, Tensor], Tensor]

    def of_rows(self, rows: Tensor) -> _Alike:
        """Return these rows within a batch reduced to `rows` [B']."""
        held, place = (self.rows[:, None] == rows).nonzero().unbind(1)
        return replace(self, lines=self.lines[held], rows=place)

    def put(self, values: Tensor) -> Tensor:
        """Select values of the batch [B, ...] for these rows, zeros for rows that have left it, [n, ...]."""
        values = values.to(self.ids.device)
        whole = values.new_zeros(len(self.ids), *values.shape[1:])
        whole[self.lines] = values[self.rows]
        return whole


class NextTokens:
    """Chooses the next token of every row of a batch as `model.generate` would after that row's prompt alone.

    Rows of different lengths are processed apart, so no padding is ever penalised. Where the generation config says
    nothing of the next token, greedy ones are the largest logits, and nothing else is computed.

    Args:
        model: the model, whose `generate` says which processors there are.
        prompts: token ids [T] of each row, all that comes before its reply.
        limits: how many tokens each reply may have.
        draws: how replies are drawn; None: they are greedy, whatever the generation config says of `do_sample`.

    Raises:
        IncompatibleError: the generation config cannot be followed; also from calls.
    """

    def __init__(
        self, model: Any, prompts: Sequence[Tensor], limits: Sequence[int], draws: Draws | None = None
    ) -> None:
        self._draws = draws
        self._alike: list[_Alike] = []
        _warn_of_unfollowed(model)
        if draws is None and not read_generation_settings(model):
            return
        sampling = None if draws is None else draws.sampling
        # Processors look at the tokens so far, and some at how many may come: rows that share both are one call.
        for rows in group_by_key(range(len(prompts)), lambda row: (len(prompts[row]), limits[row])).values():
            ids = torch.stack([prompts[row] for row in rows]).to(model.device)
            processors = make_logits_processors(model, ids, limits[rows[0]], sampling)
            if processors:
                lines = torch.arange(len(rows), device=ids.device)
                self._alike.append(_Alike(lines, torch.tensor(rows, device=ids.device), ids, processors))

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Reduce the batch to `rows`, in that order."""
        self._draws = None if self._draws is None else self._draws.of_rows(rows)
        moved = [alike.of_rows(torch.tensor(rows, device=alike.rows.device)) for alike in self._alike]
        self._alike = [alike for alike in moved if len(alike.rows)]

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the next tokens [B, 1] by logits [B, V]."""
        scores = self._processed(logits) if self._alike else logits
        # the first of the largest, as `argmax` says it, but in a third of the time on a CPU
        tokens = scores.max(-1, keepdim=True).indices if self._draws is None else self._draws(scores)
        for alike in self._alike:
            alike.ids = torch.cat([alike.ids, alike.put(tokens)], 1)
        return tokens

    def _processed(self, logits: Tensor) -> Tensor:
        scores = logits.to(torch.float32, copy=True)  # as `generate` does: processors may change what they are given
        with _make_config():
            for alike in self._alike:
                processed = alike.process(alike.ids, alike.put(scores))[alike.lines]
                scores[alike.rows.to(scores.device)] = processed.to(scores.device)
        return scores


def make_logits_processors(model: Any, ids: Tensor, limit: int, sampling: Sampling | None = None) -> Any:
    """Return the logits processors with which `model.generate` would continue prompts `ids` [B, T], often none.

    A reply is greedy, or drawn by a `sampling`: then by what else the generation config says of drawing, too. They are
    what `generate` hands to a `custom_generate`.
    """
    made = []

    def take(_: Any, input_ids: Tensor, *, logits_processor: Any, **__: Any) -> Tensor:
        made.append(logits_processor)
        return input_ids

    config = model.generation_config
    options = {name: value for name, value in {**UNFOLLOWED, **_ASIDE}.items() if hasattr(config, name)}
    if config.pad_token_id is None:
        options["pad_token_id"] = 0  # else `generate` says that it takes another token; no row is padded
    drawing: dict[str, Any] = {"do_sample": False}
    if sampling is not None:
        temperature = max(sampling.temperature, 1e-6)  # by less float32 cannot divide, and it would change nothing
        drawing = {"do_sample": True, "temperature": temperature, "top_p": sampling.top_p}
    with _make_config():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_length=ids.shape[1] + max(limit, 1),
            max_new_tokens=None,
            custom_generate=take,
            **options,
            **drawing,
        )
    return made[0]


@contextmanager
def _make_config() -> Iterator[None]:
    """Turn failures inside into an IncompatibleError that names the generation config."""
    try:
        yield
    except Exception as error:  # of whatever processors a transformers has
        if is_out_of_memory(error):
            raise
        raise IncompatibleError(
            f"the model's generation config cannot be followed: {describe_fault(error)} (mend generation_config.json)"
        ) from error


def _warn_of_unfollowed(model: Any) -> None:
    config = getattr(model, "generation_config", None)
    configured = {name: getattr(config, name, None) for name in UNFOLLOWED}
    listed = [f"{name} {value}" for name, value in configured.items() if value not in (None, UNFOLLOWED[name], 0)]
    if listed:
        warn_once(f"the checkpoint's generation config has {', '.join(listed)}: replies here do not follow that")

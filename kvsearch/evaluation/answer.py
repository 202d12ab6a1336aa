"""Replies from a compressed context, read now or taken from a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvsearch.core.errors import UsageError
from kvsearch.models.architecture import describe, require_same_rotary, warn_beyond
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Plan
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import run_attention
from kvsearch.runtime.decode.replies import Replies, find_stop_tokens
from kvsearch.runtime.program import make_full_program
from kvsearch.runtime.shared_prefill import count_held_entries, read
from kvsearch.tasks.prompts import PromptFormat, QuestionText


@dataclass(frozen=True)
class Reply:
    """A reply and what the cache held after the context; `full_bytes` is what transformers' own cache would hold.

    `evicted_mass` is the attention at the end of the context on entries that left, see `PlanCache.evicted_mass`; None
    of a context from a file.
    """

    text: str
    context_tokens: int
    entries: int
    full_entries: int
    bytes: int
    full_bytes: int
    most: int  # entries held at a time from then until the reply was complete
    evicted_mass: float | None


class CompressedContext:
    """A context in a compressed cache that answers any number of prompts; no prompt sees another.

    `ids` [1, T] are its tokens without its `rest`: see `PromptFormat.open_context`.
    """

    def __init__(self, loaded: LoadedModel, cache: PlanCache, ids: Tensor, rest: str = "") -> None:
        self.loaded, self.cache, self.ids, self.rest = loaded, cache, ids, rest
        shape, length = describe(loaded.model), ids.shape[1]
        mask = torch.ones_like(ids, device=loaded.model.device)
        # Ends of a chat turn count, too, whatever the format of the questions.
        stop = find_stop_tokens(loaded, PromptFormat(loaded.tokenizer))
        self.replies = Replies(loaded.model, cache, [ids[0]], mask, None, stop)
        self.entries, self.bytes = count_held_entries(loaded.model, cache, [length])[0], cache.nbytes()
        self.full_entries = len(shape.full_layers) * shape.kv_heads * length
        others = sum(cache.layer_nbytes(index) for index in range(shape.layers) if index not in shape.full_layers)
        self.evicted_mass = cache.evicted_mass[0] if cache.monitor else None
        self.full_bytes = self.full_entries * 2 * shape.head_dim * loaded.model.dtype.itemsize + others

    @classmethod
    def read(
        cls, loaded: LoadedModel, plan: Plan | None, ids: Tensor, *, rest: str = "", chunk: int | None = None
    ) -> CompressedContext:
        """Read a context of token ids [1, T] into the cache that `plan` allows (None: the full one).

        With `chunk`, so many tokens at a time: see `prefill_all`.

        Raises:
            UsageError: there is no token to read.
            IncompatibleError: the model and the plan or the context do not fit.
            EnvironmentFault: the device has too little memory for it.
        """
        program = make_full_program(loaded.model) if plan is None else Program.from_plan(loaded.model, plan)
        if ids.shape[1] == 0:
            raise UsageError("there is nothing to compress: give a longer context or prompt")
        with run_attention(loaded.model):
            cache = PlanCache(loaded.model, program, monitor=True)
            read(loaded.model, cache, [ids[0]], find_stop_tokens(loaded), chunk)
        return cls(loaded, cache, ids, rest)

    @classmethod
    def load(cls, loaded: LoadedModel, path: Path, plan: Plan | None = None) -> CompressedContext:
        """Take a context from a file that `save` wrote; errors as `PlanCache.load`, and UsageError of a batch."""
        cache = PlanCache.load(path, loaded.model, plan)
        if cache.tokens is None or len(cache.tokens) != 1 or cache.mask is not None:
            raise UsageError(f"{path} holds no single context with its tokens, as `kvsearch compress` writes them")
        return cls(loaded, cache, cache.tokens.long(), cache.rest)

    def save(self, path: Path, overwrite: bool = False) -> int:
        """Write cache and tokens to a file, and return its size in bytes; errors as `PlanCache.save`."""
        return self.cache.save(path, self.ids.int(), overwrite=overwrite, rest=self.rest)

    def ask(self, question: Tensor, max_new_tokens: int) -> list[int]:
        """Return the token ids of the greedy reply to a question of token ids [K]."""
        with run_attention(self.loaded.model):
            return self.replies.ask([question], [max_new_tokens])[0]

    def reply(self, formatted: PromptFormat, question: Tensor, max_new_tokens: int) -> Reply:
        """Return the reply to a question of token ids [1, K], with what the cache held."""
        said = self.ask(question[0], max_new_tokens)
        warn_beyond(self.loaded.model, self.ids.shape[1] + question.shape[1] + len(said))
        text = formatted.decode(said)
        sizes = (self.entries, self.full_entries, self.bytes, self.full_bytes, self.replies.most[0], self.evicted_mass)
        return Reply(text, self.ids.shape[1], *sizes)


def answer(
    loaded: LoadedModel,
    plan: Plan | None,
    context: str | Path,
    prompts: Sequence[str],
    plain: str,
    max_new_tokens: int,
    *,
    chunk: int | None = None,
) -> list[Reply]:
    """Answer each of the `prompts` greedily from a context that is compressed as `plan` says (None: keep all).

    A path is that of a file that `compress` wrote, which must be of `plan`, if given.

    Raises:
        UsageError: there is no prompt, and of the context's tokens none is left to compress, or it is in a file.
        IncompatibleError, EnvironmentFault: see `CompressedContext.read` and `CompressedContext.load`.
    """
    formatted = PromptFormat(loaded.tokenizer, plain)
    is_bare = any(formatted.question(prompt).shape[1] == 0 for prompt in prompts)
    if isinstance(context, Path):
        if is_bare:
            raise UsageError("there is nothing to ask: give a --prompt with --cache")
        held = CompressedContext.load(loaded, context, plan)
        questions = [formatted.question(prompt, rest=held.rest) for prompt in prompts]
    else:
        if is_bare:  # a bare continuation: its last token starts it
            whole = formatted.context(context)
            ids, questions = whole[:, :-1], [whole[:, -1:]]
        else:
            ids, encoded = formatted.encode(context, [QuestionText(prompt) for prompt in prompts])
            questions = [question.ids for question in encoded]
        # The last token of a reply is never read.
        later = max(question.shape[1] for question in questions) + max_new_tokens - 1
        require_same_rotary(loaded.model, [ids.shape[1]], later)  # before it is read
        held = CompressedContext.read(loaded, plan, ids, chunk=chunk)
    return [held.reply(formatted, question, max_new_tokens) for question in questions]

"""What lm-evaluation-harness asks of a model, in token ids: tokenised and cut as the harness' own model does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvsearch.errors import IncompatibleError, UsageError
from kvsearch.lm_eval.package import Instance, normalize_gen_kwargs

WITHOUT_EFFECT = ("temperature", "top_p", "top_k", "min_p")  # as long as nothing is sampled


class Generation(NamedTuple):
    """How a reply ends: before the first of `stops`, or after so many tokens."""

    stops: tuple[str, ...]
    max_new_tokens: int

    @classmethod
    def of(cls, options: Mapping[str, Any], where: str) -> Generation:
        """Read a task's generation options; UsageError for those that greedy replies cannot honour."""
        settings = dict(normalize_gen_kwargs(dict(options)))
        if settings.pop("do_sample"):
            raise UsageError(f"{where} samples its replies, under a plan they are greedy: it needs do_sample: false")
        stops, limit = settings.pop("until"), settings.pop("max_gen_toks")
        if settings.get("num_beams") == 1:
            del settings["num_beams"]
        other = sorted(settings.keys() - set(WITHOUT_EFFECT))
        if other:
            raise UsageError(f"{where} has generation options that greedy replies cannot honour: {', '.join(other)}")
        if limit < 1:
            raise UsageError(f"{where} allows replies of {limit} tokens: it needs max_gen_toks of 1 or more")
        return cls(tuple(stop for stop in stops if stop), limit)


class HarnessPrompt(NamedTuple):
    """A request for a reply: its number, and the token ids that fit. `truncated`: its beginning is cut off."""

    number: int
    ids: tuple[int, ...]
    truncated: bool
    generation: Generation


class HarnessContext(NamedTuple):
    """A context of a task that one or more requests continue; see `HarnessPrompt`."""

    task: str
    ids: tuple[int, ...]
    truncated: bool


@dataclass(frozen=True)
class Encoder:
    """Requests in token ids that leave room for reply or continuation within `max_length` tokens (None: no limit).

    Raises:
        IncompatibleError: a request is empty, or leaves no room; the message names task and document.
        UsageError: see `Generation.of`.
    """

    tokenizer: Any
    max_length: int | None

    @property
    def end(self) -> int | None:
        """The token that ends a text."""
        found: int | None = self.tokenizer.eos_token_id
        return found

    @property
    def start(self) -> int | None:
        """The token that stands before a text without a context."""
        found: int | None = self.tokenizer.bos_token_id
        return self.end if found is None else found

    def prompt(self, number: int, request: Instance) -> HarnessPrompt:
        """Encode a request for a reply."""
        text, options = request.args[:2]
        generation = Generation.of(options, place(request))
        ids = self._encode(text)
        if not ids:
            raise IncompatibleError(f"{place(request)}: the prompt is empty once it is tokenised")
        room = None if self.max_length is None else self.max_length - generation.max_new_tokens
        if room is not None and room < 1:
            raise IncompatibleError(
                f"{place(request)}: a reply of up to {generation.max_new_tokens} tokens leaves no room for its prompt "
                f"within {self.max_length}"
            )
        return HarnessPrompt(number, *_last(ids, room), generation)

    def pair(self, request: Instance) -> tuple[HarnessContext, tuple[int, ...]]:
        """Encode a context and what is to follow it."""
        context, continuation = self._split(*request.args[:2])
        if not context:
            raise IncompatibleError(f"{place(request)}: the context is empty, and the tokenizer has no start of a text")
        if not continuation:
            raise IncompatibleError(f"{place(request)}: the continuation is empty once it is tokenised")
        # the last token is only predicted: it takes no room
        room = None if self.max_length is None else self.max_length + 1 - len(continuation)
        if room is not None and room < 1:
            raise IncompatibleError(
                f"{place(request)}: a continuation of {len(continuation)} tokens is longer than the {self.max_length} "
                "that there is room for"
            )
        return HarnessContext(str(request.task_name), *_last(context, room)), tuple(continuation)

    def _split(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return token ids of both, cut out of those of the whole; white space between them begins the continuation."""
        lead = self._encode(context.rstrip()) if context else []
        rest = self._encode(context + continuation, special=bool(context))[len(lead) :]
        if lead or self.start is None:
            return lead, rest
        return [self.start], rest[1:] if rest[:1] == [self.start] else rest

    def _encode(self, text: str, special: bool = True) -> list[int]:
        """Return token ids, with special ones unless the text brings the first of them along (chat templates do)."""
        first = "" if self.start is None else self.tokenizer.decode([self.start])
        wanted = special and not (first and text.startswith(first))
        ids: list[int] = self.tokenizer(text, add_special_tokens=wanted, verbose=False)["input_ids"]
        return ids


def place(request: Instance) -> str:
    """Say where a request comes from, for error messages."""
    return f"task {request.task_name}, document {request.doc_id}"


def _last(ids: Sequence[int], room: int | None) -> tuple[tuple[int, ...], bool]:
    """Return the last token ids that there is room for, and whether some are cut off."""
    if room is None or len(ids) <= room:
        return tuple(ids), False
    return tuple(ids[-room:]), True

"""Turn contexts, questions and answers into token ids, with the tokenizer's chat template where it has one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvsearch.core.errors import IncompatibleError
from kvsearch.tasks.fields import is_blank

if TYPE_CHECKING:
    from torch import Tensor

    from kvsearch.tasks.base import Task

_MARK = "\u241e"  # a symbol no template contains: the place where the context ends and the question begins
PLACE = "{question}"
PLAIN_PROMPT = f"\n\nQuestion: {PLACE}\nAnswer:"
TEMPLATE_OPTIONS = {
    "date_string": "26 Jul 2024",  # Llama 3's own default; templates that ask the clock make every day's prompt another
}


class EmptyTextError(IncompatibleError):
    """A text of which nothing is left once it is tokenised."""


@dataclass(frozen=True)
class PromptFormat:
    """Prompts in two pieces: the context is tokenised alone, the question and the template's tail come after it.

    `plain` is how a question follows the context where there is no chat template; `template` off leaves the template
    out even where there is one. Hybrid models (Qwen3) would spend most replies on `thinking`.
    """

    tokenizer: Any
    plain: str = PLAIN_PROMPT
    template: bool = True
    thinking: bool = False

    @classmethod
    def of(cls, tokenizer: Any, task: Task) -> PromptFormat:
        """Return the format that a task wants."""
        return cls(tokenizer, task.prompt, task.chat, task.traced)

    @property
    def chat(self) -> bool:
        """Whether prompts go through a chat template."""
        return self.template and bool(getattr(self.tokenizer, "chat_template", None))

    @cached_property
    def lead(self) -> int:
        """How many tokens come before a context's own: the template's head, or the special ones."""
        return len(self._encode(self._head, special=not self.chat))

    def context(self, text: str) -> Tensor:
        """Return the token ids [1, T] of everything before the question; EmptyTextError if there is nothing."""
        ids = self._encode(self._head + text, special=not self.chat)
        if not ids:
            raise EmptyTextError("a context is empty once it is tokenised")
        return _row(ids)

    def question(self, text: str, prefix: str = "", *, follows: bool = False) -> Tensor:
        """Return the token ids [1, K] of a question, of what leads to the reply, and of the reply's given beginning.

        A question `follows` a reply, or else the context.
        """
        before = self._next_turn if follows and self.chat else "\n\n"
        asked = before + text + self._wrapped[1] if self.chat else self.plain.replace(PLACE, text)
        return _row(self._encode(asked + prefix, special=False))

    def answer(self, text: str, prefix: str = "") -> Tensor:
        """Return the token ids [1, K] of an answer, teacher-forced after `prefix`; EmptyTextError if there is none."""
        before = prefix or ("" if self.chat else self.plain)
        gap = " " if before and not before[-1].isspace() else ""
        ids = self._encode(gap + text, special=False) if not is_blank(text) else []  # the gap may be a token
        if not ids:
            raise EmptyTextError(f"the answer {text!r} is empty once it is tokenised")
        return _row(ids)

    def decode(self, ids: list[int]) -> str:
        """Return the text of a reply."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def ended(self, stops: Sequence[str]) -> Callable[[list[int]], bool] | None:
        """Return what tells whether a reply, token ids, has come to a stop text; None without `stops`."""
        return (lambda reply: stop_at(self.decode(reply), stops) is not None) if stops else None

    @cached_property
    def end_of_turn(self) -> int | None:
        """The token that ends the model's turn in the chat template; None if there is none, or no template.

        The first special token behind a reply counts, with nothing but white space before it.
        """
        if not self.chat:
            return None
        roles = ("user", "assistant")
        try:
            parts = self._rendered(*roles).split(_MARK)
        except Exception:  # noqa: BLE001 - a template raises what it likes: one that takes no reply shows no end of it
            return None
        special = {*self.tokenizer.all_special_ids, *getattr(self.tokenizer, "added_tokens_decoder", ())}
        for token in self._encode(parts[-1], special=False) if len(parts) > len(roles) else ():
            if token in special:
                return token
            if self.tokenizer.decode([token]).strip():
                break
        return None

    @property
    def _head(self) -> str:
        return self._wrapped[0] if self.chat else ""

    @cached_property
    def _wrapped(self) -> tuple[str, str]:
        rendered = self._rendered("user", add_generation_prompt=True)
        head, found, tail = rendered.partition(_MARK)
        if not found:
            raise IncompatibleError("the tokenizer's chat template drops the user's message")
        return head, tail

    @cached_property
    def _next_turn(self) -> str:
        """What stands between a reply and the question that follows it."""
        roles = ("user", "assistant", "user")
        parts = self._rendered(*roles).split(_MARK)
        if len(parts) <= len(roles):
            raise IncompatibleError("the tokenizer's chat template drops earlier messages: no turn can follow another")
        return parts[2]

    def _rendered(self, *roles: str, **options: Any) -> str:
        """Return the template with a mark as the message of each role."""
        messages = [{"role": role, "content": _MARK} for role in roles]
        options |= {"enable_thinking": self.thinking, "tokenize": False, **TEMPLATE_OPTIONS}
        text: str = self.tokenizer.apply_chat_template(messages, **options)
        return text

    def _encode(self, text: str, *, special: bool) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids


def cut(text: str, stops: Sequence[str]) -> str:
    """Cut a reply at the first of `stops`, without leading white space; return all of it if none is there.

    A reply is left as it is where there are no `stops`. See `stop_at` for which places count.
    """
    return text[: stop_at(text, stops)].lstrip() if stops else text


def stop_at(text: str, stops: Sequence[str]) -> int | None:
    """Return where the first of `stops` begins in a reply; None if none is there.

    A stop of white space counts only after something else was said: a reply that begins with a newline goes on.
    """
    said = len(text) - len(text.lstrip())
    places = (text.find(stop, said if stop.isspace() else 0) for stop in stops)
    return min((at for at in places if at >= 0), default=None)


def _row(ids: list[int]) -> Tensor:
    import torch  # not above: whoever lists tasks has no use for it

    return torch.tensor([ids], dtype=torch.long)

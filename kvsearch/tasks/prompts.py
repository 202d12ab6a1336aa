r"""Turn contexts, questions and answers into token ids, with the tokenizer's chat template where it has one.

A text's tokens are not its parts' tokens, joined: tokenizers merge across a boundary (".\n\n" is one token of
Llama 3), put a blank before every text (Llama 2, Mistral v0.1), or end every text with `</s>`. So the whole text is
encoded, and its tokens are divided among context, question and answer.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from kvsearch.core.errors import IncompatibleError
from kvsearch.tasks.fields import is_blank
from kvsearch.tasks.metrics import is_forced

if TYPE_CHECKING:
    from torch import Tensor

    from kvsearch.tasks.base import Task

_MARK = "\u241e"  # a symbol no template contains: the place where the context ends and the question begins
PLACE = "{question}"
PLAIN_PROMPT = f"\n\nQuestion: {PLACE}\nAnswer:"
TEMPLATE_OPTIONS = {
    "date_string": "26 Jul 2024",  # Llama 3's own default; templates that ask the clock make every day's prompt another
}


# What a text may follow: it must share no token with that, so that the text's own tokens can be told. The first is not
# known to tokenizers of whole words, the second merges with punctuation, the third with white space.
_ANCHORS = ("a", ".", "\n")
# of the names of characters in scripts that put no blanks between words
_UNSPACED = (
    "CJK", "IDEOGRAPHIC", "FULLWIDTH", "HIRAGANA", "KATAKANA", "BOPOMOFO", "YI", "THAI", "LAO", "KHMER", "MYANMAR",
    "TIBETAN",
)  # fmt: skip
_OPENING = ("Ps", "Pi")  # categories of brackets and quotation marks
_NEAR = 512  # characters before a context's end that are encoded again with what follows
_LONGEST_REST = 32  # characters at a context's end that may share a token with a question


class EmptyTextError(IncompatibleError):
    """A text that has no tokens."""


class QuestionText(NamedTuple):
    """A question about a context, how the reply to it begins (`prefix`), and an answer to teacher-force, if any."""

    question: str
    prefix: str = ""
    answer: str | None = None


class EncodedQuestion(NamedTuple):
    """Token ids of a question and the beginning of its reply, [1, K], and of an answer after these, [1, A].

    None of either where the texts are empty.
    """

    ids: Tensor
    answer: Tensor


@dataclass(frozen=True)
class PromptFormat:
    """How contexts, questions and answers become token ids.

    `plain` is how a question follows the context where there is no chat template; `template` off leaves the template
    out even where there is one. Hybrid models (Qwen3) would spend most replies on `thinking`. Answers follow after a
    blank, unless they are `verbatim` parts of a text. `system` is the system prompt, which needs a chat template; where
    that takes none (Gemma 2), it is the beginning of the user's message.
    """

    tokenizer: Any
    plain: str = PLAIN_PROMPT
    template: bool = True
    thinking: bool = False
    verbatim: bool = False
    system: str = ""

    @classmethod
    def of(cls, tokenizer: Any, task: Task) -> PromptFormat:
        """Return the format that a task wants."""
        return cls(tokenizer, task.prompt, task.chat, task.traced, is_forced(task))

    @property
    def chat(self) -> bool:
        """Whether prompts go through a chat template."""
        return self.template and bool(getattr(self.tokenizer, "chat_template", None))

    @cached_property
    def lead(self) -> int:
        """How many tokens come before a context's own: the template's head, or the special ones."""
        return _count_shared(self._encode_prompt(""), self._encode_prompt("a"))

    def encode(
        self, context: str, questions: Sequence[QuestionText], *, turns: bool = False
    ) -> tuple[Tensor, list[EncodedQuestion]]:
        """Encode a context and the questions about it as parts of whole texts.

        The context [1, T] has the tokens that it shares with every prompt. A token that reaches from the context into
        a question is the question's, so context and question joined are the tokens of the prompt's text, and with the
        answer the tokens of the whole text. (Where a token would reach from a prompt into its answer, as after
        "Answer: " with a blank, the prompt stays what the model replies to, and the answer is encoded behind it; a
        `verbatim` answer takes that token.) In `turns` only the first question follows the context, the others follow
        replies.

        Raises:
            EmptyTextError: the context has no token.
        """
        first = questions[:1] if turns else questions
        for text in first or [QuestionText("")]:
            self._require_rendered(context, text.question)
        context = self._strip_context(context, ends=not any(text.question for text in first))
        alone = self.context(context)[0].tolist()
        far, near = self._split_far(context, alone)
        encode = self._encode_after if far else self._encode_prompt
        pairs = [self._encode_pair(encode, near, text) for text in first]
        shared = min((_count_shared(alone[far:], prompt) for prompt, _ in pairs), default=len(alone) - far)
        if far + shared == 0:  # a context of one token that reaches into the question: it is read as it is alone
            return _row(alone), [self._encode_apart(text) for text in questions]
        encoded = [EncodedQuestion(_row(prompt[shared:]), _row(answer)) for prompt, answer in pairs]
        shared += far
        later = (self._encode_apart(text, follows=True) for text in questions[len(first) :])
        return _row(alone[:shared]), [*encoded, *later]

    def open_context(self, text: str) -> tuple[Tensor, str]:
        """Return a context's token ids [1, T] as far as they hold before any question, and the text behind them.

        That rest, mostly nothing, shares a token with what every question begins with: see `question`.

        Raises:
            EmptyTextError: the context has no token.
        """
        self._require_rendered(text, "a")
        text = self._strip_context(text)
        alone = self.context(text)[0].tolist()
        opening = "\n\n" if self.chat else self.plain.partition(PLACE)[0]
        continued = (
            self._encode_prompt(f"{text}{opening}a") if opening else alone
        )  # a letter, as questions begin with one
        shared = _count_shared(alone, continued)
        for rest in range(1 + _LONGEST_REST if 0 < shared < len(alone) else 1):
            if self._encode_prompt(text[: len(text) - rest]) == alone[:shared]:
                return _row(alone[:shared]), text[len(text) - rest :]
        return _row(alone), ""

    def context(self, text: str) -> Tensor:
        """Return the token ids [1, T] of a context that nothing follows; EmptyTextError if there is nothing."""
        ids = self._encode_prompt(self._strip_context(text))
        if not ids:
            raise EmptyTextError("a context is empty once it is tokenised")
        return _row(ids)

    def question(self, text: str, prefix: str = "", *, rest: str = "", follows: bool = False) -> Tensor:
        """Return the token ids [1, K] of a question, of what leads to the reply, and of the reply's given beginning.

        A question `follows` a reply, or else a context that is not known here but for its `rest`, see `open_context`.
        """
        return _row(self._encode_after(rest + self._format_question(text, prefix, follows)))

    def answer(self, text: str, prefix: str = "", question: str = "") -> Tensor:
        """Return the token ids [1, K] of an answer, teacher-forced after `prefix`; EmptyTextError if there is none."""
        ids = [] if is_blank(text) else self._encode_after(self._find_gap(question, prefix, text) + text)
        if not ids:
            raise EmptyTextError(f"the answer {text!r} is empty once it is tokenised")
        return _row(ids)

    def decode(self, ids: list[int]) -> str:
        """Return the text of a reply."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def ended(self, stops: Sequence[str]) -> Callable[[list[int]], bool] | None:
        """Return a check whether a reply, token ids, contains a stop text; None without `stops`."""
        return (lambda reply: find_stop(self.decode(reply), stops) is not None) if stops else None

    @cached_property
    def end_of_turn(self) -> int | None:
        """The token that ends the model's turn in the chat template; None if there is none, or no template.

        The first special token behind a reply counts, with nothing but white space before it.
        """
        if not self.chat:
            return None
        roles = ("user", "assistant")
        try:
            parts = self._render_template(*roles).split(_MARK)
        except Exception:  # noqa: BLE001 - a template raises what it likes: one that takes no reply shows no end of it
            return None
        special = list_added_tokens(self.tokenizer)
        for token in self._encode_bare(parts[-1]) if len(parts) > len(roles) else ():
            if token in special:
                return token
            if self.tokenizer.decode([token]).strip():
                break
        return None

    @cached_property
    def _wrapped(self) -> tuple[str, str]:
        parts = self._render_template("user", add_generation_prompt=True).split(_MARK)
        if len(parts) != 2:
            does = "drops the user's message" if len(parts) < 2 else "repeats the user's message"
            raise IncompatibleError(f"the tokenizer's chat template {does}, or does not take text for its content")
        return parts[0], parts[1]

    @cached_property
    def _next_turn(self) -> str:
        """What stands between a reply and the question that follows it."""
        roles = ("user", "assistant", "user")
        parts = self._render_template(*roles).split(_MARK)
        if len(parts) != len(roles) + 1:
            raise IncompatibleError("the tokenizer's chat template drops earlier messages: no turn can follow another")
        return parts[2]

    def _render_template(self, *roles: str, content: str = _MARK, **options: Any) -> str:
        """Return the template with a mark as the message of each role."""
        messages = [{"role": role, "content": content} for role in roles]
        if self.system and self._takes_system:
            messages.insert(0, {"role": "system", "content": self.system})
        elif self.system:
            messages[0]["content"] = f"{self.system}\n\n{content}"
        return self._apply_template(messages, **options)

    @cached_property
    def _takes_system(self) -> bool:
        """Whether the template has a place for a system prompt; some raise an error, some drop it."""
        messages = [{"role": "system", "content": _MARK}, {"role": "user", "content": "a"}]
        try:
            return _MARK in self._apply_template(messages)
        except Exception:  # noqa: BLE001 - a template raises what it likes
            return False

    def _apply_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        options |= {"enable_thinking": self.thinking, "tokenize": False, **TEMPLATE_OPTIONS}
        text: str = self.tokenizer.apply_chat_template(messages, **options)
        return text

    @cached_property
    def _trims(self) -> tuple[bool, bool]:
        """Whether the template takes away white space before and behind a message, as Llama 3's does."""
        head, _, tail = self._render_template("user", content=f" {_MARK} ", add_generation_prompt=True).partition(_MARK)
        return head == self._wrapped[0], tail == self._wrapped[1]

    def _strip_context(self, text: str, *, ends: bool = False) -> str:
        """Return a context as the template leaves it; no question follows one that `ends` a message."""
        if not self.chat:
            return text
        text = text.lstrip() if self._trims[0] else text
        return text.rstrip() if ends and self._trims[1] else text

    def _require_rendered(self, context: str, question: str) -> None:
        """Refuse a chat template that makes another text of a message than the message, but for blanks at its ends."""
        if not self.chat:
            return
        message = f"{context}\n\n{question}" if question else context
        text = self._strip_context(context, ends=not question) + self._format_question(question)
        if self._render_template("user", content=message, add_generation_prompt=True) != self._wrapped[0] + text:
            raise IncompatibleError(
                "the tokenizer's chat template changes the text of a message, so a context cannot be read before its "
                "question: repair the template, or remove it to have prompts without one"
            )

    def _format_question(self, text: str, prefix: str = "", follows: bool = False) -> str:
        """Return everything between a context, or a reply, and the reply to the question."""
        if not self.chat:
            return self.plain.replace(PLACE, text) + prefix
        before = self._next_turn if follows else "\n\n" if text else ""
        return before + (text.rstrip() if self._trims[1] else text) + self._wrapped[1] + prefix

    def _find_gap(self, question: str, prefix: str, answer: str) -> str:
        """Return the blank before an answer, where one has to be there."""
        before = prefix or ("" if self.chat else self.plain.replace(PLACE, question or "?"))
        return "" if self.verbatim or answer[:1].isspace() or not _takes_blank(before[-1:]) else " "

    def _split_far(self, context: str, ids: list[int]) -> tuple[int, str]:
        """Return how many tokens of a long context are far from its end, and the text of the others.

        Merges do not reach far, so that text is all that has to be encoded again with every question.
        """
        cut = context.rfind(" ", 0, max(len(context) - _NEAR, 0))
        near = self._encode_after(context[cut:]) if cut > 0 else []
        return (len(ids) - len(near), context[cut:]) if near and ids[-len(near) :] == near else (0, context)

    def _encode_pair(
        self, encode: Callable[[str], list[int]], context: str, text: QuestionText
    ) -> tuple[list[int], list[int]]:
        """Return the token ids of a prompt, context and question, and of the answer to it."""
        before = context + self._format_question(text.question, text.prefix)
        prompt = encode(before)
        if text.answer is None or is_blank(text.answer):
            return prompt, []
        whole = encode(before + self._find_gap(text.question, text.prefix, text.answer) + text.answer)
        shared = _count_shared(prompt, whole)
        if shared == len(prompt) or self.verbatim:
            return whole[:shared], whole[shared:]
        return prompt, self.answer(text.answer, text.prefix, text.question)[0].tolist()

    def _encode_apart(self, text: QuestionText, *, follows: bool = False) -> EncodedQuestion:
        """Encode a question and its answer where the tokens before them are given."""
        question = self.question(text.question, text.prefix, follows=follows)
        if text.answer is None or is_blank(text.answer):
            return EncodedQuestion(question, _row([]))
        return EncodedQuestion(question, self.answer(text.answer, text.prefix, text.question))

    def _encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of a prompt's beginning, from its first token on; a template brings special ones."""
        if self.chat:
            return self._encode_bare(self._wrapped[0] + text)
        ids: list[int] = self.tokenizer(text, add_special_tokens=True)["input_ids"]
        return ids[: len(ids) - self._ending]

    @cached_property
    def _ending(self) -> int:
        return count_ending(self.tokenizer)

    def _encode_bare(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _encode_after(self, text: str) -> list[int]:
        """Return the token ids of a text within a longer one, whatever text stands before it."""
        for anchor in _ANCHORS:
            before = self._encode_bare(anchor)
            whole = self._encode_bare(anchor + text)
            is_known = getattr(self.tokenizer, "unk_token_id", None) not in before
            if is_known and whole[: len(before)] == before:
                return whole[len(before) :]
        return self._encode_bare(text)


def list_added_tokens(tokenizer: Any) -> set[int]:
    """Return the ids of special and other added tokens: texts that no other token has in it."""
    return {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}


def count_ending(tokenizer: Any) -> int:
    """Count the special tokens that a tokenizer ends every text with; a prompt has not ended and is read without."""
    whole = tokenizer("a", add_special_tokens=True)["input_ids"]
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    starts = (start for start in range(len(whole) - len(bare) + 1) if whole[start : start + len(bare)] == bare)
    return len(whole) - len(bare) - next(starts, len(whole) - len(bare))


def _count_shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Count the tokens that two texts begin with in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _takes_blank(character: str) -> bool:
    """Tell whether a word that follows a character is divided from it by a blank."""
    if not character or character.isspace() or unicodedata.category(character) in _OPENING:
        return False
    return not unicodedata.name(character, "").startswith(_UNSPACED)


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """Cut a reply at the first of `stops`, without leading white space; return all of it if none is there.

    A reply is left as it is where there are no `stops`. See `find_stop` for which places count.
    """
    return text[: find_stop(text, stops)].lstrip() if stops else text


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """Find where the first stop text begins in a reply; None if it has no stop text.

    A stop of white space counts only after something else was said: a reply that begins with a newline goes on.
    """
    said = len(text) - len(text.lstrip())
    places = (text.find(stop, said if stop.isspace() else 0) for stop in stops)
    return min((at for at in places if at >= 0), default=None)


def _row(ids: Sequence[int]) -> Tensor:
    import torch  # not above: whoever lists tasks has no use for it

    return torch.tensor([list(ids)], dtype=torch.long)

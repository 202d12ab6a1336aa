"""Turn contexts, questions and answers into token ids, with the tokenizer's chat template where it has one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsearch.errors import IncompatibleError

_MARK = "\u241e"  # a symbol no template contains: the place where the context ends and the question begins
PLACE = "{question}"
PLAIN_PROMPT = f"\n\nQuestion: {PLACE}\nAnswer:"


@dataclass(frozen=True)
class PromptFormat:
    """Question-agnostic prompts: the context is tokenised alone, the question and the template's tail come after it.

    `plain` is how a question follows the context where there is no chat template.
    """

    tokenizer: Any
    plain: str = PLAIN_PROMPT

    @property
    def chat(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def context(self, text: str) -> Tensor:
        """Token ids [1, T] of everything before the question; IncompatibleError if there is nothing."""
        head = self._wrapped()[0] if self.chat else ""
        ids = self._encode(head + text, special=not self.chat)
        if not ids:
            raise IncompatibleError("a context is empty once it is tokenised")
        return _row(ids)

    def question(self, text: str) -> Tensor:
        """Token ids [1, K] of a question and of what leads to the answer."""
        if self.chat:
            return _row(self._encode("\n\n" + text + self._wrapped()[1], special=False))
        return _row(self._encode(self.plain.replace(PLACE, text), special=False))

    def answer(self, text: str) -> Tensor:
        """Token ids [1, K] of an answer to be teacher-forced; IncompatibleError if there is none."""
        ids = self._encode(text if self.chat else " " + text, special=False)
        if not ids:
            raise IncompatibleError(f"the answer {text!r} is empty once it is tokenised")
        return _row(ids)

    def decode(self, ids: list[int]) -> str:
        """Text of a reply."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _wrapped(self) -> tuple[str, str]:
        rendered: str = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": _MARK}],
            add_generation_prompt=True,
            tokenize=False,
            enable_thinking=False,  # hybrid models (Qwen3) would spend the whole reply on thinking; others ignore it
        )
        head, found, tail = rendered.partition(_MARK)
        if not found:
            raise IncompatibleError("the tokenizer's chat template drops the user's message")
        return head, tail

    def _encode(self, text: str, *, special: bool) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids


def _row(ids: list[int]) -> Tensor:
    return torch.tensor([ids], dtype=torch.long)

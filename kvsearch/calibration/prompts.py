"""The prompts of a calibration in token ids: what is read and compressed as one, and what may follow it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsearch.calibration.data import CalibrationData
from kvsearch.errors import IncompatibleError, UsageError
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.plan.protocol import QUESTION_AGNOSTIC, Protocol
from kvsearch.policies import Policy
from kvsearch.tasks.prompts import PromptFormat


@dataclass(frozen=True, eq=False)
class Continuation:
    """Tokens after a prompt, ids [1, K]: a question and its answer, or the answer where the prompt has the question."""

    tokens: Tensor
    answer: int  # where the answer starts

    @property
    def predicting(self) -> slice:
        """The rows of `tokens` that predict the answer's; the first of `tokens` is predicted by the prompt itself."""
        return slice(max(self.answer - 1, 0), -1)

    @property
    def predicted(self) -> int:
        """How many of the answer's tokens that is."""
        return self.tokens.shape[1] - max(self.answer, 1)


@dataclass(frozen=True, eq=False)
class CalibrationPrompt:
    """Token ids [1, T] that are compressed as one, the number of their context, and what may follow them."""

    ids: Tensor
    context: int
    continuations: tuple[Continuation, ...]

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    def refusal(self, model: str) -> str:
        """Word the error of a model that computes NaN here."""
        return f"{model}: the model computes NaN on calibration context {self.context}"


def prompts_of(
    loaded: LoadedModel, data: CalibrationData, protocol: Protocol = QUESTION_AGNOSTIC, answer_tokens: int | None = None
) -> list[CalibrationPrompt]:
    """Encode all prompts of `data`, one for every context (question-agnostic) or every question (question-aware).

    Answers are cut to `answer_tokens`.

    Raises:
        IncompatibleError: nothing is left of a context or an answer once it is tokenised.
    """
    form = PromptFormat(loaded.tokenizer, data.prompt)
    prompts: list[CalibrationPrompt] = []
    for number, context in enumerate(data.contexts):
        ids = form.context(context.text)
        questions = [form.question(pair.question) for pair in context.questions]
        answers = [form.answer(pair.answer)[:, :answer_tokens] for pair in context.questions]
        pairs = list(zip(questions, answers, strict=True))
        if protocol == QUESTION_AGNOSTIC:
            after = [Continuation(torch.cat([question, answer], 1), question.shape[1]) for question, answer in pairs]
            prompts.append(CalibrationPrompt(ids, number, tuple(after)))
            continue
        for question, answer in pairs:
            prompts.append(CalibrationPrompt(torch.cat([ids, question], 1), number, (Continuation(answer, 0),)))
    return prompts


def check_lengths(
    loaded: LoadedModel,
    prompts: list[CalibrationPrompt],
    policy: Policy,
    floor: Callable[[int], int],
    *,
    followed: bool = True,
) -> None:
    """Check every prompt before anything is measured; `floor` is what every head keeps of a prompt of some length.

    Raises:
        UsageError: a prompt is too short for the entries that are always kept.
        IncompatibleError: a prompt, with what follows it if it is `followed`, does not fit the model.
    """
    limit = describe(loaded.model).max_positions
    for prompt in prompts:
        # unlike `protected`, not clipped to a short prompt: the advice must name a length that is enough
        least = max(floor(prompt.length), policy.floor)
        if prompt.length <= 2 * least:
            raise UsageError(
                f"a calibration prompt of {prompt.length} tokens is too short for {policy.name}: {least} entries are "
                f"always kept, so there is next to nothing to decide; give at least {4 * least} tokens"
            )
        asked = max(after.tokens.shape[1] for after in prompt.continuations) if followed else 0
        if limit and prompt.length + asked > limit:
            more = f" and up to {asked} of question and answer" if followed else ""
            raise IncompatibleError(
                f"a calibration prompt has {prompt.length} tokens{more}: {loaded.name} takes at most {limit}"
            )

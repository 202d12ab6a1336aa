"""Prompts of a calibration as token ids: compressed prompts, and the continuations that may follow them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor

from kvsearch.calibration.data import CalibrationData, Context, Pair, TakeTokens, hash_contexts
from kvsearch.calibration.steps import StepCache
from kvsearch.core.errors import IncompatibleError, KvsearchWarning, UsageError
from kvsearch.models.loading import LoadedModel
from kvsearch.models.memory import CPU_BYTES
from kvsearch.models.work import Work
from kvsearch.plan.origin import ContextSet
from kvsearch.plan.profile_arrays import Arrays
from kvsearch.plan.schema import QUESTION_AGNOSTIC, Protocol
from kvsearch.policies import Policy
from kvsearch.runtime.attention import run_attention
from kvsearch.runtime.decode.replies import Finished, find_stop_tokens
from kvsearch.runtime.observe import DensePass
from kvsearch.runtime.program import estimate_prompt_bytes, make_full_program
from kvsearch.runtime.replay.forced_answers import (
    TOGETHER,
    ForcedQuestions,
    limit_own_reply,
    parted_replies,
    replies_of_passes,
    reply_end,
    right_reply,
)
from kvsearch.tasks.base import Example, Task
from kvsearch.tasks.encode import (
    Prompt,
    TaskPrompts,
    check_length,
    compute_token_limit,
    cut_middle,
    draw_unseen_examples,
    encode,
    make_token_counter,
)
from kvsearch.tasks.fields import is_blank
from kvsearch.tasks.metrics import is_forced
from kvsearch.tasks.prompts import PLAIN_PROMPT, EmptyTextError, PromptFormat, QuestionText


@dataclass(frozen=True, eq=False)
class Continuation:
    """Tokens after a prompt, ids [1, K]: a question and its answer, or the answer where the prompt has the question.

    An own reply in its place has at most `max_tokens` (0: not limited); `taken` picks the part to teacher-force.
    """

    tokens: Tensor
    answer: int  # where the answer starts
    max_tokens: int = 0
    taken: TakeTokens | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Drop `taken`, which holds a tokenizer, on the way to another process."""
        return {**self.__dict__, "taken": None}

    def limit_reply(self, default: int) -> int:
        """Return the maximum tokens of an own reply, `default` if the question states none."""
        limit = self.max_tokens or default
        return limit if self.taken is None else limit_own_reply(self.tokens.shape[1] - self.answer, limit)

    @property
    def predicting(self) -> slice:
        """The rows of `tokens` that predict the answer's; the first of `tokens` is predicted by the prompt itself."""
        return slice(max(self.answer - 1, 0), -1)

    @property
    def predicted(self) -> int:
        """Number of answer tokens that rows of `tokens` predict."""
        return self.tokens.shape[1] - max(self.answer, 1)


@dataclass(frozen=True, eq=False)
class CalibrationPrompt:
    """A compressed prompt: token ids [1, T], the number of its context, and its continuations.

    `text` is the number of the first context of the same text. An own reply ends with the token that makes `ended` true
    of it, and where the turn ends that a chat template began if it is `chat`. `verbatim` answers go on with the text of
    the context: they stay, and there are no replies.
    """

    ids: Tensor
    context: int
    text: int
    continuations: tuple[Continuation, ...]
    ended: Finished | None = None
    chat: bool = False
    verbatim: bool = False

    def __getstate__(self) -> dict[str, Any]:
        """Drop `ended`, which holds a tokenizer, on the way to another process."""
        return {**self.__dict__, "ended": None}

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    @property
    def may_reply(self) -> bool:
        """Whether own replies may take the place of given answers."""
        return bool(self.continuations) and not self.verbatim

    def work(self, times: float = 0) -> Work:
        """Estimate a pass over the context and `times` over its continuations.

        The attention of what follows to the context is looked at.
        """
        lengths = (after.tokens.shape[1] for after in self.continuations)
        return Work.over([self.length]) + Work.over(lengths, times, behind=self.length)

    def lengthen_answers(self, max_tokens: int) -> CalibrationPrompt:
        """Return the prompt with answers as long as own replies of `max_tokens` may be, of any tokens, for forecasts.

        Own replies that a metric judges are as long as the given answers, which stay where they are not right.
        """
        longer = []
        for after in self.continuations:
            missing = after.answer + (after.max_tokens or max_tokens) - after.tokens.shape[1]
            if after.taken is None and missing > 0:
                filler = self.ids[:, :1].expand(-1, missing)
                after = replace(after, tokens=torch.cat([after.tokens, filler], 1))
            longer.append(after)
        return replace(self, continuations=tuple(longer))

    def make_reply_questions(self, model: str, stop: frozenset[int], max_tokens: int, limit: int) -> ForcedQuestions:
        """Make the questions for own replies, which end before a token of `stop`.

        A reply has at most `max_tokens` where its question says nothing; `limit` is for context, question and reply.
        """
        questions = tuple(after.tokens[0, : after.answer] for after in self.continuations)
        room = tuple(
            min(after.limit_reply(max_tokens), limit - self.length - after.answer) for after in self.continuations
        )
        return ForcedQuestions(self.ids[0], questions, room, stop, self.refusal(model), self.ended)

    def replace_answers(self, replies: Sequence[list[int]], max_tokens: int) -> Iterator[Tensor]:
        """Yield continuations with the first `max_tokens` accepted reply tokens as answer; the given one if none."""
        for after, reply in zip(self.continuations, replies, strict=True):
            taken = (reply if after.taken is None else after.taken(reply))[:max_tokens]
            yield torch.cat([after.tokens[:, : after.answer], torch.tensor([taken])], 1) if taken else after.tokens

    def refusal(self, model: str) -> str:
        """Return the error message for a model that computes NaN on this prompt."""
        return f"{model}: the model computes NaN on calibration context {self.context}"


def encode_prompts(
    loaded: LoadedModel,
    data: CalibrationData,
    protocol: Protocol = QUESTION_AGNOSTIC,
    answer_tokens: int | None = None,
    max_length: int | None = None,
) -> list[CalibrationPrompt]:
    """Encode all prompts of `data`, one for every context (question-agnostic) or every question (question-aware).

    Answers are cut to `answer_tokens`. The middle of a context that does not fit with the longest of its questions and
    replies into `max_length` tokens, or into what the model takes where that is less, is cut out, as evaluations do; a
    `KvsearchWarning` says of how many.

    Raises:
        IncompatibleError: nothing is left of a context or an answer once it is tokenised, or a question and its answer
            leave no room for a context.
    """
    prompts: list[CalibrationPrompt] = []
    limit = compute_token_limit(loaded.model, max_length)
    truncated = 0
    text_of = {number: text[0] for text in data.by_text for number in text}
    for number, context in enumerate(data.contexts):
        plain = context.prompt or data.prompt
        form = PromptFormat(loaded.tokenizer, plain, context.chat, verbatim=context.verbatim, system=context.system)
        texts = [QuestionText(pair.question, pair.prefix, pair.answer) for pair in context.questions]
        whole, encoded = form.encode(context.text, texts)
        pairs = [
            (question, answer[:, : pair.max_new_tokens or None][:, :answer_tokens])
            for (question, answer), pair in zip(encoded, context.questions, strict=True)
        ]
        for pair, (_, answer) in zip(context.questions, pairs, strict=True):
            if not answer.shape[1]:
                raise EmptyTextError(f"the answer {pair.answer!r} is empty once it is tokenised")
        ids = (
            whole
            if limit is None
            else _cut_context(form, context, whole, pairs, limit, f"calibration context {number}")
        )
        truncated += ids.shape[1] < whole.shape[1]
        own = [(pair.max_new_tokens, taken) for pair, taken in zip_longest(context.questions, context.taken)]
        followed: list[Continuation] = []
        text = text_of[number]
        replying = (context.ended, form.chat, context.verbatim)
        for (question, answer), how in zip(pairs, own, strict=True):
            if protocol == QUESTION_AGNOSTIC:
                followed.append(Continuation(torch.cat([question, answer], 1), question.shape[1], *how))
            else:
                whole_ids = torch.cat([ids, question], 1)
                after = (Continuation(answer, 0, *how),)
                prompts.append(CalibrationPrompt(whole_ids, number, text, after, *replying))
        if protocol == QUESTION_AGNOSTIC:
            prompts.append(CalibrationPrompt(ids, number, text, tuple(followed), *replying))
    if truncated:
        warnings.warn(
            f"the middle of {truncated} of {len(data.contexts)} calibration contexts was cut out, so that context, "
            f"question and answer fit {limit} tokens: what is asked about it cannot be found; shorter texts are given "
            "with --data, or asked for with --tasks",
            KvsearchWarning,
            stacklevel=2,
        )
    return prompts


def _cut_context(
    form: PromptFormat, context: Context, ids: Tensor, pairs: Sequence[tuple[Tensor, Tensor]], limit: int, where: str
) -> Tensor:
    """Cut token ids [1, T] of a context so that the longest of its questions and replies fits."""
    reserved = max(
        (
            question.shape[1] + max(answer.shape[1], pair.max_new_tokens)
            for (question, answer), pair in zip(pairs, context.questions, strict=True)
        ),
        default=0,
    )
    if limit - reserved < min(ids.shape[1], form.lead + 2):
        raise IncompatibleError(
            f"{where}: a question and its answer of {reserved} tokens leave no room for the context within {limit} "
            "tokens: raise --max-length, or give other texts with --data or --tasks"
        )
    return cut_middle(ids[0], form.lead, limit - reserved)[None]


def split_reply_batches(model: Any, prompts: Sequence[CalibrationPrompt]) -> Iterator[list[CalibrationPrompt]]:
    """Split prompts, in order, into batches whose full caches fit into memory together."""
    part: list[CalibrationPrompt] = []
    taken = 0
    for prompt in prompts:
        size = 3 * estimate_prompt_bytes(
            model, make_full_program(model), [prompt.length]
        )  # the pass's, that for replies, the batch's
        if part and (taken + size > CPU_BYTES or len(part) == TOGETHER):
            yield part
            part = []
            taken = 0
        part.append(prompt)
        taken += size
    yield part


def add_own_replies(
    loaded: LoadedModel,
    parts: Sequence[Sequence[CalibrationPrompt]],
    max_tokens: int,
    steps: StepCache | None = None,
    read: Callable[[CalibrationPrompt], DensePass[Any]] | None = None,
) -> Iterator[CalibrationPrompt]:
    """Yield prompts with own replies of the model, of at most `max_tokens`, in place of given answers.

    A reply gets as many tokens as its question allows, `max_tokens` where it says nothing, and as the model has
    positions for. Where it is empty, or not right by the metric of its task, the given answer stays. Prompts of one
    part reply side by side, and are a step unless none of them may reply. Replies go on from the passes over the
    prompts that `read` returns; None: the prompts are read for replies alone, in other processes where there are some.

    Raises:
        IncompatibleError: the model computes NaN under its full cache.
    """
    limit = compute_token_limit(loaded.model) or sys.maxsize

    def make(missing: Sequence[Sequence[CalibrationPrompt]]) -> Iterator[Arrays]:
        stops = {
            chat: frozenset(find_stop_tokens(loaded, PromptFormat(loaded.tokenizer, template=chat)))
            for chat in {prompt.chat for part in missing for prompt in part}
        }
        questions = [
            [prompt.make_reply_questions(loaded.name, stops[prompt.chat], max_tokens, limit) for prompt in part]
            for part in missing
        ]
        answered = (
            parted_replies(loaded, questions)
            if read is None
            else map(partial(_continue_passes, loaded, read), missing, questions)
        )
        for part, replies in zip(missing, answered, strict=True):
            replied = [
                prompt.replace_answers(of_prompt, max_tokens) for prompt, of_prompt in zip(part, replies, strict=True)
            ]
            yield {str(number): tokens.numpy() for number, tokens in enumerate(chain.from_iterable(replied))}

    replying = [[prompt for prompt in part if prompt.may_reply] for part in parts]
    replied = (steps or StepCache()).stage([part for part in replying if part], make)
    answers = (torch.from_numpy(arrays[str(number)]) for arrays in replied for number in range(len(arrays)))
    for prompt in chain.from_iterable(parts):
        if prompt.may_reply:
            continuations = tuple(replace(after, tokens=next(answers)) for after in prompt.continuations)
            yield replace(prompt, continuations=continuations)
        else:
            yield prompt


def _continue_passes(
    loaded: LoadedModel,
    read: Callable[[CalibrationPrompt], DensePass[Any]],
    part: Sequence[CalibrationPrompt],
    questions: Sequence[ForcedQuestions],
) -> list[list[list[int]]]:
    """Generate replies to all questions of prompts from the passes of `read`, by prompt and question."""
    with torch.no_grad(), run_attention(loaded.model):
        passes = [read(prompt) for prompt in part]
        return replies_of_passes(loaded.model, passes, questions)


def check_lengths(prompts: Sequence[CalibrationPrompt], policy: Policy, floor: Callable[[int], int]) -> None:
    """Check the lengths of all prompts; `floor` maps a prompt length to the entries every head keeps.

    Raises:
        UsageError: a prompt is too short for the entries that are always kept.
    """
    for prompt in prompts:
        # unlike `protected`, not clipped to a short prompt: the advice must name a length that is enough
        kept = max(floor(prompt.length), policy.least)
        if prompt.length <= 2 * kept:
            raise UsageError(
                f"a calibration prompt of {prompt.length} tokens is too short for {policy.name}: {kept} entries are "
                f"always kept, so there is next to nothing to decide; give at least {4 * kept} tokens"
            )


def make_task_data(
    loaded: LoadedModel,
    tasks: Sequence[Task],
    samples: int,
    seed: int,
    max_length: int | None = None,
    used: ContextSet | None = None,
) -> CalibrationData:
    """Make calibration data of the first `samples` contexts of every task, with full right replies as answers.

    They are drawn as an evaluation draws them, none of them `used`. Questions without an answer are left out.

    Raises:
        UsageError: a task has no usable question or no context that is not used, or fills contexts to a length above
            the limit; see `check_length`.
    """
    count = make_token_counter(loaded.tokenizer)
    limit = compute_token_limit(loaded.model, max_length)
    contexts: list[Context] = []
    for task in tasks:
        check_length(loaded, task, limit)
        examples: dict[str, Example] = {}
        for example in draw_unseen_examples(task, samples, seed, count, used or ContextSet())[0]:
            answerable = tuple(
                query
                for query in example.queries
                if not (is_blank(query.question) or all(map(is_blank, query.answers)))
            )
            if answerable and not is_blank(example.context):
                examples[example.key] = replace(example, queries=answerable)
        if not examples:
            raise UsageError(f"task {task.name} has no question with an answer to calibrate on: leave it out")
        encoded = encode(loaded.tokenizer, task, list(examples.values()))
        ended = reply_end(encoded)
        contexts += (_context(encoded, prompt, examples[prompt.key], ended) for prompt in encoded.prompts)
    return CalibrationData(
        "+".join(task.name for task in tasks), PLAIN_PROMPT, tuple(contexts), hash_contexts("", contexts)
    )


def _context(encoded: TaskPrompts, prompt: Prompt, example: Example, ended: Finished | None) -> Context:
    """Make a context with its hashes, its questions, and the acceptance of own replies."""
    task = encoded.task
    key = prompt.key
    pairs = tuple(
        Pair(
            question=query.question,
            answer=query.right_reply or "",
            prefix=query.prefix,
            max_new_tokens=query.max_new_tokens,
        )
        for query in (question.query for question in prompt.questions)
    )
    judged = replace(encoded, prompts=())  # a reply is judged without what others are asked
    taken = tuple(partial(right_reply, judged, key, question.number, question.query) for question in prompt.questions)
    settings = (task.prompt, task.chat, encoded.recorded[key], taken, ended, is_forced(task), example.system)
    return Context(example.context, pairs, *settings)

"""Encode tasks as token ids, cut to fit the model; what was cut or left out is counted."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.models.architecture import describe
from kvsearch.models.foreign import name_text_on_error
from kvsearch.models.loading import LoadedModel
from kvsearch.plan.origin import ContextSet, hash_context
from kvsearch.plan.schema import QUESTION_AGNOSTIC, Protocol
from kvsearch.tasks.base import Coverage, Example, Query, Sampling, Task, TokenCount
from kvsearch.tasks.metrics import is_forced, score
from kvsearch.tasks.metrics.likelihood import FORCED
from kvsearch.tasks.prompts import EmptyTextError, PromptFormat, QuestionText

NO_CONTEXT = "empty context"
NO_QUESTION = "empty question"
NO_ANSWER = "empty answer"


@dataclass(frozen=True, eq=False)
class Question:
    """One question: its number within its example, and token ids [K] up to where the model takes over.

    Empty answers are left out of its `query`. `right` are token ids [A] of a right reply in full, as far as a reply may
    go; none where the task names no answers.
    """

    number: int
    query: Query
    ids: Tensor
    right: Tensor


@dataclass(frozen=True, eq=False)
class Prompt:
    """A context, token ids [T], and its questions.

    `truncated`: the middle of the context was cut out. `hashes` are what the context and each of its questions are
    known by elsewhere, see `hash_example`. `turns` are as in an `Example`.
    """

    key: str
    context: Tensor
    questions: tuple[Question, ...]
    truncated: bool
    hashes: tuple[str, ...]
    turns: bool = False

    def with_question(self, question: Question) -> Tensor:
        """Return the token ids of everything before the reply but other replies; the same under every protocol."""
        earlier = [turn.ids for turn in self.questions if self.turns and turn.number < question.number]
        return torch.cat([self.context, *earlier, question.ids])


@dataclass(frozen=True, eq=False)
class TaskPrompts:
    """A task in token ids, or some of its prompts. `contexts` names the context of every key, see `name_contexts`.

    `recorded` says what each key is known by in records of used contexts, see `kvsearch.plan.origin`. Replies are
    greedy, or drawn as `sampling` says: a question that is replied to several times is there as often. Up to
    `forced_tokens` of a right reply are teacher-forced, beside replies, or of a `ForcedTask` in place of them.
    """

    task: Task
    format: PromptFormat
    prompts: tuple[Prompt, ...]
    coverage: Coverage
    contexts: Mapping[str, str]
    recorded: Mapping[str, tuple[str, ...]]
    sampling: Sampling | None = None
    forced_tokens: int = 0

    @property
    def distinct(self) -> int:
        """How many different contexts there are."""
        return len({self.contexts[prompt.key] for prompt in self.prompts})


@dataclass(frozen=True)
class ForcedTask(Task):
    """The questions of another task, whose right replies are predicted instead of replied, see `force_replies`."""

    task: Task
    metric = FORCED

    @property
    def stops(self) -> tuple[str, ...]:
        return self.task.stops

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.task.name

    @property
    def prompt(self) -> str:
        return self.task.prompt

    @property
    def category(self) -> str:
        return self.task.category

    def examples(self, samples: int, seed: int, count: TokenCount) -> Sequence[Example]:
        return self.task.examples(samples, seed, count)


def have_right_replies(encoded: Sequence[TaskPrompts]) -> bool:
    """Tell whether all questions have a right reply."""
    questions = (question for task in encoded for prompt in task.prompts for question in prompt.questions)
    return all(question.query.answers and len(question.right) for question in questions)


def limit_questions(task: TaskPrompts, count: int) -> TaskPrompts:
    """Leave at most `count` questions of each context: of the next one those that follow, so that every kind is asked.

    Of questions in turns the first are left.
    """

    def limit(number: int, prompt: Prompt) -> Prompt:
        first = 0 if prompt.turns else number * count % len(prompt.questions)
        return replace(prompt, questions=(prompt.questions[first:] + prompt.questions[:first])[:count])

    prompts = tuple(limit(number, prompt) for number, prompt in enumerate(task.prompts))
    return replace(task, prompts=prompts, coverage=replace(task.coverage, **count_coverage(prompts)))


def force_replies(encoded: Sequence[TaskPrompts], max_tokens: int) -> list[TaskPrompts] | None:
    """Return tasks with right replies teacher-forced up to `max_tokens` tokens; None if a question has no right reply.

    Drawn replies have the same right one, so each of their questions is there once.
    """
    if not have_right_replies(encoded):
        return None

    def forced(prompt: Prompt) -> Prompt:
        once = {question.ids.numpy().tobytes(): question for question in reversed(prompt.questions)}
        kept = prompt.questions if prompt.turns else tuple(reversed(once.values()))
        return replace(
            prompt, questions=tuple(replace(question, right=question.right[:max_tokens]) for question in kept)
        )

    tasks = []
    for task in encoded:
        shortened = tuple(map(forced, task.prompts))
        coverage = replace(task.coverage, **count_coverage(shortened))
        forced_task = replace(task, task=ForcedTask(task.task), forced_tokens=max_tokens)
        tasks.append(replace(forced_task, prompts=shortened, coverage=coverage, sampling=None))
    return tasks


def name_contexts(tasks: Iterable[TaskPrompts]) -> dict[tuple[str, str], str]:
    """Name the context of every task and key; equal names are one context, whose questions are not independent.

    Contexts are equal if their texts are. Where all of a task are, as with worked examples, they
    say nothing about its questions: then every key is a context of its own.
    """
    return {(task.task.name, key): name for task in tasks for key, name in task.contexts.items()}


def list_context_hashes(tasks: Iterable[TaskPrompts]) -> list[str]:
    """List the hashes of all prompts' contexts, as records of used contexts hold them."""
    return [digest for task in tasks for prompt in task.prompts for digest in task.recorded[prompt.key]]


def collect_contexts(tasks: Sequence[TaskPrompts]) -> ContextSet:
    """Return the hashes of all prompts' contexts as a set."""
    return ContextSet.of(list_context_hashes(tasks))


def encode_tasks(
    loaded: LoadedModel,
    tasks: Sequence[Task],
    samples: int,
    seed: int = 0,
    max_length: int | None = None,
    used: ContextSet | None = None,
    sampling: Sampling | None = None,
) -> list[TaskPrompts]:
    """Return up to `samples` examples of every task, cut to what the model and `max_length` allow, none of them `used`.

    Questions are there as often as they are replied to by the `sampling`.

    Raises:
        UsageError: two tasks of one name, a task all of whose contexts are used or without a usable question, one that
            fills contexts to a length above the limit, a question to which the metric can judge no reply, or one to
            which no replies can be drawn.
        IncompatibleError: a question leaves no room for its context.
    """
    doubled = [name for name, times in Counter(task.name for task in tasks).items() if times > 1]
    if doubled:
        raise UsageError(f"two tasks are called {doubled[0]!r}: rename one, the name labels its row")
    count = make_token_counter(loaded.tokenizer)
    limit = compute_token_limit(loaded.model, max_length)
    for task in tasks:
        check_length(loaded, task, limit)
    made = []
    for task in tasks:
        with name_text_on_error(f"task {task.name}"):
            examples, left_out = draw_unseen_examples(task, samples, seed, count, used or ContextSet())
        if sampling is not None:
            if is_forced(task) or (sampling.replies > 1 and any(example.turns for example in examples)):
                reason = "has texts without replies" if is_forced(task) else "asks in turns, once each"
                raise UsageError(f"task {task.name} {reason}: ask it without --temperature and --replies")
            examples = [replace(example, queries=example.queries * sampling.replies) for example in examples]
        prompts = encode(loaded.tokenizer, task, examples, samples, limit, left_out)
        made.append(replace(prompts, sampling=sampling))
    return made


def make_token_counter(tokenizer: Any) -> TokenCount:
    """Return a function that counts the tokens of a text, without special ones."""
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])


def compute_token_limit(model: Any, max_length: int | None = None) -> int | None:
    """Return the limit on tokens of prompt and reply together: the model's, or `max_length` if that is less."""
    limits = [limit for limit in (describe(model).max_positions, max_length) if limit]
    return min(limits, default=None)


def encode(
    tokenizer: Any,
    task: Task,
    examples: Sequence[Example],
    wanted: int | None = None,
    limit: int | None = None,
    used: int = 0,
) -> TaskPrompts:
    """Encode examples, cut to fit `limit` tokens with question and reply (None: not cut); see `encode_tasks`.

    `wanted` contexts were asked for and `used` ones left out, which is only counted.
    """
    form = PromptFormat.of(tokenizer, task)
    if not form.chat and any(example.system for example in examples):
        raise IncompatibleError(
            f"task {task.name} begins with a system prompt, and the model's tokenizer has no chat template: take an "
            "instruct model, or leave the task out"
        )
    excluded = Counter[str]()
    prompts: list[Prompt] = []
    for example in examples:
        with name_text_on_error(f"task {task.name}, example {example.key}"):
            prompt = _encode_prompt(form, example, limit, excluded)
        if prompt is not None:
            prompts.append(prompt)
    if not prompts:
        raise UsageError(
            f"task {task.name} has no usable question ({format_reasons(excluded) or 'it has no examples'})"
        )
    for prompt in prompts:  # before anything is generated: does the metric understand the answers?
        for question in prompt.questions:
            score(task, prompt.key, question.number, question.query, "")
    several = len({prompt.hashes[0] for prompt in prompts}) > 1
    contexts = {prompt.key: prompt.hashes[0] if several else prompt.key for prompt in prompts}
    alone = several or len(prompts) == 1
    recorded = {prompt.key: prompt.hashes[:1] if alone else prompt.hashes[1:] for prompt in prompts}
    coverage = Coverage(
        task.name,
        task.category,
        wanted=len(examples) if wanted is None else wanted,
        found=len(examples),
        excluded=dict(sorted(excluded.items())),
        used=used,
        split=getattr(task, "split", None),
        **count_coverage(prompts),
    )
    return TaskPrompts(task, form, tuple(prompts), coverage, contexts, recorded)


def count_coverage(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Count the prompts, questions and lengths that `Coverage` reports."""
    lengths = [len(prompt.context) for prompt in prompts]
    return {
        "contexts": len(prompts), "truncated": sum(prompt.truncated for prompt in prompts),
        "questions": sum(len(prompt.questions) for prompt in prompts),
        "shortest": min(lengths), "longest": max(lengths),
    }  # fmt: skip


def hash_example(example: Example) -> tuple[str, ...]:
    """Return the hashes of an example's context, alone and with each of its questions; see `hash_context`.

    One of them stands in a record of used contexts: where all contexts of a task are equal, a hash with a question.
    """
    text = f"{example.system}\n\n{example.context}" if example.system else example.context
    question_hashes = (hash_context(text, query.question) for query in example.queries)
    return hash_context(text), *question_hashes


def draw_unseen_examples(
    task: Task, samples: int, seed: int, count: TokenCount, used: ContextSet
) -> tuple[Sequence[Example], int]:
    """Draw up to `samples` examples whose contexts are not `used`, and count those that are left out for it.

    In their place come more of the same seed: others where a task makes its examples, else what is left of its data.
    """
    wanted = samples
    while True:
        examples = task.examples(wanted, seed, count)
        fresh = [example for example in examples if not any(map(used.has, hash_example(example)))]
        if len(fresh) >= samples or len(examples) != wanted or wanted >= samples + 2 * len(used.ids):
            break
        wanted += samples - len(fresh)
    if examples and not fresh:
        split = getattr(task, "split", None)
        where = "" if split is None else f" of split {split}"
        raise UsageError(
            f"task {task.name}: none of its {len(examples)} contexts{where} is fresh, what is given was fitted or "
            f"chosen on all of them ({len(used.ids)} in all): give more data, other tasks, or plans made on others"
        )
    return fresh, len(examples) - len(fresh)


def hash_tokens(ids: Tensor) -> str:
    """Return the SHA-256 of token ids as little-endian 64-bit integers."""
    return hashlib.sha256(ids.numpy().astype("<i8").tobytes()).hexdigest()


def format_reasons(excluded: dict[str, int]) -> str:
    """Format reasons with their counts, for messages."""
    return ", ".join(f"{reason}: {count}" for reason, count in sorted(excluded.items()))


def cut_middle(ids: Tensor, lead: int, room: int) -> Tensor:
    """Cut token ids [T] to `room`: the first `lead` stay, and of the others half from the head, half from the tail.

    An odd one goes to the head.
    """
    if len(ids) <= room:
        return ids
    tail = (room - lead) // 2
    return torch.cat([ids[: room - tail], ids[len(ids) - tail :]])


def check_length(loaded: LoadedModel, task: Task, limit: int | None) -> None:
    """Refuse a length above the limit: such texts would lose what was hidden in them, whatever the method."""
    longest = max(getattr(task, "lengths", ()), default=getattr(task, "length", 0))
    if limit is not None and longest > limit:
        taker = (
            "--max-length allows"
            if limit < (compute_token_limit(loaded.model) or limit + 1)
            else f"{loaded.name} takes"
        )
        raise UsageError(f"task {task.name} makes prompts of {longest} tokens, {taker} {limit}: lower --length")


def _encode_prompt(form: PromptFormat, example: Example, limit: int | None, excluded: Counter[str]) -> Prompt | None:
    """Encode an example with its usable questions; None if it has none, or no context. What is left out is counted."""
    form = replace(form, system=example.system) if example.system != form.system else form
    queries = list(_usable_queries(form, example, excluded))
    texts = [QuestionText(query.question, query.prefix, query.right_reply) for _, query in queries]
    try:
        whole, encoded = form.encode(example.context, texts, turns=example.turns)
    except EmptyTextError:
        excluded[NO_CONTEXT] += len(queries)
        return None
    if not queries:
        return None
    questions = tuple(
        Question(number, query, ids[0], right[0, : query.max_new_tokens])
        for (number, query), (ids, right) in zip(queries, encoded, strict=True)
    )
    context = whole[0] if limit is None else _fit_context(form, example, whole[0], questions, limit)
    cut = len(context) < whole.shape[1]
    return Prompt(example.key, context, questions, cut, hash_example(example), example.turns)


def _usable_queries(form: PromptFormat, example: Example, excluded: Counter[str]) -> Iterator[tuple[int, Query]]:
    """Yield the queries that have a question, with their numbers, without their empty answers; count the others."""
    follows = False
    for number, query in enumerate(example.queries):
        answers = []  # metrics that look for an answer in the reply would always find an empty one
        for answer in query.answers:
            with suppress(EmptyTextError):
                form.answer(answer, query.prefix, query.question)
                answers.append(answer)
        if not form.question(query.question, query.prefix, follows=follows).shape[1]:
            excluded[NO_QUESTION] += 1
        elif query.answers and not answers:
            excluded[NO_ANSWER] += 1
        else:
            yield number, replace(query, answers=tuple(answers))
            follows = example.turns


def _fit_context(
    form: PromptFormat, example: Example, context: Tensor, questions: Sequence[Question], limit: int
) -> Tensor:
    """Cut the context so that the longest of its questions fits; all of them, under any protocol, see the same."""
    longest = max(questions, key=lambda question: len(question.ids) + question.query.max_new_tokens)
    counted = questions if example.turns else (longest,)
    room = limit - sum(len(question.ids) + question.query.max_new_tokens for question in counted)
    if room < min(len(context), form.lead + 2):
        raise IncompatibleError(
            f"task {example.task}, example {example.key}, question {longest.number}: {len(longest.ids)} tokens and a "
            f"reply of up to {longest.query.max_new_tokens} leave no room for the context within {limit} tokens: "
            "shorten them or raise the limit"
        )
    return cut_middle(context, form.lead, room)


@dataclass(frozen=True)
class Reading:
    """One sequence of a batch: the token ids that are prefilled and compressed, and the questions that follow.

    Question-agnostic: the context; all its questions follow, and no question sees another. Question-aware: context,
    question and the reply's prefix; the reply follows at once.
    """

    prompt: Prompt
    questions: tuple[Question, ...]
    protocol: Protocol

    @property
    def ids(self) -> Tensor:
        """Token ids [T] of what is compressed."""
        if self.protocol == QUESTION_AGNOSTIC:
            return self.prompt.context
        return self.prompt.with_question(self.questions[0])

    def following(self, question: Question) -> Tensor:
        """Token ids [K] between these and the reply to one of the questions: none where it is compressed, too."""
        return question.ids if self.protocol == QUESTION_AGNOSTIC else question.ids[:0]


def make_readings(prompts: Sequence[Prompt], protocol: Protocol) -> list[Reading]:
    """Return one reading per context (question-agnostic) or per question (question-aware).

    Raises:
        UsageError: question-aware, and questions are asked in turns.
    """
    if protocol == QUESTION_AGNOSTIC:
        return [Reading(prompt, prompt.questions, protocol) for prompt in prompts]
    if any(prompt.turns for prompt in prompts):
        raise UsageError("turns are asked about a context that is compressed once: use --protocol question-agnostic")
    return [Reading(prompt, (question,), protocol) for prompt in prompts for question in prompt.questions]


def list_questions(batch: Sequence[Reading]) -> list[tuple[Reading, Question]]:
    """List the questions of a batch with their readings: the first of every reading, then the second, and so on."""
    longest = max(len(reading.questions) for reading in batch)
    return [(reading, reading.questions[n]) for n in range(longest) for reading in batch if n < len(reading.questions)]

"""Run tasks under several programs: compress a batch once, then reply to every question of it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsearch.core.canonical import hash_json
from kvsearch.core.errors import IncompatibleError, KvsearchWarning, NonFiniteError
from kvsearch.core.items import Progress, with_progress
from kvsearch.core.resources import read_version
from kvsearch.evaluation.names import FULL
from kvsearch.evaluation.ready_methods import ReadyMethod
from kvsearch.evaluation.reply_store import ReplyStore
from kvsearch.evaluation.samples import ReplyPlace, Sample
from kvsearch.models.architecture import find_text_config, is_beyond_switch, require_same_rotary
from kvsearch.models.loading import LoadedModel
from kvsearch.models.memory import is_out_of_memory, release_memory
from kvsearch.plan.schema import QUESTION_AGNOSTIC, Protocol
from kvsearch.runtime import Program
from kvsearch.runtime.attention import run_attention
from kvsearch.runtime.decode.next_tokens import Draws, record_generation_settings
from kvsearch.runtime.decode.replies import Finished, Replies, find_stop_tokens, has_windows
from kvsearch.runtime.program import make_full_program, require_room
from kvsearch.runtime.replay.forced_answers import limit_own_reply, right_reply
from kvsearch.runtime.shared_prefill import JointReplies, compress_prompts, make_batches
from kvsearch.tasks.base import Task
from kvsearch.tasks.encode import (
    ForcedTask,
    Question,
    Reading,
    TaskPrompts,
    hash_tokens,
    list_questions,
    make_readings,
)
from kvsearch.tasks.metrics import STAYS_RIGHT, is_forced, is_right, score
from kvsearch.tasks.metrics.likelihood import format_losses
from kvsearch.tasks.prompts import cut_at_stop

RECORDED_PACKAGES = ("kvsearch", "torch", "transformers")
UNSCORED = 0.0  # finite, as all that is kept; scores of recalled replies are computed anew


def run_encoded(
    loaded: LoadedModel,
    programs: Mapping[str, Program],
    tasks: Sequence[TaskPrompts],
    protocol: Protocol,
    batch: int = 8,
    progress: Progress | None = None,
    memory: int | None = None,
    kept: KeptReplies | None = None,
) -> list[Sample]:
    """Run every program on all questions of what `encode_tasks` made; `memory` as in `reply_to_batch`.

    Replies that are `kept` are not made again. The rest of a batch is made as if all of it were, so replies that share
    their arithmetic still do.

    A batch that memory is too short for is halved, down to one example, which a `KvsearchWarning` says.

    Raises:
        IncompatibleError: a method made the model emit NaN or infinite logits; the message names the sample. Or
            questions come in turns, on a model with sliding windows.
        EnvironmentFault: the longest prompt alone does not fit under a program.
        RuntimeError, MemoryError: memory ran out for a single example.
    """
    if longest := max((len(prompt.context) for task in tasks for prompt in task.prompts), default=0):
        require_room(loaded.model, programs, [longest])
    # on sliding windows no padding may come between contexts and questions
    parted = has_windows(loaded.model) and protocol == QUESTION_AGNOSTIC
    if has_windows(loaded.model) and any(prompt.turns for task in tasks for prompt in task.prompts):
        raise IncompatibleError("turns differ in length, so a model with sliding windows cannot take them in a batch")
    for task in tasks:
        _require_same_rotary(loaded, task, protocol)

    def follows(reading: Reading) -> tuple[bool, tuple[int, ...]]:
        lengths = tuple(len(question.ids) for question in reading.questions) if parted else ()
        return is_beyond_switch(loaded.model, len(reading.ids)), lengths

    work = [
        (number, part)
        for number, task in enumerate(tasks)
        for part in make_batches(make_readings(task.prompts, protocol), batch, follows)
    ]
    # Replies are recalled by batch: a method with one reply missing does the whole batch again, as batches decide last
    # bits.
    known = [[] if kept is None else kept.recall(tasks[number], part, programs) for number, part in work]
    finished = [{sample.method for sample in samples} for samples in known]
    left = [(*item, done) for item, done in zip(work, finished, strict=True) if programs.keys() - done]
    # methods that are finished everywhere, as of an earlier evaluation, are not read and compressed beside new ones
    missing = {
        method: program for method, program in programs.items() if any(method not in done for _, _, done in left)
    }
    answers = loaded.map(_Answering([replace(task, prompts=()) for task in tasks], missing, memory), left)
    results: list[Sample] = []
    parts = list(zip(work, known, finished, strict=True))
    contexts = sum(len(part) for _, part in work)
    for (number, part), recalled, done in with_progress(parts, contexts, progress, lambda item: len(item[0][1])):
        task = tasks[number]
        samples = score_replies(task, part, recalled)
        for replies in next(answers) if programs.keys() - done else ():
            scored = list(replies)
            try:
                scored = score_replies(task, part, replies)
            finally:  # if a score fails, the replies are kept
                if kept is not None:
                    kept.keep(task, part, scored)
            samples += scored
        by_place = {sample.place: sample for sample in samples}
        results += [
            by_place[task.task.name, reading.prompt.key, question.number, method]
            for method in programs
            for reading, question in list_questions(part)
        ]
    return results


def _require_same_rotary(loaded: LoadedModel, task: TaskPrompts, protocol: Protocol) -> None:
    """Refuse a task, before its first question, if a reply may pass the length at which rotary factors change."""
    pairs = [(reading, question) for reading in make_readings(task.prompts, protocol) for question in reading.questions]
    for reading, question in pairs:
        later = len(reading.following(question)) + question.query.max_new_tokens - 1
        sample = f"task {task.task.name}, example {reading.prompt.key}, question {question.number}"
        require_same_rotary(loaded.model, [len(reading.ids)], later, sample)


class _Answering:
    """Replies to batches, halved when memory is too short; later batches of that length are halved at once."""

    def __init__(self, tasks: Sequence[TaskPrompts], programs: Mapping[str, Program], memory: int | None) -> None:
        self.tasks, self.programs, self.memory = tasks, programs, memory
        self._fits, self._from = sys.maxsize, sys.maxsize  # contexts at a time, of so many tokens and more

    def __call__(
        self, loaded: LoadedModel, item: tuple[int, Sequence[Reading], Collection[str]]
    ) -> Iterator[list[Sample]]:
        """Yield the replies of methods that reply together; they are not scored.

        The `item` is the number of a task, what is read together of it, and the methods that are finished.
        """
        number, batch, finished = item
        with run_attention(loaded.model):
            yield from self._reply_in_halves(loaded, self.tasks[number], batch, self.programs, finished)

    def _reply_in_halves(
        self,
        loaded: LoadedModel,
        task: TaskPrompts,
        batch: Sequence[Reading],
        programs: Mapping[str, Program],
        finished: Collection[str] = (),
    ) -> Iterator[list[Sample]]:
        """Reply as `reply_to_batch`, in halves if memory is too short for the batch, with the methods still missing."""
        # What was yielded before memory ran out is not done again.
        done, longest = set(finished), max(len(reading.ids) for reading in batch)
        if len(batch) <= self._fits or longest < self._from:
            try:
                for replies in reply_to_batch(loaded, task, batch, programs, self.memory, done):
                    yield replies
                    done |= {reply.method for reply in replies}
                return
            except (RuntimeError, MemoryError) as error:
                if len(batch) == 1 or not is_out_of_memory(error):
                    raise
            # Outside of the `except`: its traceback holds the tensors that did not fit.
            release_memory()
            middle = len(batch) // 2
            self._fits, self._from = middle, min(longest, self._from)
            short = f"memory is too short for {len(batch)} contexts at a time, so {middle} are read"
            note = f"task {task.task.name}: {short} (--batch {middle} spares the attempt)"
            warnings.warn(note, KvsearchWarning, stacklevel=4)
        middle = len(batch) // 2
        left = {method: program for method, program in programs.items() if method not in done}
        for half in (batch[:middle], batch[middle:]):
            yield from self._reply_in_halves(loaded, task, half, left)


class KeptReplies:
    """The replies of an evaluation that are kept in a store, so that no reply is generated twice.

    The key of a reply is the SHA-256 of all that decides its text.
    """

    def __init__(
        self, store: ReplyStore, loaded: LoadedModel, methods: Sequence[ReadyMethod], protocol: Protocol
    ) -> None:
        self.store = store
        self._loaded = loaded
        self._drawing = record_generation_settings(loaded.model, drawn=True)
        shared = {**describe_environment(loaded), "protocol": protocol, "stop_tokens": sorted(find_stop_tokens(loaded))}
        for label in ("name", "revision"):  # of the model: they are for the reader
            shared["model"].pop(label)
        # By the settings of a method, not by its name: plans with equal content share replies.
        self._methods = {method.label: hash_json({**shared, "method": method.definition}) for method in methods}

    def recall(self, task: TaskPrompts, batch: Sequence[Reading], methods: Iterable[str]) -> list[Sample]:
        """Return the replies to a batch of the methods all of whose replies are known, as they were scored then."""
        samples: list[Sample] = []
        for method in methods:
            keyed = self.keys(task, batch, method)
            if all(pair in self.store.samples for pair in keyed.items()):
                samples += [self.store.samples[pair] for pair in keyed.items()]
        return samples

    def keep(self, task: TaskPrompts, batch: Sequence[Reading], samples: Sequence[Sample]) -> None:
        """Write samples that were finished together; errors as for `ReplyStore.add`."""
        keys: dict[ReplyPlace, str] = {}
        for method in dict.fromkeys(sample.method for sample in samples):
            keys |= self.keys(task, batch, method)
        self.store.add([(keys[sample.place], sample) for sample in samples])

    def keys(self, task: TaskPrompts, batch: Sequence[Reading], method: str) -> dict[ReplyPlace, str]:
        """Return the key of each reply of a method to a batch."""
        keys: dict[ReplyPlace, str] = {}
        turn = sorted(find_stop_tokens(self._loaded, task.format) - find_stop_tokens(self._loaded))
        for reading, question in list_questions(batch):
            prompt = reading.prompt
            settings: dict[str, Any] = {
                "prompt": hash_tokens(prompt.with_question(question)), "context": len(prompt.context),
                "max_new_tokens": question.query.max_new_tokens, "stops": task.task.stops,
                **({"end_of_turn": turn} if turn else {}),
                **({"settled": question.query.answers} if ends_once_right(task, reading) else {}),
                **({"own_forced_tokens": task.forced_tokens} if task.forced_tokens else {}),
            }  # fmt: skip
            if task.sampling is not None:
                seed = task.sampling.derive_seed(task.task.name, prompt.key, question.number)
                settings["drawn"] = [task.sampling.temperature, task.sampling.top_p, seed, self._drawing]
            place = (task.task.name, prompt.key, question.number, method)
            keys[place] = hash_json([self._methods[method], hash_json(settings)])
        return keys


def score_replies(task: TaskPrompts, batch: Sequence[Reading], replies: Iterable[Sample]) -> list[Sample]:
    """Return replies to the questions of a batch with their scores."""
    questions = {
        (reading.prompt.key, question.number): (reading, question) for reading, question in list_questions(batch)
    }
    scored = ((reply, *questions[reply.key, reply.question]) for reply in replies)
    return [
        replace(
            reply,
            score=score(task.task, reading.prompt.key, question.number, question.query, reply.reply),
            category=question.query.category or task.task.category,
            id=question.query.id,
        )
        for reply, reading, question in scored
    ]


def reply_to_batch(
    loaded: LoadedModel,
    prompts: TaskPrompts,
    batch: Sequence[Reading],
    programs: Mapping[str, Program],
    memory: int | None = None,
    finished: Collection[str] = (),
) -> Iterator[list[Sample]]:
    """Yield replies to all questions of one batch, a list for methods that reply together and are not all `finished`.

    The model must run the attention "kvsearch". The prompts are read once for all programs, as far as `memory` bytes of
    compressed caches permit; see `compress_prompts`. The samples are not scored: see `UNSCORED`.
    """
    where = f"task {prompts.task.name}"
    ended = prompts.format.ended(prompts.task.stops)
    stop = find_stop_tokens(loaded, prompts.format)
    unfinished = programs.keys() - set(finished)
    longest = prompts.forced_tokens
    if _needs_full_cache(prompts):
        programs = {FULL: make_full_program(loaded.model), **programs}
    if is_forced(prompts.task):
        rights = [len(question.right) for reading in batch for question in reading.questions]
        longest = max(longest, *rights)
    # Forced rows have logits of the whole vocabulary, all at once.
    logits = len(batch) * longest * find_text_config(loaded.model).vocab_size * loaded.model.dtype.itemsize
    references: References = {}
    joints = compress_prompts(loaded.model, programs, [each.ids for each in batch], stop, ended, memory, logits)
    while True:
        # The prompt itself may give NaN, before any question was asked.
        with _name_samples(where, batch, [reading.questions[0] for reading in batch]):
            joint = next(joints, None)
        if joint is None:
            return
        if unfinished & set(joint.methods) or (_needs_full_cache(prompts) and FULL in joint.methods):
            replies = _collect_replies(prompts, batch, joint, where, references)
            if samples := [sample for sample in replies if sample.method in unfinished]:
                yield samples


def ends_once_right(task: TaskPrompts, reading: Reading) -> bool:
    """Tell whether replies end once their score is full: nothing takes it back, and no later turn reads the rest."""
    return find_metric_name(task.task) in STAYS_RIGHT and not reading.prompt.turns


def make_settled_check(task: TaskPrompts, reading: Reading, question: Question) -> Finished | None:
    """Make the check whether a reply, token ids, is right whatever follows; None for metrics that may take it back."""
    if not ends_once_right(task, reading):
        return None

    def is_settled(reply: list[int]) -> bool:
        text = cut_at_stop(task.format.decode(reply), task.task.stops)
        return is_right(score(task.task, reading.prompt.key, question.number, question.query, text))

    return is_settled


class Reference(NamedTuple):
    """What all methods teacher-force after a question, token ids, and the loss of it under the full cache."""

    right: list[int]
    full_loss: float


# of each sequence of a batch, by turn: what the full cache, which comes first, has said
References = dict[int, list[Reference]]


def _needs_full_cache(prompts: TaskPrompts) -> bool:
    """Tell whether the full cache comes first: it says what is teacher-forced, and others lose more than it does."""
    return is_forced(prompts.task) or prompts.forced_tokens > 0


def _collect_replies(
    prompts: TaskPrompts, batch: Sequence[Reading], joint: JointReplies, where: str, references: References
) -> Iterator[Sample]:
    """Return replies of the methods that reply together to all questions of the batch.

    Questions in turns follow those before them and the replies to them, which are read again with them. Where answers
    are teacher-forced, `references` say which; the full cache, which comes first, puts them there.
    """
    task = prompts.task
    sequences = list(batch) * len(joint.methods)
    earlier: list[list[Tensor]] = [[] for _ in sequences]
    where = f"{where}, {'method' if len(joint.methods) == 1 else 'methods'} {', '.join(joint.methods)}"
    for turn in range(max(len(reading.questions) for reading in batch)):
        # a context without a question of that number repeats its first one, unheard
        questions = [reading.questions[turn if turn < len(reading.questions) else 0] for reading in batch]
        everyone = questions * len(joint.methods)
        heard = [turn < len(reading.questions) for reading in sequences]
        limits = [
            question.query.max_new_tokens if is_heard else 1 for question, is_heard in zip(everyone, heard, strict=True)
        ]
        if prompts.sampling is not None:
            seeds = [
                prompts.sampling.derive_seed(task.name, reading.prompt.key, question.number)
                for reading, question in zip(sequences, everyone, strict=True)
            ]
            joint.replies.draws = Draws(prompts.sampling, seeds)
        started = perf_counter()
        with _name_samples(where, sequences, everyone):
            following = [reading.following(question) for reading, question in zip(sequences, everyone, strict=True)]
            texts = [torch.cat([*before, ids]) for before, ids in zip(earlier, following, strict=True)]
            right_losses: Sequence[float | None] = [None] * len(everyone)
            if is_forced(task):
                answered, losses = _force_right_replies(prompts, batch, turn, questions, joint, texts, references)
                peaks = joint.replies.most
                full_losses = [reference.full_loss for reference in references[turn]] * len(joint.methods)
                replies = list(map(format_losses, losses, full_losses))
            else:
                settled = [
                    make_settled_check(prompts, reading, question)
                    for reading, question in zip(sequences, everyone, strict=True)
                ]
                answered = joint.replies.ask(texts, limits, settled)
                peaks = joint.replies.most
                replies = [cut_at_stop(prompts.format.decode(tokens), task.stops) for tokens in answered]
                if prompts.forced_tokens:
                    _, right_losses = _force_right_replies(
                        prompts, batch, turn, questions, joint, texts, references, answered
                    )
        seconds = perf_counter() - started  # replies have waited for the device: each looks at its logits
        for row, (tokens, peak) in enumerate(zip(answered, peaks, strict=True)):
            method, sequence = joint.methods[row // len(batch)], row % len(batch)
            if heard[row]:
                prompt = batch[sequence].prompt
                question = questions[sequence]
                whole = prompt.with_question(question)
                if prompt.turns:
                    earlier[row] += [question.ids, torch.tensor(tokens, dtype=torch.long)]
                yield Sample(
                    task.name, question.query.category or task.category, method, batch[sequence].protocol, prompt.key,
                    question.number, replies[row], UNSCORED, hash_tokens(whole),
                    prompt.truncated, len(prompt.context), len(whole), len(tokens), joint.entries[method][sequence],
                    joint.nbytes[method] / len(batch), peak, joint.seconds / len(batch), seconds / len(answered),
                    loss=right_losses[row],
                )  # fmt: skip


def _force_right_replies(
    prompts: TaskPrompts,
    batch: Sequence[Reading],
    turn: int,
    questions: Sequence[Question],
    joint: JointReplies,
    texts: Sequence[Tensor],
    references: References,
    answered: Sequence[list[int]] | None = None,
) -> tuple[list[list[int]], list[float]]:
    """Teacher-force a right reply after each of `texts`; return what is forced, and its losses.

    Args:
        prompts: the task; at most its `forced_tokens` are forced.
        batch: contexts that are read together.
        turn: the number of the questions.
        questions: one about each context.
        joint: what replies.
        texts: what follows each of its sequences.
        references: what is forced for all methods; where the full cache is among these, it says so.
        answered: replies of the sequences; None: of the full cache they are made here.
    """
    has_full = FULL in joint.methods
    first = joint.methods.index(FULL) * len(batch) if has_full else 0
    of_full = slice(first, first + len(batch))
    if has_full:
        own = None if answered is None else answered[of_full]
        rights = _choose_right_replies(prompts, batch, questions, joint.replies, of_full, texts[of_full], own)
    else:
        rights = [reference.right for reference in references[turn]]
    forced = rights * len(joint.methods)
    losses = joint.replies.predict(texts, forced)
    if has_full:
        references[turn] = list(map(Reference, rights, losses[of_full]))
    return forced, losses


def _choose_right_replies(
    prompts: TaskPrompts,
    batch: Sequence[Reading],
    questions: Sequence[Question],
    replies: Replies,
    of_full: slice,
    texts: Sequence[Tensor],
    own: Sequence[list[int]] | None,
) -> list[list[int]]:
    """Choose what is teacher-forced after a question of each context: the full cache's own reply, if that is right.

    Elsewhere it is the right reply as the task words it, which a model may find unlikely where it says the same in its
    own words. Text goes on as it does. The full cache has the rows `of_full` of `replies`, and reads `texts`; `own` are
    its replies, None where it is not asked yet.
    """
    rights = [question.right.tolist() for question in questions]
    if not prompts.forced_tokens:
        return rights
    scored = replace(prompts, task=prompts.task.task) if isinstance(prompts.task, ForcedTask) else prompts
    if own is None:
        limits = [
            limit_own_reply(len(right), question.query.max_new_tokens)
            for right, question in zip(rights, questions, strict=True)
        ]
        settled = [
            make_settled_check(scored, reading, question) for reading, question in zip(batch, questions, strict=True)
        ]
        own = replies.of_rows([*range(of_full.start, of_full.stop)]).ask(texts, limits, settled)
    chosen = [
        right_reply(scored, reading.prompt.key, question.number, question.query, reply) or right
        for reading, question, reply, right in zip(batch, questions, own, rights, strict=True)
    ]
    return [tokens[: prompts.forced_tokens] for tokens in chosen]


@contextmanager
def _name_samples(where: str, batch: Sequence[Reading], questions: Sequence[Question]) -> Iterator[None]:
    """Add to a model's error which samples it could not handle."""
    try:
        yield
    except NonFiniteError as error:
        sample = f"example {batch[error.row].prompt.key}, question {questions[error.row].number}"
        raise IncompatibleError(f"{where}, {sample}: {error}") from error


# --- what an evaluation is made of, by content: two runs with equal configurations give equal reports -----------------


def describe_environment(loaded: LoadedModel) -> dict[str, Any]:
    """Describe the environment of a run: model, tokenizer, dtype, device, versions, generation config."""
    generation = record_generation_settings(loaded.model)
    return {
        **({"generation": generation} if generation else {}),
        "model": loaded.fingerprint.model_dump(mode="json", exclude={"dtype"}),
        "tokenizer_sha256": loaded.tokenizer_sha256,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": str(loaded.model.device.type),
        "versions": {package: read_version(package) for package in RECORDED_PACKAGES},
    }


def find_metric_name(task: Task) -> str:
    """Return the name of a task's metric; the class of a user's task that names no metric."""
    return str(getattr(task, "metric", type(task).__name__))


def hash_rows(task: TaskPrompts) -> str:
    """Return the SHA-256 of a task's questions: prompts in token ids, and right answers."""
    rows = [
        [
            prompt.key, question.number, hash_tokens(prompt.with_question(question)), len(prompt.context),
            question.query.max_new_tokens, question.query.answers, question.query.options,
            *([question.query.written] if question.query.written else []),
        ]
        for prompt in task.prompts
        for question in prompt.questions
    ]  # fmt: skip
    return hash_json([rows, task.task.stops])

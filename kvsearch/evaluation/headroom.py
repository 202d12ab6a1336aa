"""Headroom: what can be kept of the score at a ratio, per task.

What is tried knows more than any method may: allocations by the true importance of entries for the very questions that
are asked, beside simple policies. The best of it, context by context, can be kept; more may be possible. If random
eviction keeps the score, the task cannot tell methods apart. How far importance leads without knowing the questions is
said by that for questions about other contexts. Importance is for the model's own reply where that is right, else for
the right one.

All scores are of replies. Of the allocations by true importance two reply: the even one, and the one under which what
importance is for is predicted best, teacher-forced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from kvsearch.budgets.lukv import MarginalSolver
from kvsearch.calibration.importance import QUADRATURE_NODES, ImportancePass, compute_error_drops, measure_output_errors
from kvsearch.calibration.prompts import Continuation
from kvsearch.core.errors import IncompatibleError
from kvsearch.core.items import Progress, group_by_key, with_progress
from kvsearch.evaluation.compare import Split, estimate_replies
from kvsearch.evaluation.names import FULL
from kvsearch.evaluation.ready_methods import make_baselines, spread_evenly
from kvsearch.evaluation.reply_store import ReplyStore
from kvsearch.evaluation.runner import reply_to_batch, score_replies
from kvsearch.evaluation.samples import Sample
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.models.weights import passes_gradients
from kvsearch.models.work import StageCost, Work
from kvsearch.plan.rounding import largest_remainder
from kvsearch.plan.schema import QUESTION_AGNOSTIC
from kvsearch.plan.size import round_half_up
from kvsearch.policies import Observation, Policy, create_policy, rank_entries
from kvsearch.runtime import Program
from kvsearch.runtime.attention import run_attention
from kvsearch.runtime.program import PhaseProgram, make_full_program
from kvsearch.runtime.replay.forced_answers import TOGETHER, Asked, ForcedAnswer, forced_answers
from kvsearch.runtime.shared_prefill import compress_prompts
from kvsearch.runtime.speed import estimate_compression
from kvsearch.tasks.encode import Prompt, Reading, TaskPrompts, format_reasons, make_readings

BEST, EVEN, AGNOSTIC = "best tried", "true importance, even", "agnostic importance"
TRUE_IMPORTANCE = "true importance"  # allocations are called "true importance, NAME"
RECENT_ENTRIES = (32, 8)  # recent entries that an allocation protects
EVEN_ALLOCATION = f"{TRUE_IMPORTANCE}, even, {RECENT_ENTRIES[0]} recent"
WINDOWS: dict[str, dict[str, int]] = {"snapkv": {}, "keydiff": {"window": 1}, "kvzip": {}}  # of policies
OTHERS = 24  # questions about other contexts: 24 keep 0.96 of the bundled model's score at a tenth, evenly, 3 keep 0.54
TRIED = 4 * len(RECENT_ENTRIES)  # allocations by true importance, of which two reply
PROGRAMS = 9  # that reply on every context: two of these, two by other importance, and policies

Replied = tuple[Tensor, Tensor]  # token ids of a question [K] and of the reply that is teacher-forced after it [A]


@dataclass(frozen=True, eq=False)
class GivenScores(Policy):
    """Ranks entries by given scores, [1, Hkv, T]."""

    name: ClassVar[str] = "given"
    source: ClassVar[str] = "control"

    scores: Tensor = field(default_factory=lambda: torch.zeros(0))
    sinks: int = 4
    window: int = 32

    def score(self, observation: Observation) -> Tensor:
        return self.scores.to(observation.keys.device)


Replies = dict[str, list[Sample]]  # of one context, by method


def measure_headroom(
    loaded: LoadedModel,
    encoded: Sequence[TaskPrompts],
    ratio: float,
    full: Sequence[Sample],
    progress: Progress | None = None,
    store: ReplyStore | None = None,
) -> list[Sample]:
    """Compare the `full` cache's replies with those under allocations by true importance and simple policies.

    "best tried" is for each context what scores highest on it, of everything but the full cache. "agnostic importance"
    is for the questions of other contexts, in the allocation that scores highest on these; a context alone has none.
    A context whose replies are in the `store` is not asked again.
    """
    for task in encoded:
        if task.coverage.excluded:
            raise IncompatibleError(f"task {task.task.name}: {format_reasons(task.coverage.excluded)}")
    forced = forced_answers(loaded, encoded, QUESTION_AGNOSTIC, "own")
    contexts = [
        (number, reading, attach_replies(task, reading.prompt, forced))
        for number, task in enumerate(encoded)
        for reading in make_readings(task.prompts, QUESTION_AGNOSTIC)
    ]
    texts = [reading.ids for _, reading, _ in contexts]
    # Contexts with the same text are no others: their questions would be its own.
    others_of = [[n for n, other in enumerate(texts) if not torch.equal(other, text)] for text in texts]
    kept: dict[str, Replies] = {}
    for (_, key), sample in store.samples.items() if store is not None else ():
        kept.setdefault(key, {}).setdefault(sample.method, []).append(sample)
    keys = [f"context {number}" for number in range(len(contexts))]
    items = []
    for key, (task_number, reading, own), others in zip(keys, contexts, others_of, strict=True):
        if key in kept:
            continue
        questions = [
            (contexts[number][0] != task_number, place, question)
            for number in others
            for place, question in enumerate(contexts[number][2])
        ]
        # of the same task first, and each about another context
        questions.sort(key=lambda ranked: ranked[:2])
        items.append((task_number, reading, own, [question for *_, question in questions[:OTHERS]]))
    results = loaded.map(partial(_ask, tasks=[replace(task, prompts=()) for task in encoded], ratio=ratio), items)
    for key in with_progress((key for key in keys if key not in kept), len(items), progress):
        kept[key] = next(results)
        if store is not None:
            store.add([(key, sample) for samples in kept[key].values() for sample in samples])
    of_full = group_by_key(full, attrgetter("task", "key"))
    replies = [
        {FULL: of_full[encoded[number].task.name, reading.prompt.key], **kept[key]}
        for key, (number, reading, _) in zip(keys, contexts, strict=True)
    ]
    chosen = (
        _compare_context(own_replies, [replies[n] for n in others])
        for own_replies, others in zip(replies, others_of, strict=True)
    )
    return list(chain.from_iterable(chosen))


def estimate_headroom(loaded: LoadedModel, encoded: Sequence[TaskPrompts], ratio: float) -> StageCost:
    """Estimate the cost of `measure_headroom`: own replies, importance, predicted and generated replies.

    A context is read for each of these; questions about it and other ones follow it side by side for its importance.
    """
    allocation, *others = _make_simple_policies(
        loaded.model, lambda length: int(round_half_up((1 - ratio) * length))
    ).values()
    tasks = [task.task for task in encoded]
    programs = [*[allocation] * (PROGRAMS - len(others)), *others]
    cost = estimate_replies(loaded.model, "true importance, replies", encoded, Split(tasks, batch=1), programs)
    work = cost.work + estimate_replies(loaded.model, "", encoded, Split(tasks), [make_full_program(loaded.model)]).work
    to_compress = estimate_compression(loaded.model, [allocation] * TRIED, cost.work.longest)
    for task in encoded:
        for prompt in task.prompts:
            lengths = [len(question.ids) + question.query.max_new_tokens for question in prompt.questions]
            rows = min(len(lengths) + OTHERS, cost.questions)
            work += Work.over([len(prompt.context)], 2) + Work(seconds=to_compress * len(prompt.context))
            work += Work(rows / TOGETHER, rows * max(lengths)) + Work(len(lengths), TRIED * sum(lengths))
            # output errors: passes forward, and back, which takes twice as long
            work += Work((1 + QUADRATURE_NODES) * len(lengths), (1 + 3 * QUADRATURE_NODES) * sum(lengths))
    return replace(cost, work=work)


def _ask(
    loaded: LoadedModel,
    item: tuple[int, Reading, Sequence[Replied], Sequence[Replied]],
    tasks: Sequence[TaskPrompts],
    ratio: float,
) -> Replies:
    """Generate the replies of all methods but the full cache on one context.

    The `item` is the number of a task, one of its contexts, the questions about it, and some questions about others.
    """
    number, reading, own, others = item
    with run_attention(loaded.model):
        # Losses choose the allocation that replies: replies under all of them would take many times as long.
        tried, programs = _make_programs(loaded, reading.ids, own, ratio, others)
        losses = measure_reply_losses(loaded.model, reading.ids, own, tried)
        programs |= {method: tried[method] for method in (EVEN_ALLOCATION, min(losses, key=losses.__getitem__))}
        joints = reply_to_batch(loaded, tasks[number], [reading], programs)
        samples = chain.from_iterable(score_replies(tasks[number], [reading], answered) for answered in joints)
        return group_by_key(samples, attrgetter("method"))


def _compare_context(replies: Replies, elsewhere: Sequence[Replies]) -> Iterator[Sample]:
    """Yield the samples of all methods on one context, given the replies on contexts of other texts."""
    policies = [method for method in replies if not method.startswith((TRUE_IMPORTANCE, AGNOSTIC))]
    best = max([method for method in replies if method != FULL], key=lambda method: _score(replies[method]))
    chosen = {FULL: FULL, BEST: best, EVEN: EVEN_ALLOCATION}
    allocations = [method for method in replies if method.startswith(AGNOSTIC)]
    if allocations:
        chosen[AGNOSTIC] = max(allocations, key=lambda method: fmean(_score(other[method]) for other in elsewhere))
    for name, method in (chosen | {method: method for method in policies}).items():
        yield from (replace(sample, method=name) for sample in replies[method])


def _score(samples: Sequence[Sample]) -> float:
    return fmean(sample.score for sample in samples)


def attach_replies(task: TaskPrompts, prompt: Prompt, forced: Mapping[Asked, ForcedAnswer]) -> list[Replied]:
    """Return the questions of a prompt, each with the reply that is teacher-forced after it.

    Raises:
        IncompatibleError: there is nothing to force, as the task names no right answer.
    """
    pairs = [(item, forced[task.task.name, prompt.key, item.number].ids) for item in prompt.questions]
    for question, reply in pairs:
        if not len(reply):
            raise IncompatibleError(
                f"task {task.task.name}, example {prompt.key}, question {question.number}: no right answer is known, "
                "so nothing is important for it"
            )
    return [(question.ids, reply) for question, reply in pairs]


def _make_programs(
    loaded: LoadedModel, context: Tensor, own: Sequence[Replied], ratio: float, others: Sequence[Replied]
) -> tuple[dict[str, Program], dict[str, Program]]:
    """Make allocations by true importance of a context, token ids [T], and the simple policies beside them."""
    model = loaded.model
    passed = ImportancePass(model, [], context[None].to(loaded.device))
    importance = passed.measure_importance_of([torch.cat(pair) for pair in (*own, *others)])
    known = importance[: len(own)]
    strange = importance[len(own) :]
    total = int(round_half_up((1 - ratio) * known[0].numel()))
    weighed = own if passes_gradients(model) else ()  # quantised models may pass none: importance alone shares out
    allocations = _make_allocations(passed, known.amax(0), total, RECENT_ENTRIES, weighed)
    tried = {f"{TRUE_IMPORTANCE}, {name}": program for name, program in allocations}
    programs: dict[str, Program] = {}
    if others:
        allocations = _make_allocations(passed, strange.amax(0), total, RECENT_ENTRIES[:1])
        programs = {f"{AGNOSTIC}, {name}": program for name, program in allocations}
    return tried, programs | _make_simple_policies(model, lambda _: total)


def _make_simple_policies(model: Any, total: Callable[[int], int]) -> dict[str, Program]:
    """Make question-agnostic policies with `total(T)` entries of a context of T tokens, even over layers and heads."""
    even = {
        name: spread_evenly(model, create_policy(name, {"sinks": 4, **window}), {"prefill": total})
        for name, window in WINDOWS.items()
    }
    return even | make_baselines(model, even["snapkv"], ("streaming", "random"))


def _make_allocations(
    passed: ImportancePass, importance: Tensor, total: int, windows: Sequence[int], own: Sequence[Replied] = ()
) -> Iterator[tuple[str, Program]]:
    """Yield allocations of `total` entries that rank by `importance`, [L, Hkv, T], and protect as many recent ones.

    Even; over all heads, by the importance of every layer as a share; with what is `own` by the output errors that
    entries take away, too, and by these over layers, with equal heads.
    """
    layers, heads, length = importance.shape
    model_layers = describe(passed.model).full_layers
    policies = [GivenScores(window=recent) for recent in windows]
    valid = torch.ones(layers, length, dtype=torch.bool)
    ranks = [rank_entries(importance, valid, policy.sink_count, policy.recent_count) for policy in policies]
    orders = [of_window.argsort(-1) for of_window in ranks]
    protected = [policy.protected(length) for policy in policies]
    continuations = [Continuation(torch.cat(pair)[None], len(pair[0])) for pair in own]
    errors = list(measure_output_errors(passed, continuations, ranks[0] < protected[0], orders))
    shares = importance / importance.sum((1, 2), keepdim=True).clamp(min=1e-30)
    for number, (policy, order) in enumerate(zip(policies, orders, strict=True)):
        # Where the total is too small for what is protected, floors are even.
        floor = min(protected[number], total // (layers * heads))
        gains = {"mass": shares.gather(-1, order)}
        if errors:
            together = torch.stack([of_question[number] for of_question in errors]).sum(0)
            gains["error"] = compute_error_drops(together, protected[number])
        budgets = {"even": largest_remainder(np.full((layers, heads), total / (layers * heads)), total, 0, length)}
        budgets |= {name: MarginalSolver(values.double().numpy(), floor).solve(total) for name, values in gains.items()}
        if "error" in budgets:
            # The same layer totals with equal heads: what is left of the gain tells layers from heads.
            equal = np.repeat(budgets["error"].sum(-1, keepdims=True) / heads, heads, 1)
            budgets["layers"] = largest_remainder(equal, total, floor, length)
        ranked: dict[int, Policy] = {
            layer: replace(policy, scores=scores[None]) for layer, scores in zip(model_layers, importance, strict=True)
        }
        for name, table in budgets.items():
            program = Program(PhaseProgram(ranked, partial(lambda budgets, _: budgets, table)))
            yield f"{name}, {policy.window} recent", program


def measure_reply_losses(
    model: Any, context: Tensor, questions: Sequence[Replied], programs: Mapping[str, Program]
) -> dict[str, float]:
    """Measure the loss of right replies after a context, token ids [T], under each program.

    Losses are nats per token, means over the questions; each question is one pass for all programs.
    """
    losses = dict.fromkeys(programs, 0.0)
    for joint in compress_prompts(model, programs, [context], set()):
        for question, reply in questions:
            rows = len(joint.methods)
            predicted = joint.replies.predict([question] * rows, [reply.tolist()] * rows)
            for method, loss in zip(joint.methods, predicted, strict=True):
                losses[method] += loss / len(questions)
    return losses

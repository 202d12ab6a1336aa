"""Headroom: what can be kept of the score at a ratio, per task.

What is tried knows more than any method may: allocations by the true importance of entries for the very questions that
are asked, beside simple policies. The best of it, context by context, can be kept; more may be possible. If random
eviction keeps the score, the task cannot tell methods apart. How far importance leads without knowing the questions is
said by that for questions about other contexts. Importance is for the model's own reply where that is right, else for
the right one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from statistics import fmean
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from kvsearch.budgets.lukv import MarginalSolver
from kvsearch.calibration.importance import ImportancePass
from kvsearch.core.errors import IncompatibleError
from kvsearch.core.items import Progress, counted, grouped
from kvsearch.evaluation.compare import Split, replies_cost
from kvsearch.evaluation.reply_store import ReplyStore
from kvsearch.evaluation.runner import answer_joints, score_replies
from kvsearch.evaluation.samples import Sample
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.models.speed import StageCost, Work
from kvsearch.plan.rounding import largest_remainder
from kvsearch.plan.schema import QUESTION_AGNOSTIC
from kvsearch.plan.size import round_half_up
from kvsearch.policies import Observation, Policy, create_policy, rank_entries
from kvsearch.runtime import Program
from kvsearch.runtime.attention import running
from kvsearch.runtime.program import PhaseProgram, full_cache
from kvsearch.runtime.replay.forced_answers import Asked, ForcedAnswer, forced_answers
from kvsearch.strategies.compared import baselines, equal_uniform
from kvsearch.strategies.names import FULL
from kvsearch.tasks.encode import Prompt, Reading, TaskPrompts, listed, readings

BEST, EVEN, AGNOSTIC = "best tried", "true importance, even", "agnostic importance"
KNOWN = "true importance"  # allocations are called "true importance, NAME"
RECENT = (32, 8)  # recent entries that an allocation protects
EVEN_ALLOCATION = f"{KNOWN}, even, {RECENT[0]} recent"
WINDOWS: dict[str, dict[str, int]] = {"snapkv": {}, "keydiff": {"window": 1}, "kvzip": {}}  # of policies
MANY = 24  # questions about other contexts that are asked of a context
AROUND = 3.0  # times that it takes as long as its passes: benchmarks/said_and_taken.py, on a CPU
PROGRAMS = 30  # that are tried on every context: the full cache, allocations for either importance, and policies

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


def headroom(
    loaded: LoadedModel,
    encoded: Sequence[TaskPrompts],
    ratio: float,
    progress: Progress | None = None,
    store: ReplyStore | None = None,
) -> list[Sample]:
    """Compare the full cache, allocations by true importance and simple policies of that size.

    "best tried" is for each context what scores highest on it, of everything but the full cache. "agnostic importance"
    is for the questions of other contexts, in the allocation that scores highest on these; a context alone has none.
    A context whose replies are in the `store` is not asked again.
    """
    for task in encoded:
        if task.coverage.excluded:
            raise IncompatibleError(f"task {task.task.name}: {listed(task.coverage.excluded)}")
    forced = forced_answers(loaded, encoded, QUESTION_AGNOSTIC, "own")
    contexts = [
        (number, reading, replied(task, reading.prompt, forced))
        for number, task in enumerate(encoded)
        for reading in readings(task.prompts, QUESTION_AGNOSTIC)
    ]
    texts = [reading.ids for _, reading, _ in contexts]
    others_of = [[n for n, other in enumerate(texts) if not torch.equal(other, text)] for text in texts]
    kept: dict[str, Replies] = {}
    for (_, key), sample in store.samples.items() if store is not None else ():
        kept.setdefault(key, {}).setdefault(sample.method, []).append(sample)
    keys = [f"context {number}" for number in range(len(contexts))]
    items = []
    for key, (task_number, reading, own), others in zip(keys, contexts, others_of, strict=True):
        if key in kept:
            continue
        own_first = sorted(others, key=lambda number: contexts[number][0] != task_number)
        questions = [question for number in own_first for question in contexts[number][2]]
        items.append((task_number, reading, own, questions[:MANY]))
    asked = loaded.map(partial(_ask, tasks=[replace(task, prompts=()) for task in encoded], ratio=ratio), items)
    for key in counted((key for key in keys if key not in kept), len(items), progress):
        kept[key] = next(asked)
        if store is not None:
            store.add([(key, sample) for samples in kept[key].values() for sample in samples])
    replies = [kept[key] for key in keys]
    chosen = (_compared(mine, [replies[n] for n in others]) for mine, others in zip(replies, others_of, strict=True))
    return list(chain.from_iterable(chosen))


def importance_cost(loaded: LoadedModel, encoded: Sequence[TaskPrompts]) -> StageCost:
    """Return what `headroom` costs: own replies, importance for own and other questions, and replies under everything.

    Importance takes a pass over what is asked, and one more for every layer.
    """
    programs = [full_cache(loaded.model)] * (1 + PROGRAMS)
    cost = replies_cost("true importance, replies", encoded, Split([task.task for task in encoded], batch=1), programs)
    questions = [question for task in encoded for prompt in task.prompts for question in prompt.questions]
    lengths = [len(question.ids) + question.query.max_new_tokens for question in questions]
    times = 1 + cost.contexts * min(MANY, len(questions)) / len(questions)  # for its own context, and for others
    layers = len(describe(loaded.model).full_layers)
    return replace(cost, work=(cost.work + Work.over(lengths, times * (1 + layers))) * AROUND)


def _ask(
    loaded: LoadedModel,
    item: tuple[int, Reading, Sequence[Replied], Sequence[Replied]],
    tasks: Sequence[TaskPrompts],
    ratio: float,
) -> Replies:
    """Return the replies of everything that is tried on one context.

    The `item` is a context of the task of that number, what is asked about it, and some of what is asked about others.
    """
    number, reading, asked, others = item
    with running(loaded.model):
        programs = dict(_programs(loaded, reading.ids, asked, ratio, others))
        joints = answer_joints(loaded, tasks[number], [reading], programs)
        samples = chain.from_iterable(score_replies(tasks[number], [reading], answered) for answered in joints)
        return grouped(samples, attrgetter("method"))


def _compared(replies: Replies, elsewhere: Sequence[Replies]) -> Iterator[Sample]:
    """Yield the samples of what is compared on one context, given what was tried on contexts of other texts."""
    policies = [method for method in replies if not method.startswith((KNOWN, AGNOSTIC))]
    best = max([method for method in replies if method != FULL], key=lambda method: _score(replies[method]))
    chosen = {FULL: FULL, BEST: best, EVEN: EVEN_ALLOCATION}
    allocations = [method for method in replies if method.startswith(AGNOSTIC)]
    if allocations:
        chosen[AGNOSTIC] = max(allocations, key=lambda method: fmean(_score(other[method]) for other in elsewhere))
    for name, method in (chosen | {method: method for method in policies}).items():
        yield from (replace(sample, method=name) for sample in replies[method])


def _score(samples: Sequence[Sample]) -> float:
    return fmean(sample.score for sample in samples)


def replied(task: TaskPrompts, prompt: Prompt, forced: Mapping[Asked, ForcedAnswer]) -> list[Replied]:
    """Return the questions of a prompt with what is teacher-forced after them.

    Raises:
        IncompatibleError: there is nothing to force, as the task names no right answer.
    """
    found = [(one, forced[task.task.name, prompt.key, one.number].ids) for one in prompt.questions]
    for question, reply in found:
        if not len(reply):
            raise IncompatibleError(
                f"task {task.task.name}, example {prompt.key}, question {question.number}: no right answer is known, "
                "so nothing is important for it"
            )
    return [(question.ids, reply) for question, reply in found]


def _programs(
    loaded: LoadedModel, context: Tensor, asked: Sequence[Replied], ratio: float, others: Sequence[Replied]
) -> Iterator[tuple[str, Program]]:
    """Yield what is tried on a context, token ids [T]."""
    passed = ImportancePass(loaded.model, [], context[None].to(loaded.device))
    known, weights = measure_importance(passed, asked)
    _, layers, heads, length = known.shape
    total = int(round_half_up((1 - ratio) * layers * heads * length))
    even = {
        name: equal_uniform(loaded.model, create_policy(name, {"sinks": 4, **window}), {"prefill": lambda _: total})
        for name, window in WINDOWS.items()
    }
    uniform = even["snapkv"]
    yield FULL, full_cache(loaded.model)
    for name, program in _allocations(loaded, known.amax(0), weights, total):
        yield f"{KNOWN}, {name}", program
    if others:
        strange, weights = measure_importance(passed, others)
        for how, importance in (("mean", strange.mean(0)), ("largest", strange.amax(0))):
            for name, program in _allocations(loaded, importance, weights, total):
                yield f"{AGNOSTIC}, {how}, {name}", program
    yield from even.items()
    yield from baselines(loaded.model, uniform, ("streaming", "random")).items()


def _allocations(
    loaded: LoadedModel, importance: Tensor, weights: Mapping[str, Tensor], total: int
) -> Iterator[tuple[str, Program]]:
    """Yield allocations of `total` entries that rank by `importance`.

    By measured effect and by equal mass of layers over all heads; by effect over layers, with equal heads; even.
    """
    ranked = dict(zip(describe(loaded.model).full_layers, importance, strict=True))
    layers, heads, length = importance.shape
    for recent in RECENT:
        policy = GivenScores(window=recent)
        policies: dict[int, Policy] = {
            layer: replace(policy, scores=of_layer[None]) for layer, of_layer in ranked.items()
        }
        valid = torch.ones(layers, length, dtype=torch.bool)
        order = rank_entries(importance, valid, policy.sink_count, policy.recent_count).argsort(-1)
        floor = min(policy.protected(length), total // (layers * heads))
        budgets = {}
        for name, by_layer in weights.items():
            values = (importance * by_layer[:, None, None]).gather(-1, order).double().numpy()
            budgets[name] = MarginalSolver(values, floor).solve(total)
        equal = np.repeat(budgets["effect"].sum(-1, keepdims=True) / heads, heads, 1)
        budgets["layers"] = largest_remainder(equal, total, floor, length)
        budgets["even"] = largest_remainder(np.full((layers, heads), total / (layers * heads)), total, 0, length)
        for name, table in budgets.items():
            program = Program(PhaseProgram(policies, partial(lambda budgets, _: budgets, table)))
            yield f"{name}, {recent} recent", program


def measure_importance(passed: ImportancePass, asked: Sequence[Replied]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the importance of a context's entries for Q questions with their replies, [Q, L, Hkv, T] fp32.

    Beside it weights [L] that make layers comparable: "effect" by what their entries do to the replies, "mass" by
    giving every layer the same mass.
    """
    importance: list[Tensor] = []
    mass = effect = torch.zeros(1)
    for question, reply in asked:
        tokens = torch.cat([question, reply])[None].to(passed.model.device)
        looked_at, logits = passed.ask(tokens)
        nothing = torch.zeros_like(looked_at, dtype=torch.bool)
        effect = effect + passed.effects(tokens, len(question), logits, nothing)
        mass = mass + looked_at.sum((1, 2))
        importance.append(looked_at)
    mass = mass.clamp(min=1e-30)
    return torch.stack(importance), {"effect": effect / mass, "mass": 1 / mass}

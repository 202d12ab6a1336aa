"""Headroom: what a perfect plan could keep, per task.

The oracle knows the questions: true importance of all questions asked of a context decides. If even the oracle loses
the score, no method can keep it at this ratio; if random eviction keeps it, the task cannot tell methods apart. What a
method that does not know the questions could at most keep is decided by importance over many questions, those of other
contexts among them. Importance is for the model's own reply where that is right, else for the right one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvsearch.budgets.lukv import MarginalSolver
from kvsearch.calibration.importance import ImportancePass
from kvsearch.core.arrays import Ints
from kvsearch.core.errors import IncompatibleError
from kvsearch.core.progress import Progress, counted
from kvsearch.evaluation.runner import answer_all
from kvsearch.evaluation.samples import Sample
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.plan.rounding import largest_remainder
from kvsearch.plan.schema import QUESTION_AGNOSTIC
from kvsearch.plan.size import round_half_up
from kvsearch.policies import Observation, Policy, create_policy, rank_entries
from kvsearch.runtime import Program
from kvsearch.runtime.attention import running
from kvsearch.runtime.program import PhaseProgram, full_cache
from kvsearch.runtime.replay.forced_answers import Asked, ForcedAnswer, forced_answers
from kvsearch.strategies.compared import baselines, equal_uniform
from kvsearch.tasks.base import Task
from kvsearch.tasks.encode import Prompt, Reading, TaskPrompts, encode_tasks, listed, readings

ORACLE, ORACLE_UNIFORM, AGNOSTIC = "oracle", "oracle, uniform", "agnostic oracle"
RECENT = (32, 8)  # recent entries that an oracle's allocation protects
MANY = 24  # questions of other contexts that are asked of a context

Replied = tuple[Tensor, Tensor]  # token ids of a question [K] and of the reply that is teacher-forced after it [A]


@dataclass(frozen=True, eq=False)
class GivenScores(Policy):
    """Ranks entries by given scores, [1, Hkv, T]: the oracle's eye."""

    name: ClassVar[str] = "given"
    source: ClassVar[str] = "control"

    scores: Tensor = field(default_factory=lambda: torch.zeros(0))
    sinks: int = 4
    window: int = 32

    def score(self, observation: Observation) -> Tensor:
        return self.scores.to(observation.keys.device)


@dataclass(frozen=True)
class ContextImportance:
    """True importance of one context's entries, [L, Hkv, T] fp32: the largest and the mean over some questions.

    `known` is the largest over the context's own questions; `mean` and `most` are over others, too. `weights` [L] make
    layers comparable by their measured effect, `even` [L] by giving every layer the same mass; both are of its own
    questions.
    """

    known: Tensor
    mean: Tensor
    most: Tensor
    weights: Tensor
    even: Tensor


def headroom(
    loaded: LoadedModel,
    tasks: Sequence[Task],
    ratio: float,
    samples: int,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Sample]:
    """Compare the full cache, oracles and simple policies of that size.

    "oracle" is the best of several allocations for each context, by its score; "agnostic oracle" likewise, with
    importance over the questions of other contexts, too.
    """
    encoded = encode_tasks(loaded, tasks, samples, seed)
    for task in encoded:
        if task.coverage.excluded:
            raise IncompatibleError(f"task {task.task.name}: {listed(task.coverage.excluded)}")
    forced = forced_answers(loaded, encoded, QUESTION_AGNOSTIC, "own")
    items = []
    for number, task in enumerate(encoded):
        for reading in readings(task.prompts, QUESTION_AGNOSTIC):
            others = [one for other in task.prompts if other is not reading.prompt
                      for one in replied(task, other, forced)]  # fmt: skip
            items.append(OracleContext(number, reading, replied(task, reading.prompt, forced), others[:MANY]))
    found = loaded.map(partial(_answered, tasks=[replace(task, prompts=()) for task in encoded], ratio=ratio), items)
    return [sample for some in counted(found, len(items), progress) for sample in some]


class OracleContext(NamedTuple):
    """A context of the task of that number, what is asked of it, and some of what is asked of others."""

    task: int
    reading: Reading
    asked: Sequence[Replied]
    others: Sequence[Replied]


def _answered(loaded: LoadedModel, context: OracleContext, tasks: Sequence[TaskPrompts], ratio: float) -> list[Sample]:
    """Return the replies of all that is compared on one context."""
    with running(loaded.model):
        programs = dict(_programs(loaded, context.reading.ids, context.asked, ratio, context.others))
        return list(_best(answer_all(loaded, tasks[context.task], [context.reading], programs)))


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


def _best(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Yield the samples of one context, of the allocations of each oracle those of the best alone, under its name."""
    by_method: dict[str, list[Sample]] = {}
    for sample in samples:
        by_method.setdefault(sample.method, []).append(sample)
    oracles: dict[str, list[list[Sample]]] = {}
    for method, mine in by_method.items():
        oracles.setdefault(method.partition(":")[0], []).append(mine)
    for method, allocations in oracles.items():
        best = max(allocations, key=lambda mine: fmean(sample.score for sample in mine))
        yield from (replace(sample, method=method) for sample in best)


def _programs(
    loaded: LoadedModel, context: Tensor, asked: Sequence[Replied], ratio: float, others: Sequence[Replied] = ()
) -> Iterator[tuple[str, Program]]:
    """Yield what is compared; allocations of an oracle are called "oracle:NAME"."""
    found = context_importance(loaded, context, asked, others)
    layers, heads, length = found.known.shape
    total = int(round_half_up((1 - ratio) * layers * heads * length))
    compared = [
        create_policy("snapkv", {"sinks": 4}),
        create_policy("keydiff", {"sinks": 4, "window": 1}),
        create_policy("kvzip", {"sinks": 4}),
    ]
    even = {one.name: equal_uniform(loaded.model, one, {"prefill": lambda _: total}) for one in compared}
    uniform = even["snapkv"]
    yield "full", full_cache(loaded.model)
    for name, program in _oracles(loaded, found.known, found, uniform, total):
        yield f"{ORACLE}:{name}", program
        if name == f"even, {RECENT[0]} recent":
            yield ORACLE_UNIFORM, program
    for how, importance in (("mean", found.mean), ("largest", found.most)):
        for name, program in _oracles(loaded, importance, found, uniform, total):
            yield f"{AGNOSTIC}:{how}, {name}", program
    yield from even.items()
    yield from baselines(loaded.model, uniform, ("streaming", "random")).items()


def _oracles(
    loaded: LoadedModel, importance: Tensor, found: ContextImportance, uniform: Program, total: int
) -> Iterator[tuple[str, Program]]:
    """Yield allocations of `total` entries that rank by `importance`.

    By measured effect and by equal mass of layers over all heads; by effect over layers, with equal heads; even.
    """
    full = describe(loaded.model).full_layers
    layers, heads, length = importance.shape
    for recent in RECENT:
        policies: dict[int, Policy] = {
            layer: GivenScores(importance[row][None], window=recent) for row, layer in enumerate(full)
        }
        policy = policies[full[0]]
        valid = torch.ones(layers, length, dtype=torch.bool)
        order = rank_entries(importance, valid, policy.sink_count, policy.recent_count).argsort(-1)
        floor = min(policy.protected(length), total // (layers * heads))
        ordered = {
            name: (importance * weights[:, None, None]).gather(-1, order).double().numpy()
            for name, weights in (("effect", found.weights), ("mass", found.even))
        }
        for name, values in ordered.items():
            budgets = MarginalSolver(values, floor).solve(total)
            yield f"{name}, {recent} recent", Program(PhaseProgram(policies, partial(_fixed, budgets)))
        by_layer = MarginalSolver(ordered["effect"], floor).solve(total).sum(-1, keepdims=True)
        equal = largest_remainder(np.repeat(by_layer / heads, heads, 1), total, floor, length)
        yield f"layers, {recent} recent", Program(PhaseProgram(policies, partial(_fixed, equal)))
        if uniform.prefill is not None:
            yield f"even, {recent} recent", Program(PhaseProgram(policies, uniform.prefill.table))


def _fixed(budgets: Ints, _: int) -> Ints:
    return budgets


def context_importance(
    loaded: LoadedModel, context: Tensor, asked: Sequence[Replied], others: Sequence[Replied] = ()
) -> ContextImportance:
    """Measure the importance of a context, token ids [T], for what is asked of it and up to `MANY` of the `others`."""
    passed = ImportancePass(loaded.model, [], context[None].to(loaded.device))

    own: list[Tensor] = []
    mass = effect = torch.zeros(1)
    for question, reply in asked:
        tokens = torch.cat([question, reply])[None].to(loaded.device)
        found = passed.ask(tokens)
        nothing = torch.zeros_like(found.importance, dtype=torch.bool)
        effect = effect + passed.effects(tokens, len(question), found.logits, nothing)
        mass = mass + found.importance.sum((1, 2))
        own.append(found.importance)
    known = torch.stack(own).amax(0)
    most, total, count = known, torch.stack(own).sum(0), len(own)
    for other in others[:MANY]:
        importance = passed.ask(torch.cat(other)[None].to(loaded.device)).importance
        most, total, count = torch.maximum(most, importance), total + importance, count + 1
    whole = mass.clamp(min=1e-30)
    return ContextImportance(known, total / count, most, effect / whole, 1 / whole)

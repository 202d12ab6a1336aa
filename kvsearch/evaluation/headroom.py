"""Headroom: what a perfect plan could keep, per task. Oracle importance of all questions asked of a context decides.

If even the oracle loses the score, no method can keep it at this ratio; if random eviction keeps it, the task cannot
tell methods apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvsearch.budgets.lukv import MarginalSolver
from kvsearch.calibration.importance import ImportancePass
from kvsearch.errors import IncompatibleError, InternalError
from kvsearch.evaluation.runner import answer_all
from kvsearch.evaluation.samples import Sample
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.plan.guard import round_half_up
from kvsearch.plan.protocol import QUESTION_AGNOSTIC
from kvsearch.policies import Observation, Policy, create_policy, rank_entries
from kvsearch.progress import Progress, counted
from kvsearch.runtime import Program
from kvsearch.runtime.attention import running
from kvsearch.runtime.program import PhaseProgram, full_cache
from kvsearch.strategies.compared import baselines, equal_uniform
from kvsearch.tasks.base import Example, Task
from kvsearch.tasks.encode import counter, encode, listed
from kvsearch.tasks.prompts import PromptFormat
from kvsearch.tasks.readings import readings
from kvsearch.tasks.texts import is_blank

ORACLE, ORACLE_UNIFORM = "oracle", "oracle, uniform"


@dataclass(frozen=True, eq=False)
class GivenScores(Policy):
    """Ranks entries by given scores, [1, Hkv, T]: the oracle's eye. It protects what LU-KV over SnapKV protects."""

    name: ClassVar[str] = "given"
    source: ClassVar[str] = "control"

    scores: Tensor = field(default_factory=lambda: torch.zeros(0))
    sinks: int = 4
    window: int = 32

    def score(self, observation: Observation) -> Tensor:
        return self.scores.to(observation.keys.device)


def headroom(
    loaded: LoadedModel,
    tasks: Sequence[Task],
    ratio: float,
    samples: int,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Sample]:
    """Compare the full cache, oracle importance under oracle and uniform budgets, and simple policies of that size."""
    count = counter(loaded.tokenizer)
    examples = [(task, example) for task in tasks for example in task.examples(samples, seed, count)]
    results: list[Sample] = []
    with running(loaded.model):
        for task, example in counted(examples, len(examples), progress):
            prompts = encode(loaded.tokenizer, task, [example])
            if prompts.coverage.excluded:
                raise IncompatibleError(f"task {task.name}, example {example.key}: {listed(prompts.coverage.excluded)}")
            batch = readings(prompts.prompts, QUESTION_AGNOSTIC)
            results += answer_all(loaded, prompts, batch, dict(_programs(loaded, task, example, ratio)))
    return results


def _programs(loaded: LoadedModel, task: Task, example: Example, ratio: float) -> Iterator[tuple[str, Program]]:
    importance = context_importance(loaded, PromptFormat.of(loaded.tokenizer, task), example)
    layers, heads, length = importance.shape
    total = int(round_half_up((1 - ratio) * layers * heads * length))
    snapkv = create_policy("snapkv", {"sinks": 4})
    full = describe(loaded.model).full_layers
    policies: dict[int, Policy] = {layer: GivenScores(importance[i][None]) for i, layer in enumerate(full)}
    oracle_policy = policies[full[0]]
    ranks = rank_entries(
        importance, torch.ones(layers, length, dtype=torch.bool), oracle_policy.sink_count, oracle_policy.recent_count
    )
    ordered = importance.gather(-1, ranks.argsort(-1)).double().numpy()
    floor = min(oracle_policy.protected(length), total // (layers * heads))
    budgets = MarginalSolver(ordered, floor).solve(total)
    oracle = Program(PhaseProgram(policies, lambda _: budgets))
    keydiff = create_policy("keydiff", {"sinks": 4, "window": 1})
    uniform, of_keydiff = (equal_uniform(loaded.model, one, {"prefill": lambda _: total}) for one in (snapkv, keydiff))
    yield "full", full_cache(loaded.model)
    yield ORACLE, oracle
    if uniform.prefill is not None:
        yield ORACLE_UNIFORM, Program(PhaseProgram(policies, uniform.prefill.table))
    yield "snapkv", uniform
    yield "keydiff", of_keydiff
    yield from baselines(loaded.model, uniform, ("streaming", "random")).items()


def context_importance(loaded: LoadedModel, prompt: PromptFormat, example: Example) -> Tensor:
    """Return the largest importance over all questions, layers weighted by their effect, [L, Hkv, T] fp32."""
    passed = ImportancePass(loaded.model, [], prompt.context(example.context).to(loaded.device))
    best: Tensor | None = None
    mass = effect = torch.zeros(0)
    for query in example.queries:
        question = prompt.question(query.question, query.prefix)
        usable = next(answer for answer in query.answers if not is_blank(answer))
        answer = prompt.answer(usable, query.prefix)
        tokens = torch.cat([question, answer], 1).to(loaded.device)
        found = passed.ask(tokens)
        nothing = torch.zeros_like(found.importance, dtype=torch.bool)
        lost = passed.effects(tokens, question.shape[1], found.logits, nothing)
        taken = found.importance.sum((1, 2))
        if best is None:
            best, mass, effect = found.importance, taken, lost
        else:
            best, mass, effect = torch.maximum(best, found.importance), mass + taken, effect + lost
    if best is None:
        raise InternalError("an example without questions has no importance")
    return best * (effect / mass.clamp(min=1e-30))[:, None, None]

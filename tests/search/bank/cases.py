"""Samples for candidate banks, random candidates, and what the runtime says of them one by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvsearch.core.arrays import Ints
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.plan.schema import Protocol
from kvsearch.policies import Policy, create_policy
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import run_attention
from kvsearch.runtime.program import PhaseProgram
from kvsearch.runtime.shared_prefill import prefill_all
from kvsearch.search.bank.bank import CandidateBank
from kvsearch.search.bank.samples import BankSample, list_samples
from kvsearch.tasks.base import Example, Query
from kvsearch.tasks.encode import TaskPrompts, encode_tasks
from tests import tiny

SNAPKV = create_policy("snapkv", {"window": 4, "kernel": 3, "sinks": 2})
PROTOCOLS: tuple[Protocol, Protocol] = ("question-agnostic", "question-aware")


def encoded(loaded: LoadedModel, *shapes: tuple[int, int]) -> list[TaskPrompts]:
    """A task with a context for each (length, questions)."""
    return encode_tasks(loaded, [tiny.listed(*shapes)], len(shapes))


def samples_of(loaded: LoadedModel, protocol: Protocol, *shapes: tuple[int, int]) -> list[BankSample]:
    """Contexts and questions of different lengths."""
    return list_samples(encoded(loaded, *shapes or ((60, 3), (90, 1), (75, 2))), protocol)


def tokens_of(bank: CandidateBank, candidates: Sequence[Ints]) -> list[list[list[int] | None]]:
    """Replies by candidate and sample, None where the model emits NaN."""
    return [[None if reply.failed else reply.tokens for reply in row] for row in bank.generate_replies(candidates)]


class Talk(tiny.Listed):
    """A task whose metric wants no answers: the share of a reply's words that are different."""

    def score(self, reply: str, query: Query) -> float:
        return len(set(reply.split())) / max(1, len(reply.split()))


def without_answers(loaded: LoadedModel) -> list[BankSample]:
    """One sample of a question that names no answers."""
    context = " ".join(tiny.document(50).words[1:])
    task = Talk("talk", (Example("talk", "0", context, (Query("? code", (), 8),)),))
    return list_samples(encode_tasks(loaded, [task], 1), "question-agnostic")


def table_shape(loaded: LoadedModel) -> tuple[int, int]:
    """[L, Hkv] of a candidate."""
    shape = describe(loaded.model)
    return len(shape.full_layers), shape.kv_heads


def random_candidates(loaded: LoadedModel, count: int, most: int, seed: int = 0) -> list[Ints]:
    """Budgets that differ in every head, from 6 entries to `most`."""
    rng = np.random.default_rng(seed)
    return [rng.integers(6, most + 1, table_shape(loaded)) for _ in range(count)]


def program_of(loaded: LoadedModel, candidate: Ints, policy: Policy | dict[int, Policy] = SNAPKV) -> Program:
    """What the runtime executes for a candidate, under one policy or one for each layer."""
    policies = dict.fromkeys(describe(loaded.model).full_layers, policy) if isinstance(policy, Policy) else policy
    return Program(PhaseProgram(policies, lambda _: candidate))


@torch.no_grad()
def runtime_logits(
    loaded: LoadedModel, sample: BankSample, candidates: Sequence[Ints], policy: Policy | dict[int, Policy] = SNAPKV
) -> list[Tensor]:
    """Logits [A, V] of every candidate for the answer: prompt, then all that follows, through a PlanCache."""
    model, prompt, following = loaded.model, sample.prompt[None], sample.following[None]
    with run_attention(model):
        caches = [PlanCache(model, program_of(loaded, candidate, policy)) for candidate in candidates]
        mask = torch.ones_like(prompt)
        last = prefill_all(model, caches, prompt, mask)[0]
        found = []
        for cache in caches:
            rows = last
            if following.shape[1]:
                positions = torch.arange(prompt.shape[1], prompt.shape[1] + following.shape[1])[None]
                output = model(input_ids=following, position_ids=positions, past_key_values=cache)
                rows = torch.cat([last, output.logits[0]])
            found.append(rows[-len(sample.answer) :])
    return found


def losses_of(sample: BankSample, logits: Sequence[Tensor]) -> list[float]:
    """Mean -log p of the answer by logits [A, V]."""
    rows = torch.arange(len(sample.answer))
    return [float(-one.double().log_softmax(-1)[rows, sample.answer].mean()) for one in logits]

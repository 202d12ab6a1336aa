"""The most entries at a time: against caches that are watched token by token, where heads shrink while others grow."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvsearch.policies import create_policy
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.decode.replies import Replies
from kvsearch.runtime.program import PhaseProgram
from kvsearch.runtime.shared_prefill import read
from tests.combinations import every_value
from tests.families import build, prompts
from tests.runtime.helpers import running

LAYERS, HEADS, LENGTH = 4, 2, 60
LARGE = [20, 20, 4, 4]
DEFAULT = ("streaming", {"sinks": 2})


def phase(rows: list[int], policy: tuple[str, dict[str, Any]] = DEFAULT) -> PhaseProgram:
    """So many entries for every head of each layer; 0: the layer is not in the plan."""
    made = create_policy(*policy)
    policies = {layer: made for layer, budget in enumerate(rows) if budget}
    return PhaseProgram(policies, lambda _: np.array([[budget] * HEADS for budget in rows if budget]))


def replies_of(model: Any, program: Program, *lengths: int) -> Replies:
    contexts = [prompts(1, length, seed=length)[0][0] for length in lengths]
    return read(model, PlanCache(model, program), contexts, set())


def watched(model: Any, program: Program, length: int, question: int, fed: int) -> int:
    """The most that all planned heads hold with the token that comes in; one token at a time after the prompt."""
    cache, ids = PlanCache(model, program), prompts(1, length, seed=length)[0]
    most = 0
    with torch.no_grad():
        out = model(ids, past_key_values=cache)
        most = int(cache.entries().sum())
        for token in [*prompts(1, question, seed=7)[0][0].tolist()] + [None] * fed:
            given = out.logits[:, -1:].argmax(-1) if token is None else torch.tensor([[token]])
            most = max(most, int(cache.entries().sum()) + len(cache.planned) * HEADS)
            out = model(given, past_key_values=cache)
    return most


POLICIES = [DEFAULT, ("tova", {}), ("h2o", {}), ("scissorhands", {"window": 4, "history": 8, "drop": 3})]


@every_value(policy=POLICIES, prefill=[LARGE, [12] * 4, None])
def test_every_rule_as_it_is_watched(policy: tuple[str, dict[str, Any]], prefill: list[int] | None) -> None:
    first = None if prefill is None else phase(prefill, policy)
    model, program = build("llama"), Program(first, phase([6, 17, 9, 16], policy))
    with running(model, NAME):
        replies = replies_of(model, program, LENGTH)
        replies.reply([25])
        exact = watched(model, program, LENGTH, 0, 24)
        assert replies.most == [exact]
        replies = replies_of(model, program, LENGTH)
        replies.ask([prompts(1, 10, seed=7)[0][0]], [5])
        exact = watched(model, program, LENGTH, 10, 4)
        assert exact <= replies.most[0] <= exact + (LAYERS * HEADS * 2 if policy[0] == "scissorhands" else 0)


def test_sequences_of_a_batch_questions_and_layers_without_a_rule() -> None:
    model = build("llama")
    program = Program(phase([9, 0, 9, 9]), phase([9, 0, 0, 9]))  # 1 is not in the plan, 2 not in its decode phase
    questions = [prompts(1, length, seed=length)[0][0] for length in (3, 7)]
    with running(model, NAME):
        replies = replies_of(model, program, 40, 23)
        for asked, limits in ((questions, [2, 6]), (questions[::-1], [4, 3])):
            replies.ask(asked, limits)
            for row, length in enumerate((40, 23)):
                tokens = len(asked[row]) + limits[row] - 1
                assert replies.most[row] == 2 * HEADS * 10 + HEADS * (9 + tokens) + HEADS * (length + tokens)

"""A plan whose entries carry what leaves: however a prompt comes, the same is answered from the same few entries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvsearch.budgets.dynamic import create_allocation
from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.models.architecture import describe
from kvsearch.plan import Plan
from kvsearch.plan.arithmetic import add_carry
from kvsearch.policies import create_policy
from kvsearch.runtime import PlanCache, Program, attach
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.program import PhaseProgram
from kvsearch.runtime.shared_prefill import compress_prompts
from tests.combinations import in_turn
from tests.families import build, prompts
from tests.runtime.helpers import feed, one_by_one, plan_for, running

LENGTH, PADS = 90, 30
FAMILIES = ["llama", "qwen3", "gemma3", "gpt_oss"]  # sinks, soft caps and norms of queries among them


def planned(model: Any, decodes: bool = False, **changes: Any) -> Plan:
    shape = describe(model)
    budgets = [[20, 9] if index in shape.full_layers else None for index in range(shape.layers)]
    plan = plan_for(model, budgets, policy="snapkv", params={"window": 4, "sinks": 2}, **changes)
    return add_carry(plan.model_copy(update={"decode": plan.prefill} if decodes else {}), "match")


def answers(model: Any, plan: Plan, pieces: list[tuple[Tensor, Tensor]], prompt: int | None = None) -> Tensor:
    """Logits of all tokens behind the prompt."""
    with running(model, NAME):
        cache = PlanCache(model, plan, prompt_length=prompt)
        logits = torch.cat(feed(model, cache, pieces), 1)
    return logits[:, LENGTH:]


@in_turn(family=FAMILIES, decodes=[False, True])
def test_chunks_padding_and_single_tokens_change_nothing(family: str, decodes: bool) -> None:
    model = build(family)
    plan = planned(model, decodes)
    ids, mask = prompts(2, LENGTH, pads=PADS)
    question = prompts(2, 5, seed=1)
    expected = answers(model, plan, [(ids, mask), question])
    chunks = [(ids[:, first : first + 32], mask[:, first : first + 32]) for first in range(0, LENGTH, 32)]
    close = {"atol": 2e-4, "rtol": 1e-3}
    torch.testing.assert_close(answers(model, plan, [*chunks, question], LENGTH), expected, **close)
    torch.testing.assert_close(answers(model, plan, [(ids, mask), *one_by_one(question[0])]), expected, **close)
    row = int(mask[0].sum() < mask[1].sum())  # without its padding
    alone = ids[1 - row : 2 - row, PADS:], mask[1 - row : 2 - row, PADS:]
    with running(model, NAME):
        cache = PlanCache(model, plan)
        found = feed(model, cache, [alone, (question[0][1 - row : 2 - row], question[1][1 - row : 2 - row])])[1]
    torch.testing.assert_close(found[0], expected[1 - row], **close)
    plain = answers(model, add_carry(plan, "none"), [(ids, mask), question])
    assert float((plain - expected).abs().max()) > 1e-3  # the test would notice


def test_beams_and_batches_of_methods() -> None:
    """Sequences of a plan that carries decode beside those of one that does not."""
    model = build("llama")
    plan = planned(model)
    ids, mask = prompts(2, LENGTH)
    with attach(model, plan) as side:
        said = side.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, num_beams=3)
    assert said.shape == (2, LENGTH + 4)
    programs = {name: Program.from_plan(model, add_carry(plan, name)) for name in ("none", "match")}  # type: ignore[arg-type]
    with running(model, NAME):
        (joint,) = compress_prompts(model, programs, list(ids), set())
        assert joint.methods == ("none", "match")
        questions = [prompts(1, 5, seed=seed)[0][0] for seed in (1, 2)]
        together = joint.replies.ask(questions * 2, [4] * 4)
        for number, name in enumerate(programs):
            (alone,) = compress_prompts(model, {name: programs[name]}, list(ids), set())
            assert alone.replies.ask(questions, [4] * 2) == together[2 * number : 2 * number + 2]


def test_what_cannot_carry() -> None:
    lava = create_allocation("lava", {})
    phase = PhaseProgram({0: create_policy("lava")}, lambda _: [[9, 9]], carries={0: "match"})  # type: ignore[arg-type, return-value]
    with pytest.raises(UsageError, match="layer 0: entries carry what leaves, so its budgets must be final"):
        Program(phase, allocation=lava)
    turned = build("cohere")
    with pytest.raises(IncompatibleError, match="a plan whose entries carry what leaves turns queries back"):
        PlanCache(turned, planned(turned))

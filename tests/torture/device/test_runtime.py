"""Every policy on a model that is spread over two devices: it keeps and computes what it does on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvsearch.policies import Policy
from kvsearch.runtime import PlanCache
from kvsearch.runtime.attention import NAME
from tests.families import build, prompts
from tests.policies.probes import zap
from tests.runtime.helpers import assert_close, feed, held_tokens, running
from tests.runtime.policies import SMALL, for_model
from tests.torture.device.accelerator import events, recording, spread
from tests.torture.device.counting import program

LENGTH, TOLERANCE = 20, 1e-4
BUDGETS = np.array([[9, 9], [6, 13]])  # of two layers and two heads


@cache
def on_cpu() -> Any:
    return build("llama", num_hidden_layers=2)


@cache
def on_both() -> Any:
    """The same model, its first layer on one device, its second on the other."""
    return spread(build("llama", num_hidden_layers=2))


MODELS = (on_both, on_cpu)


@pytest.mark.parametrize("name", [*SMALL, "kvzap"])
def test_every_policy(name: str) -> None:
    """No step waits or copies, whatever the policy, in either phase."""
    policy = zap(2, 2, 64) if name == "kvzap" else for_model(SMALL[name])
    for decode in (False, True):
        if decode and policy.no_decode_rule() is not None:
            continue
        (logits, held), (expected, wanted) = (follow(one, policy, decode=decode) for one in MODELS)
        assert_close(logits[:, LENGTH - 1 :], expected[:, LENGTH - 1 :], TOLERANCE)
        assert held == wanted


def follow(model: Callable[[], Any], policy: Policy, *, decode: bool) -> tuple[Tensor, list[Any]]:
    """Logits of a prompt and of the tokens after it, and what is held then."""
    ids, mask = prompts(2, LENGTH, device=str(model().device))  # without padding: masks are looked at in every step
    answers = prompts(2, 4, seed=1, device=str(ids.device))[0]
    with running(model(), NAME):
        cache = PlanCache(model(), program(model(), policy, BUDGETS, decode=decode))
        logits = feed(model(), cache, [(ids, mask)])
        with recording():
            logits += steps(model(), cache, answers)
        cache.check_scores()
    assert {kind for kind, _ in events()} <= {"kernel"}  # none on the CPU
    return torch.cat([one.cpu() for one in logits], 1), [held_tokens(cache, layer, 2, 2) for layer in cache.planned]


@torch.no_grad()
def steps(model: Any, cache: PlanCache, tokens: Tensor) -> list[Tensor]:
    """Logits of tokens [B, n], one after the other."""
    return [model(input_ids=tokens[:, i : i + 1], past_key_values=cache).logits for i in range(tokens.shape[1])]

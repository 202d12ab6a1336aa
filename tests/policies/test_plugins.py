"""A policy of another package that goes wrong says so, with its name and its package: in every phase and allocation."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from torch import Tensor

from kvsearch.budgets.adakv import AdaKVAllocation
from kvsearch.budgets.dynamic import Allocation
from kvsearch.budgets.lava import LAVaAllocation
from kvsearch.core.errors import EnvironmentFault
from kvsearch.policies import Observation, Policy
from kvsearch.policies.decoding import State, Step
from kvsearch.runtime import Program, attach
from kvsearch.runtime.program import PhaseProgram
from tests.combinations import in_turn
from tests.families import build, prompts

LENGTH = 24
INF, NAN = float("inf"), float("nan")
WRONG: dict[str, Callable[[Tensor], Any]] = {
    "nan": lambda scores: scores.masked_fill(scores == scores.amax(-1, keepdim=True), NAN),
    "inf": lambda scores: scores.masked_fill(scores == scores.amax(-1, keepdim=True), INF),
    "broadcast heads": lambda scores: scores[:, :1],
    "half": lambda scores: scores.half(),
    "none": lambda _: None,
    "index": lambda scores: scores[99],
    "exit": lambda _: sys.exit(3),
}
SAID = {
    "nan": "NaN or infinite in layer", "inf": "NaN or infinite in layer", "broadcast heads": "shape", "half": "float16",
    "none": "returned NoneType from score(), not a tensor",
    "index": "failed in score() (IndexError: ", "exit": "failed in score() (SystemExit: 3)",
}  # fmt: skip


@dataclass(frozen=True)
class Foreign(Policy):
    """Scores that are the norms of values, made wrong."""

    name: ClassVar[str] = "foreign"
    source: ClassVar[str] = "tests"

    wrong: str = ""
    sinks: int = 1
    window: int = 2
    refresh: int = 1

    def score(self, observation: Observation) -> Tensor:
        scores = observation.value_norms(2)
        return WRONG.get(self.wrong, lambda found: found)(scores)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Online(Foreign):
    """The same as a decode rule."""

    name: ClassVar[str] = "online"

    def score(self, observation: Observation) -> Tensor:
        return observation.value_norms(2)

    def start(self, observation: Observation) -> State:
        return State({"norms": observation.value_norms(2).clone()})

    def step(self, step: Step) -> Tensor:
        norms = step.cached.state.entries["norms"]
        norms.scatter_(1, step.newest[:, None], 1.0)
        return WRONG.get(self.wrong, lambda found: found)(norms)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


def program(model: Any, policy: Policy, phases: str, allocation: Allocation | None = None) -> Program:
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    phase = PhaseProgram(dict.fromkeys(range(layers), policy), lambda _: np.full((layers, heads), 8))
    return Program(phase if phases != "decode" else None, phase if phases != "prefill" else None, allocation)


def generate(model: Any, made: Program) -> Tensor:
    ids, mask = prompts(2, LENGTH, pads=4)
    with attach(model, made) as planned:
        return planned.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)  # type: ignore[no-any-return]


PATHS: dict[str, tuple[str, Allocation | None]] = {
    "static": ("prefill", None), "scored anew": ("decode", None), "both": ("both", None),
    "adakv": ("prefill", AdaKVAllocation()), "lava": ("prefill", LAVaAllocation()),
}  # fmt: skip


@in_turn(path=PATHS, wrong=WRONG)
def test_scores_that_are_wrong_name_the_policy(model: Any, path: str, wrong: str) -> None:
    phases, allocation = PATHS[path]
    if (path, wrong) == ("scored anew", "broadcast heads"):
        return  # a step shows a policy one head at a time
    with pytest.raises(EnvironmentFault) as caught:
        generate(model, program(model, Foreign(wrong), phases, allocation))
    assert str(caught.value).startswith(f"policy foreign of {__name__} ")
    assert SAID[wrong] in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong", ["nan", "broadcast heads", "half", "none", "index"])
def test_decode_rules(model: Any, wrong: str) -> None:
    said = SAID[wrong].replace("score()", "step()")
    with pytest.raises(EnvironmentFault, match=r"^policy online of ") as caught:
        generate(model, program(model, Online(wrong), "decode"))
    assert said in str(caught.value)
    assert generate(model, program(model, Online(), "both")).shape[1] == LENGTH + 4

"""A policy of another package that goes wrong says so, with its name and its package: in every phase and allocation."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from kvsearch.budgets.adakv import AdaKVAllocation
from kvsearch.budgets.dynamic import Allocation
from kvsearch.budgets.lava import LAVaAllocation
from kvsearch.errors import EnvironmentFault, IncompatibleError, KvsearchError
from kvsearch.policies import Observation, Policy, create_policy, keep_under, plugins, registry
from kvsearch.policies.checks import lengths_after
from kvsearch.policies.decoding import State, Step
from kvsearch.runtime import Program, attach
from kvsearch.runtime.attention import NAME, using
from kvsearch.runtime.program import PhaseProgram
from kvsearch.search.bank.prepared import prefill
from tests.families import build, prompts

LENGTH = 24
INF, NAN = float("inf"), float("nan")
WRONG: dict[str, Callable[[Tensor], Any]] = {
    "nan": lambda scores: scores.masked_fill(scores == scores.amax(-1, keepdim=True), NAN),
    "inf": lambda scores: scores.masked_fill(scores == scores.amax(-1, keepdim=True), INF),
    "minus inf": lambda scores: scores.masked_fill(scores == scores.amin(-1, keepdim=True), -INF),
    "broadcast heads": lambda scores: scores[:, :1],
    "broadcast entries": lambda scores: scores[..., :1],
    "no batch": lambda scores: scores[0],
    "half": lambda scores: scores.half(),
    "whole": lambda scores: scores.long(),
    "list": lambda scores: scores.tolist(),
    "meta": lambda scores: scores.to("meta"),
    "none": lambda _: None,
}
SAID = {
    "nan": "NaN or infinite in layer", "inf": "NaN or infinite in layer", "minus inf": "NaN or infinite in layer",
    "broadcast heads": "shape", "broadcast entries": "shape", "no batch": "shape", "half": "float16", "whole": "int64",
    "list": "returned list from score(), not a tensor", "meta": "device meta", "none": "returned NoneType",
}  # fmt: skip
RAISED: dict[str, Callable[[Tensor], Any]] = {
    "index": lambda scores: scores[99],
    "exit": lambda _: sys.exit(3),
    "exit without a word": lambda _: sys.exit(),
    "of its own": lambda _: {}["a\nb"],
}


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
        return {**WRONG, **RAISED}.get(self.wrong, lambda found: found)(scores)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Online(Foreign):
    """The same as a decode rule."""

    name: ClassVar[str] = "online"

    def score(self, observation: Observation) -> Tensor:
        return observation.value_norms(2)

    def start(self, observation: Observation) -> State:
        state = observation.value_norms(2).clone()
        return State({"norms": state[:, :1] if self.wrong == "state" else state})

    def step(self, step: Step) -> Tensor:
        norms = step.cached.state.entries["norms"]
        norms.scatter_(1, step.newest[:, None], 1.0)
        return {**WRONG, **RAISED}.get(self.wrong, lambda found: found)(norms)  # type: ignore[no-any-return]


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


@pytest.mark.parametrize("path", PATHS)
def test_scores_that_are_right_pass(model: Any, path: str) -> None:
    phases, allocation = PATHS[path]
    assert generate(model, program(model, Foreign(), phases, allocation)).shape[1] == LENGTH + 4


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("path", PATHS)
def test_scores_that_are_wrong_name_the_policy(model: Any, path: str, wrong: str) -> None:
    phases, allocation = PATHS[path]
    if (path, wrong) == ("scored anew", "broadcast heads"):
        return  # a step shows a policy one head at a time
    with pytest.raises(EnvironmentFault) as caught:
        generate(model, program(model, Foreign(wrong), phases, allocation))
    assert str(caught.value).startswith(f"policy foreign of {__name__} ")
    assert SAID[wrong] in str(caught.value)
    assert str(caught.value).endswith("repair it, or use another policy")


@pytest.mark.parametrize("raised", RAISED)
@pytest.mark.parametrize("path", PATHS)
def test_what_a_policy_raises_is_its_own(model: Any, path: str, raised: str) -> None:
    phases, allocation = PATHS[path]
    with pytest.raises(EnvironmentFault, match=rf"^policy foreign of {__name__} failed in score\(\) \(") as caught:
        generate(model, program(model, Foreign(raised), phases, allocation))
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value.__cause__, (IndexError, SystemExit, KeyError))


@pytest.mark.parametrize("wrong", ["nan", "broadcast heads", "half", "none", *RAISED])
def test_decode_rules(model: Any, wrong: str) -> None:
    said = "failed in step" if wrong in RAISED else SAID[wrong].replace("score()", "step()")
    with pytest.raises(EnvironmentFault, match=r"^policy online of ") as caught:
        generate(model, program(model, Online(wrong), "decode"))
    assert said in str(caught.value)
    assert generate(model, program(model, Online(), "both")).shape[1] == LENGTH + 4
    with pytest.raises(EnvironmentFault, match=r"made the state 'norms' of \(2, 1, 24\)"):
        generate(model, program(model, Online("state"), "decode"))


def test_what_is_no_method_stays_as_it_is() -> None:
    @dataclass(frozen=True)
    class Helped(Foreign):
        name: ClassVar[str] = "helped"
        norm: Callable[[Tensor], Tensor] = torch.linalg.norm
        twice: Callable[[int], int] = lambda number: 2 * number

        @staticmethod
        def least() -> int:
            return 3

        @classmethod
        def called(cls) -> str:
            return cls.name

    assert (Helped.least(), Helped().called(), Helped(sinks=2).sinks) == (3, "helped", 2)
    assert (Helped().twice(4), Helped().norm) == (8, torch.linalg.norm)


@pytest.mark.parametrize("wrong", ["nan", "broadcast entries"])
def test_what_a_search_shares(model: Any, wrong: str) -> None:
    ids, _ = prompts(1, LENGTH)
    layers = range(model.config.num_hidden_layers)
    with using(model, NAME), pytest.raises(EnvironmentFault, match="policy foreign of "):
        prefill(model, {layer: (Foreign(wrong),) for layer in layers}, ids[0], None)


def test_what_is_interrupted_or_told_on_purpose_or_too_large_is_not_its_fault(model: Any) -> None:
    for error in (KeyboardInterrupt(), IncompatibleError("not for this model"), MemoryError()):

        def fail(_: Tensor, error: BaseException = error) -> Any:
            raise error

        WRONG["other"] = fail
        with pytest.raises(type(error)) as caught:
            generate(model, program(model, Foreign("other"), "prefill"))
        assert caught.value is error
    del WRONG["other"]


def test_the_package_is_that_of_the_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    class Distribution:
        name, version = "kvsearch-foreign", "1.2"

    point = EntryPoint("foreign", f"{__name__}:Foreign", plugins.GROUP)
    object.__setattr__(point, "dist", Distribution)
    for module in (plugins, registry):
        monkeypatch.setattr(module, "entry_points", lambda group: [point])
    assert plugins.package_of_class(Foreign) == "kvsearch-foreign 1.2"
    assert str(plugins.fault(Foreign, "is odd")).startswith("policy foreign of kvsearch-foreign 1.2 is odd: ")


def test_a_module_that_exits_when_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Leaving:
        name, value, dist, module = "leaving", "leaving:Policy", None, "leaving"

        def load(self) -> None:
            sys.exit("no licence")

    monkeypatch.setattr(registry, "entry_points", lambda group: [Leaving()])
    with pytest.raises(EnvironmentFault, match=r"policy leaving of leaving cannot be imported \(SystemExit: no"):
        create_policy("leaving")


def test_parameters_and_declarations_are_guarded_too() -> None:
    @dataclass(frozen=True)
    class Broken(Foreign):
        name: ClassVar[str] = "broken"

        def __post_init__(self) -> None:
            raise ValueError("no")

    with pytest.raises(EnvironmentFault, match=r"policy broken of .* failed in __post_init__\(\) \(ValueError: no\)"):
        Broken()

    @dataclass(frozen=True)
    class Undecided(Foreign):
        name: ClassVar[str] = "undecided"

        @property
        def recent_count(self) -> int:
            return 1 // 0

    with pytest.raises(EnvironmentFault, match=r"policy undecided of .* failed in recent_count\(\)"):
        _ = Undecided().recent_count


def test_protected_entries_and_padding_may_have_any_score() -> None:
    @dataclass(frozen=True)
    class Any_(Foreign):
        name: ClassVar[str] = "any"

        def score(self, observation: Observation) -> Tensor:
            free = observation.candidates(self.sinks, self.window)[:, None]
            return torch.where(free, observation.value_norms(2), NAN)

    valid = torch.ones(2, 12, dtype=torch.bool)
    valid[0, :5] = False
    states = torch.randn(2, 2, 12, 4)
    seen = Observation(states, states, valid, 1.0)
    kept = keep_under(Any_(), seen, torch.full((2, 2), 5))
    assert lengths_after(seen) == [7, 12]
    assert kept.sum(-1).tolist() == [[5, 5], [5, 5]]
    assert issubclass(EnvironmentFault, KvsearchError)

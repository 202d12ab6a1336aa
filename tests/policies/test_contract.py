"""The contract of every built-in policy, each with its defaults and with settings that reach its branches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from _pytest.mark.structures import ParameterSet

from kvsearch.policies import Policy, create_policy
from kvsearch.policies.cake import CAKE
from kvsearch.policies.cam import CaM
from kvsearch.policies.criticalkv import CriticalKV
from kvsearch.policies.d2o import D2O
from kvsearch.policies.defensivekv import DefensiveKV
from kvsearch.policies.duo_attention import DuoAttention
from kvsearch.policies.expected_attention import ExpectedAttention
from kvsearch.policies.full import FullKV
from kvsearch.policies.h2o import H2O
from kvsearch.policies.keydiff import KeyDiff
from kvsearch.policies.knorm import Knorm
from kvsearch.policies.lava import LAVa
from kvsearch.policies.pyramidkv import PyramidKV
from kvsearch.policies.registry import BUILT_IN
from kvsearch.policies.scissorhands import Scissorhands
from kvsearch.policies.snapkv import SnapKV
from kvsearch.policies.streaming import StreamingLLM
from kvsearch.policies.tova import TOVA
from kvsearch.policies.vatp import VATP
from kvsearch.testing.policy_contract import PolicyContract
from tests.policies.probes import example

BY_POSITION = (
    StreamingLLM(), CaM(), CaM(sinks=0, merge_next=1, expectation=True),
    DuoAttention(), DuoAttention(sinks=1, window=2),
)  # fmt: skip
BY_SCORE = (
    FullKV(), H2O(), H2O(recent=3, sinks=1), TOVA(), TOVA(protect_last=True, sinks=2),
    SnapKV(), SnapKV(window=3, kernel=5, pooling="max", group="mean", sinks=2),
    SnapKV(window=2, kernel=3, pooling="avg", group="max", protect=4), PyramidKV(window=4, protect=0),
    Scissorhands(), Scissorhands(history=3, window=2, sinks=1), CaM(base="h2o", sinks=0, recent=3),
    D2O(), D2O(sinks=1, recent_share=0.25, merging="code", ema=0.7),
    CAKE(), CAKE(window=4, protect=1, gamma=2.0), CAKE(window=1, pooling="none", sinks=1),
    VATP(), VATP(base="scissorhands", sinks=1, history=5, recent=2),
    VATP(base="snapkv", window=4, kernel=3, sinks=1, protect=2),
    LAVa(), LAVa(window=4, kernel=3, protect=1), LAVa(window=2, kernel=5, pooling="avg"),
    KeyDiff(), KeyDiff(sinks=4, window=1), Knorm(sinks=2, window=3),
    ExpectedAttention(future=5, sinks=2, window=3, epsilon=0.02),
    ExpectedAttention(future=3, sinks=0, covariance=False, value_norm=False),
    CriticalKV(), CriticalKV(window=2, kernel=3, group="max", sinks=1, norm="l2", ratio=0.3),
    CriticalKV(base="expected_attention", future=8, window=4, protect=2),
    DefensiveKV(), DefensiveKV(window=4, protect=1, mass=0.0),
    DefensiveKV(window=3, kernel=3, aggregate="mean", floor="none"),
    *map(example, ("probe", "query_bank", "kvzip", "kvzap")),
)  # fmt: skip

SETTINGS = (*BY_POSITION, *BY_SCORE)
COVERED = {policy.name for policy in SETTINGS}
OTHERS = tuple(create_policy(name) for name in BUILT_IN if name not in COVERED)  # with their defaults


def named(policy: Policy) -> str:
    return f"{policy.name}-{'-'.join(str(value)[:8] for value in policy.parameters().values())}"


def settings_of_all() -> Iterator[ParameterSet]:
    """All settings above; those behind the first two of a policy are nightly."""
    seen = Counter[str]()
    for policy in (*SETTINGS, *OTHERS):
        seen[policy.name] += 1
        yield pytest.param(policy, id=named(policy), marks=[pytest.mark.nightly] if seen[policy.name] > 2 else [])


@pytest.fixture(scope="class", params=list(settings_of_all()))
def policy(request: pytest.FixtureRequest) -> None:
    request.cls.policy = request.param
    request.cls.score_is_position = any(request.param is one for one in BY_POSITION)


@pytest.mark.usefixtures("policy")
class TestContract(PolicyContract):
    """All of them."""

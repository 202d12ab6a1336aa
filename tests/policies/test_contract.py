"""The contract of every built-in policy, each with its defaults and with settings that reach its branches."""

from __future__ import annotations

from kvsearch.policies.expected_attention import ExpectedAttention
from kvsearch.policies.full import FullKV
from kvsearch.policies.keydiff import KeyDiff
from kvsearch.policies.snapkv import SnapKV
from kvsearch.policies.streaming import StreamingLLM
from tests.policies.contract import PolicyContract
from tests.policies.probes import example


class TestFullKV(PolicyContract):
    policy = FullKV()


class TestStreamingLLM(PolicyContract):
    policy = StreamingLLM()
    score_is_position = True


class TestStreamingLLMWithoutSinks(PolicyContract):
    policy = StreamingLLM(sinks=0)
    score_is_position = True


class TestSnapKV(PolicyContract):
    policy = SnapKV()


class TestSnapKVMaxPooled(PolicyContract):
    policy = SnapKV(window=3, kernel=5, pooling="max", group="mean", sinks=2)


class TestSnapKVAveraged(PolicyContract):
    policy = SnapKV(window=2, kernel=3, pooling="avg", group="max")


class TestSnapKVUnpooled(PolicyContract):
    policy = SnapKV(window=5, kernel=7, pooling="none", sinks=1)


class TestKeyDiff(PolicyContract):
    policy = KeyDiff()


class TestKeyDiffProtected(PolicyContract):
    policy = KeyDiff(sinks=4, window=1)


class TestProbe(PolicyContract):
    policy = example("probe")


class TestQueryBank(PolicyContract):
    policy = example("query_bank")


class TestKVzip(PolicyContract):
    policy = example("kvzip")


class TestKVzap(PolicyContract):
    policy = example("kvzap")


class TestExpectedAttention(PolicyContract):
    policy = ExpectedAttention(future=8)


class TestExpectedAttentionMeansOnly(PolicyContract):
    policy = ExpectedAttention(future=3, sinks=0, covariance=False, value_norm=False)


class TestExpectedAttentionProtected(PolicyContract):
    policy = ExpectedAttention(future=5, sinks=2, window=3, epsilon=0.02)

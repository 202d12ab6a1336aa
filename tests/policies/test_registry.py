from __future__ import annotations

import pytest

from kvsearch.core.errors import UsageError
from kvsearch.policies import create_policy
from kvsearch.policies.expected_attention import ExpectedAttention


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("snapkv", {"window": "32"}, "window must be a whole number, got '32'"),
        ("snapkv", {"window": True}, "window must be a whole number, got True"),
        ("snapkv", {"pooling": 3}, "pooling must be text, got 3"),
        ("expected_attention", {"covariance": 1}, "covariance must be true or false, got 1"),
        ("expected_attention", {"epsilon": "0.1"}, "epsilon must be a number, got '0.1'"),
        ("snapkv", {"window": 0}, "window must be 1 or more, got 0"),
        ("snapkv", {"kernel": 4}, "kernel must be odd, got 4"),
        ("snapkv", {"pooling": "mean"}, "pooling is max, avg or none, got 'mean'"),
        ("snapkv", {"protect": -2}, "protect must be 0 or more, got -2"),
        ("keydiff", {"window": -1}, "window must be 0 or more, got -1"),  # which has no checks of its own
        ("cake", {"gamma": float("inf")}, "gamma must be finite and 0 or more, got inf"),
        ("cam", {"base": "tova"}, "base is streaming or h2o, got 'tova'"),
        ("cam", {"merge_next": 0}, "merge_next must be 1 or more, got 0"),
        ("criticalkv", {"ratio": 1.5}, "ratio must be between 0 and 1, got 1.5"),
        ("criticalkv", {"norm": "l3"}, "norm is l1 or l2, got 'l3'"),
        ("defensivekv", {"aggregate": "sum"}, "aggregate is mean or max, got 'sum'"),
        ("h2o", {"recent_share": -0.1}, "recent_share must be between 0 and 1, got -0.1"),
        ("scissorhands", {"history": 32768}, "history must be between 1 and 32767, got 32768"),
        ("vatp", {"base": "snapkv", "kernel": 4}, "its base snapkv: kernel must be odd, got 4"),
        ("expected_attention", {"future": 0}, "future must be 1 or more, got 0"),
        ("expected_attention", {"epsilon": float("nan")}, "epsilon must be finite and 0 or more, got nan"),
        ("snapkv", {"window": 10**400}, "window must be 2147483647 or less, got a number of very many digits"),
        ("cam", {"seed": 2**63}, f"seed must be {2**63 - 1} or less, got {2**63}"),
    ],
)
def test_parameters_of_wrong_types_and_out_of_range(name: str, params: dict[str, object], expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        create_policy(name, params)
    assert str(caught.value) == f"policy {name}: {expected}"


def test_whole_numbers_serve_as_floats() -> None:
    policy = create_policy("expected_attention", {"epsilon": 1})
    assert policy == ExpectedAttention(epsilon=1.0)
    assert type(policy.parameters()["epsilon"]) is float

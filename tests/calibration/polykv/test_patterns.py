"""Which patterns a PolyKV calibration tries: names and sets, settings, and what cannot be tried."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvsearch.calibration.polykv.options import PAPER_PATTERNS, make_candidates
from kvsearch.core.errors import UsageError
from kvsearch.plan import PolicySpec
from kvsearch.policies import Policy, create_policy, list_policy_names
from kvsearch.policies.registry import list_fitted

BOTH = ("prefill", "decode")


def tried(
    names: str | Sequence[str | PolicySpec] = "paper", phases: Sequence[Any] = BOTH, budget: int = 512, **settings: Any
) -> tuple[list[Policy], list[str]]:
    return make_candidates(
        names, {key.replace("__", "."): value for key, value in settings.items()}, phases, (budget, 1024)
    )


def names_of(policies: Sequence[Policy]) -> list[str]:
    return [policy.name for policy in policies]


def test_the_nine_of_the_paper_or_all_that_can_be_judged() -> None:
    policies, remarks = tried()
    assert policies == [create_policy(name) for name in PAPER_PATTERNS]
    assert (len(policies), remarks) == (9, [])
    policies, remarks = tried("all")
    left_out = sorted(["duo_attention", "kvzip", *list_fitted()])
    assert names_of(policies) == [name for name in list_policy_names() if name not in ("full", *left_out)]
    assert [remark.partition(" is left out: ")[0] for remark in remarks] == left_out
    assert remarks[0].endswith("some of its heads are never evicted, so budgets do not say what it keeps")
    assert "probe is left out: policy probe has no default for weights: give a value" in remarks


def test_settings_of_all_that_have_them_and_of_one() -> None:
    policies, _ = tried(window=4, cake__window=6, kernel=5)
    windows = {policy.name: getattr(policy, "window", None) for policy in policies}
    assert windows == {
        "h2o": None, "tova": None, "cam": None, "pyramidkv": 4, "snapkv": 4, "d2o": None, "cake": 6,
        "scissorhands": 4, "streaming": None,
    }  # fmt: skip
    own = PolicySpec(name="snapkv", params={"window": 16, "sinks": 2})
    (policy,), _ = tried([own], window=8)  # what is typed wins over what a recipe has
    assert (policy.sink_count, policy.recent_count) == (2, 8)


@pytest.mark.parametrize(
    ("names", "settings", "problem"),
    [
        ("paper", {"windo": 8}, r"setting 'windo': none of the patterns has such a parameter; did you mean 'window'\?"),
        ("paper", {"keydiff.window": 8}, r"'keydiff' is none of the patterns .*known: h2o, tova, cam"),
        ("paper", {"window": 0}, "policy pyramidkv: window must be 1 or more, got 0"),
        (["snapvk"], {}, r"unknown pattern 'snapvk'; did you mean 'snapkv'\?"),
        (["tova", "snapkv", "tova"], {}, "the pattern tova is given twice"),
        (["full"], {}, "policy full: it agrees with itself, so no signal can judge it: leave it out"),
        (["duo_attention"], {}, "policy duo_attention: some of its heads are never evicted"),
        ([], {}, "there are no patterns: name some"),
    ],
)
def test_what_cannot_be_tried(names: str | list[str], settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        make_candidates(names, settings, BOTH, (512,))


def test_budgets_below_what_a_pattern_always_keeps() -> None:
    policies, remarks = tried(budget=31)
    assert names_of(policies) == [name for name in PAPER_PATTERNS if name not in ("snapkv", "cake")]
    assert remarks[0] == (
        "snapkv is left out: it always keeps 32 entries (0 sinks, 32 recent), more than a budget of 31: lower them "
        "with --set, or raise the budget"
    )
    assert len(remarks) == 2
    assert names_of(tried(budget=32)[0]) == list(PAPER_PATTERNS)
    with pytest.raises(UsageError, match=r"policy snapkv: it always keeps 32 entries .* a budget of 31"):
        tried(["snapkv"], budget=31)
    with pytest.raises(UsageError, match=r"^no pattern is left to try; h2o is left out: it always keeps 600 entries"):
        tried(budget=512, sinks=599, window=600)

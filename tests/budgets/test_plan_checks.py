"""What is wrong with the policies and budgets of a plan, all in one message."""

from __future__ import annotations

from typing import Any

import pytest

from kvsearch.budgets.plan_checks import check_plan
from kvsearch.core.errors import UsageError
from kvsearch.plan import PhasePlan, Plan
from kvsearch.plan.arithmetic import add_carry
from tests.plan.builders import plan_dict


def planned(*layers: tuple[str, dict[str, Any], list[int]] | None, **changes: Any) -> Plan:
    """A plan of one layer per (policy, parameters, budget); None keeps its full cache."""
    content = plan_dict([None if layer is None else layer[2] for layer in layers])
    for made, layer in zip(content["prefill"]["layers"], layers, strict=True):
        if layer is not None:
            made["policy"] = {"name": layer[0], "params": layer[1]}
    content |= {"length": 400, "floor": 1, **changes}
    if content.get("decode") == "as prefill":
        content["decode"] = content["prefill"]
    return Plan.model_validate(content)


def problems(plan: Plan) -> list[str]:
    """The lines of the one message about `plan`."""
    with pytest.raises(UsageError) as caught:
        check_plan(plan, "p.json")
    assert caught.value.exit_code == 2
    first, *lines = str(caught.value).split("\n  ")
    assert first == f"p.json is not valid, {len(lines)} problem{'s' if len(lines) > 1 else ''}:"
    return lines


def test_a_good_plan_passes() -> None:
    small: dict[str, Any] = {"window": 4, "sinks": 2}
    check_plan(planned(("snapkv", small, [6, 9]), None, ("streaming", {}, [5, 40]), decode="as prefill"), "p.json")
    check_plan(planned(("keydiff", {}, [1, 1]), ("full", {}, [1, 1])), "p.json")
    lines = problems(planned(("snapkv", {}, [31, 32]), decode="as prefill"))
    assert [line.partition(":")[0] for line in lines] == ["prefill.layers.0.budget", "decode.layers.0.budget"]


def test_a_budget_below_the_protected_entries() -> None:
    plan = planned(("snapkv", {"sinks": 4}, [20, 40, 35]), None, ("streaming", {}, [5, 5, 4]))
    assert problems(plan) == [
        "prefill.layers.0.budget: is 20 at head 0, 35 at head 2, below the 36 entries that snapkv always keeps "
        "(4 sinks and 32 recent): raise it to 36, or lower sinks or protect",
        "prefill.layers.2.budget: is 4 at head 2, below the 5 entries that streaming always keeps "
        "(4 sinks and 1 recent): raise it to 5, or lower sinks",
    ]


def test_heads_that_keep_everything_have_room() -> None:
    small: dict[str, Any] = {"sinks": 4, "window": 60}
    check_plan(planned(("duo_attention", small, [64, 400]), length=400), "p.json")
    check_plan(planned(("duo_attention", small, [50, 50]), length=50), "p.json")
    assert "is 50 at head 1" in problems(planned(("duo_attention", small, [64, 50]), length=400))[0]


def test_what_is_wrong_with_a_policy_is_said_once_with_its_layers() -> None:
    plan = planned(
        ("snapk", {}, [9, 9]), ("snapkv", {"windw": 4}, [9, 9]), ("snapk", {}, [9, 9]), ("snapkv", {}, [9, 9]),
        ("snapkv", {"kernel": 4}, [99, 99]), ("snapk", {}, [9, 9]),
    )  # fmt: skip
    lines = problems(plan)
    assert lines[0].startswith(
        "prefill.layers.0.policy (and in layers 2, 5): unknown policy 'snapk'; did you mean 'snapkv'?"
    )
    assert lines[1].startswith("prefill.layers.1.policy: policy snapkv has no parameter 'windw'; did you mean 'window'")
    assert lines[2] == "prefill.layers.4.policy: policy snapkv: kernel must be odd, got 4"
    assert lines[3].startswith("prefill.layers.3.budget: is 9 at head 0, 9 at head 1, below the 32")
    assert len(lines) == 4


def test_what_carries_nothing() -> None:
    small: dict[str, Any] = {"window": 4, "sinks": 2}
    plan = planned(("d2o", {}, [20, 20]), ("full", {}, [9, 9]), ("snapkv", small, [6, 9]), decode="as prefill")
    layers = tuple(layer and layer.model_copy(update={"carry": "match"}) for layer in plan.phase("prefill").layers)
    carrying = plan.model_copy(update={"prefill": PhasePlan(layers=layers), "decode": None})
    assert problems(carrying) == [
        "prefill.layers.0.carry: is match, but d2o merges what leaves into what stays itself: leave carry out",
        "prefill.layers.1.carry: is match, but full keeps everything here, so nothing leaves: leave carry out",
    ]
    cake: dict[str, Any] = {"name": "cake", "params": {}}
    alone = planned(("cake", {"window": 4}, [60, 90]), allocation=cake)
    (shared,) = problems(add_carry(alone, "match"))
    assert shared == (
        "prefill.layers.0: entries carry what leaves, so its budgets must be final when a layer ends: use allocation "
        "adakv or static, not cake"
    )
    check_plan(add_carry(planned(("cake", {"window": 4}, [60, 90])), "match"), "p.json")


def test_allocations_that_do_not_suit_the_policies() -> None:
    small: dict[str, Any] = {"window": 4, "sinks": 2}
    lava: dict[str, Any] = {"name": "lava", "params": {}}
    check_plan(planned(("lava", {"window": 4}, [6, 9]), ("snapkv", small, [6, 9]), allocation=lava), "p.json")
    plan = planned(("full", {}, [400, 400]), ("d2o", {}, [20, 20]), ("d2o", {}, [20, 20]), allocation=lava)
    first, second = problems(plan)
    assert first == (
        "prefill.layers.0: full never evicts some heads, whatever their budget, so there is nothing to share: use a "
        "static plan, not allocation lava"
    )
    assert second.startswith("prefill.layers.1: d2o merges what it evicts")
    (unknown,) = problems(planned(("snapkv", small, [6, 9]), allocation={"name": "lavaa", "params": {}}))
    assert unknown.startswith("allocation: unknown allocation 'lavaa'; did you mean 'lava'?")
    assert problems(planned(("snapkvv", {}, [60, 90]), allocation=lava))[0].startswith("prefill.layers.0.policy")

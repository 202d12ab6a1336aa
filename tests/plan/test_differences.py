"""Plans are compared head by head, and in everything else that changes what they do."""

from __future__ import annotations

from typing import Any

import pytest

from kvsearch.core.errors import IncompatibleError
from kvsearch.plan.arithmetic import BudgetChange, SettingChange, compare_plans
from tests.plan.builders import PROVENANCE, make_plan, model_dict, phase_dict


def with_policies(*policies: tuple[str, dict[str, Any]] | None) -> dict[str, Any]:
    phase = phase_dict([None if policy is None else [4, 4] for policy in policies])
    for layer, policy in zip(phase["layers"], policies, strict=True):
        if policy is not None:
            layer["policy"] = {"name": policy[0], "params": policy[1]}
    return phase


def test_budgets_are_compared_head_by_head() -> None:
    before = make_plan([[10, 6], None, [4, 12]])
    after = make_plan([[10, 7], [5, 5], [4, 12]], decode=phase_dict([None, None, [8, 8]]))
    assert compare_plans(before, after)[1] == [
        BudgetChange("prefill", 0, 1, 6, 7),
        BudgetChange("prefill", 1, 0, None, 5),
        BudgetChange("prefill", 1, 1, None, 5),
        BudgetChange("decode", 2, 0, None, 8),
        BudgetChange("decode", 2, 1, None, 8),
    ]
    with pytest.raises(IncompatibleError, match="other layers or heads"):
        compare_plans(before, make_plan([[4, 4]]))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"length": 50}, [("length", 40, 50)]),
        ({"floor": 2}, [("floor", 4, 2)]),
        ({"scaling": "fixed", "length": None}, [("scaling", "proportional", "fixed"), ("length", 40, None)]),
        (
            {"allocation": {"name": "lava", "params": {"layers": "planned"}}},
            [("allocation", "static", "lava"), ("allocation.layers", None, "planned")],
        ),
        (
            {"model": model_dict(weights_sha256="0" * 64)},
            [("model.weights_sha256", model_dict()["weights_sha256"], "0" * 64)],
        ),
    ],
)
def test_settings_of_the_whole_plan(changes: dict[str, Any], expected: list[tuple[Any, ...]]) -> None:
    changes = {"provenance": {**PROVENANCE, "seed": 8}, **changes}  # which does not matter
    found = compare_plans(make_plan(), make_plan(**changes))
    assert found == ([SettingChange(*change) for change in expected], [])


def test_policies_and_parameters_are_grouped_by_layers() -> None:
    snapkv, wider, h2o = ("snapkv", {"window": 4}), ("snapkv", {"window": 8}), ("h2o", {"sinks": 1})
    before = make_plan([[4, 4]] * 4, prefill=with_policies(snapkv, snapkv, snapkv, snapkv))
    after = make_plan([[4, 4]] * 4, prefill=with_policies(wider, h2o, snapkv, wider))
    assert compare_plans(before, after)[0] == [
        SettingChange("policy.window", 4, 8, "prefill", (0, 3)),
        SettingChange("policy", "snapkv", "h2o", "prefill", (1,)),
        SettingChange("policy.window", 4, None, "prefill", (1,)),
        SettingChange("policy.sinks", None, 1, "prefill", (1,)),
    ]

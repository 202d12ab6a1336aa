"""Plans of policies and budgets by layer."""

from __future__ import annotations

import numpy as np
import pytest

from kvsearch.budgets.lava import LAVaAllocation
from kvsearch.plan import ModelFingerprint, PolicySpec
from kvsearch.plan.origin import Provenance
from kvsearch.strategies.build import Chosen, build_plan
from tests.plan.builders import PROVENANCE, model_dict

MODEL = ModelFingerprint.model_validate(model_dict(layers=4, kv_heads=2))
ORIGIN = Provenance.model_validate(PROVENANCE)
POLICIES = (PolicySpec(name="snapkv"), PolicySpec(name="tova"))
CHOSEN = Chosen(POLICIES, np.array([[3, 4], [5, 6]]))


def test_layers_that_are_not_planned_keep_everything() -> None:
    later = CHOSEN._replace(budgets=CHOSEN.budgets + 1)
    plan = build_plan(MODEL, (1, 2), {"prefill": CHOSEN, "decode": later}, ORIGIN, 3)
    assert plan.budgets("prefill") == (None, (3, 4), (5, 6), None)
    assert plan.budgets("decode") == (None, (4, 5), (6, 7), None)
    assert [layer.policy for layer in plan.phase("decode").layers if layer is not None] == list(POLICIES)
    assert (plan.total, plan.floor, plan.scaling, plan.length, plan.provenance) == (18, 3, "fixed", None, ORIGIN)
    assert plan.allocation.name == "static"


def test_the_total_is_that_of_the_only_phase() -> None:
    plan = build_plan(MODEL, (1, 2), {"decode": CHOSEN}, ORIGIN, 3, "proportional", 9, LAVaAllocation(floor_share=0.5))
    assert (plan.total, plan.prefill, plan.scaling, plan.length) == (18, None, "proportional", 9)
    assert (plan.allocation.name, plan.allocation.params["floor_share"]) == ("lava", 0.5)


@pytest.mark.parametrize("layers", [(1,), (0, 1, 2)])
def test_every_row_needs_a_layer(layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="zip"):
        build_plan(MODEL, layers, {"prefill": CHOSEN}, ORIGIN, 3)

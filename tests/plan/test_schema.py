"""The plan schema: strict types, and every contradiction named by its place, several at once."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from kvsearch.core.errors import IncompatibleError
from kvsearch.core.parsing import describe_validation_error
from kvsearch.plan import Plan
from tests.plan.builders import PROVENANCE, model, model_dict, phase_dict, plan_dict


def problems(data: dict[str, Any]) -> list[str]:
    """The lines under the heading, as a user sees them."""
    with pytest.raises(ValidationError) as caught:
        Plan.model_validate(data)
    return describe_validation_error(caught.value, "plan.json").split("\n  ")[1:]


BAD: list[tuple[dict[str, Any], str]] = [
    (plan_dict(total=33), "total: says 33, but the prefill budgets add up to 32: correct one of them"),
    (plan_dict(total=32.0), "total: must be a whole number, not 32.0"),
    (plan_dict(floor=5), "prefill.layers.2.budget: is 4 at head 0, below the floor of 5 entries"),
    (plan_dict(length=11), "prefill.layers.2.budget: is 12 at head 1, above the length of 11 tokens"),
    (plan_dict(length=None), 'scaling: "proportional" needs a length'),
    (plan_dict(prefill=None), "decode: a plan needs at least one phase"),
    (plan_dict(prefill=phase_dict([None] * 3)), "prefill.layers: plans no layer"),
    (plan_dict(prefill=phase_dict([[10, 6], None, [4, 12]], carry="fold")), "prefill.layers.0.carry: must be "),
    (
        plan_dict(decode=phase_dict([[10, 6], None, [4, 12]], carry="match")),
        "decode.layers.0.carry: is match, but only what leaves a prompt is carried: drop it",
    ),
    (
        plan_dict([[40, 40], None, [4, 12]], prefill=phase_dict([[40, 40], None, [4, 12]], carry="match")),
        "prefill.layers.0.carry: is match, but this layer keeps all of 40 tokens, so nothing leaves it: drop it",
    ),
    (plan_dict(model=model_dict(layers=4)), "prefill.layers: has 3 items, but model.layers is 4"),
    (plan_dict(model=model_dict(kv_heads=3)), "prefill.layers.0.budget: has 2 items, but model.kv_heads is 3"),
    (plan_dict([[10, 0], [4, 4]]), "prefill.layers.0.budget.1: must be at least 1, not 0"),
    (plan_dict(provenance={**PROVENANCE, "settings": {"a": {}}}), "provenance.settings.a: must be a finite number"),
]


@pytest.mark.parametrize(("data", "expected"), BAD, ids=[expected.partition(":")[0] for _, expected in BAD])
def test_each_mistake_is_named_by_its_place(data: dict[str, Any], expected: str) -> None:
    found = problems(data)
    assert any(line.startswith(expected) for line in found), found
    assert all("\n" not in line for line in found)


@pytest.mark.parametrize(
    ("made", "here", "expected"),
    [
        ("bfloat16", "float16", "plan.json was made in bfloat16, and this model is loaded in float16: float16 rounds"),
        ("float16", "float32", "plan.json was made in float16, and this model is loaded in float32: float16 rounds"),
        ("float16", "float16", "plan.json was made for another model, which is called 'toy' as this one is"),
        ("float32", "bfloat16", "plan.json was made for another model"),  # these have equal hashes: others are others
        (None, "float16", "or load it in the --dtype of then"),
    ],
)
def test_another_dtype_is_told_from_another_model(made: str | None, here: str, expected: str) -> None:
    plan, found = model(dtype=made), model(dtype=here, weights_sha256="a" * 64)
    assert plan.mismatch(model(dtype=here)) is None
    with pytest.raises(IncompatibleError) as caught:
        plan.require(found, "plan.json")
    assert expected in str(caught.value)
    if "was made in" in expected:
        assert f"load it with --dtype {made}, or make plan.json again" in str(caught.value)


def test_another_model_is_refused_with_both_hashes() -> None:
    ours, other = model(), model(name="other", config_sha256="b" * 64, weights_sha256="c" * 64)
    with pytest.raises(IncompatibleError) as caught:
        ours.require(other, "plan.json")
    message = str(caught.value)
    hashes = (ours.config_sha256, ours.weights_sha256, other.config_sha256, other.weights_sha256)
    assert all(digest[:12] in message for digest in hashes)
    assert message.startswith("plan.json was made for another model, 'toy', and this is 'other': it has other ")
    with pytest.raises(IncompatibleError, match=r"called 'toy' as this one is: it has other weights .*--dtype"):
        ours.require(model(weights_sha256="c" * 64), "plan.json")
    ours.require(model(), "plan.json")

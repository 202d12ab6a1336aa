"""A plan in YAML: nothing is lost on the way there and back, edits count, and mistakes are named by their line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.errors import UsageError
from kvsearch.core.limits import MOST_NUMBER
from kvsearch.plan import Plan, canonical_json
from kvsearch.plan.yaml import plan_to_yaml
from kvsearch.selection.from_yaml import plan_from_yaml
from tests.examples import at_most
from tests.plan.builders import PROVENANCE, model_dict

SNAPKV = {"name": "snapkv", "params": {"window": 8}}
TOVA = {"name": "tova", "params": {}}


def layer(policy: dict[str, Any], *budget: int) -> dict[str, Any]:
    return {"policy": policy, "budget": budget}


def plan_of(layers: list[dict[str, Any] | None], **changes: Any) -> Plan:
    """A fixed plan of a toy model with two kv heads and these prefill layers."""
    return Plan.model_validate(
        {
            "model": model_dict(layers=len(layers)),
            "scaling": "fixed",
            "floor": 1,
            "prefill": {"layers": layers},
            "total": sum(sum(one["budget"]) for one in layers if one),
            "provenance": PROVENANCE,
            **changes,
        }
    )


EXAMPLE = plan_of([layer(SNAPKV, 640, 640)] * 3 + [layer(TOVA, 600, 700), None, None])
HERE = Path(__file__).parent
EXAMPLE_YAML = (HERE / "example.yaml").read_text(encoding="utf-8")


def edited(*changes: tuple[str, str]) -> str:
    text = EXAMPLE_YAML
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


def same(read: Plan, written: Plan) -> None:
    assert read == written
    assert canonical_json(read) == canonical_json(written)


def test_the_layout() -> None:
    assert plan_to_yaml(EXAMPLE) == EXAMPLE_YAML
    same(plan_from_yaml(EXAMPLE_YAML, "strategy.yaml"), EXAMPLE)


TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12)
AWKWARD = st.sampled_from([
    "yes", "no", "~", "null", "1", "1e3", "0x1F", "010", "1_000", "12:30:45", "2020-01-01", "<<", "=", "- a", "a: b",
    "# c", "{", "'", '"', " a ", "a\nb", "\ta", "\x00", "\x85", "\ufeff", "\u2028", "é", "🎲", "*a", "&a", "!a", "%",
])  # fmt: skip
WHOLE_NUMBER = st.integers(-MOST_NUMBER, MOST_NUMBER)
SCALAR = st.booleans() | WHOLE_NUMBER | st.floats(allow_nan=False, allow_infinity=False) | TEXT | AWKWARD
SETTINGS = st.dictionaries(TEXT | AWKWARD, st.none() | SCALAR | st.lists(st.none() | SCALAR, max_size=3), max_size=5)
POLICIES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.fixed_dictionaries({}, optional={"window": st.integers(1, 8), "kernel": st.sampled_from([1, 5])}).map(
        lambda params: {"name": "snapkv", "params": {"window": 8, **params}}
    ),
    st.sampled_from([{}, {"recent_share": 0.25}, {"recent_share": 1.0, "recent": 2}, {"recent_share": 1}]).map(
        lambda params: {"name": "h2o", "params": params}
    ),
    st.just(TOVA),
    st.just({"name": "full", "params": {}}),
)
ALLOCATIONS = st.sampled_from(
    [None, {"name": "static", "params": {}}, {"name": "adakv", "params": {"floor_share": 0.5}}]
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    count, heads = draw(st.integers(1, 7)), draw(st.integers(1, 3))
    length = draw(st.none() | st.integers(40, 2**31 - 1))
    scaling = draw(st.sampled_from(["fixed", "proportional"])) if length else "fixed"
    entries = st.integers(8, 40 if scaling == "proportional" else 2**31 - 1)
    budget = st.lists(entries, min_size=heads, max_size=heads) | entries.map(lambda same: [same] * heads)
    whole = [length or 40] * heads  # policy full counts as the whole prompt
    entry = st.builds(
        lambda policy, kept: {"policy": policy, "budget": whole if policy["name"] == "full" else kept}, POLICIES, budget
    )
    entry |= st.just({"policy": SNAPKV, "budget": [9] * heads})
    planned = st.lists(st.none() | entry, min_size=count, max_size=count).filter(any)
    prefill, decode = draw(st.tuples(st.just([]) | planned, st.just([]) | planned).filter(any))
    for number, one in enumerate(prefill):
        if one is not None and one["policy"] == SNAPKV and one["budget"] == [9] * heads and draw(st.booleans()):
            prefill[number] = {**one, "carry": "match"}
    main: list[Any] = prefill or decode
    allocation = None
    if all(one["policy"]["name"] == "snapkv" for one in [*prefill, *decode] if one):
        allocation = draw(ALLOCATIONS)
    phases = {name: {"layers": part} for name, part in (("prefill", prefill), ("decode", decode)) if part}
    return Plan.model_validate(
        {
            "model": model_dict(
                layers=count, kv_heads=heads, name=draw(TEXT | AWKWARD), revision=draw(st.none() | AWKWARD)
            ),
            "length": length,
            "scaling": scaling,
            "floor": draw(st.integers(0, 8)),
            **phases,
            **({"allocation": allocation} if allocation else {}),
            "total": sum(sum(one["budget"]) for one in main if one),
            "provenance": {
                **PROVENANCE,
                "data_sha256": draw(st.none() | st.just("0" * 64) | st.just("1" * 31 + "e" + "2" * 32)),
                "settings": draw(SETTINGS),
            },
        }
    )


@given(plans())
@at_most(25)
def test_reading_what_was_written_gives_the_same_plan(plan: Plan) -> None:
    text = plan_to_yaml(plan)
    read = plan_from_yaml(text, "strategy.yaml")
    same(read, plan)
    assert plan_to_yaml(Plan.model_validate_json(canonical_json(plan))) == text


def test_an_edit_changes_what_it_says_and_the_total() -> None:
    text = edited(("0-2: {policy: snapkv, budget: 640", "0 - 1: {policy: snapkv, budget: 100"), ("    3:", "    2-3:"))
    read = plan_from_yaml(text, "strategy.yaml")
    expected = [layer(SNAPKV, 100, 100)] * 2 + [layer(TOVA, 600, 700)] * 2 + [None, None]
    same(read, plan_of(expected, model=model_dict(layers=6)))
    assert read.total == 3000
    assert read.provenance == EXAMPLE.provenance


def test_what_stands_under_policies_is_for_entries_without_parameters_of_their_own() -> None:
    text = edited(
        ("prefill:", "policies: {tova: {sinks: 2}, snapkv: {window: 3}}\nprefill:"),
        ("4-5: full", "4-5: {policy: snapkv, budget: 9}"),
    )
    read = plan_from_yaml(text, "strategy.yaml").phase("prefill").layers
    assert [one.policy.params for one in read if one] == [{"window": 8}] * 3 + [{"sinks": 2}] + [{"window": 3}] * 2


def problems(text: str) -> list[str]:
    with pytest.raises(UsageError) as caught:
        plan_from_yaml(text, "mine.yaml")
    heading, *found = str(caught.value).split("\n  ")
    assert heading == f"mine.yaml is not valid, {len(found)} problem{'s' if len(found) > 1 else ''}:"
    return found


LAST = "4-5: full"
MISTAKES = yaml.safe_load((HERE / "mistakes.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake["says"] for mistake in MISTAKES])
def test_each_mistake_is_named_by_its_line(mistake: dict[str, Any]) -> None:
    found = problems(edited(*mistake["edits"]))
    assert any(line.startswith(mistake["says"]) for line in found), found


def test_all_mistakes_are_told_at_once_in_the_order_of_their_lines() -> None:
    found = problems(
        edited(
            ("scaling: fixed\n", ""), ("640", "[1, x]"), (LAST, "5-6: ful"), ("  seed: 7\n", ""),
            ("  kv_heads", "  heads"),
        )
    )  # fmt: skip
    assert [line.partition(": ")[0] + ": " + line.split(": ")[1] for line in found] == [
        "line 3: scaling", "line 8: prefill.layers", "line 9: prefill.layers.0-2.budget.1",
        "line 11: prefill.layers.5-6", "line 11: prefill.layers.5-6",
        "line 12: fingerprint.kv_heads", "line 17: fingerprint.heads", "line 19: provenance.seed",
    ]  # fmt: skip


def test_without_any_phase_there_is_nothing_to_do() -> None:
    start, end = EXAMPLE_YAML.index("prefill:"), EXAMPLE_YAML.index("fingerprint:")
    found = problems(EXAMPLE_YAML[:start] + "decode:\n" + EXAMPLE_YAML[end:])
    assert found == ["line 8: decode: a plan needs at least one phase: give prefill, decode or both"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is not a kvsearch.strategy file: it has no"),
        (canonical_json(EXAMPLE).decode(), "is not a kvsearch.strategy file: its format is 'kvsearch.plan'"),
        (edited(("version: 1", "version: 2")), "was written by a newer kvsearch (version 2, this one reads 1)"),
        (
            edited(("floor: 1", "floor: *x")),
            "is not valid YAML at line 7: the alias *x is not read: write out",
        ),
        (edited((LAST, "3: full")), "is not valid YAML at line 12: the key '3' is given twice"),
    ],
)
def test_what_is_no_strategy_at_all(text: str, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan_from_yaml(text, "mine.yaml")
    assert str(caught.value).startswith("mine.yaml")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)

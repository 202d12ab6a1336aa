"""A plan in YAML: nothing is lost on the way there and back, edits count, and mistakes are named by their line."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.errors import UsageError
from kvsearch.core.limits import MOST_NUMBER
from kvsearch.plan import Plan, canonical_json
from kvsearch.plan.yaml import plan_to_yaml
from kvsearch.strategies.from_yaml import plan_from_yaml
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
EXAMPLE_YAML = """\
# A plan to read and edit; `kvsearch plan build` makes a plan file of it again.
# Layers: a number or a range. Budgets: entries per kv head, one for all or a list. full: the whole cache, uncounted.
format: kvsearch.strategy
version: 1
model: toy
scaling: fixed
floor: 1
prefill:
  layers:
    0-2: {policy: snapkv, budget: 640, params: {window: 8}}
    3: {policy: tova, budget: [600, 700]}
    4-5: full
fingerprint:
  model_type: llama
  config_sha256: c4876eb0bf58683e9c2c1cf77e30d13693ce3b77f7d596ac8202756ae7312a6d
  weights_sha256: d268719fe168df889a511a52b2241077c7585e2ee3e7237b5d16fb481310b429
  layers: 6
  kv_heads: 2
  head_dim: 8
provenance:
  method: uniform
  seed: 7
  kvsearch: 0.1.0
  torch: 2.8.0
  transformers: 5.17.0
  settings:
    note: né
    questions: 3
    ratios: [0.5, 0.25]
"""


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


def test_parameters_stand_in_their_entries() -> None:
    wide = {"name": "snapkv", "params": {"window": 16, "kernel": 5}}
    bare = {"name": "snapkv", "params": {}}
    plan = plan_of([layer(policy, entries, entries) for policy in (SNAPKV, wide, bare) for entries in (40, 50)])
    text = plan_to_yaml(plan)
    assert "0: {policy: snapkv, budget: 40, params: {window: 8}}\n" in text
    assert "5: {policy: snapkv, budget: 50}\n" in text
    same(plan_from_yaml(text, "strategy.yaml"), plan)


# --- there and back -------------------------------------------------------------------------------------------------

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
def test_reading_what_was_written_gives_the_same_plan(plan: Plan) -> None:
    text = plan_to_yaml(plan)
    read = plan_from_yaml(text, "strategy.yaml")
    same(read, plan)
    assert plan_to_yaml(Plan.model_validate_json(canonical_json(plan))) == text


# --- edits ----------------------------------------------------------------------------------------------------------


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


# --- mistakes -------------------------------------------------------------------------------------------------------


def problems(text: str) -> list[str]:
    with pytest.raises(UsageError) as caught:
        plan_from_yaml(text, "mine.yaml")
    heading, *found = str(caught.value).split("\n  ")
    assert heading == f"mine.yaml is not valid, {len(found)} problem{'s' if len(found) > 1 else ''}:"
    return found


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_policy_full_counts_as_the_whole_prompt(phase: str) -> None:
    """Two layers are in one entry and told once; the first head of another one is enough."""
    text = edited(
        ("floor: 1", "floor: 1\nlength: 1000"), ("prefill:", f"{phase}:"),
        ("4-5: full", "4-5: {policy: full, budget: 9}"),
        ("policy: tova, budget: [600, 700]", "policy: full, budget: [1000, 999]"),
    )  # fmt: skip
    what = "is below 1000, but full keeps all entries of a prompt of that length: give 1000"
    assert problems(text) == [
        f"line 12: {phase}.layers.3.budget: {what}", f"line 13: {phase}.layers.4-5.budget: {what}",
    ]  # fmt: skip
    right = text.replace("999", "1000").replace("budget: 9}", "budget: 1200}")
    assert plan_from_yaml(right, "mine.yaml").total == 3 * 2 * 640 + 2000 + 2 * 2400


FIRST, LAST = "0-2: {policy: snapkv, budget: 640, params: {window: 8}}", "4-5: full"
MISTAKES: list[tuple[list[tuple[str, str]], str]] = [
    ([("scaling: fixed", "scalng: fixed")], "line 6: scalng: unknown key; did you mean 'scaling'?"),
    ([("scaling: fixed", "scaling: proportional")], 'line 6: scaling: "proportional" needs a length'),
    ([("floor: 1", "floor: 1\ntotal: 5000")], "line 8: total: follows from budgets: remove it"),
    ([("floor: 1", "floor: 601")], "line 11: prefill.layers.3.budget: is 600 at head 0, below the floor of 601 entrie"),
    ([("model: toy\n", "")], "line 3: model: is missing: add it"),
    ([("  layers:\n", "  layer:\n")], "line 9: prefill.layer: unknown key; did you mean 'layers'?"),
    ([("  layers:\n    0-2: ", "  layers: [x]\nx:\n    0-2: ")], "line 9: prefill.layers: must be a mapping such as 0"),
    ([(FIRST, "0-2:")], "line 10: prefill.layers.0-2: must be full (the whole cache) or a mapping such as {policy: sn"),
    ([(FIRST, "0-x: full")], "line 10: prefill.layers.0-x: must be a layer or a range of layers, such as 3 or 0-7"),
    ([(LAST, "3-5: full")], "line 12: prefill.layers.3-5: layer 3 is in 3, too: give every layer once"),
    ([(LAST, "4-6: full")], "line 12: prefill.layers.4-6: the model has layers 0 to 5"),
    ([(LAST, "4: full")], "line 9: prefill.layers: says nothing of layer 5: add"),
    ([("budget: 640", "budgt: 640")], "line 10: prefill.layers.0-2.budgt: unknown key; did you mean 'budget'?"),
    ([("budget: 640, ", "")], "line 10: prefill.layers.0-2.budget: is missing: add it"),
    ([("tova", "tovva")], "line 11: prefill.layers.3.policy: unknown policy 'tovva'; did you mean 'tova'?"),
    ([("window: 8", "windw: 8")], "line 10: prefill.layers.0-2.policy: policy snapkv has no parameter 'windw'; did yo"),
    ([("640", "many")], "line 10: prefill.layers.0-2.budget: must be a whole number, not 'many'"),
    ([("640", "7")], "line 10: prefill.layers.0-2.budget: is 7 at head 0, 7 at head 1, below the 8 entries that snapk"),
    ([("700]", "700, 1]")], "line 11: prefill.layers.3.budget: has 3 items, but model.kv_heads is 2: one budget per k"),
    ([(FIRST, "0-2: full"), ("3: {policy: tova, budget: [600, 700]}", "3: full")], "line 9: prefill.layers: plans no"),
    ([("prefill:", "prefil:")], "line 8: prefil: unknown key; did you mean 'prefill'?"),
    ([("  kv_heads: 2\n", "")], "line 13: fingerprint.kv_heads: is missing: add it"),
    ([("  seed: 7\n", "  sed: 7\n")], "line 22: provenance.sed: unknown key; did you mean 'seed'?"),
    ([("note: né", "note: {a: 1}")], "line 27: provenance.settings.note: must be a finite number"),
    ([("prefill:", "allocation: {name: adakv, parms: {}}\nprefill:")], "line 8: allocation.parms: unknown key; did yo"),
    (
        [("prefill:", "allocation: {name: adakv}\nprefill:"), (LAST, "4-5: {policy: full, budget: 9}")],
        "line 13: prefill.layers.4-5: full never evicts some heads",
    ),
    ([("prefill:", "policies: tova\nprefill:")], "line 8: policies: must be a mapping such as snapkv: {window: 8}"),
    ([("prefill:", "policies:\n  tova: {sink: 1}\nprefill:")], "line 13: prefill.layers.3.policy: policy tova has no"),
    ([("prefill:", "decode: 3\nprefill:")], "line 8: decode: must be a mapping with the keys layers"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "expected"), MISTAKES, ids=[expected for _, expected in MISTAKES])
def test_each_mistake_is_named_by_its_line(changes: list[tuple[str, str]], expected: str) -> None:
    found = problems(edited(*changes))
    assert any(line.startswith(expected) for line in found), found


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
        ("model: toy", "is not a kvsearch.strategy file: it has no"),
        (canonical_json(EXAMPLE).decode(), "is not a kvsearch.strategy file: its format is 'kvsearch.plan'"),
        (edited(("version: 1", "version: 2")), "was written by a newer kvsearch (version 2, this one reads 1)"),
        (edited(("floor: 1", "floor: [1")), "is not valid YAML at line 8: "),
        (
            edited(("floor: 1", "floor: *x")),
            "is not valid YAML at line 7: the alias *x is not read: write out",
        ),
        (edited(("floor: 1", "[floor]: 1")), "is not valid YAML at line 7: a key must be a word or number"),
        (edited((LAST, "3: full")), "is not valid YAML at line 12: the key '3' is given twice"),
    ],
)
def test_what_is_no_strategy_at_all(text: str, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan_from_yaml(text, "mine.yaml")
    assert str(caught.value).startswith("mine.yaml")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)

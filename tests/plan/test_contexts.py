"""The record of contexts: what is in a set, what stays of it in a file, and how records are joined."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.canonical import canonical_json
from kvsearch.core.errors import UsageError
from kvsearch.plan import load_plan, save_plan
from kvsearch.plan.arithmetic import scale
from kvsearch.plan.origin import ContextRecord, ContextSet, hash_context, join_records
from kvsearch.plan.yaml import plan_to_yaml
from kvsearch.runs.identity import CONTEXTS
from kvsearch.runs.lock import lock_directory
from kvsearch.runs.run import read_contexts, write_contexts
from kvsearch.selection.from_yaml import plan_from_yaml
from tests.plan.builders import PROVENANCE, make_plan


def hashes(first: int, last: int) -> list[str]:
    """The hashes of contexts with these numbers."""
    return [hash_context(f"context {number}") for number in range(first, last)]


def recorded(**sets: ContextSet) -> dict[str, object]:
    """What a plan's provenance is made of, with a record."""
    return {**PROVENANCE, "contexts": ContextRecord(**sets)}


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)))
def test_a_listed_set_is_a_set(one: set[int], other: set[int]) -> None:
    known = hashes(0, 41)
    assert known[1] == hash_context(" context\n 1 ") == hashlib.sha256(b"context 1").hexdigest()
    a, b = (ContextSet.of([known[number] for number in numbers]) for numbers in (one, other))
    both = a.union(b)
    assert {number for number, found in enumerate(known) if both.has(found)} == one | other
    assert both.ids == b.union(a).ids
    assert len(both.ids) == len(one | other)
    assert ContextSet.model_validate_json(both.model_dump_json()) == both


def test_what_is_made_of_something_unknown_is_not_complete() -> None:
    one = ContextRecord(fitted=ContextSet.of(hashes(0, 2)))
    other = ContextRecord(chosen=ContextSet.of(hashes(2, 4)))
    both = join_records([one, other])
    assert both == ContextRecord(fitted=one.fitted, chosen=other.chosen)
    assert [both.used.has(found) for found in hashes(0, 5)] == [True] * 4 + [False]
    assert join_records([one, None]) == one.model_copy(update={"complete": False})
    assert join_records([one, ContextRecord(complete=False)]) == join_records([one, None])
    assert join_records([None, None]) is None


def test_the_file_of_a_run_has_all_hashes(tmp_path: Path) -> None:
    with lock_directory(tmp_path):
        write_contexts(tmp_path, {"chosen": hashes(0, 3)})
    found = read_contexts(tmp_path)
    assert (found.fitted, found.chosen) == ((), tuple(sorted(hashes(0, 3))))
    (tmp_path / CONTEXTS).write_text('{"format": "kvsearch.contexts", "version": 1, "chosen": ["x"]}')
    with pytest.raises(UsageError, match=r"contexts\.json is not valid.*\n.*chosen\.0"):
        read_contexts(tmp_path)


def test_plans_carry_their_record_on(tmp_path: Path) -> None:
    layer = {"policy": {"name": "snapkv", "params": {"window": 4}}, "budget": [10, 6]}
    origin = recorded(fitted=ContextSet.of(hashes(0, 1000)))
    plan = make_plan(prefill={"layers": [layer, None, layer]}, provenance=origin)
    record = plan.provenance.contexts
    assert scale(plan, budget=12).provenance.contexts == record
    assert plan_from_yaml(plan_to_yaml(plan), "p.yaml") == plan
    save_plan(plan, tmp_path / "p.json")
    assert load_plan(tmp_path / "p.json") == plan
    assert b"contexts" not in canonical_json(make_plan())

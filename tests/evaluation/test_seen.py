"""Plans that are asked what they were made on: said beside their scores, and never taken for unknown or clean."""

from __future__ import annotations

from typing import Any

from kvsearch.evaluation.compare import ContextOverlap, Split, prepare
from kvsearch.evaluation.ready_methods import prepare_with_baselines
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Plan
from kvsearch.plan.origin import ContextRecord, ContextSet, hash_context
from kvsearch.tasks.encode import encode_tasks
from tests import tiny
from tests.evaluation.results import json_of, rendered, tables_of

TASK = tiny.listed((60, 2), (48, 1), (70, 2), name="one")
HASHES = [hash_context(row.context) for row in TASK.rows]
OTHERS = [hash_context(f"other {number}") for number in range(2000)]


def plan_with(model: LoadedModel, contexts: ContextRecord | None) -> Plan:
    plan = tiny.plan_for(model, [[15, 15]] * 4)
    return plan.model_copy(update={"provenance": plan.provenance.model_copy(update={"contexts": contexts})})


def seen_by(model: LoadedModel, contexts: ContextRecord | None) -> ContextOverlap:
    return ContextOverlap(contexts, encode_tasks(model, [TASK], 3))


def test_what_a_plan_has_seen_is_counted(model: LoadedModel) -> None:
    record = ContextRecord(
        fitted=ContextSet.of([HASHES[0], *OTHERS[:2]]),
        chosen=ContextSet.of(HASHES[:2]),
        reported=ContextSet.of(HASHES),
    )
    seen = seen_by(model, record)
    assert seen.shared == {"fitted": 1, "chosen": 2, "reported": 3}
    assert seen.warning.startswith("it was fitted on 1 and chosen on 2 of the 3 contexts asked here")
    assert seen.notes == [seen.warning, "it was chosen on 2 contexts"]
    assert seen.as_json()["chosen"] == {"contexts": 2, "asked_here": 2}


def test_what_is_not_known_is_said(model: LoadedModel) -> None:
    unknown, part = seen_by(model, None), seen_by(model, ContextRecord(complete=False))
    assert unknown.notes == [
        "which contexts it was fitted and chosen on is not known (it was written by hand or by an older version)"
    ]
    assert unknown.as_json() == {"known": False}
    assert part.notes == ["of a part of what it was made of, which contexts it was fitted and chosen on is not known"]
    assert part.as_json()["complete"] is False


def test_notes_and_json_of_an_evaluation(model: LoadedModel) -> None:
    plans = {
        "mine": plan_with(model, ContextRecord(chosen=ContextSet.of(HASHES[:1]))),
        "old": plan_with(model, None),
    }
    methods = prepare_with_baselines(model, plans, ("snapkv",), "mine")
    found = prepare(model, methods, "mine", Split([TASK], 3)).run()
    data: dict[str, Any] = {one["name"]: one["contexts"] for one in json_of(found)["blocks"][0]["methods"]}
    assert data["mine"]["chosen"] == {"contexts": 1, "asked_here": 1}
    assert (data["old"], data["snapkv"]["known"]) == ({"known": False}, True)
    text = " ".join(rendered(tables_of(found)).split())
    assert "mine: it was chosen on 1 of the 3 contexts asked here" in text
    assert "mine: it was chosen on 1 contexts" in text
    assert "old: which contexts it was fitted and chosen on is not known" in text
    assert "snapkv: " not in text

"""What every exporter of plans must do; a test class subclasses `ExporterContract` and sets its `target`.

    class TestMyTarget(ExporterContract):
        target = "mine"

        def held(self, exported, model, length):
            return ...  # what the tool holds of a prompt, by its own arithmetic, written anew

An exporter names as a loss whatever the tool cannot express; the files hold everything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, ClassVar, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.arrays import Ints
from kvsearch.core.canonical import hash_json
from kvsearch.core.errors import IncompatibleError
from kvsearch.exporters import create_exporter
from kvsearch.exporters.base import BudgetExporter, ExportedFiles, ExportInputs, PlanExporter, PrefillBudgets
from kvsearch.models.architecture import Architecture
from kvsearch.plan import ModelFingerprint, PhasePlan, Plan, PolicySpec
from kvsearch.plan.origin import ContextRecord, make_provenance
from kvsearch.testing.policy_contract import properties

HEADS: Final = 2
PROMPT_LENGTH: Final = 400  # tokens of the prompts that plans are for
Rows = Sequence[Sequence[int] | None]  # budgets of the heads of every layer; None: the full cache

budget_rows = st.lists(st.integers(1, PROMPT_LENGTH), min_size=HEADS, max_size=HEADS)
plan_rows = st.lists(budget_rows | st.none(), min_size=1, max_size=5).filter(any)
windows = st.integers(1, 40)
plan_policies: st.SearchStrategy[tuple[str, dict[str, Any]]] = st.one_of(
    st.sampled_from([("knorm", {}), ("keydiff", {}), ("pyramidkv", {}), ("h2o", {})]),
    st.tuples(st.just("snapkv"), st.fixed_dictionaries({"window": windows, "sinks": st.integers(0, 4)})),
    st.tuples(st.just("duo_attention"), st.fixed_dictionaries({"window": windows, "sinks": st.integers(0, 4)})),
    st.tuples(
        st.sampled_from(["streaming", "expected_attention"]), st.fixed_dictionaries({"sinks": st.integers(0, 6)})
    ),
)


def make_plan(rows: Rows, policy: str, params: Mapping[str, Any], *, fixed: bool) -> Plan:
    """Make a plan of one policy for prompts of `PROMPT_LENGTH` tokens."""
    planned = np.array([row for row in rows if row is not None])
    hashes = {"config_sha256": hash_json("config"), "weights_sha256": hash_json("weights")}
    model = ModelFingerprint(
        name="toy", model_type="llama", revision=None, layers=len(rows), kv_heads=HEADS, head_dim=8, **hashes
    )
    spec = PolicySpec(name=policy, params=dict(params))
    return Plan(
        model=model,
        length=PROMPT_LENGTH,
        scaling="fixed" if fixed else "proportional",
        floor=1,
        prefill=PhasePlan.of([None if row is None else spec for row in rows], planned),
        decode=None,
        total=int(planned.sum()),
        provenance=make_provenance("uniform", 0, None, {}, ContextRecord()),
    )


def compare_entries(planned: Ints, held: Ints) -> tuple[int, int]:
    """Return how many planned entries are not held, and how many are held beyond the plan's total."""
    return int(np.maximum(planned - held, 0).sum()), max(int((held - planned).sum()), 0)


class ExporterContract:
    """Subclasses set `target`, and define `held`: the entries that the tool holds with the exported files."""

    target: ClassVar[str]

    def held(self, exported: ExportedFiles, model: ModelFingerprint, length: int) -> Ints:
        """Return the entries [L, Hkv] that the tool holds of a prompt of `length` tokens."""
        raise NotImplementedError

    def export(self, plan: Plan) -> ExportedFiles | None:
        """Export a plan; None if the target cannot express it, and refuses it in one line."""
        exporter = create_exporter(self.target)
        assert isinstance(exporter, PlanExporter)
        layers = plan.model.layers
        shape = Architecture("llama", layers, 3 * HEADS, HEADS, 8, 24 * HEADS, tuple(range(layers)), 4096)
        try:
            return exporter.export(plan, ExportInputs(None, shape))
        except IncompatibleError as error:
            assert "\n" not in str(error)
            return None

    @properties
    @given(plan_rows, plan_policies, st.booleans())
    def test_what_is_said_to_be_lost_is_what_the_tool_does_not_hold(
        self, rows: Rows, policy: tuple[str, dict[str, Any]], fixed: bool
    ) -> None:
        plan = make_plan(rows, *policy, fixed=fixed)
        exported = self.export(plan)
        if exported is None:
            return
        planned = PrefillBudgets(plan).entries
        held = self.held(exported, plan.model, PROMPT_LENGTH)
        missing, beyond = compare_entries(planned, held)
        counted = [entries for entries in exported.losses.values() if entries is not None]
        assert not missing or missing in counted
        assert not beyond or beyond in counted
        exporter = create_exporter(self.target)
        if isinstance(exporter, BudgetExporter) and exporter.coarser:
            lines = [line for line in exported.losses if line.startswith(exporter.coarser)]
            assert len(lines) == (missing > 0) + (beyond > 0)
        if not exported.losses:
            assert (held == planned).all()

    @properties
    @given(plan_rows, plan_policies)
    def test_files_are_the_same_again_and_say_how_they_are_loaded(
        self, rows: Rows, policy: tuple[str, dict[str, Any]]
    ) -> None:
        plan = make_plan(rows, *policy, fixed=False)
        exported = self.export(plan)
        if exported is None:
            return
        assert exported == self.export(plan)
        assert exported.files
        assert all(data for data in exported.files.values())
        for name in exported.files:
            path = PurePosixPath(name)
            assert not path.is_absolute()
            assert ".." not in path.parts
        assert all(line.format(path="PATH") for line in exported.usage)
        assert len(exported.describe()) == len(exported.losses)

    def test_it_is_registered(self) -> None:
        assert isinstance(create_exporter(self.target), PlanExporter)
        with pytest.raises(IncompatibleError, match="while decoding only"):
            plan = make_plan([[8, 8]], "streaming", {}, fixed=True)
            decode = plan.model_copy(update={"prefill": None, "decode": plan.prefill})
            create_exporter(self.target).export(decode, ExportInputs(PROMPT_LENGTH))  # type: ignore[attr-defined]

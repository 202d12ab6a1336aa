"""docs/plan-format.md: its examples are read by the loaders, and it names every field of what they check."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from kvsearch.core.canonical import canonical_json
from kvsearch.core.fields import Record
from kvsearch.plan import load_plan
from kvsearch.plan.origin import ContextRecord, ContextSet
from kvsearch.plan.profile import ProfileMetadata, TableCheck, load_profile
from kvsearch.plan.profile_arrays import GRID_SIZE, SignalAxes
from kvsearch.plan.schema import LayerPlan, ModelFingerprint, PhasePlan, Plan, PolicySpec, Provenance
from kvsearch.runs.identity import RunConfig, read_config
from kvsearch.runs.run import ContextsFile, read_contexts
from kvsearch.runtime.store.cache_file import CacheHeader
from kvsearch.search.trials import TRIAL_RECORDS

PAGE = (Path(__file__).parents[2] / "docs" / "plan-format.md").read_text(encoding="utf-8")
EXAMPLES: dict[str, str] = dict(re.findall(r"^```json (\w+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
RECORDS: tuple[type[Record], ...] = (
    Plan, PhasePlan, LayerPlan, PolicySpec, ModelFingerprint, Provenance, ContextRecord, ContextSet,
    ProfileMetadata, TableCheck, SignalAxes, RunConfig, ContextsFile, CacheHeader, *TRIAL_RECORDS.values(),
)  # fmt: skip


def table(metadata: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The ratios of a profile that gives all heads the same."""
    highest = 1 - metadata["floor"] / metadata["length"]
    rows = np.minimum(np.arange(1, GRID_SIZE + 1) / (GRID_SIZE + 1), highest)
    shape = len(metadata["layers"]), metadata["model"]["kv_heads"]
    return np.broadcast_to(rows[:, None, None], (GRID_SIZE, *shape)).astype(np.float32)


def test_the_plan_is_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(EXAMPLES["plan"])
    plan = load_plan(path)
    assert json.loads(canonical_json(plan)) == json.loads(EXAMPLES["plan"])


def test_the_profile_is_read(tmp_path: Path) -> None:
    metadata = json.loads(EXAMPLES["profile"])
    path = tmp_path / "profile.safetensors"
    path.write_bytes(save({"evicted_ratio": table(metadata)}, {"kvsearch": EXAMPLES["profile"]}))
    assert json.loads(canonical_json(load_profile(path).metadata)) == metadata


def test_the_files_of_a_run_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(EXAMPLES["run"])
    (tmp_path / "contexts.json").write_text(EXAMPLES["contexts"])
    config = read_config(tmp_path)
    assert json.loads(config.to_bytes()) == json.loads(EXAMPLES["run"])
    assert json.loads(canonical_json(read_contexts(tmp_path))) == json.loads(EXAMPLES["contexts"])


def test_every_field_and_every_kind_of_line_is_named() -> None:
    named = [(record.__name__, name) for record in RECORDS for name in record.model_fields]
    assert [(record, name) for record, name in named if f"`{name}`" not in PAGE] == []
    assert [kind for kind in TRIAL_RECORDS if f"| `{kind}` |" not in PAGE] == []

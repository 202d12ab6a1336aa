"""kvpress itself loads what we export, and keeps the entries that our runtime keeps."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvsearch.calibration.options import QueryStatisticsOptions
from kvsearch.exporters.base import SINGLE_FILE, ExportInputs
from kvsearch.exporters.budget_tables import DuoAttentionGates
from kvsearch.exporters.kvpress import KvpressLayers, KvpressLukv
from kvsearch.exporters.kvzap import KvpressKvzap
from kvsearch.exporters.statistics import KvpressEA
from kvsearch.plan import Plan, Profile, Size
from kvsearch.plan.build import plan_from_profile
from kvsearch.plan.profile import ProfileMetadata
from kvsearch.plan.rounding import largest_remainder
from kvsearch.policies import Observation, Policy
from kvsearch.policies.base import QueryStatistics
from kvsearch.runtime import PlanCache
from kvsearch.runtime.attention import run_attention
from kvsearch.runtime.observe import DensePass
from kvsearch.runtime.stock import CACHE
from tests.calibrations import calibrate_query_statistics
from tests.plan.builders import metadata_dict, ratio_table
from tests.policies.probes import fitted, ranking
from tests.tiny import calibration_data, loaded, plan_for

PYTHON = Path(__file__).parents[2] / ".venv-kvpress" / "bin" / "python"
SIDE = Path(__file__).with_name("run_press.py")
LENGTH = 100
POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("snapkv", {"window": 8, "kernel": 5, "pooling": "avg"}),
    ("keydiff", {}),
    ("knorm", {}),
    ("expected_attention", {"sinks": 4}),
    ("streaming", {"sinks": 4}),
    ("tova", {"protect_last": True}),
]

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="`make interop` installs the tools")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    torch.manual_seed(0)
    made = loaded("llama")
    directory = tmp_path_factory.mktemp("model")
    made.model.save_pretrained(directory)
    return made, directory


def ids(made: Any) -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, made.model.config.vocab_size, (LENGTH,), generator=generator).tolist()


def theirs(directory: Path, tokens: list[int], usage: Sequence[str], path: Path) -> list[list[list[int]]]:
    lines = [line.format(path=str(path)) for line in usage]
    command = [str(PYTHON), str(SIDE), str(directory), json.dumps(tokens), json.dumps(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[list[list[int]]] = json.loads(done.stdout.splitlines()[-1])
    return found


def ours(made: Any, plan: Plan, tokens: list[int]) -> list[list[list[int]]]:
    with run_attention(made.model), torch.no_grad():
        cache = PlanCache(made.model, plan)
        made.model(torch.tensor([tokens]), use_cache=True, **{CACHE: cache})
    return [
        [cache.kept_positions(layer, 0, head) for head in range(plan.model.kv_heads)]
        for layer in range(plan.model.layers)
    ]


@pytest.mark.parametrize(("policy", "params"), POLICIES, ids=[name for name, _ in POLICIES])
def test_a_share_per_layer_keeps_what_the_plan_keeps(
    model: tuple[Any, Path], tmp_path: Path, policy: str, params: dict[str, Any]
) -> None:
    made, directory = model
    shape = made.fingerprint
    budgets = [[30 + 20 * layer] * shape.kv_heads for layer in range(shape.layers)]
    spec = {"policy": {"name": policy, "params": params}}
    layers = [{**spec, "budget": budget} for budget in budgets]
    plan = plan_for(made, budgets, prefill={"layers": layers}, length=LENGTH, floor=1)
    exported = KvpressLayers().export(plan, ExportInputs())
    assert not exported.losses
    path = tmp_path / "ratios.json"
    path.write_bytes(exported.files[SINGLE_FILE])
    assert theirs(directory, ids(made), exported.usage, path) == ours(made, plan, ids(made))


def test_the_curve_keeps_what_the_plan_keeps(model: tuple[Any, Path], tmp_path: Path) -> None:
    made, directory = model
    shape = made.fingerprint
    metadata = metadata_dict(
        model=shape.model_dump(), layers=list(range(shape.layers)), length=LENGTH, floor=10,
        policy={"name": "snapkv", "params": {"window": 8, "kernel": 5, "pooling": "avg", "sinks": 2}},
    )  # fmt: skip
    wanted = 1 - ratio_table(shape.layers, shape.kv_heads).astype(np.float64)
    heads = shape.layers * shape.kv_heads  # entries are whole: a ratio of i% keeps (100 - i) of 100 on average
    totals = [max(99 - at, 10) * heads for at in range(99)]
    entries = [largest_remainder(row * LENGTH, total, 10, LENGTH) for row, total in zip(wanted, totals, strict=True)]
    table = 1 - np.stack(entries) / LENGTH
    profile = Profile(ProfileMetadata.model_validate(metadata), {"evicted_ratio": table.astype(np.float32)})
    exported = KvpressLukv().export(profile, ExportInputs())
    assert not exported.losses
    path = tmp_path / "curve.npy"
    path.write_bytes(exported.files[SINGLE_FILE])
    usage = [line.replace("compression_ratio=0.8", "compression_ratio=0.5") for line in exported.usage]
    plan = plan_from_profile(profile, Size(ratio=0.5))
    kept, planned = theirs(directory, ids(made), usage, path), ours(made, plan, ids(made))
    assert [[len(head) for head in layer] for layer in kept] == [
        list(budget or ()) for budget in plan.budgets("prefill")
    ]
    assert kept == planned


def test_the_gates_choose_the_heads_that_keep_everything(model: tuple[Any, Path], tmp_path: Path) -> None:
    made, directory = model
    shape = made.fingerprint
    budgets = [
        [LENGTH if (layer + head) % 2 else 12 for head in range(shape.kv_heads)] for layer in range(shape.layers)
    ]
    spec = {"policy": {"name": "duo_attention", "params": {"sinks": 4, "window": 8}}}
    layers = [{**spec, "budget": budget} for budget in budgets]
    plan = plan_for(made, budgets, prefill={"layers": layers}, scaling="fixed", length=LENGTH, floor=12)
    exported = DuoAttentionGates().export(plan, ExportInputs())
    assert not exported.losses
    for name, data in exported.files.items():
        (tmp_path / name).write_bytes(data)
    sparsity = json.loads(exported.files["config.json"])["sparsity"]
    usage = (
        "folder = {path!r}",
        "config = json.load(open(folder + '/config.json'))",
        "gates = np.clip(np.loadtxt(folder + '/full_attention_heads.tsv', dtype=float, delimiter='\\t'), 0, 1)",
        "DuoAttentionPress.load_attention_pattern = "
        "staticmethod(lambda model: (config['sink_size'], config['recent_size'], gates))",
        f"press = DuoAttentionPress(head_compression_ratio={sparsity})",
    )
    assert theirs(directory, ids(made), usage, tmp_path) == ours(made, plan, ids(made))


def kept_by(scores: torch.Tensor, share: float) -> list[list[list[int]]]:
    """The positions of the highest scores [L, Hkv, T], as a press keeps them when it evicts a share."""
    kept = scores.topk(int(scores.shape[-1] * (1 - share)), -1).indices.sort(-1).values
    found: list[list[list[int]]] = kept.tolist()
    return found


def written(files: Mapping[str, bytes], folder: Path) -> Path:
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def scores_of(made: Any, tokens: list[int], policy: Policy, statistics: Any = None) -> torch.Tensor:
    """Scores of a policy [L, Hkv, T]; `statistics` by layer take the place of those of the prompt."""

    def look(seen: Observation) -> torch.Tensor:
        if statistics is not None:
            seen = replace(seen, statistics={policy.sink_count: statistics[seen.layer]})
        return policy.score(seen)[0]

    needs = {layer: [policy.needs()] for layer in range(made.fingerprint.layers)}
    with run_attention(made.model), torch.no_grad():
        return torch.stack(DensePass(made.model, needs, look, torch.tensor([tokens])).noted)


def test_query_statistics_rank_as_they_do_here(model: tuple[Any, Path], tmp_path: Path) -> None:
    made, directory = model
    options = QueryStatisticsOptions(params={"sinks": 4})
    policy = options.make_policy()
    profile = calibrate_query_statistics(made, calibration_data(80, 120), policy, options)
    exported = KvpressEA().export(profile, ExportInputs())
    statistics = [
        QueryStatistics(
            *(torch.from_numpy(profile.arrays[name][layer].copy())[None] for name in ("query_mean", "query_cov"))
        )
        for layer in range(made.fingerprint.layers)
    ]
    scores = scores_of(made, ids(made), policy, statistics)
    scores[..., :4] = float("inf")  # sinks
    theirs_kept = theirs(directory, ids(made), exported.usage, written(exported.files, tmp_path))
    assert theirs_kept == kept_by(scores, 0.8)


@pytest.mark.parametrize("width", [3, 0])
def test_a_probe_ranks_as_it_does_here(model: tuple[Any, Path], tmp_path: Path, width: int) -> None:
    made, directory = model
    shape = made.fingerprint
    size = 2 * made.model.config.head_dim
    profile = ranking(("key", "value"), width, range(shape.layers), shape.kv_heads, size, shape)
    exported = KvpressKvzap().export(profile, ExportInputs(model=made.model))
    scores = scores_of(made, ids(made), fitted(profile))
    theirs_kept = theirs(directory, ids(made), exported.usage, written(exported.files, tmp_path))
    assert theirs_kept == kept_by(scores, 0.8)

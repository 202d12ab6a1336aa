"""kvsearch bench, end to end on the bundled model and on a shape."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from kvsearch.core.errors import EnvironmentFault
from kvsearch.models import shapes
from kvsearch.models.architecture import describe
from tests.cli.conftest import Run, done, done_json

SHORT = ("--new-tokens", 2, "--rounds", 1)


@pytest.fixture(autouse=True)
def _small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsearch.benchmark.speed.COPIED_BYTES", 2**12)


def test_a_plan_beside_the_full_cache(run: Run, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    assert run("plan", "uniform", "bundled", "--policy", "snapkv", "--budget", 40, "-o", plan)[0] == 0
    arguments = ("bench", "bundled", "--plan", plan, "--length", 64, *SHORT)
    told = done_json(*arguments, "--batch", "1,2", "--json")
    assert [(row["cache"], row["batch"], row["entries"]) for row in told["costs"]][3:5] == [
        (str(plan), 1, 40.0), ("DynamicCache", 2, 64.0),
    ]  # fmt: skip
    foretold = done_json(*arguments, "--batch", "1,2", "--dry-run", "--json")
    held = {row["cache"]: row["held_bytes"] for row in told["costs"] if row["batch"] == 2}
    assert foretold["bytes"]["DynamicCache"] == held["DynamicCache"] // 64 * 66  # with two new tokens
    assert foretold["bytes"][str(plan)] == held[str(plan)] // 40 * 42
    assert foretold["memory"]["cache"] == sum(foretold["bytes"].values())
    assert foretold["needed_bytes"] == sum(foretold["memory"].values()) - foretold["memory"]["weights"]  # it is loaded


def test_a_shape_has_random_weights(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 50, "num_hidden_layers": 3}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    monkeypatch.setitem(shapes.SHAPES, "llama-3.1-8b", {**shapes.SHAPES["llama-3.1-8b"], **small})
    arguments = ("bench", "--shape", "llama-3.1-8b", "--layers", 2, "--budget", 32, "--length", 48, *SHORT, "--json")
    told = done_json(*arguments)
    assert told["machine"]["dtype"] == "bfloat16"
    assert told["costs"][-1]["cache"] == "snapkv, 32 per head"
    assert told["costs"][-1]["held_bytes"] == 2 * 2 * 32 * (2 * 8 * 2 + 4)
    monkeypatch.setattr("kvsearch.benchmark.capacity.measure_free_bytes", lambda _: 40_000)
    code, _, talk = run(*arguments[:-1], "--dry-run")
    assert code == 3
    assert "batch 1 at 48 tokens needs 0.0 GB" in talk
    assert "0.0 GB are free: lower --length, or measure fewer plans" in talk
    monkeypatch.setattr(shapes, "measure_free_bytes", lambda _: 1000)
    code, _, talk = run(*arguments[:-1])
    assert code == 3
    assert "takes 0.0 GB for its weights and cpu has 0.0 GB free" in talk


@pytest.mark.nightly
def test_a_curve_of_where_a_plan_pays(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = tmp_path / "curve.svg"
    grid = ("--length", "64,16", "--batch", "1,3", *SHORT)
    arguments = ("bench", "bundled", "--policy", "knorm", "--ratio", 0.5, *grid, "--curve")
    out, _ = done(*arguments, picture, "--json")
    assert picture.read_text().count("knorm, 50% evicted, batch 3") == 2  # of tokens per second, and of times
    told = json.loads(out)
    caches = ["DynamicCache", "kvsearch, full", "knorm, 50% evicted"]
    assert [cost["cache"] for cost in told["measured"]] == 4 * caches
    assert [cost["entries"] for cost in told["measured"][-3:]] == [1536, 1536, 768]  # 24 heads, a prompt of 64
    assert [(check["length"], check["batch"]) for check in told["checks"][::3]] == [(32, 1), (32, 3)]
    costs = {cache: told["costs"][cache]["step"] for cache in caches}
    for point in told["points"]:
        if point["cache"] == caches[-1]:
            a, b, c = costs[caches[-1]]
            seconds = a + b * point["batch"] + c * point["batch"] * 12 * point["length"]
            assert point["tokens_per_second"] == pytest.approx(point["batch"] / seconds)
    assert {(point["length"], point["is_measured"]) for point in told["points"]} == {
        (16, True), (64, True), (128, False), (256, False),
    }  # fmt: skip
    record = tmp_path / "curve.json"
    record.write_text(out)
    shown, _ = done("show", record)
    assert "at batch 3" in shown
    assert "points that were not measured for the fit: errors of" in shown
    page = tmp_path / "report.html"
    done("report", record, "-o", page)
    assert "Requests that fit at once" in page.read_text()
    foretold = done_json(*arguments, picture, "--dry-run", "--json")
    assert len(foretold["estimate"]["stages"]) == 4 + len(told["checks"]) / 3
    monkeypatch.setattr("kvsearch.report.draw.write_atomically", Mock(side_effect=EnvironmentFault("the disk is full")))
    code, _, talk = run(*arguments, picture)
    assert code == 3
    assert talk.splitlines()[-1].endswith("the disk is full")
    [line] = [line for line in talk.splitlines() if "kvsearch.break-even/1" in line]
    assert len(json.loads(line.partition(": ")[2])["measured"]) == 12


@pytest.mark.nightly
def test_the_largest_batch_and_what_show_and_report_read(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsearch.benchmark.capacity.find_default_memory", lambda *_, **__: 5_000_000)
    monkeypatch.setattr("torch.compile", lambda call, fullgraph: call)
    arguments = ("bench", "bundled", "--ratio", 0.75, "--policy", "knorm", "--phases", "both", "--skewed", *SHORT)
    out, _ = done(*arguments, "--length", "32,64", "--largest-batch", "--compile", "--json")
    costs = {(row["cache"], row["length"]): row for row in json.loads(out)["costs"]}
    ours = "knorm, 75% evicted, skewed, both"
    assert (costs[ours, 64]["entries"], costs[ours, 32]["entries"]) == (16, 8)
    # a sequence of 66 tokens in 6 layers of 2 heads: 12 * 2 * 32 * 4 bytes a token, beside it what a step takes
    assert 1 < costs["StaticCache", 64]["largest_batch"] < 5e6 / (66 * 3072)
    assert costs[ours, 64]["largest_batch"] > costs["DynamicCache", 64]["largest_batch"]
    assert all(row["largest_tokens_per_second"] > 0 for row in costs.values())
    assert {cache for (cache, _), row in costs.items() if row["compiled_seconds"]} == {"kvsearch, full", ours}
    for floor, seconds in (("floor", "token_seconds"), ("prefill_floor", "prefill_seconds")):
        assert 0 < costs[ours, 64][f"{floor}_share"] == costs[ours, 64][f"{floor}_seconds"] / costs[ours, 64][seconds]
    found = tmp_path / "speed.json"
    found.write_text(out)
    shown, _ = done("show", found)
    for words in ("batch 1, 64 tokens", "largest batch", "TFLOP/s"):
        assert words in shown
    done("report", found, "-o", tmp_path / "report.html")
    assert "Time per token, batch 1" in (tmp_path / "report.html").read_text()
    monkeypatch.setattr("kvsearch.benchmark.capacity.find_default_memory", lambda *_, **__: 100_000)
    code, _, talk = run(*arguments, "--length", 64, "--largest-batch")
    assert (code, talk.count("\n")) == (3, 1)
    assert "may be used: give a shorter --length" in talk


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_shapes_are_those_of_the_models(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shapes.SHAPES[name]))
    shape, billions = describe(model), sum(one.numel() for one in model.parameters()) / 1e9
    layers, size = {
        "llama-3.1-8b": (32, 8.03), "llama-3.1-70b": (80, 70.55), "qwen3-8b": (36, 8.19),
    }[name]  # fmt: skip
    assert (shape.kv_heads, shape.head_dim, shape.layers) == (8, 128, layers)
    assert billions == pytest.approx(size, abs=0.005)

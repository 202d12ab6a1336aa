"""Descriptions of papers' tables: every stage can be a job, every row has a method, and numbers are as printed."""

from __future__ import annotations

import re
from dataclasses import replace
from statistics import fmean

import pytest

from kvsearch.commands.bench import BenchOptions
from kvsearch.commands.calibrate import CalibrateOptions
from kvsearch.commands.evaluate import EvaluateOptions
from kvsearch.commands.evolve import EvolveOptions
from kvsearch.commands.export import ExportOptions
from kvsearch.commands.plan import PyramidOptions, ScaleOptions, UniformOptions
from kvsearch.commands.reproduce import ReproduceOptions, TableStages
from kvsearch.commands.select import SelectOptions
from kvsearch.commands.validate import ValidateOptions
from kvsearch.config.options import JobOptions
from kvsearch.core.errors import UsageError
from kvsearch.papers.tables import PAPER_TABLES, PaperTable, Scale, find_table, model_of, numbers

JOBS: dict[str, type[JobOptions]] = {
    "calibrate": CalibrateOptions, "evaluate": EvaluateOptions, "evolve": EvolveOptions, "export": ExportOptions,
    "scale": ScaleOptions, "select": SelectOptions, "validate": ValidateOptions, "uniform": UniformOptions,
    "pyramid": PyramidOptions, "bench": BenchOptions,
}  # fmt: skip
# averages that the papers print beside scores which have another mean
SLIPS = {
    ("lava-table2", "Mistral-7B", "128", "CAKE"), ("lava-table6", "Qwen2.5-7B", "256", "SnapKV"),
    ("lava-table6", "Qwen2.5-7B", "512", "SnapKV"), ("lava-table7", "Qwen2.5-14B", "128", "Ada-PyramidKV"),
    ("evolkv-table2", "Llama-3-8B-Instruct", "256", "StreamingLLM"),
}  # fmt: skip
LEFT_OUT = {"lava-mistral": "passage_count", "lava-llama3": "vcsum"}


@pytest.mark.parametrize("table", PAPER_TABLES.values(), ids=PAPER_TABLES)
def test_every_stage_has_options_of_its_job_and_every_row_a_method_or_a_plan(table: PaperTable) -> None:
    for scale in (table.paper, table.bundled):
        stages, before = table.stages(scale), set[str]()
        for stage in stages:
            needed = set(re.findall(r"\{([\w-]+)\}", f"{dict(stage.options)} {stage.methods}"))
            assert needed <= before
            assert stage.name not in before
            before.add(stage.name)
            job = JOBS[stage.job]
            named = {"model": "bundled", "output": "out.json"}
            job.of(**{name: value for name, value in named.items() if name in job.model_fields}, **stage.options)
        methods = {method.partition("={")[0] for stage in stages for method in stage.methods}
        plans = {stage.name for stage in stages if stage.job not in ("calibrate", "validate", "evaluate", "bench")}
        plans.add("DynamicCache")  # the full one, of costs
        sizes = [str(size) for size in (*scale["budgets"], *scale["ratios"])]
        blocks = [ask.get("block", "") for ask in scale["asks"]]
        there = [row for row in table.rows if _names(row, sizes, blocks) & (methods | plans)]
        if table.view == "profiles":
            assert set(table.rows) < {stage.name for stage in stages}
        elif table.view == "signals":
            assert set(table.rows) == {"cosine", "ppl", "entropy"}
        elif table.name == "evolkv-group-size":  # both forms in one list
            assert len(there) in (5, 6)
        else:
            assert len(there) == len(table.rows)


def _names(method: str, sizes: list[str], blocks: list[str]) -> set[str]:
    return {method.format(size=size, block=block) for size in sizes for block in blocks or [""]}


@pytest.mark.parametrize("table", PAPER_TABLES.values(), ids=PAPER_TABLES)
def test_numbers_are_of_the_rows_and_their_average(table: PaperTable) -> None:
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for (model, block, row, column), value in numbers(table.name).items():
        assert model in table.models.values()
        found.setdefault((model, block, row), {})[column] = value
    if table.view == "scores":
        assert {row for _, _, row in found} <= {"Full", *table.rows.values()}
    if "categories.*" in table.columns:
        return
    for (model, block, row), values in found.items():
        whole = values.pop("average", None)
        for average, task in LEFT_OUT.items():
            if f"averages.{average}|averages.macro" in table.columns:
                values.pop(task, None)
        if whole is None or not values:
            continue
        assert (abs(fmean(values.values()) - whole) < 0.011) != ((table.name, model, block, row) in SLIPS)


def test_a_model_is_known_by_the_last_part_of_its_name() -> None:
    table = find_table("lava-table2")
    assert model_of(table, "mistralai/Mistral-7B-Instruct-v0.2") == "Mistral-7B"
    assert model_of(table, "/models/mistral-7b-instruct-v0.2/") == "Mistral-7B"
    assert model_of(table, "mistralai/Mistral-7B-Instruct-v0.3") is None


def test_a_template_is_a_stage_for_each_value_of_its_variables() -> None:
    description = {
        "name": "s-$block-$budget", "verb": "evaluate", "words": "asking $tasks",
        "each": {"ask": "$asks", "budget": "$larger"},
        "options": {
            "budgets": "$budgets", "group": "$group", "settings": ["window=$window", "{search-$source}"],
            "plan": {"each": {"made": ["a", "b"], "budget": "$budgets"}, "item": "{$made-$budget}"},
        },
        "methods": ["uniform"],
    }  # fmt: skip
    asks = [
        {"tasks": "niah", "samples": 3, "length": [100], "block": "x"}, {"tasks": "gsm8k", "samples": 4, "block": "y"},
    ]  # fmt: skip
    scale = {"asks": asks, "budgets": [8, 16, 32], "window": 2, "group": 4, "own": [32]}
    stages = replace(find_table("lava-table2"), templates=(description,)).stages(scale)
    assert [stage.name for stage in stages] == ["s-x-16", "s-x-32", "s-y-16", "s-y-32"]
    first, last = stages[0], stages[-1]
    assert first.options == {
        "tasks": "niah", "samples": 3, "length": [100], "budgets": "8,16,32", "group": 4,
        "settings": ("window=2", "{search-8}"),
        "plan": ("{a-8}", "{a-16}", "{a-32}", "{b-8}", "{b-16}", "{b-32}"),
    }  # fmt: skip
    assert (last.words, last.block, last.methods) == ("asking gsm8k", "y", ("uniform",))
    assert last.options["settings"] == ("window=2", "{search-32}")


def test_stages_are_named_by_what_decides_them() -> None:
    def keys(table: str, **given: object) -> dict[str, str]:
        options = ReproduceOptions.of(table=table, model="bundled", **given)
        found = find_table(table)
        return TableStages(options, found.stages(options.scale(found))).keys

    first, again, others = keys("lukv-table5"), keys("lukv-table5", batch=2), keys("lukv-table5", samples=5)
    assert first == again
    assert first["lukv-snapkv"] == others["lukv-snapkv"] == keys("lukv-table3")["lukv-snapkv"]  # it is shared
    assert first["scores"] != others["scores"]
    assert keys("lukv-table3", seed=1)["lukv-snapkv"] != first["lukv-snapkv"]


def test_what_is_given_takes_the_place_of_what_is_asked() -> None:
    def scale(table: str, **given: object) -> Scale:
        options = ReproduceOptions.of(table=table, model="m", **given)
        return options.scale(find_table(table))

    assert scale("lukv-table2", tasks="ruler:no-qa", samples=7)["asks"] == [{"tasks": "ruler:no-qa", "samples": 7}]
    (ask,) = scale("evolkv-table4", length="4096")["asks"]
    assert ask["length"] == (4096,)
    found = scale("evolkv-table1", tasks="synthetic:single", length=(512,), budgets="24,48")
    assert found["budgets"] == [24, 48]
    assert found["searches"] == [{"tasks": "synthetic:single", "samples": 30, "length": (512,)}]
    with pytest.raises(UsageError, match="evicts shares of the prompts: leave --budgets out"):
        scale("lukv-table1", budgets="24")
    with pytest.raises(UsageError, match="has one budget"):
        scale("polykv-table1", budgets="24,48")

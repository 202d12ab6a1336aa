"""Recipes that are shipped: every one is valid for its command, says what it is, and is found by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsearch.commands.calibrate import CalibrateOptions
from kvsearch.commands.evaluate import EvaluateOptions
from kvsearch.commands.evolve import EvolveOptions
from kvsearch.commands.run import RunOptions
from kvsearch.config.recipes import find_recipe, find_shipped_recipe, list_shipped_recipes, read_description
from kvsearch.core.errors import UsageError

OPTIONS = {"calibrate": CalibrateOptions, "evaluate": EvaluateOptions, "evolve": EvolveOptions, "run": RunOptions}
MODELS = ("llama-3.1-8b", "qwen3-8b", "mistral-7b", "qwen2.5-32b")


@pytest.mark.parametrize("name", list_shipped_recipes())
def test_a_recipe_is_valid_and_says_what_it_is(name: str, tmp_path: Path) -> None:
    job, _, stem = name.partition("/")
    found = OPTIONS[job].of(stem, output=tmp_path / "x", **({} if stem.endswith(MODELS) else {"model": "bundled"}))
    assert found.model_dump()["output"] == tmp_path / "x"
    assert len(read_description(list_shipped_recipes()[name])) > 20
    assert find_recipe(name, job) == find_recipe(stem, job) == list_shipped_recipes()[name]


def test_names_of_several_commands_and_of_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give evolve/bundled or run/bundled"):
        find_shipped_recipe("bundled")
    with pytest.raises(UsageError, match="did you mean 'calibrate/lukv-paper'"):
        find_shipped_recipe("lukv-papr")
    assert find_shipped_recipe("paper-8b")[0] == "evolve/paper-8b"
    assert find_recipe("mine.yaml", "run") == Path("mine.yaml")
    with pytest.raises(UsageError, match=r"did you mean 'llama-3.1-8b'"):
        find_recipe("llama-3.1-8", "run")


def test_the_configuration_of_a_run_names_files_from_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine.jsonl", "plan.json", "snapkv"):
        Path(name).touch()
    options = EvaluateOptions.of(
        model="./m", tasks="ruler:vt+jsonl:mine.jsonl+jsonl:other.jsonl", plan="plan.json", methods="snapkv"
    )
    recorded = options.to_recipe()
    assert recorded["tasks"] == f"ruler:vt+jsonl:{tmp_path}/mine.jsonl+jsonl:other.jsonl"
    assert (recorded["plan"], recorded["methods"]) == ([f"{tmp_path}/plan.json"], "snapkv")

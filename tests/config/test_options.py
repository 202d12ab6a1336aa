"""Options are declared once: what a field becomes on the command line, in recipes, in config.json and in Python."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, ClassVar, Literal
from unittest import mock

import pytest
from typer.testing import CliRunner

from kvsearch.cli import command
from kvsearch.cli.command import Verb, describe_flags, make_group
from kvsearch.cli.console import Console
from kvsearch.commands.public import job
from kvsearch.commands.reporter import NullReporter, Reporter
from kvsearch.config.options import SIZE, JobOptions, Listed, Params, Repeated, Seeded, merge_params, option
from kvsearch.core.errors import UsageError
from kvsearch.runs.identity import RunConfig


class Shared(JobOptions):
    """What another job has, too."""

    job: ClassVar[str] = "evaluate"

    colour: str = option("red", "Which colour.", panel="Looks")


class Brewing(Shared, Seeded):
    """What is brewed."""

    recipes: ClassVar[bool] = True

    leaf: str = option(..., "Which leaf.", argument=True)
    cups: int = option(2, "How many.", SIZE, short="-c", ge=1)
    heat: Literal["low", "high"] = option("low", "How hot.")
    stir: bool = option(True, "Leave it alone.", flag="--no-stir", negated=True)
    sizes: Annotated[tuple[int, ...], Listed] = option((1,), "Sizes.", metavar="N,...", shown="1")
    plan: Annotated[tuple[Path, ...], Repeated] = option((), "A plan; repeatable.", repeated=True)
    params: Params = option({}, "A setting.", flag="--set", repeated=True)
    output: Path | None = option(None, "Where.", short="-o", recorded=False)
    strength: float | None = option(None, "How strong.")


def brew(options: Brewing, console: Console) -> None:
    """Print what was typed."""
    console.print_json({**options.model_dump(mode="json"), "typed": sorted(options.model_fields_set)})


APP = make_group("tea", "Make tea.", {"brew": Verb("brew", "Print what was typed.", f"{__name__}:Brewing", brew)})
APP.callback()(lambda: None)  # a group, though it has one verb


def run(*arguments: str) -> tuple[int, str, str]:
    with mock.patch.object(command, "read_catalog", lambda options: describe_flags(resolve_name(options))):
        result = CliRunner().invoke(APP, ["brew", *arguments])
    return result.exit_code, result.stdout, result.stderr


def typed(*arguments: str) -> dict[str, object]:
    code, out, talk = run(*arguments)
    assert code == 0, talk
    found: dict[str, object] = json.loads(out)
    return found


def refused(*arguments: str) -> str:
    code, out, talk = run(*arguments)
    assert (code, out) == (2, "")
    return talk


def test_flags_are_made_of_fields() -> None:
    found = typed(
        "oolong", "-c", "3", "--heat", "high", "--no-stir", "--sizes", "4,8", "--plan", "a", "--plan", "b", "--set",
        "x=1", "--set", "y=no", "--colour", "blue", "-o", "out", "--strength", "0.5", "--seed", "7",
    )  # fmt: skip
    assert found == {
        "leaf": "oolong", "cups": 3, "heat": "high", "stir": False, "sizes": [4, 8], "plan": ["a", "b"],
        "params": {"x": 1, "y": "no"}, "colour": "blue", "output": "out", "strength": 0.5, "seed": 7,
        "typed": sorted(Brewing.model_fields),
    }  # fmt: skip


def test_the_help() -> None:
    code, text, _ = run("--help-all")
    assert code == 0
    for words in ("brew LEAF [OPTIONS]", "--cups, -c N", "[default: 2]", "--no-stir ", "N,...", "Looks:"):
        assert words in text
    assert "--dry-run" not in text
    assert text.index("--cups") < text.index("--recipe") < text.index("--colour") < text.index("--json")


def test_all_mistakes_at_once() -> None:
    talk = refused("oolong", "--cups", "0", "--heat", "hot", "--sizes", "x")
    assert talk.startswith("kvsearch: error: what was given is not valid, 3 problems:\n")
    assert all(flag in talk for flag in ("--cups: ", "--heat: ", "--sizes.0: "))
    assert refused("oolong", "--cups", "0") == "kvsearch: error: --cups: must be at least 1, not 0\n"
    assert refused("oolong", "--strength", "nan") == "kvsearch: error: --strength: must be a finite number, not nan\n"
    assert "--cups: must be at most 2147483647, not 999999" in refused("oolong", "--cups", "99999999999999999999999")
    assert "No such option" in refused("oolong", "--device", "bananas")
    assert "LEAF is missing: which leaf" in refused("--cups", "3")


def test_a_recipe_under_what_is_typed(tmp_path: Path) -> None:
    recipe = tmp_path / "tea.yaml"
    recipe.write_text("leaf: assam\ncups: 4\nparams: {x: 1}\nsizes: [2, 3]\n")
    found = typed("--recipe", str(recipe), "--cups", "5")
    assert (found["leaf"], found["cups"], found["params"], found["sizes"]) == ("assam", 5, {"x": 1}, [2, 3])
    recipe.write_text("leaf: assam\ncups: 0\nmilk: true\n")
    talk = refused("--recipe", str(recipe), "--heat", "hot")
    assert talk.startswith(f"kvsearch: error: {recipe} is not valid, 2 problems:\n")
    assert "cups: " in talk
    assert "milk: unknown key" in talk
    recipe.write_text("leaf: assam\n")
    assert refused("--recipe", str(recipe), "--cups", "0").startswith("kvsearch: error: --cups: ")
    assert "unknown recipe 'tea'" in refused("--recipe", "tea")


def test_a_configuration_is_a_recipe(tmp_path: Path) -> None:
    options = Brewing.of(leaf="assam", cups=4, params=["x=1"], output=tmp_path, plan=[Path("a")])
    assert "output" not in options.to_recipe()
    config = tmp_path / "config.json"
    config.write_bytes(RunConfig(job="evaluate", options=options.to_recipe(), content={}).to_bytes())
    assert Brewing.of(config, output=tmp_path) == options
    config.write_bytes(RunConfig(job="select", options=options.to_recipe(), content={}).to_bytes())
    with pytest.raises(UsageError, match="is of kvsearch select, not of evaluate"):
        Brewing.of(config)
    config.write_text('{"schema": "kvsearch.evaluation.config/1"}')
    with pytest.raises(UsageError, match="does not say the options of its run"):
        Brewing.of(config)
    config.write_text("[")
    with pytest.raises(UsageError, match="is not valid JSON"):
        Brewing.of(config)


def test_a_job_is_a_function_with_the_same_options(tmp_path: Path) -> None:
    heard: list[Reporter] = []

    @job(Brewing)
    def brewed(options: Brewing, reporter: Reporter) -> Brewing:
        heard.append(reporter)
        return options

    assert brewed("assam", cups=3) == Brewing(leaf="assam", cups=3)
    assert brewed(Brewing(leaf="green")) == Brewing(leaf="green")
    (tmp_path / "tea.yaml").write_text("leaf: assam\ncups: 4\n")
    assert brewed(recipe=tmp_path / "tea.yaml", cups=5) == Brewing(leaf="assam", cups=5)
    assert all(isinstance(reporter, NullReporter) for reporter in heard)
    with pytest.raises(TypeError, match="at most 1 positional"):
        brewed("assam", "green")
    with pytest.raises(UsageError, match="milk: unknown key"):
        brewed("assam", milk=True)
    parameters = inspect.signature(brewed).parameters
    assert next(iter(parameters)) == "leaf"
    assert {"cups", "seed", "colour", "recipe", "reporter"} <= parameters.keys()
    assert (parameters["cups"].default, parameters["params"].default) == (2, {})
    with pytest.raises(TypeError, match="as one object or as keywords, not both"):
        brewed(Brewing(leaf="green"), cups=3)


def test_parameters_are_merged_one_by_one() -> None:
    for stated in ({"x": 1, "y": 2}, ["x=1", "y=2"]):
        for given in ({"y": 3}, ["y=3"]):
            assert merge_params({"params": stated}, {"params": given}, None)["params"] == {"x": 1, "y": 3}
        assert merge_params({"params": stated}, {"policy": "other"}, "own")["params"] == {}
    wrong = merge_params({"params": 5}, {"params": ["x=1"]}, None)
    assert wrong["params"] == 5, "what is wrong in a recipe stays wrong"


def test_what_belongs_to_the_command_cannot_be_in_a_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "tea.yaml"
    recipe.write_text("leaf: assam\noutput: elsewhere\n")
    assert refused("--recipe", str(recipe)) == (
        f"kvsearch: error: {recipe}: output cannot be in a recipe: give it with the command\n"
    )

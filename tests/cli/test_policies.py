"""`kvsearch policies`, and policies and plans that are refused before any model is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from kvsearch.cli.console import Console
from kvsearch.errors import KvsearchWarning, UsageError
from kvsearch.plan import Plan, save_plan
from kvsearch.policies import registry
from tests.cli.conftest import Run
from tests.plan.builders import plan_dict

NO_MODEL = "/no/such/model"  # loading it would end with another exit code
USAGE, ENVIRONMENT = 2, 3


def write_plan(path: Path, *layers: tuple[str, dict[str, Any], list[int]]) -> Path:
    content = plan_dict([budget for _, _, budget in layers])
    for made, (name, params, _) in zip(content["prefill"]["layers"], layers, strict=True):
        made["policy"] = {"name": name, "params": params}
    save_plan(Plan.model_validate(content), path)
    return path


def complaint(run: Run, *arguments: object) -> str:
    """What a command says that must fail before it looks for its model."""
    code, out, talk = run(*arguments)
    assert (code, out) == (USAGE, ""), talk
    return talk.removeprefix("kvsearch: error: ")


# --- the listing --------------------------------------------------------------------------------------------------


def test_the_listing_names_every_policy(run: Run) -> None:
    code, out, _ = run("policies")
    assert code == 0
    lines = out.splitlines()
    assert all(any(line.split()[:1] == [name] for line in lines) for name in registry.BUILT_IN)
    for words in ("scored anew every 16 steps", "last 32 query rows", "window=32, kernel=7", "arXiv", "kvsearch"):
        assert words in out
    assert "\x1b" not in out


def test_one_policy_in_full(run: Run) -> None:
    code, out, _ = run("policies", "snapkv")
    assert code == 0
    for words in ("score[i] = pool_i(", "arXiv 2404.14469", "last 32 query rows", "window   int, default 32"):
        assert words in out


def test_as_json(run: Run) -> None:
    code, out, _ = run("policies", "--json")
    assert code == 0
    listed = json.loads(out)
    assert set(listed) == {"policies", "problems"}
    one = {policy["name"]: policy for policy in listed["policies"]}["snapkv"]
    code, out, _ = run("policies", "snapkv", "--json")
    assert code == 0
    assert json.loads(out) == one
    assert one["parameters"][0] == {"name": "window", "type": "int", "default": 32}


def test_the_help_documents_every_key_of_the_json(run: Run) -> None:
    _, out, _ = run("policies", "--help")
    _, listed, _ = run("policies", "snapkv", "--json")
    facts = json.loads(listed)
    for key in (*facts, *facts["decode"], *facts["parameters"][0], "policies", "problems", "error"):
        assert key in out, key


def test_an_unknown_name(run: Run) -> None:
    assert complaint(run, "policies", "snapvk").startswith("unknown policy 'snapvk'; did you mean 'snapkv'?")


def test_a_broken_package_does_not_break_the_listing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("theirs", "no_such_module_here:X", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: EntryPoints([point]))
    code, out, _ = run("policies")
    assert code == 0
    assert "snapkv" in out
    found = [line for line in out.splitlines() if line.startswith("theirs (no_such_module_here): ")]
    assert len(found) == 1
    assert "No module named" in found[0]
    code, out, talk = run("policies", "theirs")
    assert (code, out) == (ENVIRONMENT, "")
    assert "repair or uninstall" in talk
    code, out, _ = run("policies", "--json")
    assert {"name", "package", "error"} == set(json.loads(out)["problems"][-1])


def test_readme_names_every_policy() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert [name for name in registry.BUILT_IN if f"`{name}`" not in readme] == []


def test_help_still_loads_nothing_heavy() -> None:
    arguments = "['policies', '--help'], standalone_mode=False"
    code = f"import sys, kvsearch.cli as cli; cli.app({arguments}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


# --- refused before a model is loaded -----------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["generate", "evaluate", "show"])
def test_a_plan_is_checked_before_its_model_is_loaded(run: Run, tmp_path: Path, command: str) -> None:
    bad = write_plan(
        tmp_path / "bad.json", ("snapk", {}, [9, 9]), ("snapkv", {"kernel": 4}, [9, 9]), ("snapkv", {}, [9, 40])
    )
    arguments = ("show", bad) if command == "show" else (command, NO_MODEL, "--plan", bad)
    told = complaint(run, *arguments, *(("--prompt", "hello") if command == "generate" else ()))
    assert told.splitlines()[0] == f"{bad} is not valid, 3 problems:"
    for words in (
        "prefill.layers.0.policy: unknown policy 'snapk'; did you mean 'snapkv'?",
        "prefill.layers.1.policy: policy snapkv: kernel must be odd, got 4",
        "prefill.layers.2.budget: is 9 at head 0, below the 32 entries that snapkv always keeps",
    ):
        assert words in told


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"windw": 4}, "no parameter 'windw'; did you mean 'window'?"),
        ({"window": "wide"}, "window must be int"),
        ({"window": 0}, "window must be 1 or more"),
        ({"window": 400}, "is 9 at head 0, 9 at head 1, below the 400"),
    ],
)
def test_every_problem_of_a_plan(run: Run, tmp_path: Path, params: dict[str, Any], words: str) -> None:
    bad = write_plan(tmp_path / "bad.json", ("snapkv", params, [9, 9]))
    assert words in complaint(run, "generate", NO_MODEL, "--plan", bad, "--prompt", "hello", "--dry-run")
    assert words in complaint(run, "evaluate", NO_MODEL, "--plan", bad)


@pytest.mark.parametrize(
    ("recipe", "arguments", "words"),
    [
        ("policy: snapk", (), "did you mean 'snapkv'?"),
        ("policy: knorm\nparams: {sinks: -1}", (), "policy knorm: sinks must be 0 or more, got -1"),
        ("policy: snapkv\nparams: {windw: 3}", (), "no parameter 'windw'; did you mean 'window'?"),
        ("policy: snapkv", ("--policy", "kejdiff"), "did you mean 'keydiff'?"),
        ("policy: keydiff", ("--set", "window=-1"), "window must be 0 or more, got -1"),
    ],
)
def test_recipes_are_checked_before_the_model_is_loaded(
    run: Run, tmp_path: Path, recipe: str, arguments: tuple[str, ...], words: str
) -> None:
    (tmp_path / "r.yaml").write_text(recipe)
    given = ("--recipe", tmp_path / "r.yaml", *arguments)
    assert words in complaint(run, "calibrate", NO_MODEL, "-o", tmp_path / "run", *given)
    assert not (tmp_path / "run").exists()


# --- warnings -----------------------------------------------------------------------------------------------------


def warned(common: Console, capsys: pytest.CaptureFixture[str]) -> str:
    """What is shown of one of our warnings."""
    assert common.run(lambda: warnings.warn("no good", KvsearchWarning, stacklevel=1)) == 0
    return capsys.readouterr().err


def test_our_warnings_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert warned(Console(), capsys) == "kvsearch: warning: no good\n"
    assert warned(Console(quiet=True, log_file=tmp_path / "log.txt"), capsys) == ""
    assert "WARNING no good" in (tmp_path / "log.txt").read_text()


def test_the_warnings_of_others_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(RuntimeWarning, match="theirs"):
        Console().run(lambda: warnings.warn("theirs", RuntimeWarning, stacklevel=1))
    assert "kvsearch" not in capsys.readouterr().err


def test_calibrating_knorm_for_a_model_that_normalises_keys_warns(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise UsageError("far enough")

    monkeypatch.setattr("kvsearch.runtime.key_norms.normalises_keys", lambda model: True)
    monkeypatch.setattr("kvsearch.calibration.lukv.calibrate_lukv", stop)
    _, _, talk = run("calibrate", "bundled", "-o", tmp_path / "run", "--policy", "knorm")
    lines = [line for line in talk.splitlines() if "warning" in line.lower()]
    assert len(lines) == 1
    assert lines[0].startswith("kvsearch: warning: ")
    assert "knorm" in lines[0]
    assert ".py" not in talk

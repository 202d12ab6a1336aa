"""Every command, end to end, on the bundled model."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvsearch.calibration.data import default_data, load_calibration_data
from kvsearch.cli import VERBS, load_command
from kvsearch.models.loading import BUNDLED
from kvsearch.plan import load_plan, load_profile
from kvsearch.plan.contexts import ContextRecord, ContextSet, context_hash
from kvsearch.runs.contexts import read_contexts
from tests.cli.conftest import Run

HEAVY = ("torch", "transformers", "cma", "sklearn", "pandas", "numpy", "scipy", "datasets", "rich.progress")


def test_importing_the_command_line_loads_nothing_heavy() -> None:
    code = f"import sys, kvsearch.cli; print([m for m in {HEAVY} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = f"import sys, kvsearch, kvsearch.plan; print([m for m in {HEAVY} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


LOADING = ("--device", "--dtype", "--offline")
GENERAL = ("--json", "--quiet", "--verbose", "--log-file", "--debug")
WITH_MODEL = {
    "run",
    "calibrate",
    "validate",
    "select",
    "evolve",
    "export",
    "evaluate",
    "generate",
    "compress",
    "bench",
    "headroom",
    "lm-eval",
    "doctor",
    "reproduce",
}
FORETELLING = {
    "run", "calibrate", "validate", "select", "evolve", "export", "evaluate", "generate", "compress", "bench",
    "headroom", "lm-eval", "reproduce",
}  # fmt: skip


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in ("plan", "recipes")])
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_every_command_offers_what_it_uses(run: Run, verb: str, flag: str) -> None:
    code, out, _ = run(verb, flag)
    assert code == 0
    assert [option for option in GENERAL if option not in out] == []
    assert all((option in out) == (verb in WITH_MODEL) for option in LOADING)
    assert ("--dry-run" in out) == (verb in FORETELLING)


@pytest.mark.parametrize("verb", VERBS)
def test_the_list_of_commands_says_what_they_say(verb: str) -> None:
    """The list is made without importing them."""
    command = load_command(verb)
    assert (command.help or "").split("\n")[0] == VERBS[verb]
    assert command.name in (verb, "plan")


def test_options_of_other_commands_are_refused(run: Run) -> None:
    code, _, talk = run("plan", "diff", "--device", "bananas", "a.json", "b.json")
    assert code == 2
    assert "No such option" in talk


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--colour",), "No such option: --colour (see `kvsearch -h`)"),
        (("evolv",), "No such command 'evolv'. Did you mean 'evolve'? (see `kvsearch -h`)"),
        (("show", "x", "--colour"), "No such option: --colour (see `kvsearch show -h`)"),
        (("plan", "dif"), "No such command 'dif'. Did you mean 'diff'? (see `kvsearch plan -h`)"),
        (("show", "--ratio"), "Option '--ratio' requires an argument."),
    ],
)
def test_what_does_not_exist_is_told_on_one_line(run: Run, arguments: tuple[str, ...], expected: str) -> None:
    assert run(*arguments) == (2, "", f"kvsearch: error: {expected}\n")


def test_version(run: Run) -> None:
    code, out, _ = run("--version")
    assert code == 0
    assert out.startswith("kvsearch 0.")


def test_calibrate_writes_config_and_profile(calibrated: Path) -> None:
    assert json.loads((calibrated / "config.json").read_text())["content"]["recipe"]["policy"] == "snapkv"
    assert (calibrated / "profile.safetensors").stat().st_size > 1000


def test_calibrating_twice_gives_the_same_bytes(run: Run, calibrated: Path, tmp_path: Path) -> None:
    code, _, _ = run("calibrate", "bundled", "-o", tmp_path / "again", "--questions", 8)
    assert code == 0
    assert (tmp_path / "again/profile.safetensors").read_bytes() == (calibrated / "profile.safetensors").read_bytes()
    configs = [json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "again", calibrated)]
    assert configs[0]["content"] == configs[1]["content"]
    assert configs[0]["options"] == configs[1]["options"]


def test_calibrate_tells_its_plan_without_doing_it(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("calibrate", "bundled", "-o", tmp_path / "run", "--policy", "keydiff", "--dry-run")
    assert code == 0
    told = json.loads(out)
    assert told["recipe"]["params"] == {"sinks": 4, "window": 1}
    assert told["recipe"]["answers"] == "own"
    assert (told["own_replies"], told["own_reply_tokens"]) == (28, 28 * 128)
    assert not (tmp_path / "run").exists()
    code, out, _ = run("calibrate", "bundled", "-o", tmp_path / "run", "--answers", "given", "--dry-run")
    assert "own_replies" not in json.loads(out)


@pytest.mark.parametrize("recipe", sorted(Path("recipes/calibrate").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_is_valid(run: Run, tmp_path: Path, recipe: Path) -> None:
    fitting = ("--budgets", "128,256") if recipe.stem == "polykv-sweep" else ()  # it goes on to 1024, the texts do not
    code, out, talk = run("calibrate", "bundled", "--recipe", recipe, "-o", tmp_path / "run", "--dry-run", *fitting)
    assert code == 0, talk
    assert json.loads(out)["recipe"]["method"] == recipe.stem.partition("-")[0]


def test_options_override_a_recipe(run: Run, tmp_path: Path) -> None:
    arguments = ("--recipe", "recipes/calibrate/lukv-paper.yaml", "--normalization", "none", "--set", "window=16")
    code, out, _ = run("calibrate", "bundled", *arguments, "-o", tmp_path / "run", "--dry-run")
    assert code == 0
    assert json.loads(out)["recipe"]["normalization"] == "none"
    assert json.loads(out)["recipe"]["params"]["window"] == 16


def test_export_by_ratio_and_by_budget(run: Run, calibrated: Path, tmp_path: Path) -> None:
    code, out, _ = run("export", calibrated, "--ratio", 0.9, "--length", 2000, "-o", tmp_path / "a.json", "--json")
    assert code == 0
    assert json.loads(out)["total"] == load_plan(tmp_path / "a.json").total == 200 * 24
    code, out, _ = run("export", calibrated, "--budget", 64, "-o", tmp_path / "b.json", "--json")
    assert code == 0
    assert load_plan(tmp_path / "b.json").total == 64 * 24
    assert json.loads(out)["scaling"] == "fixed"


def test_profile_and_plan_record_what_they_were_fitted_on(calibrated: Path) -> None:
    texts = load_calibration_data(default_data("bundled")).limited(8)
    known = [context_hash(context.text) for context in texts.contexts]
    profile, plan = load_profile(calibrated / "profile.safetensors"), load_plan(calibrated / "plan.json")
    record = ContextRecord(fitted=ContextSet.of(known, 8))
    assert profile.metadata.provenance.contexts == plan.provenance.contexts == record
    assert read_contexts(calibrated).fitted == tuple(sorted(known))


def test_export_dry_run_writes_nothing(run: Run, calibrated: Path, tmp_path: Path) -> None:
    code, _, talk = run("export", calibrated, "--ratio", 0.5, "-o", tmp_path / "a.json", "--dry-run")
    assert code == 0
    assert "would write" in talk
    assert not (tmp_path / "a.json").exists()


def test_generate_answers_from_the_small_cache(run: Run, calibrated: Path) -> None:
    plan = calibrated / "plan.json"
    code, out, _ = run("generate", "bundled", "--plan", plan, "--max-new-tokens", 3, "--json")
    assert code == 0
    small = json.loads(out)
    code, out, _ = run("generate", "bundled", "--max-new-tokens", 3, "--json")
    full = json.loads(out)
    assert small["text"] == full["text"]
    assert small["entries"] * 5 == pytest.approx(full["entries"], rel=0.01)
    code, _, talk = run("generate", "bundled", "--plan", plan, "--max-new-tokens", 3)
    assert "expected to begin with: " + full["text"] in talk


def test_show_a_plan_and_a_profile(run: Run, calibrated: Path) -> None:
    code, out, _ = run("show", calibrated / "plan.json")
    assert code == 0
    assert "entries per layer and kv head" in out
    code, out, _ = run("show", calibrated, "--ratio", 0.5, "--plan", calibrated / "plan.json")
    assert code == 0
    assert re.search(r"answers +own", out)
    for title in ("local eviction ratio at 0.5", "recall lost", "importance evicted", "rank correlation"):
        assert title in out
    code, out, _ = run("show", calibrated, "--json")
    assert code == 0
    shown = json.loads(out)
    assert shown["stability"][1]["verdict"]
    total = sum(map(sum, shown["eviction_loss"]["lukv"]))
    assert total < sum(map(sum, shown["eviction_loss"]["uniform"]))


def test_headroom_orders_the_methods(run: Run) -> None:
    arguments = ("--tasks", "synthetic:multikey,chain", "--samples", 3, "--length", 512)
    code, out, _ = run("headroom", "bundled", *arguments, "--json")
    assert code == 0
    share = json.loads(out)["share_of_full"]
    assert share["full"] == 1
    assert share["oracle"] > share["snapkv"] > share["streaming"]
    code, out, _ = run("headroom", "bundled", *arguments)
    assert "share of the full-cache score" in out


def test_doctor_is_content_here(run: Run) -> None:
    code, out, _ = run("doctor", "--json")
    assert code == 0
    answers = [json.loads(out)[f"{name} model"] for name in BUNDLED]
    assert all(answer.startswith("answers '") for answer in answers)


def test_quiet_says_nothing(run: Run, calibrated: Path, tmp_path: Path) -> None:
    code, out, talk = run("export", calibrated, "--ratio", 0.5, "-o", tmp_path / "a.json", "--quiet")
    assert (code, out, talk) == (0, "", "")


def test_log_file_records_what_happened(run: Run, calibrated: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    run("export", calibrated, "--ratio", 2, "-o", tmp_path / "a.json", "--log-file", log)
    assert "outside (0, 1)" in log.read_text()


def test_a_log_that_cannot_be_written_ends(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("kvsearch.cli.log.LogFile.flush", full)
    code, _, talk = run("policies", "knorm", "--log-file", tmp_path / "log.txt")
    assert code == 0
    assert talk.count("log.txt: no space left on device; the log ends there") == 1
    assert "Traceback" not in talk
